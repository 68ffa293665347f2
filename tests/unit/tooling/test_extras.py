"""Each extra has its page, can be taken out, and has tests of its own with one that `make test` runs."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import pytest

from embershard.errors import SetupError
from embershard.lazy_names import named
from tests.without import CAPABILITIES, PROJECT, is_in, needs, rooms_of

EXTRAS = sorted(
    path.stem for path in (PROJECT / "embershard" / "extras").iterdir() if path.stem not in ("__init__", "__pycache__")
)


def capability_of(extra: str) -> str:
    (found,) = (name for name, each in CAPABILITIES.items() if f"extras.{extra}" in each.rooms)
    return found


@cache
def marked(mark: str) -> frozenset[Path]:
    """Return the test files in which something has a mark."""
    files = (PROJECT / "tests").rglob("test_*.py")
    return frozenset(file for file in files if f"pytest.mark.{mark}" in file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("extra", EXTRAS)
def test_it_has_a_page_and_can_be_taken_out(extra: str) -> None:
    page = (PROJECT / "docs" / "extras.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {extra}\n\n(.*?)(?=\n## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert {"What", "For", "Registered", "Promise"} <= set(re.findall(r"^\* \*\*(\w+)\*\*", section, re.MULTILINE))
    assert rooms_of([capability_of(extra)])


def test_what_an_installation_is_without_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "embershard.extras.mlperf", None)
    with pytest.raises(SetupError, match=r"^this needs embershard\.extras\.mlperf, which this installation"):
        named("embershard.extras.mlperf:MlperfTracker")
    monkeypatch.setitem(sys.modules, "embershard.extras.accumulation", None)
    with pytest.raises(SetupError, match=r"^this needs embershard\.extras\.accumulation, which this installation"):
        from embershard import accumulating  # noqa: F401  # a public name
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):  # what is no extra keeps its own error
        named("no_such_library:name")


@pytest.mark.slow
def test_each_has_tests_of_its_own_and_a_smoke_test() -> None:
    own, smoke = marked("extra"), marked("smoke")
    assert smoke <= set(own), "smoke is a mark of extras alone"
    for extra in EXTRAS:
        capability = CAPABILITIES[capability_of(extra)]
        rooms = rooms_of([capability_of(extra)])
        of_extra = {file for file in own if needs(file, rooms) or any(word in str(file) for word in capability.tests)}
        assert of_extra & smoke, f"{extra}: none of {sorted(map(str, of_extra))} has a test that make test runs"


@pytest.mark.slow
def test_a_file_that_is_about_an_extra_is_marked() -> None:
    """Files in which most of what is imported of the package belongs to extras."""
    own = marked("extra")
    for file in sorted((PROJECT / "tests").rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        of_package = re.findall(r"^from (embershard\.\S+) import", text, re.MULTILINE)
        of_extras = [name for name in of_package if is_in(name, ["embershard.extras"])]
        assert file in own or 2 * len(of_extras) <= len(of_package), file
