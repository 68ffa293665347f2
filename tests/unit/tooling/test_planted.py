"""Faults are planted where they belong, and are noticed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planted.draw import changes, faults_of
from tests.planted.fault import Fault, known

_TEXT = '''def most(numbers, least=1):
    """The largest, but at least 1."""
    if not numbers or len(numbers) < 2:
        print("few")
        return False
    return max(numbers) + 1
'''


def test_every_kept_fault_still_fits_and_names_a_test(project_dir: Path) -> None:
    for fault in known():
        changed = fault.planted_in((project_dir / fault.file).read_text(encoding="utf-8"))
        assert changed is not None, f"{fault} is gone: remove it, or draw others (python -m tests.planted.draw)"
        assert (project_dir / fault.test.partition("::")[0]).is_file(), fault.test


def test_changes_are_of_what_runs() -> None:
    found = {(line, old, new) for line, _, _, old, new in changes(ast.parse(_TEXT))}
    assert found == {
        (1, "1", "2"), (3, "not ", ""), (3, "or", "and"), (3, "<", "<="), (3, "2", "3"), (4, "print('few')", "pass"),
        (5, "False", "True"), (6, "max", "min"), (6, "+", "-"), (6, "1", "2"),
    }  # fmt: skip


def test_a_fault_is_one_change_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "most.py").write_text(_TEXT)
    faults = faults_of(tmp_path, "most.py")
    (turned,) = (fault for fault in faults if fault.old == "+")
    assert turned.planted_in(_TEXT) == _TEXT.replace("+ 1", "- 1")
    assert turned.planted_in(_TEXT.replace("max", "sum")) is None
    second = Fault("most.py", "a = 1", 1, 4, "1", "2")
    assert second.planted_in("a = 1\n  a = 1\n") == "a = 1\n  a = 2\n"
    assert second.planted_in("a = 1\n") is None
    with turned.planted(tmp_path) as fits:
        assert fits
        assert (tmp_path / "most.py").read_text() != _TEXT
    assert (tmp_path / "most.py").read_text() == _TEXT


@pytest.mark.slow
def test_a_test_that_fails_notices_a_fault(tmp_path: Path) -> None:
    """In a process of its own, which forks others."""
    (tmp_path / "most.py").write_text("def most(numbers):\n    return max(numbers)\n")
    (tmp_path / "test_most.py").write_text("from most import most\n\ndef test_most():\n    assert most([1, 2]) == 2\n")
    program = f"""
from pathlib import Path
from tests.planted.fault import Fault, run_tests
tree, fault = Path({str(tmp_path)!r}), Fault("most.py", "return max(numbers)", 0, 7, "max", "min")
print(run_tests(tree, ["test_most.py"])[0])
with fault.planted(tree):
    print(run_tests(tree, ["test_most.py"])[0])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["0", "1"], done.stderr
