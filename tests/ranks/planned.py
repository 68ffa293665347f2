"""Runs of the trainer that obey a plan, as one rank of a pool of processes."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from embershard.cache import CacheConfig
from embershard.data import open_source
from embershard.distributed import CheckpointConfig, Ranks, complete_checkpoints
from embershard.errors import EmbershardError
from embershard.models import table_name
from embershard.sharding.config import ShardingConfig
from embershard.sharding.plan import Plan, TablePlacement, pools_of
from embershard.sharding.sharding_types import ROWS_TYPES
from embershard.sharding.torchrec.spec import CacheSpec
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.optimizers import DenseOptimizerConfig, EmbeddingOptimizerConfig
from embershard.training.reports import EvalReport, Report, TrainReport
from embershard.training.trainer import Trainer
from tests.ranks.parity import differences, snapshot
from tests.small_runs import small_data, small_model
from tests.unit.sharding.plans import make_plan, ranks_for

DIM = 8


def make_config(plan: Path | None, **changes: Any) -> RunConfig:
    """A small run over 26 tables with SGD everywhere, so that every kernel is allowed."""
    parts: dict[str, Any] = {
        "data": small_data(1200),
        "model": small_model(DIM),
        "embedding_optimizer": EmbeddingOptimizerConfig(kind="sgd", lr=0.1),
        "dense_optimizer": DenseOptimizerConfig(kind="sgd", lr=0.1),
        "train": TrainConfig(batch_size=20, log_every=1, max_steps=12, device="cpu"),
        "checkpoint": CheckpointConfig(at_end=False),
        "sharding": ShardingConfig(plan=None if plan is None else str(plan)),
    }
    return RunConfig(**{**parts, **changes})


def mixed_plan(kinds: list[str], world_size: int, ranks_per_node: int, **changes: Any) -> Plan:
    """The run's tables with these sharding types in turn; the first one is on the device, the second one replicated.

    Slots are for the lookups of one batch of all ranks, and a few more.
    """
    tables = []
    for number, feature in enumerate(open_source(make_config(None).data).schema.sparse):
        sharding = "data_parallel" if number == 1 else kinds[number % len(kinds)]
        kernel = {0: "device", 1: "replicated"}.get(number, "cached")
        ranks = ranks_for(sharding, number, world_size, ranks_per_node, column_shards=2)
        name = table_name(feature.name)
        tables.append(TablePlacement(name, feature.num_rows, DIM, "fp32", sharding, kernel, ranks))  # type: ignore[arg-type]
    plan = make_plan(tables, world_size, ranks_per_node, batch_size=20, **changes)
    rows = {table.table: table.rows for table in tables}
    pools = []
    for placed, pool in zip(plan.pools, pools_of(tables, ranks_per_node), strict=True):
        wanted = sum(min(rows[name], 20 * world_size) for name in pool.tables)
        pools.append(dataclasses.replace(placed, slots=max(1, min(pool.rows, wanted))))
    return dataclasses.replace(plan, pools=tuple(pools))


def with_rows(plan: Plan) -> Plan:
    """The plan with every second pair of tables exchanging rows where they can, in more pools; a slot for every row."""
    tables = [
        dataclasses.replace(table, exchange="rows" if number // 2 % 2 and table.sharding in ROWS_TYPES else "pooled")
        for number, table in enumerate(plan.tables)
    ]
    pools = tuple(pool.with_slots(max(1, pool.rows)) for pool in pools_of(tables, plan.ranks_per_node))
    return dataclasses.replace(plan, tables=tuple(tables), pools=pools)


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of a run with a cache beside one without."""

    different: list[str]
    num_compared: int
    losses: list[float]
    cache: dict[str, Any]
    replicated: list[list[float]]


def here() -> Ranks:
    """The calling process's place."""
    local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    return Ranks(dist.get_rank(), dist.get_world_size(), *local, torch.device("cpu"))


def compare(plan: Path, **changes: Any) -> Outcome:
    """A planned run through caches, and the same tables at the same places in stock TorchRec."""
    with_cache = make_config(plan, **changes)
    uncached = dataclasses.replace(with_cache, cache=dataclasses.replace(with_cache.cache, enabled=False))
    stock, stock_losses, _ = _train(uncached)
    found, losses, cache = _train(with_cache)
    assert cache is not None
    different = [f"initial {name}" for name in differences(stock[0], found[0])] + differences(stock[1], found[1])
    different += ["losses"] if losses != stock_losses else []
    replicated = [found[1][name].flatten().tolist() for name in sorted(found[1]) if _is_whole_table(name)]
    return Outcome(different, len(found[1]), losses, dataclasses.asdict(cache), replicated)


def _is_whole_table(name: str) -> bool:
    return "embedding_bags" in name and name.endswith(".weight")


def _train(config: RunConfig) -> tuple[tuple[dict[str, Tensor], dict[str, Tensor]], list[float], Any]:
    trainer = Trainer(config, here())
    before = snapshot(trainer.model)
    losses = _losses(trainer.train())
    after, cache = snapshot(trainer.model), trainer.metrics.cache_reader.totals(None)
    trainer.close()
    return (before, after), losses, cache


def _losses(reports: Iterator[Report]) -> list[float]:
    found = []
    for report in reports:
        if isinstance(report, TrainReport):
            found.append(report.loss)
        elif isinstance(report, EvalReport):
            found.append(report.quality["logloss"])
    return found


def continue_with(plan: Path, other: Path, folder: Path) -> tuple[list[float], list[float]]:
    """A planned run, and its second half again from a checkpoint by another plan: the losses of both second halves."""
    whole = Trainer(make_config(plan, checkpoint=CheckpointConfig(every_steps=6, at_end=False)), here(), folder)
    losses = _losses(whole.train())
    whole.close()
    second = Trainer(make_config(other), here())
    second.resume(complete_checkpoints(folder)[0])
    resumed = _losses(second.train())
    second.close()
    return losses[6:], resumed


def refused(plan: Path, **changes: Any) -> str:
    """What a run with this plan says instead of training."""
    try:
        Trainer(make_config(plan, **changes), here())
    except EmbershardError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refused_with_dense(plan: Path, dense_optimizer: DenseOptimizerConfig) -> str:
    """As :func:`refused`, without a cache and with another optimizer of the dense layers."""
    return refused(plan, dense_optimizer=dense_optimizer, cache=CacheConfig(enabled=False))


def refused_with_a_wrong_slot_on_one_rank(plan: Path) -> str:
    """As :func:`refused`, when rank 1 makes a cache that the plan does not want."""
    num_slots = CacheSpec.num_slots

    def one_more(self: CacheSpec, *args: Any) -> int:
        return num_slots(self, *args) - (self.rank == 1)

    with mock.patch.object(CacheSpec, "num_slots", one_more):
        return refused(plan)


def grown(plan: Path) -> Outcome:
    """:func:`compare` with caches that are too small for a batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compare(plan)
