"""How many slots each pool of a rank gets."""

from __future__ import annotations

import math
from collections.abc import Sequence

from embershard.cache.slot_map import MOST_POOL_ROWS
from embershard.planning.predict import counted_reports
from embershard.planning.request import Budget
from embershard.planning.workload import PoolKey, Workload, by_rank, pools
from embershard.sharding import memory_model
from embershard.sharding.memory_model import PoolMemory
from embershard.sharding.shards import PoolPlacement
from embershard.sharding.sizes import PlacedShard

#: Batches differ: the one with the most distinct rows must fit, too.
_ROOM = 1.1
_STAYING = 0.1


def least_slots(workload: Workload, shards: Sequence[PlacedShard]) -> int:
    """Slots without which a batch may not fit: the most distinct rows of one where the trace tells them, else those to
    be expected and a tenth more. Tables that stay take up to a tenth of the slots (`pinned_tables`) beside them."""
    rows = sum(shard.rows for shard in shards)
    unique_ids = sum(each.unique_ids for each in counted_reports(workload, shards, max(1, rows)))
    needed = max(unique_ids * _ROOM, workload.most_unique_ids(shards)) / (1.0 - _STAYING)
    return memory_model.slots_for(rows, math.ceil(needed))


def fixed_bytes(workload: Workload, shards: Sequence[PlacedShard]) -> int:
    """Device memory of a rank for all but its caches."""
    return sum(memory_model.resident_bytes(shards).values()) + sum(workload.step_bytes(shards).values())


def split_slots(workload: Workload, shards: Sequence[PlacedShard], budget: Budget) -> list[PoolPlacement] | None:
    """The pools of all ranks with as many slots as the budget allows; None where it is too small for a rank, or
    a pool has more rows than a cache can number."""
    found: list[PoolPlacement] = []
    for rank, here in enumerate(by_rank(shards, workload.shape.world_size)):
        slots = _rank_slots(workload, here, budget)
        if slots is None:
            return None
        for (_, sharding, columns, _), members, count in slots:
            names = tuple(sorted({shard.table.table for shard in members}))
            found.append(PoolPlacement(rank, names, sharding, columns, count))  # type: ignore[arg-type]
    return found


_Sized = tuple[PoolKey, list[PlacedShard], int]


def _rank_slots(workload: Workload, here: Sequence[PlacedShard], budget: Budget) -> list[_Sized] | None:
    grouped = pools(here)
    if any(sum(shard.rows for shard in members) > MOST_POOL_ROWS for members in grouped.values()):
        return None
    if budget.ratio is not None:
        return _by_ratio(workload, here, grouped, budget)
    left = budget.cache_bytes
    if left is None:
        assert budget.device_bytes is not None
        left = budget.device_bytes - fixed_bytes(workload, here)
    elif any(shard.kernel == "device" for shard in here):
        return None
    if not grouped:
        return [] if left >= 0 else None
    return _divided(workload, grouped, left)


def _by_ratio(
    workload: Workload, here: Sequence[PlacedShard], grouped: dict[PoolKey, list[PlacedShard]], budget: Budget
) -> list[_Sized] | None:
    """A share of each pool's rows was asked for: so no table is whole on the device."""
    assert budget.ratio is not None
    if any(shard.kernel == "device" for shard in here):
        return None
    found: list[_Sized] = []
    needed = fixed_bytes(workload, here)
    for key, members in grouped.items():
        memory = memory_model.pool_memory(members, workload.shape.memory)
        slots = memory_model.slots_for(memory.rows, budget.ratio * memory.rows)
        needed += memory.device_bytes(slots)
        found.append((key, members, slots))
    return found if budget.device_bytes is None or needed <= budget.device_bytes else None


def _divided(workload: Workload, grouped: dict[PoolKey, list[PlacedShard]], left: int) -> list[_Sized] | None:
    """Each pool gets what one batch needs, and of the rest what its rows would hold in one cache for all of them: so
    rows compete by frequency across pools, too."""
    memories = {key: memory_model.pool_memory(members, workload.shape.memory) for key, members in grouped.items()}
    least = {key: least_slots(workload, members) for key, members in grouped.items()}
    left -= sum(memories[key].device_bytes(least[key]) for key in grouped)
    if left < 0:
        return None
    if len(grouped) == 1:
        weights = dict.fromkeys(grouped, 1.0)
    else:
        weights = _held_bytes(workload, grouped, memories, left)
    extra = _fill(left, weights, {key: max(0, memories[key].rows - least[key]) for key in grouped}, memories)
    return [(key, grouped[key], least[key] + extra[key]) for key in grouped]


def _held_bytes(
    workload: Workload, grouped: dict[PoolKey, list[PlacedShard]], memories: dict[PoolKey, PoolMemory], left: int
) -> dict[PoolKey, float]:
    mean_bytes = sum(memory.slot_bytes for memory in memories.values()) / len(memories)
    members = [shard for shards in grouped.values() for shard in shards]
    reports = iter(counted_reports(workload, members, max(1, int(left / mean_bytes))))
    return {
        key: memories[key].slot_bytes * sum(next(reports).held_rows for _ in shards) for key, shards in grouped.items()
    }


def _fill(
    left: int, weights: dict[PoolKey, float], room: dict[PoolKey, int], memories: dict[PoolKey, PoolMemory]
) -> dict[PoolKey, int]:
    """Slots in proportion to ``weights``, at most ``room``; what a full pool leaves goes to the others."""
    extra = dict.fromkeys(weights, 0)
    open_pools = set(weights)
    while open_pools:
        total = sum(weights[key] for key in open_pools)
        share = {key: left * weights[key] / total if total else left / len(open_pools) for key in open_pools}
        full = {key for key in open_pools if share[key] >= room[key] * memories[key].slot_bytes}
        if not full:
            for key in open_pools:
                extra[key] = int(share[key] // memories[key].slot_bytes)
            break
        for key in sorted(full):
            extra[key] = room[key]
            left -= room[key] * memories[key].slot_bytes
        open_pools -= full
    return extra
