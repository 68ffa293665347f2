"""Kernels that count what a plan did: per table for the statistics, and uses of slots for their scores. The loops
`count_plan` and `count_uses` do it on a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from embershard.cache.gpu.launch import COUNTED, kernel, launch

_ABOVE_ALL = tl.constexpr(2**63 - 1)
# The columns of `CacheCounters.values`; there are `_COLUMNS`.
_LOOKUPS, _MISSED, _HITS, _FILLS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_CRITICAL_FILLS, _WRITE_BACKS, _EVICTIONS = 4, tl.constexpr(5), tl.constexpr(6)
_COLUMNS = tl.constexpr(9)


@triton.jit
def _runs(number, inside, ends, num_ends, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first and the last of the consecutive runs, which end before `ends`, that have some of the numbers."""
    run = tl.arange(0, PADDED)
    end = tl.load(ends + run, mask=run < num_ends, other=_ABOVE_ALL)
    lowest, highest = tl.min(tl.where(inside, number, _ABOVE_ALL)), tl.max(tl.where(inside, number, 0))
    return tl.sum((end <= lowest).to(tl.int32)), tl.sum((end <= highest).to(tl.int32))


@triton.jit
def _in_run(number, inside, ends, run):  # type: ignore[no-untyped-def]
    start = tl.load(ends + run - 1, mask=run > 0, other=0)
    return inside & (number >= start) & (number < tl.load(ends + run))


@triton.jit
def _add(values, table, counter, found):  # type: ignore[no-untyped-def]
    tl.atomic_add(values + table * _COLUMNS + counter, found, mask=(found > 0) & (counter >= 0), sem="relaxed")


@triton.jit
def _add_rows(  # type: ignore[no-untyped-def]
    keys, part, count, ends, num_tables, values, counter, second, PADDED: tl.constexpr, BLOCK: tl.constexpr
):
    """Add the number of keys of each table to its counter, and to a second one unless that is -1."""
    at = part * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + at, mask=at < count, other=0)
    first, last = _runs(key, at < count, ends, num_tables, PADDED)
    for table in range(first, last + 1):
        found = tl.sum(_in_run(key, at < count, ends, table).to(tl.int64))
        _add(values, table, counter, found)
        _add(values, table, second, found)


@kernel()
def _count_plan(  # type: ignore[no-untyped-def]
    first_hits, missed, fill_keys, evicted_keys, dirty_keys, feature_ends, table_of_feature, table_ends, values,
    num_ids, num_missed, num_fills, num_evicted, num_dirty, num_features, num_tables, second, count,
    FEATURES: tl.constexpr, TABLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first programs count ids, the next ones missed ids, then rows filled, evicted, and written back."""
    part, lanes = tl.program_id(0), tl.arange(0, BLOCK).to(tl.int64)
    if part < tl.cdiv(num_ids, BLOCK):
        at = part * BLOCK + lanes
        hit = tl.load(first_hits + at, mask=at < num_ids, other=0) != 0
        first, last = _runs(at, at < num_ids, feature_ends, num_features, FEATURES)
        for feature in range(first, last + 1):
            in_run = _in_run(at, at < num_ids, feature_ends, feature)
            _add(values, tl.load(table_of_feature + feature), _LOOKUPS, tl.sum(in_run.to(tl.int64)))
            _add(values, tl.load(table_of_feature + feature), _HITS, tl.sum((in_run & hit).to(tl.int64)))
    part -= tl.cdiv(num_ids, BLOCK)
    if (part >= 0) & (part < tl.cdiv(num_missed, BLOCK)):
        at = part * BLOCK + lanes
        position = tl.load(missed + at, mask=at < num_missed, other=0)
        first, last = _runs(position, at < num_missed, feature_ends, num_features, FEATURES)
        for feature in range(first, last + 1):
            found = tl.sum(_in_run(position, at < num_missed, feature_ends, feature).to(tl.int64))
            _add(values, tl.load(table_of_feature + feature), _MISSED, found)
    part -= tl.cdiv(num_missed, BLOCK)
    if (part >= 0) & (part < tl.cdiv(num_fills, BLOCK)):
        _add_rows(fill_keys, part, num_fills, table_ends, num_tables, values, _FILLS, second, TABLES, BLOCK)
    part -= tl.cdiv(num_fills, BLOCK)
    if (part >= 0) & (part < tl.cdiv(num_evicted, BLOCK)):
        _add_rows(evicted_keys, part, num_evicted, table_ends, num_tables, values, _EVICTIONS, -1, TABLES, BLOCK)
    part -= tl.cdiv(num_evicted, BLOCK)
    if part >= 0:
        _add_rows(dirty_keys, part, num_dirty, table_ends, num_tables, values, _WRITE_BACKS, -1, TABLES, BLOCK)


@kernel()
def _count_uses(slots, first_hits, fill_slots, scores, weight, num_fills, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    hit = tl.load(first_hits + at, mask=at < count, other=0) != 0
    slot = tl.load(slots + at, mask=hit, other=0)
    tl.store(scores + slot, tl.load(scores + slot, mask=hit, other=0) + weight, mask=hit)
    filled = at < num_fills  # no more than ids, and other slots than those that were hit
    slot = tl.load(fill_slots + at, mask=filled, other=0)
    tl.store(scores + slot, tl.load(scores + slot, mask=filled, other=0) + weight, mask=filled)


def count_plan(
    values: Tensor,
    table_of_feature: Tensor,
    table_ends: Tensor,
    feature_lengths: Tensor,
    parts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    critical_path: bool,
) -> None:
    """Add a plan's numbers to the counters of its tables; see `CacheCounters`.

    Args:
        values: int64 [T, 9].
        table_of_feature, feature_lengths: int64 [F].
        table_ends: int64 [T], end of each table's keys.
        parts: `first_hits`, `missed`, and the keys that are filled, evicted and written back.
    """
    sizes = [part.numel() for part in parts]
    num_features, num_tables = feature_lengths.numel(), table_ends.numel()
    tables = (feature_lengths.cumsum(0), table_of_feature, table_ends, values)
    second = _CRITICAL_FILLS if critical_path else -1
    room = {"FEATURES": triton.next_power_of_2(num_features), "TABLES": triton.next_power_of_2(num_tables)}
    num_programs = sum(triton.cdiv(each, COUNTED) for each in sizes)
    numbers = (*sizes, num_features, num_tables, second)
    launch(_count_plan, num_programs * COUNTED, *parts, *tables, *numbers, block=COUNTED, **room)


def count_uses(scores: Tensor, slots: Tensor, first_hits: Tensor, fill_slots: Tensor, weight: float) -> None:
    """Add `weight` to the scores (float32 [S + 1]) of a batch's distinct slots; see `SlotScores.used`."""
    launch(_count_uses, slots.numel(), slots, first_hits, fill_slots, scores, weight, fill_slots.numel())
