"""Compiled loops of `SlotMap` and of plans: keys to slots, distinct ids of a batch, counts of uses and of plans."""

from __future__ import annotations

import numba
import numpy as np

from embershard.cache.loops.compiled import Bools, Counters, Float32s, Int32s, Int64s, compiled

_BATCH_SHIFT = 32
_BLOCK = 512  # ids whose state is fetched from memory together


@compiled
def out_of_range(keys: Int64s, end: int) -> int:
    """Return the position of the first of `keys` [N] that is not in [0, `end`); -1 if all are."""
    signs = 0
    for key in keys:  # without a branch, several keys at a time
        signs |= key | (end - 1 - key)
    if signs < 0:
        for position in range(keys.size):
            if keys[position] < 0 or keys[position] >= end:
                return position
    return -1


@compiled
def find(
    keys: Int64s, entries: Int32s, use_stamps: Int64s, first_stamp: int, slots: Int64s, first_hits: Bools,
    missed: Int64s,
) -> int:  # fmt: skip
    """Look up `keys` [N] and stamp the slots found: position p with `first_stamp` + p, the last of a slot's.

    Args:
        entries: [R] slot of every key; below 1: not cached.
        use_stamps: [S + 1].
        slots: [N], written: 0 where a key is not cached.
        first_hits: [N], written: True at the position whose stamp the slot has.
        missed: [N], written from its end: positions of keys that are not cached, ascending.

    Returns:
        The number of positions in `missed`; if a key is not in [0, R), -1 - its position.
    """
    for position in range(keys.size):
        key = keys[position]
        if key < 0 or key >= entries.size:
            return -1 - position
        slots[position] = max(entries[key], 0)
    missing = keys.size
    stamps = np.empty(_BLOCK, np.int64)
    for end in range(keys.size, 0, -_BLOCK):
        start = max(end - _BLOCK, 0)
        for position in range(start, end):
            stamps[position - start] = use_stamps[slots[position]]
        for position in range(end - 1, start - 1, -1):
            slot, stamp = slots[position], first_stamp + position
            if slot == 0:
                missing -= 1
                missed[missing] = position
                first_hits[position] = False
                continue
            is_first = stamps[position - start] < first_stamp
            if is_first:  # or a later position of this block was
                is_first = use_stamps[slot] < first_stamp
            is_first = is_first or use_stamps[slot] == stamp
            if is_first:
                use_stamps[slot] = stamp
            first_hits[position] = is_first
    return keys.size - missing


@compiled
def distinct(keys: Int64s, order: Int64s, inverse: Int64s) -> int:
    """Number the distinct `keys` [M] in ascending order, in which `order` [M] sorts them.

    Args:
        keys: overwritten: the distinct ones come first, ascending.
        inverse: [M], written: for each key its number.

    Returns:
        How many are distinct.
    """
    ascending = keys[order]
    number = -1
    for place in range(order.size):
        if place == 0 or ascending[place] != keys[number]:
            number += 1
            keys[number] = ascending[place]
        inverse[order[place]] = number
    return number + 1


@compiled
def bind(keys: Int64s, slots: Int64s, entries: Int32s, key_of_slot: Int32s, use_stamps: Int64s, stamp: int) -> None:
    """Bind `keys` to `slots` (both [M], distinct), with use stamp `stamp`."""
    for i in range(keys.size):
        key, slot = keys[i], slots[i]
        entries[key] = slot
        key_of_slot[slot] = key
        use_stamps[slot] = stamp


@compiled
def fill(
    missed: Int64s, inverse: Int64s, fill_slots: Int64s, victims: Int64s, key_of_slot: Int32s, use_stamps: Int64s,
    clean_through: int, slots: Int64s, evicted_keys: Int64s, are_dirty: Bools,
) -> int:  # fmt: skip
    """Give the missed ids the slots of their rows, and look up the rows to evict.

    Args:
        missed, inverse: positions of the missed ids, and for each the number of its row.
        fill_slots: [M] slot of each row to fill.
        victims: [E] slots to evict.
        key_of_slot, use_stamps: [S + 1].
        clean_through: rows that no later batch used need no write-back.
        slots: [N], written at `missed`.
        evicted_keys, are_dirty: [E], written: the victims' keys, and which of them need a write-back.

    Returns:
        How many need one.
    """
    for i in range(missed.size):
        slots[missed[i]] = fill_slots[inverse[i]]
    num_dirty = 0
    for i in range(victims.size):
        slot = victims[i]
        evicted_keys[i] = key_of_slot[slot]
        are_dirty[i] = use_stamps[slot] >> _BATCH_SHIFT > clean_through
        num_dirty += are_dirty[i]
    return num_dirty


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
    counters: Counters, table_of_feature: Int64s, feature_lengths: Int64s, table_ends: Int64s, first_hits: Bools,
    missed: Int64s, fill_keys: Int64s, evicted_keys: Int64s, write_back_keys: Int64s, critical_path: bool,
) -> None:  # fmt: skip
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


_MULTIPLIER = -7046029254386353131  # 2^64 over the golden ratio: spreads neighbouring ids


@compiled
def distinct_ids(ids: Int64s, bounds: Int64s, distinct: Int64s, inverse: Int64s, counts: Int64s) -> int:
    """Number the distinct ids of every group, group after group, in the order in which they first occur.

    Args:
        ids: [N].
        bounds: [G + 1] of the groups among the ids, from 0 to N.
        distinct: [N], written: the distinct ids come first.
        inverse: [N], written: for each id its place in `distinct`.
        counts: [G], written: how many ids of each group are distinct.

    Returns:
        How many are distinct in all.
    """
    largest = 0
    for group in range(counts.size):
        largest = max(largest, bounds[group + 1] - bounds[group])
    bits = 1
    while 1 << bits < 2 * largest:
        bits += 1
    cells = np.empty(1 << bits, np.int64)  # open addressing: the number of an id, -1 where a cell is free
    total = 0
    for group in range(counts.size):
        first = total
        start, end = bounds[group], bounds[group + 1]
        bits = 1
        while 1 << bits < 2 * (end - start):
            bits += 1
        mask = (1 << bits) - 1
        cells[: mask + 1] = -1
        for position in range(start, end):
            key = ids[position]
            cell = ((key * _MULTIPLIER) >> (64 - bits)) & mask
            while cells[cell] >= 0 and distinct[cells[cell]] != key:
                cell = (cell + 1) & mask
            if cells[cell] < 0:
                cells[cell] = total
                distinct[total] = key
                total += 1
            inverse[position] = cells[cell]
        counts[group] = total - first
    return total
