"""Slots use a budget up, and never more than that."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.cache.config import LEAST_SLOTS, CachePolicy
from embershard.planning.request import Budget
from embershard.planning.slots import least_slots, split_slots
from embershard.planning.workload import Layout, Workload
from embershard.sharding.memory_model import pool_memory
from embershard.sharding.plan import TablePlacement
from embershard.sharding.run_shape import ReplaySettings
from embershard.sharding.sizes import by_pool, place_shards
from tests.unit.planning.requests import LFU, data_of, make_workload
from tests.unit.sharding.plans import ranks_for

TYPES = ("table_wise", "row_wise", "column_wise")


def placements(workload: Workload, types: Sequence[str], kernels: Sequence[str] = ()) -> list[TablePlacement]:
    world, node = workload.shape.world_size, min(workload.shape.ranks_per_node, workload.shape.world_size)
    return [
        TablePlacement(
            t.table, t.rows, t.dim, t.dtype, kind, (*kernels, *["cached"] * 99)[n], ranks_for(kind, n, world, node, 2)
        )
        for n, (t, kind) in enumerate(zip(workload.model.tables, types, strict=True))
    ]


@pytest.mark.slow
@given(
    st.lists(st.sampled_from(TYPES), min_size=4, max_size=4),
    st.integers(0, 400_000),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.sampled_from([LFU, ReplaySettings(), ReplaySettings(CachePolicy("lru", by_next_use=False), 0)]),
)
@settings(max_examples=60)
def test_the_last_byte_counts(types, budget, world_size, whole, policy):
    """Never over the budget; less than a slot per pool is left, unless all rows fit. None only where a batch may not
    fit. With 3 rows on 4 ranks, a block without rows is among the shards."""
    workload = make_workload((3, 50, 900, 2500), (16, 16, 64, 32), world_size=world_size, cache=policy)
    layout = Layout(workload, placements(workload, types))
    fixed = [workload.fixed_bytes([s for s in layout.shards if s.rank == rank]) for rank in range(world_size)]
    limit = Budget(device_bytes=budget + max(fixed)) if whole else Budget(cache_bytes=budget)
    found = split_slots(layout, limit)
    fits = True
    for rank in range(world_size):
        here = [shard for shard in layout.shards if shard.rank == rank]
        grouped = by_pool(here)
        memories = {key: pool_memory(members, workload.shape) for key, members in grouped.items()}
        may_use = budget + max(fixed) - fixed[rank] if whole else budget
        least = sum(memories[key].device_bytes(least_slots(workload, members)) for key, members in grouped.items())
        fits &= least <= may_use
        if found is None:
            continue
        used = sum(memories[key].device_bytes(found[key]) for key in grouped)
        assert used <= may_use
        slots = [count for key, count in found.items() if key.rank == rank]
        assert len(slots) == len(grouped)
        if sum(slots) < sum(max(1, memory.rows) for memory in memories.values()):
            assert may_use - used < sum(memory.slot_bytes for memory in memories.values())
        for key, members in grouped.items():
            assert least_slots(workload, members) <= found[key] <= max(1, sum(shard.rows for shard in members))
    assert (found is not None) == fits


def test_slots_go_where_the_lookups_are():
    """Two pools of a rank with as many rows each; one has few hot rows, the other one only cold ones."""
    hot = np.random.default_rng(0).integers(0, 300, 6000)
    cold = np.random.default_rng(1).integers(0, 6000, 6000)
    from tests.unit.planning.traces import counted

    data = counted({"t0": (6000, hot), "t1": (6000, cold)})
    workload = make_workload((6000, 6000), (32, 64), world_size=1, data=data)
    layout = Layout(workload, placements(workload, ["table_wise"] * 2))
    found = split_slots(layout, Budget(cache_bytes=300_000))
    assert found is not None
    first, second = found.values()
    assert [key.columns for key in found] == [32, 64]
    assert first > 300, "all of the hot rows"
    assert second > least_slots(workload, [s for s in layout.shards if s.table.table == "t1"])


@pytest.mark.parametrize("ratio", [0.001, 0.1, 1.0])
def test_a_ratio_is_a_share_of_each_pools_rows(ratio):
    workload = make_workload((3, 50, 900, 2500), (16, 16, 64, 32))
    layout = Layout(workload, placements(workload, ["row_wise"] * 4))
    found = split_slots(layout, Budget(ratio=ratio))
    assert found is not None
    rows = {(16, 0): 27, (16, 1): 26, (64, 0): 450, (64, 1): 450, (32, 0): 1250, (32, 1): 1250}
    assert {(key.columns, key.rank): count for key, count in found.items()} == {
        key: min(count, max(LEAST_SLOTS, round(ratio * count))) for key, count in rows.items()
    }


def test_a_ratio_within_a_device_limit():
    workload = make_workload((900, 2500))
    layout = Layout(workload, placements(workload, ["table_wise"] * 2))
    needed = [
        workload.fixed_bytes([shard]) + pool_memory([shard], workload.shape).device_bytes(round(0.5 * shard.rows))
        for shard in layout.shards
    ]
    assert split_slots(layout, Budget(ratio=0.5, device_bytes=max(needed))) is not None
    assert split_slots(layout, Budget(ratio=0.5, device_bytes=max(needed) - 1)) is None


def test_without_a_cache_all_rows_must_fit():
    workload = make_workload((900, 2500), world_size=2)
    tables = placements(workload, ["table_wise"] * 2, ["device", "device"])
    layout = Layout(workload, tables)
    need = max(workload.fixed_bytes([shard]) for shard in layout.shards)
    assert need > 2500 * 260
    assert split_slots(layout, Budget(device_bytes=need)) == {}
    assert split_slots(layout, Budget(device_bytes=need - 1)) is None
    assert split_slots(layout, Budget(ratio=1.0)) is None
    assert split_slots(layout, Budget(cache_bytes=10**9)) is None


def test_the_least_slots_hold_a_batch():
    """And every batch that the data have, beside tables that stay."""
    data = data_of((5000,), 20_000)
    workload = make_workload((5000,), world_size=1, batch_size=200, data=data)
    (shard,) = place_shards(workload.model, placements(workload, ["table_wise"]), workload.shape)
    rows = data.trace.tables["t0"].rows
    distinct = [len(np.unique(rows[start : start + 200])) for start in range(0, 20_000, 200)]
    least = least_slots(workload, [shard])
    assert max(distinct) / 0.9 <= least < 1.3 * np.mean(distinct)


def test_the_least_budget_fits_and_a_byte_less_does_not():
    workload = make_workload((900, 2500), (32, 64), world_size=1)
    layout = Layout(workload, placements(workload, ["table_wise"] * 2))
    need = sum(pool_memory([s], workload.shape).device_bytes(least_slots(workload, [s])) for s in layout.shards)
    assert split_slots(layout, Budget(cache_bytes=need)) is not None
    assert split_slots(layout, Budget(cache_bytes=need - 1)) is None
