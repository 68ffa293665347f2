"""Compiled loops of `NextUseIndex`: the chains of known uses."""

from __future__ import annotations

import numba
import numpy as np

from embershard.cache.loops.compiled import Bools, Int32s, Int64s, compiled

_BLOCK = 512  # ids whose state is fetched from memory together


@numba.njit(nogil=True)
def _know_block(
    keys: Int64s, state: tuple[Int32s, Int32s, Int32s, Int32s], first_use: int, stop: int, batch: int, wrap: int,
    uses: Int32s, end: int,
) -> int:  # fmt: skip
    """Append the keys of a block, whose uses end before `stop`; return where its uses begin in `uses`."""
    entries, next_uses, last_uses, next_batches = state
    fetched = np.empty(keys.size, np.int32)  # all at once: memory is far
    for i in range(keys.size):
        fetched[i] = entries[keys[i]]
    for i in range(keys.size):
        fetched[i] = last_uses[fetched[i]] if fetched[i] > 0 else -fetched[i]
    start = stop - keys.size
    for i in range(keys.size - 1, -1, -1):
        if _is_of_batch(fetched[i], first_use, uses.size, wrap):
            continue  # a later use in this batch stands for the row
        entry = entries[keys[i]]
        last = last_uses[entry] if entry > 0 else -entry
        if last == 0:
            if entry > 0:
                next_uses[entry] = batch
        elif _is_of_batch(last, first_use, uses.size, wrap):
            continue
        else:
            next_batches[last & (next_batches.size - 2)] = batch
        number = ((first_use + start + i) & (wrap - 1)) + 1
        if entry > 0:
            last_uses[entry] = number
        else:
            entries[keys[i]] = -number
        end -= 1
        uses[end] = start + i
    return end


@numba.njit(nogil=True, inline="always")
def _is_of_batch(use: int, first_use: int, count: int, wrap: int) -> bool:
    """True if use number `use` (0: none) is one of the `count` after `first_use`."""
    return use != 0 and ((use - 1 - first_use) & (wrap - 1)) < count


@compiled
def know(
    keys: Int64s, feature_lengths: Int64s, takes_part: Bools, entries: Int32s, next_uses: Int32s, last_uses: Int32s,
    next_batches: Int32s, first_use: int, batch: int, wrap: int, uses: Int32s, positions: Int32s,
) -> int:  # fmt: skip
    """Append known batch `batch` to the chains of its keys' uses (`next_use.py`).

    Args:
        keys: [N], each in [0, R).
        feature_lengths: [F] keys per feature; sums to N.
        takes_part: [F] features whose keys are counted, M in all.
        entries: [R] slot of every key, or its trace.
        next_uses, last_uses: [S + 1].
        next_batches: ring of the chains, and one more cell.
        first_use: number of the batch's first use, less one.
        wrap: use numbers run from 1 to this and start again.
        uses, positions: [M], written from their ends: per distinct key the number of its last use in the batch,
            counted from 0 over the features that take part, and its position in the batch. Both ascending. May be
            one array if every feature takes part, as both are equal then.

    Returns:
        The number of distinct keys; -1, and nothing is changed, if `feature_lengths` are not F or do not sum to N.
    """
    if feature_lengths.size != takes_part.size or feature_lengths.sum() != keys.size:
        return -1
    end, use, stop = uses.size, uses.size, keys.size
    state = (entries, next_uses, last_uses, next_batches)
    for feature in range(feature_lengths.size - 1, -1, -1):
        first = stop - feature_lengths[feature]
        if takes_part[feature]:
            for block_stop in range(stop, first, -_BLOCK):
                block = keys[max(block_stop - _BLOCK, first) : block_stop]
                found = _know_block(block, state, first_use, use, batch, wrap, uses, end)
                for i in range(found, end):
                    positions[i] = block_stop - use + uses[i]
                use, end = use - block.size, found
        stop = first
    return uses.size - end


@compiled
def arrive(
    slots: Int64s, uses: Int32s, positions: Int32s, first_use: int, wrap: int, next_batches: Int32s,
    next_uses: Int32s, last_uses: Int32s, distinct_slots: Int64s, later: Int32s,
) -> None:  # fmt: skip
    """Give the slots of a known batch their rows' next uses.

    Args:
        slots: [N].
        uses, positions: [U], of the batch's distinct rows.
        distinct_slots, later: [U], written: their slots, and the batches that use them next; 0 for none.
    """
    capacity = next_batches.size - 1
    for i in range(uses.size):
        slot = slots[positions[i]]
        number = ((first_use + uses[i]) & (wrap - 1)) + 1
        batch = next_batches[number & (capacity - 1)]
        distinct_slots[i] = slot
        later[i] = batch
        next_uses[slot] = batch
        if batch == 0:
            last_uses[slot] = 0


@compiled
def take_traces(keys: Int64s, slots: Int64s, entries: Int32s, next_uses: Int32s, last_uses: Int32s, soon: int) -> None:
    """Take over the traces of `keys` [M], about to be bound to `slots` [M]; with one, the next use is `soon`."""
    for i in range(keys.size):
        slot, last = slots[i], -entries[keys[i]]
        last_uses[slot] = last
        next_uses[slot] = soon if last > 0 else 0
