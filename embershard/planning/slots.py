"""The slots of caches: what a batch needs at least, and the rest of a rank's budget, divided among its pools."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from embershard.cache.config import MOST_POOL_ROWS
from embershard.planning.request import Budget
from embershard.planning.workload import Layout, Workload
from embershard.sharding import memory_model
from embershard.sharding.memory_model import PoolMemory
from embershard.sharding.pins import TablePin
from embershard.sharding.shards import PoolKey
from embershard.sharding.sizes import PlacedShard

#: Slots per distinct row of the mean batch: batches differ, and the one with the most distinct rows must fit, too.
_ROOM = 1.1
_STAYING = 0.1


def pinned_slots(shards: Sequence[PlacedShard], pins: Mapping[str, TablePin]) -> int | None:
    """Return the slots that are decided of the cache of these shards; None: the planner decides."""
    of_shards = [pins[shard.table.table] for shard in shards if shard.table.table in pins]
    given = [pin.slots for pin in of_shards if pin.slots is not None]
    return memory_model.slots_for(sum(shard.rows for shard in shards), max(given)) if given else None


def least_slots(workload: Workload, shards: Sequence[PlacedShard], pins: Mapping[str, TablePin] | None = None) -> int:
    """Return the slots without which a batch may not fit: the most distinct rows of a batch where the trace has them,
    else the expected ones and a tenth more. Tables that stay take up to a tenth of the slots (`pinned_tables`). Of a
    cache whose slots are decided (`pins`), those."""
    if (decided := pinned_slots(shards, pins or {})) is not None:
        return decided
    rows = sum(shard.rows for shard in shards)
    step_rows = sum(each.step_rows for each in workload.counted_reports(shards, max(1, rows)))
    return memory_model.slots_for(rows, math.ceil(needed_slots(step_rows, workload.most_unique_ids(shards))))


def needed_slots(unique_ids: float, most_unique_ids: float = 0.0) -> float:
    """Return the slots without which a batch may not fit, from its expected distinct rows and the most of a batch."""
    return max(unique_ids * _ROOM, most_unique_ids) / (1.0 - _STAYING)


def split_slots(
    layout: Layout, budget: Budget, pins: Mapping[str, TablePin] | None = None
) -> dict[PoolKey, int] | None:
    """Return as many slots for each pool of all ranks as the budget allows, or as are decided (`pins`); None where it
    is too small for a rank, or a pool has more rows than a cache can number."""
    found: dict[PoolKey, int] = {}
    for rank, here in enumerate(layout.of_ranks):
        slots = _rank_slots(layout, here, layout.pools_of_ranks[rank], budget.alone(rank), pins or {})
        if slots is None:
            return None
        found |= slots
    return found


_Members = Mapping[PoolKey, Sequence[PlacedShard]]


def _rank_slots(
    layout: Layout,
    here: Sequence[PlacedShard],
    members_of: _Members,
    budget: Budget,
    pins: Mapping[str, TablePin],
) -> dict[PoolKey, int] | None:
    workload = layout.workload
    memories = {key: memory_model.pool_memory(shards, workload.shape) for key, shards in members_of.items()}
    if any(memory.rows > MOST_POOL_ROWS for memory in memories.values()):
        return None
    is_resident = any(shard.kernel == "device" for shard in here)  # only a budget for everything covers such tables
    if budget.ratio is not None:
        slots = {
            key: pinned_slots(members_of[key], pins) or memory_model.slots_for(memory.rows, budget.ratio * memory.rows)
            for key, memory in memories.items()
        }
        needed = workload.fixed_bytes(here) + sum(memories[key].device_bytes(count) for key, count in slots.items())
        fits = budget.device_bytes is None or needed <= budget.device_bytes
        return slots if fits and not is_resident else None
    if budget.cache_bytes is not None:
        return None if is_resident else _divided(layout, members_of, memories, budget.cache_bytes, pins)
    assert budget.device_bytes is not None
    return _divided(layout, members_of, memories, budget.device_bytes - workload.fixed_bytes(here), pins)


def _divided(
    layout: Layout,
    members_of: _Members,
    memories: Mapping[PoolKey, PoolMemory],
    left: int,
    pins: Mapping[str, TablePin],
) -> dict[PoolKey, int] | None:
    """Give each pool the need of one batch, and divide the rest as the rows would in one cache for all pools: so rows
    compete by frequency across pools, too."""
    workload, places = layout.workload, layout.places
    least = {key: least_slots(workload, members, pins) for key, members in members_of.items()}
    left -= sum(memories[key].device_bytes(count) for key, count in least.items())
    if left < 0:
        return None
    weights = dict.fromkeys(members_of, 1.0)
    if len(members_of) > 1:
        mean_bytes = sum(memory.slot_bytes for memory in memories.values()) / len(memories)
        everything = [shard for members in members_of.values() for shard in members]
        reports = iter(workload.counted_reports(everything, max(1, int(left / mean_bytes))))
        for key, members in members_of.items():
            weights[key] = memories[key].slot_bytes * sum(next(reports).held_rows for _ in members)
    most = {key: rows if (rows := memories[key].rows) <= (own := places.get(key, rows)) else own // 2 for key in least}
    room = {
        key: 0 if pinned_slots(members_of[key], pins) else max(0, most[key] - count) for key, count in least.items()
    }
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
