"""Two ranks, of which one has a loss that is not finite: both skip its batch, or both stop."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from embershard.errors import NotFiniteError
from embershard.pipeline.config import LookAheadConfig
from embershard.pipeline.left_steps import collectives_begun
from embershard.sharding.config import ShardingConfig
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.parts.loss_monitor import Losses
from embershard.training.reports import TrainReport
from embershard.training.steps import Steps
from embershard.training.trainer import Trainer
from tests.covering import matrix
from tests.ranks.planned import here
from tests.ranks.workers import RankPool
from tests.unit.data.targets import target_config, write_targets
from tests.unit.training.poisoned import Feed, config_of, losses, run, state_of
from tests.unit.training.test_trainer import make_config

pytestmark = pytest.mark.ranks


def skip_batches(bad_rank: int, cache: str, left_out: set[int]) -> tuple[bool, list[str], list[str]]:
    """Train while `bad_rank` has a poisoned batch, and without these batches: are the losses equal, which tensors
    differ, and what this rank said of the skipped batches."""
    ranks = here()
    config, bad = config_of(cache, batch_size=50), {2, 7, 12}
    reports, state, _ = run(config, ranks, poisoned=bad if ranks.rank == bad_rank else ())
    without, expected, _ = run(config, ranks, left_out=left_out)
    different = [name for name, values in state.items() if not torch.equal(values, expected[name])]
    return losses(reports) == losses(without), different, [r.reason for r in reports if hasattr(r, "reason")]


def stop(
    folder: Path | None, cache: str, bad: int, train: dict[str, Any], reads_late: bool = False
) -> tuple[str, list[str], int]:
    """Train until the second rank has the poisoned batch; return the error, the kinds and steps of reports, and steps
    trained. `reads_late`: what travelled is not read behind its step."""
    ranks, said = here(), []
    trainer = Trainer(config_of(cache, "stop", batch_size=50, **train), ranks, folder)
    Feed(trainer, poisoned={bad} if ranks.rank == 1 else ())
    with mock.patch.object(Losses, "after_step", return_value=()) if reads_late else contextlib.nullcontext():
        try:
            for report in trainer.train():
                said.append(f"{type(report).__name__} {report.step}")
        except NotFiniteError as error:
            return str(error), said, trainer.steps
        finally:
            trainer.close()
    return "", said, trainer.steps


def told(config: RunConfig, travel: bool, asked_at: int | None) -> tuple[list[Any], Any, list[int]]:
    """What a run reports, its tensors, and the collectives that each step but the first began; by losses that travel,
    or by a collective of their own. The second rank is asked to stop in step `asked_at`."""
    ranks, begun, said = here(), list[int](), list[Any]()
    with contextlib.nullcontext() if travel else mock.patch.object(Steps, "carrier", None):
        trainer = Trainer(config, ranks)
        for report in trainer.train():
            begun.append(collectives_begun())
            if isinstance(report, TrainReport):
                said.append((report.step, report.loss, report.label_losses, report.quality))
                if ranks.rank == 1 and report.step + 1 == asked_at:
                    trainer.supervision.signal = 15
            else:
                said.append((type(report).__name__, report.step))
        state = state_of(trainer)
        trainer.close()
    return said, state, [after - before for before, after in itertools.pairwise(begun)]


def told_both_ways(config: RunConfig, asked_at: int | None = None) -> tuple[list[Any], list[Any], list[str], list[int]]:
    """Reports of both ways, which tensors differ, and the collectives that travelling saves, by report."""
    (by_agreement, state, few), (by_gather, expected, many) = (told(config, way, asked_at) for way in (True, False))
    different = [name for name, values in state.items() if not torch.equal(values, expected[name])]
    return by_agreement, by_gather, different, [b - a for a, b in zip(few, many, strict=True)]


BAD = {2, 7, 12}


@pytest.mark.parametrize(("bad_rank", "cache"), [matrix(0, "resident"), matrix(1, "cached"), (0, "look-ahead")])
def test_both_ranks_skip_the_batch(two_ranks: RankPool, bad_rank: int, cache: str):
    expected = [f"Step {step}: the loss of rank {bad_rank} is nan." for step in (2, 6, 10)]
    for is_equal, different, said in two_ranks.run(skip_batches, bad_rank, cache, BAD):
        assert is_equal
        assert different == []
        assert said == expected


@pytest.mark.matrix
def test_a_batch_more_or_less_is_noticed(two_ranks: RankPool):
    for is_equal, different, _ in two_ranks.run(skip_batches, 1, "cached", BAD - {7}):
        assert not is_equal
        assert different


@pytest.mark.parametrize("cache", ["cached", "look-ahead"])
def test_both_ranks_stop_and_name_the_batch(two_ranks: RankPool, tmp_path: Path, cache: str):
    """Losses that travel are read behind their step; others before its backward."""
    first, second = two_ranks.run(stop, tmp_path / "checkpoints", cache, 7, {"max_steps": 18})
    assert first == second
    error, said, steps = first
    file = tmp_path / "non_finite" / "step_7_rank_1.pt"
    assert error.startswith(f"Step 7: the loss of rank 1 is nan. Its batch is in {file}. ")
    assert error.endswith("step_5.")
    assert torch.load(file, weights_only=True)["rank"] == 1
    assert steps == (7 if cache == "look-ahead" else 6)
    assert said[-1] == "TrainReport 6"


@pytest.mark.parametrize("bad", [5, 12])
def test_nothing_is_made_of_a_loss_that_was_not_read(two_ranks: RankPool, bad: int):
    """Step 5 would be evaluated. At step 12 there are no more agreements: its loss is read before its backward."""
    train = {"log_every": 100, "eval_every": 5, "max_steps": 12}
    (error, said, steps), _ = two_ranks.run(stop, None, "look-ahead", bad, train)
    assert (error.partition(".")[0], steps) == (f"Step {bad}: the loss of rank 1 is nan", min(bad, 11))
    assert said == (["EvalReport 5", "EvalReport 10"] if bad == 12 else [])
    if bad == 5:
        (_, said, _), _ = two_ranks.run(stop, None, "look-ahead", bad, train, True)
        assert "EvalReport 5" in said, "the control"


@pytest.mark.parametrize("asked_at", [None, 6])
def test_losses_that_travel_change_nothing(two_ranks: RankPool, asked_at: int | None):
    """Reports, tensors, and the step in which all ranks stop; a step has one collective less, until data end."""
    config = config_of("look-ahead", "stop", batch_size=50, max_steps=18)
    for by_agreement, by_gather, different, saved in two_ranks.run(told_both_ways, config, asked_at):
        assert by_agreement == by_gather
        assert by_agreement[-1] == ("StopReport", 6) if asked_at else by_agreement[-1][0] == "EvalReport"
        assert different == []
        assert saved == ([1] * 5 + [0] if asked_at else [1] * 11 + [0] * 7)


@pytest.mark.parametrize("kind", ["several labels", pytest.param("hot and cold", marks=pytest.mark.extra)])
def test_other_numbers_travel_with_losses(two_ranks: RankPool, tmp_path: Path, kind: str):
    """Sums of labels; and losses by which the order of batches is decided, far behind those that are read ahead."""
    if kind == "several labels":
        config = target_config(write_targets(tmp_path / "samples.parquet"), "several")
    else:
        config = make_config(
            sharding=ShardingConfig(mode="hot_cold", hot_bytes=20_000),
            train=TrainConfig(batch_size=10, log_every=1, epochs=2, max_steps=90),
            look_ahead=LookAheadConfig(lookahead=4, prefetch=2),
        )
    for by_agreement, by_gather, different, saved in two_ranks.run(told_both_ways, config):
        assert by_agreement == by_gather
        assert bool(by_agreement[0][2]) == (kind == "several labels")
        assert different == []
        assert sum(saved) >= len(saved) - 9, saved
