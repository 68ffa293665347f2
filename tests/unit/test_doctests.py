"""The examples in docstrings work, and every public name has one."""

from __future__ import annotations

import doctest
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from embershard.distributed import process_group
from tests.unit import doctest_names

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).resolve().parents[2]
FILES = sorted([*(PROJECT / "embershard").rglob("*.py"), *(PROJECT / "examples" / "dlrm_v4").glob("*.py")])
ROOMS = [file for file in FILES if file.name == "__init__.py" and "__all__" in file.read_text(encoding="utf-8")]


def module_name(file: Path) -> str:
    parts = file.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def examples(file: Path) -> int:
    return len(re.findall(r"^\s*>>> ", file.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.fixture
def one_rank() -> Iterator[None]:
    with process_group("cpu"):
        yield


@pytest.mark.parametrize("file", [file for file in FILES if examples(file)], ids=module_name)
def test_the_examples_work(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    """In an empty folder. No example escapes: doctest finds as many as the file shows."""
    monkeypatch.chdir(tmp_path)
    given = {}
    if "(model" in file.read_text(encoding="utf-8") and {"torchrec", "pipeline"} & set(file.parts):
        request.getfixturevalue("one_rank")
        given = doctest_names.names()
    tests = doctest.DocTestFinder().find(importlib.import_module(module_name(file)), extraglobs=given)
    assert sum(len(test.examples) for test in tests) == examples(file)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    output: list[str] = []
    for test in tests:
        runner.run(test, out=output.append)
    assert runner.failures == 0, "".join(output)


@pytest.mark.parametrize("file", ROOMS, ids=module_name)
def test_every_public_name_has_an_example(file: Path):
    """Constants and warnings excepted."""
    room = importlib.import_module(module_name(file))
    without = []
    for name in room.__all__:
        thing = getattr(room, name)
        is_excepted = not callable(thing) or (isinstance(thing, type) and issubclass(thing, Warning))
        if not is_excepted and ">>> " not in (thing.__doc__ or ""):
            without.append(f"{room.__name__}.{name}")
    assert without == []
