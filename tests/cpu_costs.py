"""CPU seconds of tests and of all processes that they start, by file: `python -m pytest -p tests.cpu_costs ...`.

`--costs FILE` writes those of every test, a line each, the costliest first.

Counted are the process that runs a test, its live descendants, and those that have ended and were waited for. What a
fixture of a whole folder does counts where it is first used. A busy core makes the same work cost more. Looking for the
descendants costs milliseconds a test, which are not counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

_NAME = "cpu_seconds"
_SHOWN = 40
_BEFORE = pytest.StashKey[float]()


def _so_far() -> float:
    """Return the CPU seconds of this process and of its descendants."""
    here = psutil.Process()
    total = 0.0
    for process in (here, *here.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:  # its parent has its seconds, if it waited
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="FILE", help="of every test, a line each")


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[_BEFORE] = _so_far()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    finally:
        started = time.process_time()
        now = _so_far()
        looking = time.process_time() - started
        item.user_properties.append((_NAME, now - looking - item.config.stash[_BEFORE]))
        item.config.stash[_BEFORE] = now


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what each file and the costliest tests took."""
    files, tests = Counter[str](), Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "teardown":
                seconds = dict(report.user_properties).get(_NAME, 0.0)
                files[report.nodeid.split("::")[0]] += seconds
                tests[report.nodeid] += seconds
    terminalreporter.section(f"{files.total():,.0f} CPU seconds, without collecting")
    for name, seconds in [*files.most_common(_SHOWN), *tests.most_common(_SHOWN)]:
        terminalreporter.write_line(f"{seconds:8.1f}  {name}")
    if written := terminalreporter.config.getoption("--costs"):
        Path(written).write_text("".join(f"{seconds:.2f} {name}\n" for name, seconds in tests.most_common()))
