"""`tests/in_time.py`: what continuous integration leaves out when time is over."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import in_time

pytestmark = pytest.mark.slow
_FILES = [f"test_{letter}.py" for letter in "abcdef"]


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    for name in _FILES:
        (tmp_path / name).write_text("def test_1():\n    pass\n\n\ndef test_2():\n    pass\n")
    return tmp_path


def _run(suite: Path, project: Path, until: float, order: str, *options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "tests.in_time", "--until", str(until), "--order", order, *options]
    environment = os.environ | {"PYTHONPATH": str(project), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.matrix
def test_the_order_of_files_is_that_of_the_commit(suite: Path, project_dir: Path) -> None:
    def order(commit: str) -> list[str]:
        lines = _run(suite, project_dir, time.time() + 3600, commit, "--collect-only", "-q").splitlines()
        return [line for line in lines if "::" in line]

    one, other = order("1f00"), order("2e11")
    assert one == order("1f00")
    assert one != other
    assert sorted(one) == sorted(other)
    for first, second in zip(one[::2], one[1::2], strict=True):
        assert (first.split("::")[0], first[-1], second[-1]) == (second.split("::")[0], "1", "2"), "a file stays whole"


def test_what_a_change_reaches_comes_first(monkeypatch: pytest.MonkeyPatch, project_dir: Path) -> None:
    """A file that changed, and one that imports what did; the others are in the order of before."""
    tests = project_dir / "tests" / "unit"
    files = [tests / name for name in ("test_units.py", "cache/test_planner.py", "models/test_hstu.py", "test_docs.py")]
    items: list[Any] = [SimpleNamespace(path=file) for file in files]
    for changed, first in (
        ({"embershard.extras.hstu"}, ["test_hstu.py"]),
        ({"tests.unit.test_units"}, ["test_units.py"]),
        (set(), []),
    ):
        monkeypatch.setattr("tests.in_time.changed_modules", lambda _, changed=changed: frozenset(changed))
        config: Any = SimpleNamespace(getoption=lambda name: {"order": "1f00"}.get(name))
        in_time.pytest_collection_modifyitems(config, items)
        assert [item.path.name for item in items][: len(first)] == first


def test_no_change_behind_an_unknown_revision() -> None:
    assert in_time.changed_modules("no such revision") == frozenset()


def test_what_has_no_time_is_left_out_and_named(suite: Path, project_dir: Path) -> None:
    told = _run(suite, project_dir, time.time() - 1, "1f00", "-n", "2")
    assert "12 tests were left out: the time was over" in told
    assert "12 skipped" in told
    assert all(f"     2  {name}" in told for name in _FILES)


def test_nothing_is_left_out_while_there_is_time(suite: Path, project_dir: Path) -> None:
    told = _run(suite, project_dir, time.time() + 3600, "1f00")
    assert "12 passed" in told
    assert "left out" not in told
