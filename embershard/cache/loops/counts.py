"""Compiled loops that count: uses for `LfuScores`, and plans for `CacheCounters`."""

from __future__ import annotations

import numba

from embershard.cache.loops.compiled import Bools, Counters, Float32s, Int64s, compiled


@compiled
def count_uses(scores: Float32s, slots: Int64s, first_hits: Bools, fill_slots: Int64s, weight: float) -> None:
    """Add `weight` to the scores of a batch's distinct slots: of `slots` [N] those at `first_hits`; `fill_slots`."""
    for position in range(slots.size):
        if first_hits[position]:
            scores[slots[position]] += weight
    for i in range(fill_slots.size):
        scores[fill_slots[i]] += weight


@numba.njit(nogil=True, inline="always")
def _table_of(key: int, table_ends: Int64s) -> int:
    """Number of the first table that ends behind `key`. NumPy's search takes two seconds to compile."""
    low, high = 0, table_ends.size - 1
    while low < high:
        middle = (low + high) // 2
        if table_ends[middle] <= key:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def count_plan(
    counters: Counters,
    table_of_feature: Int64s,
    feature_lengths: Int64s,
    table_ends: Int64s,
    first_hits: Bools,
    missed: Int64s,
    fill_keys: Int64s,
    evicted_keys: Int64s,
    write_back_keys: Int64s,
    critical_path: bool,
) -> None:
    """Add a plan's numbers to its tables' `counters` [T, 9], whose columns are those of `Counter`.

    Args:
        table_of_feature, feature_lengths: [F].
        table_ends: [T] end of each table's keys.
        first_hits, missed, fill_keys, evicted_keys, write_back_keys: see `CachePlan`.
    """
    position, miss = 0, 0
    for feature in range(feature_lengths.size):
        end = position + feature_lengths[feature]
        table = counters[table_of_feature[feature]]
        table[0] += end - position
        hits = 0
        for place in range(position, end):
            hits += first_hits[place]
        table[2] += hits
        first_miss = miss
        while miss < missed.size and missed[miss] < end:
            miss += 1
        table[1] += miss - first_miss
        position = end
    number = 0
    for key in fill_keys:
        while key >= table_ends[number]:
            number += 1
        counters[number, 3] += 1
        counters[number, 4] += critical_path
    for key in evicted_keys:
        counters[_table_of(key, table_ends), 6] += 1
    for key in write_back_keys:
        counters[_table_of(key, table_ends), 5] += 1
