"""Compiled loops of `SlotMap` and of plans: keys to slots."""

from __future__ import annotations

import numpy as np

from embershard.cache.loops.compiled import Bools, Int32s, Int64s, compiled

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
    keys: Int64s,
    entries: Int32s,
    use_stamps: Int64s,
    first_stamp: int,
    slots: Int64s,
    first_hits: Bools,
    missed: Int64s,
) -> int:
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
    missed: Int64s,
    inverse: Int64s,
    fill_slots: Int64s,
    victims: Int64s,
    key_of_slot: Int32s,
    use_stamps: Int64s,
    clean_through: int,
    slots: Int64s,
    evicted_keys: Int64s,
    are_dirty: Bools,
) -> int:
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
