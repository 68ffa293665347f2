"""Tests for as long as there is time: `python -m pytest -p tests.in_time --until EPOCH_SECONDS --order TEXT ...`.

Files run in an order that the text decides, so what is left out on a slow machine changes with it; first come those
that changed since `--changed-since REVISION`, or that import what did. A test that would start after `--until` is
skipped, and the end says how many were left out, by file.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections import Counter
from itertools import groupby
from pathlib import Path

import pytest

from tests.without import PROJECT, needs

_LEFT_OUT = "left out: no time"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--until", type=float, required=True, metavar="EPOCH_SECONDS", help="start no test after this")
    parser.addoption("--changed-since", metavar="REVISION", help="of git: what changed behind it comes first")
    parser.addoption("--order", required=True, metavar="TEXT", help="decides the order of the files: a commit, say")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle the files, and put those first that a change reaches; the tests of each stay together, and in order."""
    files = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
    random.Random(config.getoption("order")).shuffle(files)
    changed = changed_modules(config.getoption("changed_since") or "HEAD")
    files.sort(key=lambda tests: module_of(tests[0].path) not in changed and not needs(tests[0].path, changed))
    items[:] = [item for tests in files for item in tests]


def changed_modules(revision: str) -> frozenset[str]:
    """Return the modules that changed behind a revision; none where git does not know it."""
    command = ["git", "diff", "--name-only", "--diff-filter=d", revision, "--", "*.py"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    return frozenset(module_of(PROJECT / name) for name in done.stdout.splitlines())


def module_of(path: Path) -> str:
    """Return the full name of a file's module; its own path elsewhere."""
    if not path.is_relative_to(PROJECT):
        return str(path)
    return ".".join(path.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() >= item.config.getoption("until"):
        pytest.skip(_LEFT_OUT)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    files = Counter(report.nodeid.split("::")[0] for report in skipped if _LEFT_OUT in str(report.longrepr))
    if files:
        terminalreporter.section(f"{files.total():,} tests were left out: the time was over")
        for file, count in sorted(files.items()):
            terminalreporter.write_line(f"{count:6,}  {file}")
