"""Trainings with blocks of columns that differ, as one rank of a pool of processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from embershard.cache import CacheConfig
from embershard.data import open_source
from embershard.models import table_name
from embershard.pipeline.config import LookAheadConfig
from embershard.sharding.plan import Plan, TablePlacement, pools_of
from embershard.training.optimizers import EmbeddingOptimizerConfig
from tests.ranks import planned
from tests.small_runs import small_model
from tests.unit.sharding.plans import make_plan, ranks_for

DIM = 96
#: Sharding type, columns and number of blocks of the tables, in turn.
KINDS: list[tuple[str, tuple[int, ...]]] = [
    ("column_wise", (64, 32)),
    ("table_wise", ()),
    ("column_wise", (32, 64)),
    ("row_wise", ()),
    ("column_wise", ()),
    ("column_wise", (60, 36)),
]
ON_NODES: list[tuple[str, tuple[int, ...]]] = [
    ("grid_shard", (64, 32)),
    ("table_column_wise", (32, 64)),
    ("table_row_wise", ()),
    ("column_wise", (32, 64)),
    ("grid_shard", ()),
]


def mixed_plan(
    kinds: list[tuple[str, tuple[int, ...]]], world_size: int = 2, ranks_per_node: int = 2, slots: float = 1.0
) -> Plan:
    """A plan of a small run's 26 tables: the first one is on the device, the others are cached, with slots for the
    lookups of a batch of all ranks."""
    tables = []
    for number, feature in enumerate(open_source(planned.make_config(None).data).schema.sparse):
        sharding, columns = kinds[number % len(kinds)]
        kinds_of: Any = (sharding, "cached" if number else "device")
        ranks = ranks_for(sharding, number, world_size, ranks_per_node, column_shards=2)
        if sharding == "grid_shard" and columns:  # a node for each block
            ranks = tuple(range(world_size))
        tables.append(
            TablePlacement(table_name(feature.name), feature.num_rows, DIM, "fp32", *kinds_of, ranks, columns=columns)
        )
    rows = {table.table: table.rows for table in tables}
    pools = []
    for pool in pools_of(tables, ranks_per_node):
        wanted = round(slots * sum(min(rows[name], 20 * world_size) for name in pool.tables))
        pools.append(pool.with_slots(max(1, min(pool.rows, wanted))))
    return make_plan(tables, world_size, ranks_per_node, batch_size=20, pools=tuple(pools))


def changes_of(optimizer: str, lookahead: int) -> dict[str, Any]:
    """Settings of a run."""
    return {
        "model": small_model(DIM),
        "embedding_optimizer": EmbeddingOptimizerConfig(kind=optimizer, lr=0.1),  # type: ignore[arg-type]
        "cache": CacheConfig(policy="lookahead" if lookahead else "lfu"),
        "look_ahead": LookAheadConfig(lookahead, 1),
    }


def compare(plan: Path, optimizer: str, lookahead: int) -> planned.Outcome:
    """A run through caches, and the same tables at the same places in stock TorchRec."""
    return planned.compare(plan, **changes_of(optimizer, lookahead))


def losses(plan: Path, optimizer: str) -> list[float]:
    """Of a run through caches."""
    trainer = planned.Trainer(planned.make_config(plan, **changes_of(optimizer, 0)), planned.here())
    found = planned._losses(trainer.train())
    trainer.close()
    return found


def without_unequal(plan: Plan, sharding: str = "column_wise") -> Plan:
    """The plan with the unequal tables cut otherwise."""
    tables = [
        dataclasses.replace(table, columns=(), sharding=sharding, ranks=table.ranks[: 2 if "column" in sharding else 1])  # type: ignore[arg-type]
        if table.columns
        else table
        for table in plan.tables
    ]
    pools = tuple(pool.with_slots(max(1, pool.rows // 2)) for pool in pools_of(tables, plan.ranks_per_node))
    return dataclasses.replace(plan, tables=tuple(tables), pools=pools)
