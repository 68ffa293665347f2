"""What every rank builds is what the plan says, for 1, 2 and 4 ranks: one process plays one rank after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec.distributed import comm
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from embershard import CachedEmbeddingBagCollectionSharder
from embershard.errors import ShardingError
from embershard.sharding.plan import Plan, TablePlacement
from embershard.sharding.torchrec import StockEmbeddingBagCollectionSharder
from embershard.sharding.torchrec.planner.placement import check_built, torchrec_plan
from tests.unit.sharding.plans import SHARDED, make_plan, ranks_for
from tests.unit.sharding.test_placement import model_of

CPU = torch.device("cpu")


@contextmanager
def playing(rank: int, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group whose collectives do nothing."""
    for name, value in (("LOCAL_WORLD_SIZE", plan.ranks_per_node), ("LOCAL_RANK", rank % plan.ranks_per_node)):
        monkeypatch.setenv(name, str(value))
    for kept in ("_INTRA_PG", "_CROSS_PG"):  # TorchRec keeps a node's group for the life of a process
        monkeypatch.setattr(comm, kept, None)
    # The first model of a process broadcasts a flag; nobody sends it here, so memory would be read as it was.
    monkeypatch.setattr(dist, "broadcast_object_list", lambda *args, **kwargs: None)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(plan: Plan, obeyed: Plan | None = None, cached: bool = True) -> nn.Module:
    sharder = (
        CachedEmbeddingBagCollectionSharder(plan=obeyed or plan) if cached else StockEmbeddingBagCollectionSharder()
    )
    model = model_of(plan.tables)
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=CPU,
        plan=torchrec_plan(plan, model, [sharder], CPU, cached=cached),
        sharders=[sharder],
        init_data_parallel=False,
    )


def every_kind(world_size: int, ranks_per_node: int) -> Plan:
    """Each sharding type in two dims and both dtypes, some on the device, one replicated, small ones among them."""
    everywhere = tuple(range(world_size))
    tables = [
        TablePlacement("r", 9, 16, "fp32", "data_parallel", "replicated", ()),
        TablePlacement("fewer_rows_than_ranks", 5, 48, "fp32", "row_wise", "cached", everywhere),
        TablePlacement("fewer_rows_on_device", 5, 48, "fp16", "row_wise", "device", everywhere),
        TablePlacement("beside_it_on_device", 50, 48, "fp16", "row_wise", "device", everywhere),
    ]
    for number, sharding in enumerate(SHARDED * 4):
        dim, dtype = (16, 32)[number // 6 % 2], ("fp32", "fp16")[number // 12]
        ranks = ranks_for(sharding, number, world_size, ranks_per_node, column_shards=2)
        kernel = "device" if number % 7 == 3 else "cached"
        tables.append(TablePlacement(f"t{number}", 3 + 11 * number, dim, dtype, sharding, kernel, ranks))  # type: ignore[arg-type]
    return make_plan(tables, world_size, ranks_per_node)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(1, 1), (2, 2), (4, 2)])
def test_every_rank_is_built_as_planned(world_size, ranks_per_node, monkeypatch):
    plan = every_kind(world_size, ranks_per_node)
    for rank in range(world_size):
        with playing(rank, plan, monkeypatch):
            check_built(build(plan), plan, rank)
            check_built(build(plan, cached=False), plan, rank, cached=False)


@pytest.mark.slow
def test_another_build_is_noticed(monkeypatch):
    plan = every_kind(2, 2)
    with playing(1, plan, monkeypatch):
        model = build(plan)
    pool = next(pool for pool in plan.pools if pool.rank == 1)
    slots = tuple(dataclasses.replace(p, slots=p.slots + 1) if p is pool else p for p in plan.pools)
    kernel, rank = (
        [dataclasses.replace(t, **change) if t.table == "t0" else t for t in plan.tables]
        for change in ({"kernel": "device"}, {"ranks": (1,)})
    )
    check_built(model, plan, 1)
    for other, message in (
        (
            dataclasses.replace(plan, pools=slots),
            r"rank 1 is not built as planned; pools planned and not built: \[Pool",
        ),
        (make_plan(rank, 2, 2), "shards planned and not built: .*table='t0', rank=1.*built and not planned: none"),
    ):
        with pytest.raises(ShardingError, match=message):
            check_built(model, other, 1)
    with playing(0, plan, monkeypatch), pytest.raises(ShardingError, match=r"kernel='device'.*kernel='cached'"):
        check_built(build(plan), make_plan(kernel, 2, 2), 0)
    with pytest.raises(ShardingError, match=r"kernel='device'.*kernel='cached'"):
        check_built(model, plan, 1, cached=False)


def test_a_cache_takes_its_slots_from_the_plan_alone(monkeypatch):
    plan = make_plan([TablePlacement("t0", 40, 16, "fp32", "table_wise", "cached", (0,))], 1, 1)
    other = make_plan([TablePlacement("t9", 40, 16, "fp32", "table_wise", "cached", (0,))], 1, 1)
    said = r"rank 0: the plan has no pool of the tables \['t0'\]; its pools there are \[\('t9',\)\]"
    with playing(0, plan, monkeypatch), pytest.raises(ShardingError, match=said):
        build(plan, obeyed=other)
