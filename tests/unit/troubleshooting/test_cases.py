"""docs/troubleshooting.md: every message is provoked, and the page is up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.troubleshooting.case import Case, Outcome
from tests.unit.troubleshooting.page import PAGE, page, sections

pytestmark = pytest.mark.slow

#: Of so many messages of a section, `make test` provokes one.
ONE_OF = 3
CASES = [
    pytest.param(
        case,
        id=f"{module.__name__.rpartition('.')[2]}: {case.cause}",
        marks=() if number % ONE_OF == 0 else pytest.mark.matrix,
    )
    for module in sections()
    for number, case in enumerate(module.CASES)
]


def problem(case: Case, outcome: Outcome, folder: Path) -> str:
    """Return in what the outcome differs from the case; empty when it does not."""
    said = outcome.stderr.strip().replace(f"{folder}/", "")
    if "\n" in said or "Traceback" in said:
        return f"not one line: {said}"
    if not re.fullmatch(case.pattern, said):
        return f"said: {said}"
    if outcome.code != case.code or not outcome.code:
        return f"exit code {outcome.code}"
    return ""


@pytest.mark.parametrize("case", CASES)
def test_the_message_is_as_documented(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert problem(case, case.provoke(), tmp_path) == ""


def test_the_page_is_up_to_date():
    hint = "docs/troubleshooting.md is not what the cases say: python -m tests.unit.troubleshooting"
    assert PAGE.read_text(encoding="utf-8") == page(), hint


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (Outcome(2, "embershard: a.toml: 17 bytes\n"), ""),
        (Outcome(2, "embershard: /x/a.toml: 17 bytes"), ""),
        (Outcome(1, "embershard: a.toml: 17 bytes"), "exit code 1"),
        (Outcome(2, "embershard: b.toml: 17 bytes"), "said: "),
        (Outcome(2, "embershard: a.toml: 17 bytes\nmore"), "not one line"),
    ],
)
def test_a_difference_is_noticed(outcome: Outcome, said: str):
    case = Case("a file", lambda: outcome, "embershard: a.toml: <number> bytes", "nothing")
    assert problem(case, outcome, Path("/x")).startswith(said) is True
    assert bool(problem(case, outcome, Path("/x"))) is bool(said)
