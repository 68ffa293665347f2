"""A run in time order that is asked to stop while it evaluates windows: the rest of them is evaluated by its resume."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from embershard.distributed import process_group
from embershard.training.quality.reports import Report, SaveReport, StopReport, WindowReport
from embershard.training.trainer import Trainer
from tests.ranks.time_order import BORDER, make_config, write_clicks

pytestmark = pytest.mark.slow


def windows(reports: list[Report]) -> list[tuple[int, int, object]]:
    return [(each.step, each.window, each.quality) for each in reports if isinstance(each, WindowReport)]


def test_a_signal_between_two_windows_of_a_batch(tmp_path: Path) -> None:
    config = make_config(write_clicks(tmp_path / "clicks"), 3)
    with process_group("cpu") as ranks:
        whole = Trainer(config, ranks, None)
        wanted = windows(list(whole.train()))
        whole.close()
        first, _ = (window for step, window, _ in wanted if step == BORDER)
        stopped, reports = Trainer(config, ranks, tmp_path / "checkpoints"), list[Report]()
        for report in stopped.train():
            reports.append(report)
            if isinstance(report, WindowReport) and report.window == first:
                stopped.supervision.signal = signal.SIGTERM
        stopped.close()
        assert (type(reports[-1]), reports[-1].step) == (StopReport, BORDER)
        assert windows(reports) == [each for each in wanted if each[1] <= first], "no step, and no other window"
        assert any(isinstance(each, SaveReport) and each.step == BORDER for each in reports), "before its evaluation"
        rest = Trainer(config, ranks, tmp_path / "checkpoints")
        rest.resume(tmp_path / "checkpoints" / f"step_{BORDER}")
        found = list(rest.train())
        rest.close()
    again = windows(found)
    assert again[:2] == [each for each in wanted if each[0] == BORDER], "both: its record has the first one already"
    assert [each for each in windows(reports) if each[0] < BORDER] + again == wanted
