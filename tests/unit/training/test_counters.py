"""Statistics of a model with several sharded modules, on one rank."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard import CacheConfig, CachedEmbeddingBagCollectionSharder, cache_stats, plan_sharding
from embershard.distributed import Ranks
from embershard.sharding.torchrec import cached_embeddings
from embershard.training.parts.counts import CacheReader, ProcessorClock


class Model(nn.Module):
    """Modules with tables of 8 columns: rows by name and module."""

    def __init__(self, tables: dict[str, dict[str, int]]) -> None:
        super().__init__()
        meta = torch.device("meta")
        self.sparse = nn.ModuleDict(
            {
                module: EmbeddingBagCollection(
                    [
                        EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=rows, feature_names=[f"f_{name}"])
                        for name, rows in of_module.items()
                    ],
                    device=meta,
                )
                for module, of_module in tables.items()
            }
        )
        self.dense = nn.Linear(1, 1)  # for DistributedDataParallel to wrap

    def forward(self, features: dict[str, KeyedJaggedTensor]) -> Tensor:
        return sum(self.sparse[name](each).values().sum() for name, each in features.items())  # type: ignore[return-value]


def train(tables: dict[str, dict[str, int]], lookups: dict[str, dict[str, int]], **constraints: Any) -> nn.Module:
    """One step on so many different ids per table, by module."""
    model = Model(tables)
    sharders: Any = [CachedEmbeddingBagCollectionSharder(CacheConfig(ratio=0.5, policy="lfu"))]
    names = {name for of_module in tables.values() for name in of_module}
    given = {name: ParameterConstraints(**constraints) for name in names} if constraints else None
    plan = plan_sharding(model, sharders, world_size=1, local_world_size=1, device="cpu", constraints=given)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = DistributedModelParallel(model, env=env, device=torch.device("cpu"), plan=plan, sharders=sharders)
    features = {
        module: KeyedJaggedTensor(
            keys=[f"f_{name}" for name in counts],
            values=torch.cat([torch.arange(count) for count in counts.values()]),
            lengths=torch.tensor(list(counts.values())),
        )
        for module, counts in lookups.items()
    }
    sharded(features).backward()
    return sharded


TABLES = {"user": {"id": 40, "age": 20}, "item": {"id": 60, "shop": 30}}
LOOKUPS = {"user": {"id": 5, "age": 3}, "item": {"id": 7, "shop": 2}}


def test_tables_of_one_name_in_two_modules_are_two(ranks):
    model = train(TABLES, LOOKUPS)
    found = [(stats.table, stats.module, stats.rows, stats.lookups) for stats in cache_stats(model)]
    assert found == [
        ("age", "sparse.user", 20, 3),
        ("id", "sparse.item", 60, 7),
        ("id", "sparse.user", 40, 5),
        ("shop", "sparse.item", 30, 2),
    ]
    assert sum(len(pool.stats()) for pool in cached_embeddings(model)) == 4


def test_column_shards_of_one_module_are_one_table(ranks):
    tables, lookups = {"user": {"id": 40}, "item": {"id": 60}}, {"user": {"id": 5}, "item": {"id": 7}}
    model = train(tables, lookups, sharding_types=["column_wise"], min_partition=4)
    assert sum(len(pool.stats()) for pool in cached_embeddings(model)) == 4
    found = [(stats.table, stats.module, stats.rows, stats.lookups) for stats in cache_stats(model)]
    assert found == [("id", "sparse.item", 60, 14), ("id", "sparse.user", 40, 10)]


@pytest.mark.slow
def test_a_report_names_the_module_only_of_namesakes(ranks):
    totals = CacheReader(train(TABLES, LOOKUPS), ranks).totals(0.5)
    expected = {"age": (20, 3), "shop": (30, 2), "sparse.item.id": (60, 7), "sparse.user.id": (40, 5)}
    (rank,) = totals.ranks
    for tables in (totals.tables, rank.tables):
        assert {name: (table.rows, table.lookups) for name, table in tables.items()} == expected
    assert sorted(pool.tables for pool in rank.pools) == [("age", "sparse.user.id"), ("shop", "sparse.item.id")]
    assert totals.rows == rank.rows == 150


@pytest.mark.slow
def test_a_report_of_different_names_has_no_modules(ranks):
    totals = CacheReader(train({"user": {"id": 40}, "item": {"shop": 60}}, {"user": {"id": 5}}), ranks).totals(0.5)
    assert list(totals.tables) == ["id", "shop"]
    assert sorted(pool.tables for pool in totals.ranks[0].pools) == [("id",), ("shop",)]


def test_what_other_programs_take_is_a_share_of_the_cores_of_a_machine(monkeypatch):
    """Of four cores: 6 of 40 seconds are this rank's and another's, 14 those of others; the busier machine counts."""
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    seconds = iter([100.0, 110.0])
    busy, own = iter([50.0, 70.0]), iter([7.0, 11.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(time, "process_time", lambda: next(own))
    monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(user=next(busy), idle=1e6))
    clock = ProcessorClock()
    ranks = Ranks(rank=0, world_size=4, local_rank=0, local_world_size=2, device=torch.device("cpu"))
    others = [[40.0, 20.0, 2.0], [40.0, 8.0, 4.0], [40.0, 8.0, 4.0]]
    monkeypatch.setattr(Ranks, "all_gather_objects", lambda _, mine: [mine, *others])
    assert clock.taken_by_others(ranks) == pytest.approx(14 / 40)
