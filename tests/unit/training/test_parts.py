"""The parts of a run: in which order they act, and that one which does nothing changes no bit."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from embershard.distributed import CheckpointConfig, PublishConfig, Ranks
from embershard.errors import SetupError
from embershard.training.checkpoint.resume import resume_run
from embershard.training.config import TrainConfig
from embershard.training.parts.part import Part
from embershard.training.reports import Report, StopReport, TrainReport
from embershard.training.trainer import Trainer
from tests.unit.distributed.test_blocks import stock_loaded
from tests.unit.training.test_trainer import losses, make_config

pytestmark = pytest.mark.slow  # whole training runs


def config_of(**train: Any) -> Any:
    return make_config(
        train=TrainConfig(batch_size=100, log_every=1, max_steps=4, **train),
        checkpoint=CheckpointConfig(every_steps=2, keep_last=9, asynchronous=False),
    )


class Noting(Part):
    """Notes which of its hooks are called, and where the run stands."""

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self.calls: list[tuple[str, int]] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or not callable(found) or not hasattr(Part, name):
            return found
        self.calls.append((name, self.run.steps))
        return found


def test_hooks_come_in_order(ranks: Ranks, tmp_path: Path) -> None:
    trainer = Trainer(config_of(eval_every=3), ranks, tmp_path)
    trainer.parts.append(part := Noting(trainer))
    trainer.parts.insert(0, first := Noting(trainer))
    first.at_end = lambda: [StopReport(1, None)]  # type: ignore[method-assign]
    part.at_end = lambda: [StopReport(2, None)]  # type: ignore[method-assign]
    first.finish = lambda: [StopReport(4, None)]  # type: ignore[method-assign]
    part.finish = lambda: [StopReport(3, None)]  # type: ignore[method-assign]
    reports = list(trainer.train())
    trainer.close()
    assert [report.step for report in reports if isinstance(report, StopReport)] == [1, 2, 3, 4], "the last is first"
    of_saves = ["before_save", "state", "tensors"]
    of_reports = ["report_entries", "served"]
    assert [name for name, _ in part.calls if name not in (*of_saves, *of_reports)] == [
        "begin", *["before_batch", "after_step"] * 4, "at_end", "evaluate_at_end", "finish", "close",
    ]  # fmt: skip
    assert [(name, step) for name, step in part.calls if name in ("before_batch", "after_step")] == [
        (name, step + (name == "after_step")) for step in range(4) for name in ("before_batch", "after_step")
    ]
    assert [step for name, step in part.calls if name == "before_save"] == [2, 4]
    assert [step for name, step in part.calls if name == "served"] == [3, 4], "in evaluations"
    assert set(pairwise(name for name, _ in part.calls)) >= {("before_save", "state"), ("evaluate_at_end", "finish")}


def test_a_part_adds_to_reports_and_to_the_result(ranks: Ranks, tmp_path: Path) -> None:
    trainer = Trainer(config_of(), ranks, tmp_path)
    trainer.parts.append(part := Part(trainer))
    part.report_entries = lambda: {"batches": {"mine": trainer.steps}}  # type: ignore[method-assign]
    part.result = lambda: {"mine": trainer.steps}  # type: ignore[method-assign]
    found = [report.batches for report in trainer.train() if isinstance(report, TrainReport)]
    totals = trainer.of_parts(lambda each: each.result())
    trainer.close()
    assert found == [{"mine": step} for step in range(1, 5)]
    assert (totals["mine"], {*totals} >= {"mine", "cache", "look_ahead", "sent_bytes"}) == (4, True)


def test_a_part_that_does_nothing_changes_no_bit(ranks: Ranks, tmp_path: Path) -> None:
    found = []
    for name, kinds in (("without", []), ("with", [Part, Part])):
        trainer = Trainer(config_of(eval_every=3), ranks, tmp_path / name)
        trainer.parts[:0] = [kind(trainer) for kind in kinds]
        found.append(losses(list(trainer.train())))
        trainer.close()
    assert found[0] == found[1]
    plain, idle = (tmp_path / name / "step_4" for name in ("without", "with"))
    assert [key for key, value in stock_loaded(plain).items() if not torch.equal(value, stock_loaded(idle)[key])] == []
    assert json.loads((plain / "scalars.json").read_text()) == json.loads((idle / "scalars.json").read_text())


class Counting(Part):
    """Has a state, and reports."""

    num_steps = 0

    def after_step(self) -> Iterator[Report]:
        self.num_steps += 1
        yield StopReport(self.run.steps, None)

    def state(self) -> dict[str, Any]:
        return {"counted": {"steps": self.num_steps}}

    def read_state(self, saved: Any, comparison: Any) -> None:
        self.num_steps = saved.of_parts["counted"]["steps"]

    def result(self) -> dict[str, Any]:
        return {"counted": self.num_steps}


def test_a_part_may_report_and_go_on(ranks: Ranks, tmp_path: Path) -> None:
    config = config_of()
    first = Trainer(replace(config, train=replace(config.train, max_steps=2)), ranks, tmp_path)
    first.parts.insert(0, Counting(first))
    reports = list(first.train())
    first.close()
    assert [report.step for report in reports if isinstance(report, StopReport)] == [1, 2]
    second = Trainer(config, ranks, tmp_path)
    second.parts.insert(0, part := Counting(second))
    resume_run(second)
    assert (second.steps, part.num_steps) == (2, 2)
    list(second.train())
    second.close()
    assert second.of_parts(lambda each: each.result())["counted"] == 4


HIDDEN = (
    *(f"embershard.training.parts.{name}" for name in ("average", "id_tables", "windows")),
    *(f"embershard.extras.{name}.part" for name in ("publications", "following", "hot_cold", "warm_start")),
    "embershard.extras.accumulation",
)


def test_a_run_needs_no_module_of_a_part_that_it_has_not(ranks, tmp_path, monkeypatch) -> None:
    for name in HIDDEN:
        monkeypatch.setitem(sys.modules, name, None)  # its import raises
    trainer = Trainer(config_of(), ranks, tmp_path / "run")
    list(trainer.train())
    trainer.resume(tmp_path / "run" / "step_2")
    trainer.close()
    publish = PublishConfig(str(tmp_path / "published"), every_steps=2)
    with pytest.raises(SetupError, match=r"this needs embershard\.extras\.publications"):
        Trainer(replace(config_of(), publish=publish), ranks, tmp_path / "other")
    with pytest.raises(SetupError, match=r"this needs embershard\.extras\.accumulation"):  # not at the first step
        Trainer(replace(config_of(), train=replace(config_of().train, accumulate=2)), ranks)
