"""docs/troubleshooting.md: made from the cases."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

from tests.unit.troubleshooting import cases
from tests.unit.troubleshooting.case import Case

PAGE = Path(__file__).resolve().parents[3] / "docs" / "troubleshooting.md"
_HEAD = """\
# Troubleshooting

Messages of embershard's commands, their exit codes, and what to do. Every message is one line on stderr that names the
setting or the file. `<words>` stand for what differs from case to case.

| exit code | meaning |
|---|---|
| 0 | done; also where who reads the output, as `head`, ended first |
| 1 | a run, a check or a comparison failed; also if ranks see why before a step (files, too few samples, memory) |
| 2 | wrong usage, settings, files or data, seen before any rank was started |
| 130 | stopped by Ctrl-C, in order or at once by a second one |
| 129, 143 | stopped at once by a second SIGHUP or SIGTERM (0 after the first, which stops in order) |

A message of a rank begins with the rank and the name of the error: `[rank1]: DataError: ...`. A traceback is a bug of
embershard: please report it.

This page is made from test cases: `python -m tests.unit.troubleshooting` writes it, and
`tests/unit/troubleshooting/test_cases.py` provokes every message. To add one, add a `Case` to a file of
`tests/unit/troubleshooting/cases`.
"""


def sections() -> list[ModuleType]:
    """Return the modules of cases, each with its `TITLE` and `CASES`, by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(cases.__path__))
    return [importlib.import_module(f"{cases.__name__}.{name}") for name in names]


def page() -> str:
    """Return the text of the page."""
    return "\n".join([_HEAD, *(_section(module.TITLE, module.CASES) for module in sections())])


def _section(title: str, rows: list[Case]) -> str:
    lines = [f"## {title}", "", "| what happened | message | exit code | what to do |", "|---|---|---|---|"]
    for case in rows:
        lines.append(f"| {_cell(case.cause)} | {_code(case.message)} | {case.code} | {_cell(case.remedy)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    space = " " if "`" in text else ""
    return f"{fence}{space}{_cell(text)}{space}{fence}"
