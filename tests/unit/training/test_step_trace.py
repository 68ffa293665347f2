"""Traces of steps: their stages are named, and training is as without a trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard import stages
from embershard.distributed import Ranks
from embershard.extras.step_trace import Span, StepTrace, mean_stages
from embershard.pipeline.config import LookAheadConfig
from embershard.training.reports import TrainReport
from embershard.training.trainer import Trainer
from tests.unit.training.test_trainer import make_config

pytestmark = [pytest.mark.slow, pytest.mark.extra]  # whole training runs

STAGES = {"input", "id exchange", "know", "plan", "fills", "lookup", "forward", "backward", "optimizer"}


def train(ranks: Ranks, *traced: Any) -> tuple[list[float], str]:
    """Train; return the losses, and what a trace of `traced` says at the end."""
    trainer = Trainer(make_config(look_ahead=LookAheadConfig(lookahead=3)), ranks)
    if traced:
        trainer.parts.append(StepTrace(trainer, *traced))
    reports = list(trainer.train())
    trainer.close()
    trace = trainer.part(StepTrace)
    return [report.loss for report in reports if isinstance(report, TrainReport)], trace.describe() if trace else ""


@pytest.mark.smoke
def test_a_trace_names_all_stages_and_changes_no_bit(ranks: Ranks, tmp_path: Path):
    losses, said = train(ranks, 5, 8, tmp_path)
    assert losses == train(ranks)[0]
    with gzip.open(tmp_path / "rank_0.json.gz") as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    assert {name.removeprefix(stages.PREFIX) for name in names if name.startswith(stages.PREFIX)} == STAGES
    found = json.loads((tmp_path / "rank_0.stages.json").read_text())
    assert (found["rank"], found["steps"]) == (0, 4)
    assert found["training"].keys() | found["beside"].keys() == STAGES | {"other"}
    assert not stages._is_recorded
    assert said.startswith("Traced 4 steps: ")


def test_a_trace_of_steps_that_do_not_come(ranks: Ranks, tmp_path: Path):
    _, said = train(ranks, 500, 501, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert "No step from 500 to 501 was trained here" in said


def test_a_run_that_ends_within_the_traced_steps(ranks: Ranks, tmp_path: Path):
    train(ranks, 6, 100, tmp_path)
    assert json.loads((tmp_path / "rank_0.stages.json").read_text())["steps"] >= 1


def test_without_a_trace_no_stage_is_recorded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.profiler.record_function", lambda *_: pytest.fail("recorded"))
    assert stages.is_stage("plan")(lambda rows: rows)(3) == 3
    with stages.stage("plan"):
        pass
    with stages.stages_recorded(), pytest.raises(pytest.fail.Exception, match="recorded"):
        stages.stage("plan")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_times_of_nested_stages_add_up_to_the_outer_ones(cuts: list[tuple[int, int]]):
    """Stages that lie one in another, at any depth, take together what the outermost take."""
    spans, start = [], 0.0
    for depth, width in cuts:
        length = 1000.0 * (width + 2 * depth + 1)
        for inner in range(depth + 1):
            spans.append(Span("forward" if inner == 0 else f"s{inner}", 1, start + inner, start + length - inner))
        start += length
    found = mean_stages(spans, steps=1, seconds=start / 1e6, training_thread=None)
    assert sum(found["training"].values()) == pytest.approx(start / 1e3)
    assert all(value >= 0 for value in found["training"].values())


def test_collectives_and_other_threads_stand_apart():
    spans = [Span("forward", 1, 0, 100), Span("plan", 2, 0, 80), Span("gloo:all_reduce", 1, 50, 150)]
    found = mean_stages(spans, steps=1, seconds=2e-4, training_thread=None)
    assert found["between_ranks"] == {"gloo:all_reduce": 0.1}
    assert found["beside"] == {"plan": 0.08}
    assert found["training"] == pytest.approx({"forward": 0.1, "other": 0.1})
