"""Compiled loops of `VictimQueue`: ranks of slots, and the choice of the lowest."""

from __future__ import annotations

import numpy as np

from embershard.cache.loops.compiled import Int32s, Int64s, compiled

KNOWN_USE = 0x7F800001 << 32
LAST_BATCH = 2**31
_BATCH_SHIFT = 32
_NEVER = 2**63 - 1


@compiled
def _rank(slot: int, stamp: int, next_use: int, score_bits: Int32s) -> int:
    unknown = stamp >> _BATCH_SHIFT
    if score_bits.size:
        unknown |= int(score_bits[slot]) << _BATCH_SHIFT
    known = KNOWN_USE + LAST_BATCH - next_use
    return known if next_use > 0 else unknown


@compiled
def offer(
    slots: Int64s, next_uses: Int32s, worst: int, worst_next_use: int, use_stamps: Int64s, score_bits: Int32s,
) -> tuple[Int64s, Int64s, Int64s, Int32s]:  # fmt: skip
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


@compiled
def _count_usable(
    slots: Int64s, stamps: Int64s, known_next_uses: Int32s, width: int, oldest_pinned: int, use_stamps: Int64s,
    next_uses: Int32s,
) -> int:  # fmt: skip
    """Count those of the first `width` entries of a queue that may be evicted and whose rank still holds."""
    usable = 0
    for place in range(width):
        slot, stamp = slots[place], stamps[place]
        if use_stamps[slot] == stamp and stamp >> _BATCH_SHIFT < oldest_pinned:
            usable += next_uses[slot] == known_next_uses[place]
    return usable


@compiled
def candidates(
    queue_slots: Int64s, queue_stamps: Int64s, queue_ranks: Int64s, queue_next_uses: Int32s, ready_slots: Int64s,
    ready_stamps: Int64s, count: int, oldest_pinned: int, worst: int, use_stamps: Int64s, next_uses: Int32s,
    score_bits: Int32s,
) -> tuple[Int64s, Int64s, Int64s, Int64s, int, int]:  # fmt: skip
    """Collect the slots that may be evicted: of the rest of a victim queue and of the slots offered since its refill.

    Args:
        queue_slots, queue_stamps, queue_ranks, queue_next_uses: [Q], the rest of the queue.
        ready_slots, ready_stamps: [M], offered slots that are no longer pinned.
        count: the number of victims wanted.
        oldest_pinned, worst, next_uses, score_bits: see `VictimQueue` and `offer`.

    Returns:
        Candidates, [C] each: slots, stamps, ranks and places in the queue (-1: offered). First come those whose rank in
        the queue still holds. Then their number, and how many entries of the queue were looked at.
    """
    queue = (queue_slots, queue_stamps, queue_next_uses)
    width = min(2 * count, queue_slots.size)  # most entries are usable, so a short window nearly always suffices
    usable = _count_usable(*queue, width, oldest_pinned, use_stamps, next_uses)
    if usable < count:
        width = queue_slots.size
        usable = _count_usable(*queue, width, oldest_pinned, use_stamps, next_uses)
    room, queued, total = width + ready_slots.size, 0, usable
    slots, stamps = np.empty(room, np.int64), np.empty(room, np.int64)
    ranks, places = np.empty(room, np.int64), np.empty(room, np.int64)
    for i in range(room):
        is_queued = i < width
        slot = queue_slots[i] if is_queued else ready_slots[i - width]
        stamp = queue_stamps[i] if is_queued else ready_stamps[i - width]
        if use_stamps[slot] != stamp or stamp >> _BATCH_SHIFT >= oldest_pinned:
            continue
        if is_queued and next_uses[slot] == queue_next_uses[i]:
            slots[queued], stamps[queued], ranks[queued], places[queued] = slot, stamp, queue_ranks[i], i
            queued += 1
            continue
        rank = _rank(slot, stamp, next_uses[slot], score_bits)
        if rank <= worst:
            slots[total], stamps[total], ranks[total], places[total] = slot, stamp, rank, i if is_queued else -1
            total += 1
    return slots[:total], stamps[:total], ranks[:total], places[:total], usable, width


@compiled
def choose(
    slots: Int64s, ranks: Int64s, places: Int64s, usable: int, width: int, count: int, bound: int
) -> tuple[Int64s, int, Int64s]:
    """Choose the `count` lowest of the candidates, or all if there are fewer.

    Args:
        slots, ranks, places, usable, width: result of `candidates`, C in all.
        bound: the `count`-th lowest rank; above all ranks if there are fewer.

    Returns:
        Slots to evict; how many entries of the queue are done with; and numbers of the other candidates that are not
        in the queue behind these.
    """
    num_victims, num_below = min(slots.size, count), 0
    for rank in ranks:
        num_below += rank < bound
    victims, left = np.empty(num_victims, np.int64), np.empty(slots.size, np.int64)
    chosen, equal, num_left, passed = 0, num_below, 0, width
    for i in range(slots.size):
        if ranks[i] < bound:
            victims[chosen] = slots[i]
            chosen += 1
        elif ranks[i] == bound and equal < num_victims:
            victims[equal] = slots[i]
            equal += 1
        elif i < usable:
            passed = min(passed, places[i])
        elif places[i] < passed:  # entries of the queue from `passed` on are still in it
            left[num_left] = i
            num_left += 1
    return victims, passed, left[:num_left]


@compiled
def lowest_ranks(
    use_stamps: Int64s, next_uses: Int32s, score_bits: Int32s, end: int, num_pinned: int, oldest_pinned: int,
    bound: int, stride: int,
) -> tuple[Int64s, Int64s, Int64s]:  # fmt: skip
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


@compiled
def settle_ties(order: Int64s, ranks: Int64s) -> None:
    """Sort `order` [M], which sorts `ranks` [M] in any way, ascending among equal ranks."""
    start = 0
    for end in range(1, order.size + 1):
        if end == order.size or ranks[order[end]] != ranks[order[start]]:
            if end - start > 1:
                order[start:end].sort()
            start = end
