"""Runs of `embershard train` with groups: what they train, when they save and evaluate, and how they go on."""

from __future__ import annotations

import dataclasses
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from embershard import cache_stats, flush
from embershard.cache import CacheConfig
from embershard.cache.rows.moves import RowMoves
from embershard.distributed import CheckpointConfig, complete_checkpoints
from embershard.extras.groups import row_sync
from embershard.extras.groups.model import GroupedModelParallel
from embershard.extras.groups.part import RowAverages
from embershard.extras.verify.equivalence import compare_with_stock
from embershard.pipeline.config import LookAheadConfig
from embershard.sharding.config import ShardingConfig
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.optimizers import DenseOptimizerConfig, EmbeddingOptimizerConfig
from embershard.training.reports import EvalReport, SaveReport, TrainReport
from embershard.training.trainer import Trainer
from tests.covering import matrix
from tests.ranks import groups
from tests.ranks.planned import here, mixed_plan
from tests.ranks.workers import RankPool
from tests.small_runs import small_data, small_run
from tests.unit.distributed.test_blocks import stock_loaded

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.extra]


def config_of(
    num_groups: int = 2, sync_every: int = 3, lookahead: int = 8, steps: int = 10, **changes: Any
) -> RunConfig:
    """A small run whose caches evict rows."""
    sharding = ShardingConfig(groups=num_groups, sync_every=sync_every if num_groups > 1 else 1)
    return small_run(
        **{
            "data": small_data(1000, scale=0.001),
            "cache": CacheConfig(ratio=0.02),
            "look_ahead": LookAheadConfig(lookahead),
            "sharding": sharding,
            "train": TrainConfig(global_batch_size=64, max_steps=steps, log_every=1, eval_every=4, device="cpu"),
            "checkpoint": CheckpointConfig(every_steps=4, keep_last=9),
            **changes,
        }
    )


@dataclasses.dataclass
class Trained:
    """What a rank saw of a run."""

    losses: list[float]
    saved: list[int]
    evaluated: list[int]
    evictions: int
    weights: dict[str, list[Tensor]]


def train(config: RunConfig, folder: Path, resumed: Path | None = None, stop_at: int | None = None) -> Trained:
    """On this rank, from the start or a checkpoint; `stop_at`: a signal comes in this step."""
    reports: list[Any] = []
    with groups.envs_are_kept():
        trainer = Trainer(config, here(), folder)
        if resumed is not None:
            trainer.resume(resumed, allow_changes=("sharding.groups", "sharding.sync_every"))
        for report in trainer.train():
            reports.append(report)
            if isinstance(report, TrainReport) and report.step == stop_at:
                trainer.supervision.note_agreed(signal.SIGTERM)
        found = Trained(
            [report.loss for report in reports if isinstance(report, TrainReport)],
            [report.step for report in reports if isinstance(report, SaveReport)],
            [report.step for report in reports if isinstance(report, EvalReport)],
            sum(each.evictions for each in cache_stats(trainer.model)),
            groups.snapshot(trainer.model),
        )
        trainer.close()
    return found


def without_a_cache(config: RunConfig) -> RunConfig:
    return dataclasses.replace(config, cache=CacheConfig(enabled=False))


@pytest.mark.parametrize("lookahead", [pytest.param(8, marks=pytest.mark.smoke), matrix(0)])
def test_a_run_trains_what_it_trains_without_a_cache(four_ranks: RankPool, tmp_path: Path, lookahead: int):
    config = config_of(lookahead=lookahead)
    cached = four_ranks.run(train, config, tmp_path / "cached")
    whole = four_ranks.run(train, without_a_cache(config), tmp_path / "whole")
    for ours, plain in zip(cached, whole, strict=True):
        assert groups.differences(ours.weights, plain.weights) == []
        assert ours.losses == plain.losses
    assert sum(each.evictions for each in cached) > 500
    assert len(cached[0].losses) == 10


def accumulated(config: RunConfig, folder: Path) -> Trained:
    return train(dataclasses.replace(config, train=dataclasses.replace(config.train, accumulate=2)), folder)


def test_micro_batches_train_rows_together(two_ranks: RankPool, tmp_path: Path):
    """Sums are rounded in another order than those of whole batches."""
    cached = two_ranks.run(accumulated, config_of(), tmp_path / "cached")
    plain = two_ranks.run(accumulated, without_a_cache(config_of()), tmp_path / "plain")
    whole = two_ranks.run(train, config_of(), tmp_path / "whole")
    for ours, theirs, at_once in zip(cached, plain, whole, strict=True):
        assert groups.differences(ours.weights, theirs.weights) == []
        assert ours.losses == pytest.approx(at_once.losses, rel=1e-5)


def test_replicas_are_not_one_group(two_ranks: RankPool, tmp_path: Path):
    """Control: the comparisons of weights can fail."""
    one = two_ranks.run(train, config_of(1), tmp_path / "one")
    two = two_ranks.run(train, config_of(2), tmp_path / "two")
    assert one[0].losses[0] == two[0].losses[0]
    assert one[0].losses[5:] != two[0].losses[5:]


def test_saves_and_evaluations_wait_for_an_average(two_ranks: RankPool, tmp_path: Path):
    found = two_ranks.run(train, config_of(), tmp_path)
    assert [each.saved for each in found] == [[6, 9, 10]] * 2
    assert [each.evaluated for each in found] == [[6, 9, 10]] * 2
    whole = [stock_loaded(path) for path in complete_checkpoints(tmp_path)]
    for name, shard in found[1].weights.items():
        if f"model.{name}" in whole[-1] and shard[0].shape == whole[-1][f"model.{name}"].shape:
            assert torch.equal(shard[0], whole[-1][f"model.{name}"]), name


def train_unsettled(config: RunConfig, folder: Path) -> Trained:
    with mock.patch.object(RowAverages, "is_settled", True):
        return train(config, folder)


def test_without_waiting_a_save_comes_between_averages(two_ranks: RankPool, tmp_path: Path):
    """Control."""
    assert two_ranks.run(train_unsettled, config_of(), tmp_path)[0].saved == [4, 8, 10]


@pytest.mark.parametrize("stop_at", [4])
def test_a_signal_ends_a_run_behind_an_average(two_ranks: RankPool, tmp_path: Path, stop_at: int):
    found = two_ranks.run(train, config_of(), tmp_path, None, stop_at)
    assert [(len(each.losses), each.saved) for each in found] == [(6, [6])] * 2


def test_a_run_goes_on_as_it_would_have(two_ranks: RankPool, tmp_path: Path):
    config = config_of(steps=9)
    whole = two_ranks.run(train, config, tmp_path / "whole")
    rest = two_ranks.run(train, config, tmp_path / "rest", tmp_path / "whole" / "step_6")
    for ours, expected in zip(rest, whole, strict=True):
        assert groups.differences(ours.weights, expected.weights) == []
        assert ours.losses == expected.losses[6:]


def test_saves_of_what_changed_have_what_any_group_trained(two_ranks: RankPool, tmp_path: Path):
    """The first group writes them."""
    config = config_of(steps=12, checkpoint=CheckpointConfig(every_steps=3, keep_last=9, full_every=9))
    whole = two_ranks.run(train, config, tmp_path / "whole")
    folder = tmp_path / "whole" / "step_9"
    rows = sorted(path.name for path in folder.glob("rows_*.safetensors"))
    assert rows == ["rows_0.safetensors"]
    rest = two_ranks.run(train, config, tmp_path / "rest", folder)
    for ours, expected in zip(rest, whole, strict=True):
        assert groups.differences(ours.weights, expected.weights) == []


def loaded(config: RunConfig, folder: Path, checkpoint: Path) -> tuple[list[str], int]:
    """Names of tensors whose parts here are not those of the checkpoint, and how many parts were compared."""
    saved, different, count = stock_loaded(checkpoint), [], 0
    with groups.envs_are_kept():
        trainer = Trainer(config, here(), folder)
        trainer.resume(checkpoint, allow_changes=("sharding.groups", "sharding.sync_every"))
        flush(trainer.model)
        for name, value in trainer.model.state_dict().items():
            for shard in value.local_shards() if isinstance(value, ShardedTensor) else ():
                first, size = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                part = saved[f"model.{name}"][first[0] : first[0] + size[0], first[1] : first[1] + size[1]]
                count += 1
                different += [] if torch.equal(part, shard.tensor) else [name]
        trainer.close()
    return different, count


@pytest.fixture(scope="module")
def of_two_by_two(four_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of step 6 of two groups of two ranks."""
    folder = tmp_path_factory.mktemp("two_by_two")
    four_ranks.run(train, config_of(steps=6), folder)
    return folder / "step_6"


@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_other_groups_go_on_with_its_rows(four_ranks: RankPool, of_two_by_two: Path, tmp_path: Path, num_groups: int):
    found = four_ranks.run(loaded, config_of(num_groups), tmp_path, of_two_by_two)
    assert [different for different, _ in found] == [[]] * 4
    assert sum(count for _, count in found) >= 26 * num_groups
    rest = four_ranks.run(train, config_of(num_groups, steps=9), tmp_path / "rest", of_two_by_two)
    assert len(rest[0].losses) == 3


def test_fewer_ranks_go_on_with_its_rows(two_ranks: RankPool, of_two_by_two: Path, tmp_path: Path):
    assert all(different == [] for different, _ in two_ranks.run(loaded, config_of(), tmp_path, of_two_by_two))


def planned(folder: Path) -> tuple[list[str], int]:
    """Train by a plan for a group's ranks with tables of every kernel; return what differs between the replicas."""
    path = folder / f"plan_{here().rank}.json"
    mixed_plan(["table_wise", "row_wise", "column_wise"], 2, 2).save(path)
    config = config_of(
        steps=6,
        data=small_data(1200),
        model=dataclasses.replace(config_of().model, embedding_dim=8, dense_arch_layer_sizes=(8, 8)),
        cache=CacheConfig(),
        sharding=ShardingConfig(plan=str(path), groups=2, sync_every=3),
        embedding_optimizer=EmbeddingOptimizerConfig(kind="sgd", lr=0.1),
        dense_optimizer=DenseOptimizerConfig(kind="sgd", lr=0.1),
    )
    found = train(config, folder / "run").weights
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    return groups.differences(found, every[(dist.get_rank() + 2) % 4]), len(found)


def test_a_plan_is_one_of_a_group(four_ranks: RankPool, tmp_path: Path):
    for different, count in four_ranks.run(planned, tmp_path):
        assert different == []
        assert count > 20


def test_ranks_that_cannot_be_divided_are_refused_before_anything_is_built(two_ranks: RankPool, tmp_path: Path):
    with mock.patch.object(GroupedModelParallel, "__init__", side_effect=AssertionError("built")):
        for message in two_ranks.run(message_of_three_groups, tmp_path):
            assert "got 3 groups of 2 ranks" in message


def message_of_three_groups(folder: Path) -> str:
    return groups.look_ahead.message_of(lambda: train(config_of(3), folder))


def interrupted(config: RunConfig, folder: Path) -> tuple[Trained, list[str]]:
    """A run whose third average ends early, and then one that goes on from its newest checkpoint."""
    names = []
    average, count = row_sync.mean_over, 0

    def fail_late(*given: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return average(*given)

    with mock.patch.object(row_sync, "mean_over", fail_late), pytest.raises(KeyboardInterrupt):
        train(config, folder)
    names = [path.name for path in complete_checkpoints(folder)]
    dist.barrier()
    return train(config, folder, folder / names[-1]), names


def test_an_average_that_was_interrupted_costs_the_steps_behind_the_last_save(two_ranks: RankPool, tmp_path: Path):
    config = config_of(steps=12, checkpoint=CheckpointConfig(every_steps=3, keep_last=9, asynchronous=False))
    whole = two_ranks.run(train, config, tmp_path / "whole")
    for (rest, names), expected in zip(two_ranks.run(interrupted, config, tmp_path / "cut"), whole, strict=True):
        assert names == ["step_3", "step_6"]
        assert groups.differences(rest.weights, expected.weights) == []


def verdict(config: RunConfig, is_broken: bool) -> tuple[bool, int]:
    """Of `embershard verify`: are cached tables equal to stock ones, and how often did pins matter."""
    broken = mock.patch.object(RowMoves, "refill") if is_broken else nullcontext()
    with groups.envs_are_kept(), broken:
        found = compare_with_stock(config, here(), 7)
    return found.is_equal, found.num_tensors


@pytest.mark.parametrize("is_broken", [False, matrix(True)])
def test_verify_compares_groups_with_stock(two_ranks: RankPool, is_broken: bool):
    for is_equal, num_tensors in two_ranks.run(verdict, config_of(), is_broken):
        assert is_equal == (not is_broken)
        assert num_tensors > 26
