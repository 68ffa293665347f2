"""A run in time order that is asked to stop while it evaluates windows: the rest of them is evaluated by its resume.

And a checkpoint of a version that knew no time order.
"""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from embershard.data.time_config import TimeConfig
from embershard.distributed import process_group
from embershard.errors import CheckpointError
from embershard.training.reports import Report, SaveReport, StopReport, WindowReport
from embershard.training.trainer import Trainer
from tests.ranks.time_order import BORDER, EVERY, make_config, write_clicks
from tests.unit.distributed.checkpoints import make_manifest_right

pytestmark = pytest.mark.slow


def windows(reports: list[Report]) -> list[tuple[int, int, object]]:
    return [(each.step, each.window, each.quality) for each in reports if isinstance(each, WindowReport)]


@pytest.mark.matrix
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


def test_a_position_of_a_version_without_time_order_is_none_in_it(tmp_path: Path) -> None:
    ordered = make_config(write_clicks(tmp_path / "clicks"), 3)
    plain = replace(ordered.data, time=TimeConfig(), eval_fraction=0.0)
    config = replace(ordered, data=plain, train=replace(ordered.train, max_steps=EVERY + 1))
    saved = tmp_path / "checkpoints" / f"step_{EVERY}"
    with process_group("cpu") as ranks:
        trainer = Trainer(config, ranks, tmp_path / "checkpoints")
        list(trainer.train())
        trainer.close()
        scalars = json.loads((saved / "scalars.json").read_text())
        settings = scalars["settings"]
        scalars["settings"] = {key: value for key, value in settings.items() if not key.startswith("data.time")}
        assert len(settings) == len(scalars["settings"]) + 3
        (saved / "scalars.json").write_text(json.dumps(scalars))
        make_manifest_right(saved)
        same = Trainer(config, ranks, None)
        _, comparison = same.resume(saved)
        assert not comparison.notes
        same.close()
        trainer = Trainer(replace(ordered, data=replace(ordered.data, eval_fraction=0.0)), ranks, None)
        with pytest.raises(CheckpointError, match=r"data\.time\.column +none +\"at\""):
            trainer.resume(saved)
        trainer.close()
