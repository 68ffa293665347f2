"""Divides the slots of a rank among its pools."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

from embershard.cache.config import MOST_POOL_ROWS
from embershard.planning.predict import counted_reports
from embershard.planning.request import Budget
from embershard.planning.workload import PoolKey, Workload, by_pool, by_rank
from embershard.sharding import memory_model
from embershard.sharding.memory_model import PoolMemory
from embershard.sharding.shards import PoolPlacement, Sharding
from embershard.sharding.sizes import PlacedShard

#: Batches differ: the one with the most distinct rows must fit, too.
_ROOM = 1.1
_STAYING = 0.1


def least_slots(workload: Workload, shards: Sequence[PlacedShard]) -> int:
    """Return the slots without which a batch may not fit: the most distinct rows of a batch where the trace has them,
    else the expected ones and a tenth more. Pinned tables take up to a tenth of the slots (`pinned_tables`)."""
    rows = sum(shard.rows for shard in shards)
    unique_ids = sum(each.unique_ids for each in counted_reports(workload, shards, max(1, rows)))
    needed = max(unique_ids * _ROOM, workload.most_unique_ids(shards)) / (1.0 - _STAYING)
    return memory_model.slots_for(rows, math.ceil(needed))


def fixed_bytes(workload: Workload, shards: Sequence[PlacedShard]) -> int:
    """Return the device memory of a rank for all but its caches."""
    return sum(memory_model.resident_bytes(shards).values()) + sum(workload.step_bytes(shards).values())


def split_slots(workload: Workload, shards: Sequence[PlacedShard], budget: Budget) -> list[PoolPlacement] | None:
    """Return the pools of all ranks with as many slots as the budget allows; None where it is too small for a rank, or
    a pool has more rows than a cache can number."""
    found: list[PoolPlacement] = []
    for rank, here in enumerate(by_rank(shards, workload.shape.world_size)):
        members_of = by_pool(here)
        slots = _rank_slots(workload, here, members_of, budget)
        if slots is None:
            return None
        for key, members in members_of.items():
            names = tuple(sorted({shard.table.table for shard in members}))
            found.append(PoolPlacement(rank, names, cast(Sharding, key.sharding), key.columns, slots[key]))
    return found


_Members = Mapping[PoolKey, Sequence[PlacedShard]]


def _rank_slots(
    workload: Workload, here: Sequence[PlacedShard], members_of: _Members, budget: Budget
) -> dict[PoolKey, int] | None:
    memories = {key: memory_model.pool_memory(shards, workload.shape.memory) for key, shards in members_of.items()}
    if any(memory.rows > MOST_POOL_ROWS for memory in memories.values()):
        return None
    is_resident = any(shard.kernel == "device" for shard in here)  # only a budget for everything covers such tables
    if budget.ratio is not None:
        slots = {
            key: memory_model.slots_for(memory.rows, budget.ratio * memory.rows) for key, memory in memories.items()
        }
        needed = fixed_bytes(workload, here) + sum(memories[key].device_bytes(count) for key, count in slots.items())
        fits = budget.device_bytes is None or needed <= budget.device_bytes
        return slots if fits and not is_resident else None
    if budget.cache_bytes is not None:
        return None if is_resident else _divided(workload, members_of, memories, budget.cache_bytes)
    assert budget.device_bytes is not None
    return _divided(workload, members_of, memories, budget.device_bytes - fixed_bytes(workload, here))


def _divided(
    workload: Workload, members_of: _Members, memories: Mapping[PoolKey, PoolMemory], left: int
) -> dict[PoolKey, int] | None:
    """Give each pool the need of one batch, and divide the rest as the rows would in one cache for all pools: so rows
    compete by frequency across pools, too."""
    least = {key: least_slots(workload, members) for key, members in members_of.items()}
    left -= sum(memories[key].device_bytes(count) for key, count in least.items())
    if left < 0:
        return None
    weights = dict.fromkeys(members_of, 1.0)
    if len(members_of) > 1:
        mean_bytes = sum(memory.slot_bytes for memory in memories.values()) / len(memories)
        everything = [shard for members in members_of.values() for shard in members]
        reports = iter(counted_reports(workload, everything, max(1, int(left / mean_bytes))))
        for key, members in members_of.items():
            weights[key] = memories[key].slot_bytes * sum(next(reports).held_rows for _ in members)
    room = {key: max(0, memories[key].rows - count) for key, count in least.items()}
    extra = _fill(left, weights, room, {key: memory.slot_bytes for key, memory in memories.items()})
    return {key: count + extra[key] for key, count in least.items()}


def _fill(
    left: int, weights: Mapping[PoolKey, float], room: Mapping[PoolKey, int], slot_bytes: Mapping[PoolKey, int]
) -> dict[PoolKey, int]:
    """Return slots in proportion to `weights`, at most `room`; the rest of a full pool goes to the others."""
    extra = dict.fromkeys(weights, 0)
    open_pools = set(weights)
    while open_pools:
        total = sum(weights[key] for key in open_pools)
        share = {key: left * weights[key] / total if total else left / len(open_pools) for key in open_pools}
        full = {key for key in open_pools if share[key] >= room[key] * slot_bytes[key]}
        for key in sorted(full):
            extra[key] = room[key]
            left -= room[key] * slot_bytes[key]
        if not full:
            return extra | {key: int(share[key] // slot_bytes[key]) for key in open_pools}
        open_pools -= full
    return extra
