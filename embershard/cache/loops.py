"""Compiled loops over the ids of a batch: what the cache's maps do on a CPU, in one pass each.

The same work as a chain of torch operations passes over the batch 5 to 20 times, and at small batches the calls cost
more than the work. Each loop changes its arrays exactly as the torch operations beside its call do (those run on a
GPU and with hashed maps), and releases Python's lock while it runs. Numba compiles them once per machine, and keeps
the result beside this file.

Arrays are one-dimensional and contiguous: N keys and positions of a batch, S + 1 slots, R rows.
"""

# mypy: disable-error-code="no-untyped-call, untyped-decorator"
from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any, NewType, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]
Float32s = NDArray[np.float32]
Counters = NewType("Counters", NDArray[np.int64])  # [T, C]
_Loop = TypeVar("_Loop", bound=Callable[..., Any])

WRAP = 2**30  # of use numbers
_BATCH_SHIFT = 32
_BLOCK = 512  # ids whose state is fetched from memory together
KNOWN_USE = 0x7F800001 << 32
LAST_BATCH = 2**31
_NEVER = np.iinfo(np.int64).max


_TYPES = {
    Int64s: numba.int64[::1],
    Int32s: numba.int32[::1],
    Bools: numba.boolean[::1],
    Float32s: numba.float32[::1],
    Counters: numba.int64[:, ::1],
    int: numba.int64,
    float: numba.float32,
    bool: numba.boolean,
}


_WORDS = (numba.uint8, numba.int16, numba.int32, numba.int64)


def _compiled(loop: _Loop) -> _Loop:
    """Compile `loop` for its annotations, when it is imported; the result is kept beside this file."""
    arguments = typing.get_type_hints(loop)
    arguments.pop("return")
    return cast(_Loop, numba.njit(tuple(_TYPES[each] for each in arguments.values()), nogil=True, cache=True)(loop))


@_compiled
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
        The number of positions in `missed`; for a key out of range, -1 - its position.
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
            if is_first:  # or an earlier position of this block was
                is_first = use_stamps[slot] < first_stamp
            is_first = is_first or use_stamps[slot] == stamp
            if is_first:
                use_stamps[slot] = stamp
            first_hits[position] = is_first
    return keys.size - missing


@_compiled
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


@_compiled
def bind(
    keys: Int64s, slots: Int64s, entries: Int32s, key_of_slot: Int32s, use_stamps: Int64s, stamp: int
) -> None:
    """Bind `keys` to `slots` (both [M], distinct), with use stamp `stamp`."""
    for i in range(keys.size):
        key, slot = keys[i], slots[i]
        entries[key] = slot
        key_of_slot[slot] = key
        use_stamps[slot] = stamp


@numba.njit(nogil=True, cache=True)
def _know_block(
    keys: Int64s,
    state: tuple[Int32s, Int32s, Int32s, Int32s],
    first_use: int,
    stop: int,
    batch: int,
    uses: Int32s,
    end: int,
) -> int:
    """Append the keys of a block, whose uses end before `stop`; return where its uses begin in `uses`."""
    entries, next_uses, last_uses, next_batches = state
    fetched = np.empty(keys.size, np.int32)  # all at once: memory is far
    for i in range(keys.size):
        fetched[i] = entries[keys[i]]
    for i in range(keys.size):
        fetched[i] = last_uses[fetched[i]] if fetched[i] > 0 else -fetched[i]
    start = stop - keys.size
    for i in range(keys.size - 1, -1, -1):
        if _is_of_batch(fetched[i], first_use, uses.size):
            continue  # a later use in this batch stands for the row
        entry = entries[keys[i]]
        last = last_uses[entry] if entry > 0 else -entry
        if last == 0:
            if entry > 0:
                next_uses[entry] = batch
        elif _is_of_batch(last, first_use, uses.size):
            continue
        else:
            next_batches[last & (next_batches.size - 2)] = batch
        number = ((first_use + start + i) & (WRAP - 1)) + 1
        if entry > 0:
            last_uses[entry] = number
        else:
            entries[keys[i]] = -number
        end -= 1
        uses[end] = start + i
    return end


@numba.njit(nogil=True, cache=True, inline="always")
def _is_of_batch(use: int, first_use: int, count: int) -> bool:
    """True if use number `use` (0: none) is one of the `count` after `first_use`."""
    return use != 0 and ((use - 1 - first_use) & (WRAP - 1)) < count


@_compiled
def know(
    keys: Int64s,
    feature_lengths: Int64s,
    takes_part: Bools,
    entries: Int32s,
    next_uses: Int32s,
    last_uses: Int32s,
    next_batches: Int32s,
    first_use: int,
    batch: int,
    uses: Int32s,
    positions: Int32s,
) -> int:
    """Append known batch `batch` to the chains of its keys' uses (`next_use.py`).

    Args:
        keys: [N].
        feature_lengths: [F] keys per feature.
        takes_part: [F] features whose keys are counted, M in all.
        entries: [R] slot of every key, or its trace.
        next_uses, last_uses: [S + 1].
        next_batches: ring of the chains, and one more cell.
        first_use: number of the batch's first use, less one.
        uses, positions: [M], written from their ends: per distinct key the number of its last use in the batch,
            counted from 0 over the features that take part, and its position in the batch. Both ascending.

    Returns:
        The number of distinct keys.
    """
    end, use, stop = uses.size, uses.size, keys.size
    state = (entries, next_uses, last_uses, next_batches)
    for feature in range(feature_lengths.size - 1, -1, -1):
        first = stop - feature_lengths[feature]
        if takes_part[feature]:
            for block_stop in range(stop, first, -_BLOCK):
                block = keys[max(block_stop - _BLOCK, first) : block_stop]
                found = _know_block(block, state, first_use, use, batch, uses, end)
                for i in range(found, end):
                    positions[i] = block_stop - use + uses[i]
                use, end = use - block.size, found
        stop = first
    return uses.size - end


@_compiled
def arrive(
    slots: Int64s,
    uses: Int32s,
    positions: Int32s,
    first_use: int,
    next_batches: Int32s,
    next_uses: Int32s,
    last_uses: Int32s,
    distinct_slots: Int64s,
    following: Int32s,
) -> None:
    """Give the slots of a known batch their rows' next uses.

    Args:
        slots: [N].
        uses, positions: [U], of the batch's distinct rows.
        distinct_slots, following: [U], written: their slots, and the batches that use them next; 0 for none.
    """
    capacity = next_batches.size - 1
    for i in range(uses.size):
        slot = slots[positions[i]]
        number = ((first_use + uses[i]) & (WRAP - 1)) + 1
        batch = next_batches[number & (capacity - 1)]
        distinct_slots[i] = slot
        following[i] = batch
        next_uses[slot] = batch
        if batch == 0:
            last_uses[slot] = 0


@_compiled
def admit(keys: Int64s, slots: Int64s, entries: Int32s, next_uses: Int32s, last_uses: Int32s, soon: int) -> None:
    """Take over the traces of `keys` [M], about to be bound to `slots` [M]; with one, the next use is `soon`."""
    for i in range(keys.size):
        slot, last = slots[i], -entries[keys[i]]
        last_uses[slot] = last
        next_uses[slot] = soon if last > 0 else 0


@_compiled
def _rank(slot: int, stamp: int, next_use: int, score_bits: Int32s) -> int:
    unknown = stamp >> _BATCH_SHIFT
    if score_bits.size:
        unknown |= np.int64(score_bits[slot]) << _BATCH_SHIFT
    known = KNOWN_USE + LAST_BATCH - next_use
    return known if next_use > 0 else unknown


@_compiled
def offer(
    slots: Int64s,
    next_uses: Int32s,
    worst: int,
    worst_next_use: int,
    use_stamps: Int64s,
    score_bits: Int32s,
) -> tuple[Int64s, Int64s, Int64s, Int32s]:
    """Keep those of `slots` [M] whose rank is at most `worst`.

    Args:
        next_uses: [M] of the slots' rows; 0 for none.
        worst_next_use: `worst` as a next use.
        score_bits: [S + 1] scores, as the integers that their bits are; empty without scores.

    Returns:
        The slots kept, in their order, with their use stamps, ranks and next uses.
    """
    kept_slots, kept_stamps = np.empty(slots.size, np.int64), np.empty(slots.size, np.int64)
    kept_ranks, kept_next_uses = np.empty(slots.size, np.int64), np.empty(slots.size, np.int32)
    kept = 0
    for i in range(slots.size):
        slot, next_use = slots[i], next_uses[i]
        if next_use != 0 and next_use < worst_next_use:
            continue
        stamp = use_stamps[slot]
        rank = _rank(slot, stamp, next_use, score_bits)
        if rank <= worst:
            kept_slots[kept], kept_stamps[kept], kept_ranks[kept], kept_next_uses[kept] = slot, stamp, rank, next_use
            kept += 1
    return kept_slots[:kept], kept_stamps[:kept], kept_ranks[:kept], kept_next_uses[:kept]


@_compiled
def _choose(
    slots: Int64s,
    stamps: Int64s,
    ranks: Int64s,
    places: Int64s,
    num_queued: int,
    count: int,
    width: int,
    next_uses: Int32s,
) -> tuple[Int64s, int, Int64s, Int64s, Int64s, Int32s]:
    """The second half of `take_lowest`, for candidates at `places` of the queue; -1: offered."""
    total, bound, num_equal = slots.size, _NEVER, 0
    if total > count:
        bound = np.partition(ranks, count - 1)[count - 1]
        num_equal = count - (ranks < bound).sum()
    chosen, equal = 0, min(total, count) - num_equal
    victims, left = np.empty(min(total, count), np.int64), np.empty(total, np.int64)
    num_left, passed = 0, width
    for i in range(total):
        if ranks[i] < bound:
            victims[chosen] = slots[i]
            chosen += 1
        elif ranks[i] == bound and equal < victims.size:
            victims[equal] = slots[i]
            equal += 1
        elif i < num_queued:
            passed = min(passed, places[i])
        elif places[i] < passed:  # entries of the queue from `passed` on are still in it
            left[num_left] = i
            num_left += 1
    left = left[:num_left]
    waiting = slots[left]
    return victims, passed, waiting, stamps[left], ranks[left], next_uses[waiting]


@_compiled
def take_lowest(
    queue_slots: Int64s,
    queue_stamps: Int64s,
    queue_ranks: Int64s,
    queue_next_uses: Int32s,
    ready_slots: Int64s,
    ready_stamps: Int64s,
    count: int,
    oldest_pinned: int,
    worst: int,
    use_stamps: Int64s,
    next_uses: Int32s,
    score_bits: Int32s,
) -> tuple[Int64s, int, Int64s, Int64s, Int64s, Int32s]:
    """Take the `count` lowest ranks of the rest of a victim queue and of the slots offered since its refill.

    Args:
        queue_slots, queue_stamps, queue_ranks, queue_next_uses: [Q], the rest of the queue.
        ready_slots, ready_stamps: [M], offered slots that are no longer pinned.
        oldest_pinned, worst, next_uses, score_bits: see `VictimQueue` and `offer`.

    Returns:
        Slots to evict; how many entries of the queue are done with; and of the offered slots, and of those that were
        ranked again, the rest: slots, stamps, ranks and next uses.
    """
    width = min(2 * count, queue_slots.size)
    usable = 0
    for _ in range(2):  # most entries are usable, so a short window nearly always suffices
        usable = 0
        for place in range(width):
            slot, stamp = queue_slots[place], queue_stamps[place]
            if use_stamps[slot] == stamp and stamp >> _BATCH_SHIFT < oldest_pinned:
                usable += next_uses[slot] == queue_next_uses[place]
        if usable >= count:
            break
        width = queue_slots.size
    room = width + ready_slots.size
    slots, stamps = np.empty(room, np.int64), np.empty(room, np.int64)
    ranks, places = np.empty(room, np.int64), np.empty(room, np.int64)
    queued, total = 0, usable
    for i in range(room):
        place = i if i < width else -1
        slot, stamp = (queue_slots[i], queue_stamps[i]) if i < width else (ready_slots[i - width], ready_stamps[i - width])
        if use_stamps[slot] != stamp or stamp >> _BATCH_SHIFT >= oldest_pinned:
            continue
        if i < width and next_uses[slot] == queue_next_uses[i]:
            slots[queued], stamps[queued], ranks[queued], places[queued] = slot, stamp, queue_ranks[i], place
            queued += 1
            continue
        rank = _rank(slot, stamp, next_uses[slot], score_bits)
        if rank <= worst:
            slots[total], stamps[total], ranks[total], places[total] = slot, stamp, rank, place
            total += 1
    return _choose(slots[:total], stamps[:total], ranks[:total], places[:total], queued, count, width, next_uses)


@_compiled
def lowest_ranks(
    use_stamps: Int64s,
    next_uses: Int32s,
    score_bits: Int32s,
    end: int,
    num_pinned: int,
    oldest_pinned: int,
    bound: int,
    stride: int,
) -> tuple[Int64s, Int64s, Int64s]:
    """Rank every `stride`-th slot from 1 to `end` - 1.

    Args:
        num_pinned: slots up to this one are never evicted.
        bound: highest rank wanted.

    Returns:
        Slots that may be evicted and whose rank is at most `bound`, ascending, and their ranks; and slots of such a
        rank that batches in flight pin.
    """
    slots, ranks = np.empty(end // stride + 2, np.int64), np.empty(end // stride + 2, np.int64)
    pinned = np.empty(end // stride + 2, np.int64)
    found, num_in_flight = 0, 0
    for slot in range(1, end, stride):
        stamp = use_stamps[slot]
        rank = _rank(slot, stamp, next_uses[slot] if next_uses.size else 0, score_bits)
        is_low, is_free = (rank <= bound) & (slot > num_pinned), stamp >> _BATCH_SHIFT < oldest_pinned
        slots[found], ranks[found] = slot, rank  # a branch would be guessed wrong too often
        found += is_low & is_free
        if is_low and not is_free and stamp != _NEVER:  # not empty
            pinned[num_in_flight] = slot
            num_in_flight += 1
    return slots[:found], ranks[:found], pinned[:num_in_flight]


@_compiled
def settle_ties(order: Int64s, ranks: Int64s) -> None:
    """Sort `order` [M], which sorts `ranks` [M] in any way, ascending among equal ranks."""
    start = 0
    for end in range(1, order.size + 1):
        if end == order.size or ranks[order[end]] != ranks[order[start]]:
            if end - start > 1:
                order[start:end].sort()
            start = end


@_compiled
def add_per_feature(ids: Int64s, addends: Int64s, lengths: Int64s, sums: Int64s) -> None:
    """Write to `sums` [N] the `ids` [N], each with the addend of its feature; feature f has `lengths[f]` of them."""
    position = 0
    for feature in range(lengths.size):
        end = min(position + lengths[feature], ids.size)
        addend = addends[feature]
        for place in range(position, end):
            sums[place] = ids[place] + addend
        position = end


@_compiled
def count_uses(scores: Float32s, slots: Int64s, first_hits: Bools, fill_slots: Int64s, weight: float) -> None:
    """Add `weight` to the scores of a batch's distinct slots: those of `slots` [N] at `first_hits`, and `fill_slots`."""
    for position in range(slots.size):
        if first_hits[position]:
            scores[slots[position]] += weight
    for i in range(fill_slots.size):
        scores[fill_slots[i]] += weight




@_compiled
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
        counters[np.searchsorted(table_ends, key, side="right"), 6] += 1
    for key in write_back_keys:
        counters[np.searchsorted(table_ends, key, side="right"), 5] += 1


@numba.njit(
    [(word[:, ::1], numba.int64[::1], word[:, ::1], numba.int64[::1]) for word in _WORDS], nogil=True, cache=True
)
def copy_rows(target: NDArray[Any], target_rows: Int64s, source: NDArray[Any], source_rows: Int64s) -> None:
    """Do `target[target_rows] = source[source_rows]` for tables of integers [rows, words per row]."""
    for i in range(target_rows.size):
        target_row, source_row = target_rows[i], source_rows[i]
        for word in range(target.shape[1]):
            target[target_row, word] = source[source_row, word]
