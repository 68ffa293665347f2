"""Triton kernels that choose victims: what `loops.candidates`, `loops.choose` and `loops.lowest_ranks` do, with numbers
that stay on the device (`slot_map.py`).

The candidates of a plan are numbered: W entries of the ranking whose rank holds, the same W entries again for those
that were ranked anew, and the O slots that were offered; `ranks` [2 W + O] has their ranks, `NEVER` for none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from embershard.cache.gpu.launch import kernel
from embershard.cache.gpu.slot_map import FILLS

# Places in `numbers`.
USABLE = tl.constexpr(3)  # entries of the ranking whose rank holds
VICTIMS = tl.constexpr(4)
DIRTY = tl.constexpr(5)  # of these
LEFT = tl.constexpr(6)  # entries of the ranking from the first one that is left
WAITING = tl.constexpr(7)  # other candidates that are left
PINNED = tl.constexpr(8)  # offered slots that are still pinned
NUM_NUMBERS = 9

NEVER = tl.constexpr(torch.iinfo(torch.int64).max)
_KNOWN_USE = tl.constexpr((0x7F800001 << 32) + 2**31)


@triton.jit
def _rank(slot, stamp, next_use, score_bits, inside, SCORES: tl.constexpr):  # type: ignore[no-untyped-def]
    rank = stamp >> 32
    if SCORES:
        rank = rank | (tl.load(score_bits + slot, mask=inside, other=0).to(tl.int64) << 32)
    return tl.where(next_use > 0, _KNOWN_USE - next_use.to(tl.int64), rank)


@triton.jit
def _limits(numbers, num_free, width, is_whole):  # type: ignore[no-untyped-def]
    """Victims needed, and the entries of the ranking that may be taken."""
    needed = tl.maximum(tl.load(numbers + FILLS) - num_free, 0)
    return needed, tl.where(is_whole > 0, width, tl.minimum(2 * needed, width))


@kernel()
def rank_candidates(  # type: ignore[no-untyped-def]
    queue_slots, queue_stamps, queue_ranks, queue_uses, offered, use_stamps, next_uses, score_bits, worst, numbers,
    ranks, stride, oldest_pinned, num_free, width, is_whole, count,
    USES: tl.constexpr, SCORES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rank the candidates, of the W entries `width` and the offered slots `offered` [3, stride]; `count` is W + O."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    queued, inside = place < width, place < count
    at = offered + place - width
    slot = tl.where(
        queued, tl.load(queue_slots + place, mask=queued, other=0), tl.load(at, mask=inside & ~queued, other=0)
    )
    stamp = tl.where(
        queued,
        tl.load(queue_stamps + place, mask=queued, other=-1),
        tl.load(at + stride, mask=inside & ~queued, other=-1),
    )
    limit = _limits(numbers, num_free, width, is_whole)[1]
    lowest = tl.load(worst)
    is_free = inside & (slot > 0) & (tl.load(use_stamps + slot, mask=inside, other=-2) == stamp)
    is_free = is_free & ((stamp >> 32) < oldest_pinned)
    queue_rank = tl.load(queue_ranks + place, mask=queued, other=NEVER)
    is_free = is_free & (~queued | ((place < limit) & (queue_rank <= lowest)))
    holds = queued
    if USES:
        next_use = tl.load(next_uses + slot, mask=inside, other=0)
        holds = queued & (next_use == tl.load(queue_uses + place, mask=queued, other=-1))
        rank = _rank(slot, stamp, next_use, score_bits, inside, SCORES)
        is_again = is_free & ~holds & (rank <= lowest)
        tl.store(ranks + width + place, tl.where(is_again, rank, NEVER), mask=inside)
    usable = is_free & holds
    tl.store(ranks + place, tl.where(usable, queue_rank, NEVER), mask=queued)
    tl.atomic_add(numbers + USABLE, tl.sum(usable.to(tl.int64)), sem="relaxed")


@triton.jit
def _slot_of(candidate, queue_slots, offered, width, inside):  # type: ignore[no-untyped-def]
    queued = candidate < 2 * width
    at = tl.where(candidate < width, candidate, candidate - width)
    from_queue = tl.load(queue_slots + at, mask=inside & queued, other=0)
    return tl.where(queued, from_queue, tl.load(offered + candidate - 2 * width, mask=inside & ~queued, other=0))


# Marks of candidates.
_BELOW, _EQUAL, _DIRTY = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
_WAITS, _STILL_PINNED = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _numbered(is_marked, ends, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many are marked up to each of this program's items, and in all; `ends` has the sums up to each program."""
    of_kind, program = ends + KIND * tl.num_programs(0), tl.program_id(0)
    before = tl.load(of_kind + program - 1, mask=program > 0, other=0)
    return before + tl.cumsum(is_marked.to(tl.int32), 0), tl.load(of_kind + tl.num_programs(0) - 1)


@kernel()
def mark_victims(  # type: ignore[no-untyped-def]
    queue_slots, offered, ranks, ascending, use_stamps, numbers, marks, counts, clean_through, num_free, width,
    count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Mark the candidates below the rank of the last victim, those of that rank, and where the slot's row must be
    written back: `marks` int8 [count], and their `counts` [4, programs]. `ascending` [count] are the sorted ranks."""
    candidate = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = candidate < count
    needed = tl.maximum(tl.load(numbers + FILLS) - num_free, 0)
    last = tl.load(ascending + tl.minimum(tl.maximum(needed - 1, 0), count - 1))
    is_short = tl.load(ascending + tl.minimum(needed, count - 1)) == NEVER
    last = tl.where(is_short | (needed >= count), NEVER, last)  # all of them
    last = tl.where(needed > 0, last, -1)
    rank = tl.load(ranks + candidate, mask=inside, other=NEVER)
    below, equal = rank < last, (rank == last) & (rank != NEVER)
    slot = _slot_of(candidate, queue_slots, offered, width, inside)
    dirty = (tl.load(use_stamps + slot, mask=inside, other=0) >> 32) > clean_through
    mark = tl.where(below, _BELOW, tl.where(equal, _EQUAL, 0))
    mark = tl.where((below | equal) & dirty, mark + _DIRTY, mark)
    tl.store(marks + candidate, mark.to(tl.int8), mask=inside)
    at = counts + tl.program_id(0)
    tl.store(at, tl.sum(below.to(tl.int32)))
    tl.store(at + tl.num_programs(0), tl.sum(equal.to(tl.int32)))
    tl.store(at + 2 * tl.num_programs(0), tl.sum((below & dirty).to(tl.int32)))
    tl.store(at + 3 * tl.num_programs(0), tl.sum((equal & dirty).to(tl.int32)))


@kernel()
def choose_victims(  # type: ignore[no-untyped-def]
    queue_slots, offered, marks, ends, key_of_slot, numbers, ranks, victims, num_free, width, is_whole, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the victims' slots and keys, and slots and keys of those to write back: `victims` int64 [4, count]. The
    ranks of victims become `NEVER`."""
    candidate = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = candidate < count
    needed, limit = _limits(numbers, num_free, width, is_whole)
    mark = tl.load(marks + candidate, mask=inside, other=0).to(tl.int32)
    below, equal, is_dirty = (mark & _BELOW) > 0, (mark & _EQUAL) > 0, (mark & _DIRTY) > 0
    of_below, num_below = _numbered(below, ends, 0)
    num_equal = _numbered(equal, ends, 1)[0]
    chosen = below | (equal & (num_below + num_equal <= needed))
    at = tl.where(below, of_below, num_below + num_equal) - 1
    slot = _slot_of(candidate, queue_slots, offered, width, inside)
    key = tl.load(key_of_slot + slot, mask=chosen, other=0).to(tl.int64)
    tl.store(victims + at, slot, mask=chosen)
    tl.store(victims + count + at, key, mask=chosen)
    dirty = chosen & is_dirty
    of_below, num_below = _numbered(below & is_dirty, ends, 2)
    num_equal = _numbered(equal & is_dirty, ends, 3)[0]
    at = tl.where(below, of_below, num_below + num_equal) - 1
    tl.store(victims + 2 * count + at, slot, mask=dirty)
    tl.store(victims + 3 * count + at, key, mask=dirty)
    tl.atomic_add(numbers + VICTIMS, tl.sum(chosen.to(tl.int64)), sem="relaxed")
    tl.atomic_add(numbers + DIRTY, tl.sum(dirty.to(tl.int64)), sem="relaxed")
    rank = tl.load(ranks + candidate, mask=inside, other=NEVER)
    is_left = inside & (candidate < width) & (rank != NEVER) & ~chosen
    tl.atomic_max(numbers + LEFT, tl.max(tl.where(is_left, limit - candidate, 0).to(tl.int64)), sem="relaxed")
    tl.store(ranks + candidate, NEVER, mask=chosen)


@kernel()
def mark_waiting(  # type: ignore[no-untyped-def]
    offered, ranks, numbers, marks, counts, stride, oldest_pinned, num_free, width, is_whole, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Mark, of the W entries and the O offered slots, those that wait outside of the ranking, and offered ones that are
    still pinned: `marks` int8 [W + O], `counts` [2, programs]. Entries that are not passed are still in the ranking."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, queued = place < count, place < width
    passed = _limits(numbers, num_free, width, is_whole)[1] - tl.load(numbers + LEFT)
    rank = tl.load(ranks + width + place, mask=inside, other=NEVER)
    waits = (rank != NEVER) & (~queued | (place < passed))
    at = offered + place - width
    slot = tl.load(at, mask=inside & ~queued, other=0)
    stamp = tl.load(at + stride, mask=inside & ~queued, other=-1)
    is_pinned = (slot > 0) & ((stamp >> 32) >= oldest_pinned)
    mark = tl.where(waits, _WAITS, tl.where(is_pinned, _STILL_PINNED, 0))
    tl.store(marks + place, mark.to(tl.int8), mask=inside)
    tl.store(counts + tl.program_id(0), tl.sum(waits.to(tl.int32)))
    tl.store(counts + tl.num_programs(0) + tl.program_id(0), tl.sum(is_pinned.to(tl.int32)))


@kernel()
def keep_waiting(  # type: ignore[no-untyped-def]
    queue_slots, queue_stamps, offered, ranks, marks, ends, numbers, kept, stride, width, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write what `mark_waiting` marked, first what waits: slots, stamps and ranks, `kept` int64 [3, W + O]."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, queued = place < count, place < width
    mark = tl.load(marks + place, mask=inside, other=0).to(tl.int32)
    waits, is_pinned = mark == _WAITS, mark == _STILL_PINNED
    of_waiting, num_waiting = _numbered(waits, ends, 0)
    of_pinned, num_pinned = _numbered(is_pinned, ends, 1)
    at = offered + place - width
    old = inside & ~queued
    slot = tl.load(queue_slots + place, mask=queued, other=0) + tl.load(at, mask=old, other=0)
    stamp = tl.load(queue_stamps + place, mask=queued, other=0) + tl.load(at + stride, mask=old, other=0)
    to = tl.where(waits, of_waiting, num_waiting + of_pinned) - 1
    tl.store(kept + to, slot, mask=mark > 0)
    tl.store(kept + count + to, stamp, mask=mark > 0)
    tl.store(kept + 2 * count + to, tl.load(ranks + width + place, mask=inside, other=NEVER), mask=mark > 0)
    if tl.program_id(0) == 0:
        tl.store(numbers + WAITING, num_waiting.to(tl.int64))
        tl.store(numbers + PINNED, num_pinned.to(tl.int64))


@kernel()
def drop_waiting(  # type: ignore[no-untyped-def]
    slots, stride, worst, queue_ranks, kept, num_queued, num_beside, count, BLOCK: tl.constexpr
):
    """Drop the waiting slots (int64 [3, stride], of which `count` wait) that rank above `worst`. `kept` int64 [2],
    zeros before: entries of the ranking up to `worst`; and the slots that still wait, with the `num_beside` others."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, lowest = place < count, tl.load(worst)
    stays = inside & (tl.load(slots + 2 * stride + place, mask=inside, other=NEVER) <= lowest)
    tl.store(slots + place, tl.zeros([BLOCK], tl.int64), mask=inside & ~stays)
    num_kept = tl.sum(stays.to(tl.int64))
    if tl.program_id(0) == 0:
        num_kept += num_beside
        first, stop = num_queued * 0, num_queued
        while first < stop:
            middle = (first + stop) // 2
            is_in = tl.load(queue_ranks + middle) <= lowest
            first, stop = tl.where(is_in, middle + 1, first), tl.where(is_in, stop, middle)
        tl.store(kept, first.to(tl.int64))
    tl.atomic_add(kept + 1, num_kept, sem="relaxed")


# Places in what a refill finds, int64 [NUM_FOUND], zeros before.
LUCKY = tl.constexpr(0)  # ranks up to the sample's bound
END = tl.constexpr(1)  # entries of the ranking
WORST = tl.constexpr(2)  # the last one's rank, -1 if there is none
IN_FLIGHT = tl.constexpr(3)  # pinned slots that rank no worse
OF_BATCH = tl.constexpr(4)  # of these, slots of the batch that is planned
NUM_FOUND = 5

# A refill finds the rank of the last slot that it ranks digit by digit, from the highest one: each pass counts the
# slots with the digits found so far by their next digit. Ranks are computed again in each pass, and stored nowhere.
NUM_DIGITS, DIGITS = 8, 256  # of a rank, and values of one
DIGIT_BITS = tl.constexpr(8)


@triton.jit
def _evictable(  # type: ignore[no-untyped-def]
    slot, inside, use_stamps, next_uses, score_bits, num_pinned, oldest_pinned, USES: tl.constexpr, SCORES: tl.constexpr
):
    """Rank slots: those that may be evicted, `NEVER` for others; and those that batches in flight pin."""
    stamp = tl.load(use_stamps + slot, mask=inside, other=0)
    next_use = tl.zeros_like(slot)
    if USES:
        next_use = tl.load(next_uses + slot, mask=inside, other=0)
    rank = _rank(slot, stamp, next_use, score_bits, inside, SCORES)
    may_go, is_free = inside & (slot > num_pinned), (stamp >> 32) < oldest_pinned
    in_flight = may_go & ~is_free & (stamp != NEVER)
    return tl.where(may_go & is_free, rank, NEVER), tl.where(in_flight, rank, NEVER)


@kernel()
def rank_sample(  # type: ignore[no-untyped-def]
    use_stamps, next_uses, score_bits, num_pinned, oldest_pinned, sample, stride, count,
    USES: tl.constexpr, SCORES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rank slots 1, 1 + `stride`, ...: `sample` int64 [count], `NEVER` of those that may not be evicted."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    state = (use_stamps, next_uses, score_bits, num_pinned, oldest_pinned)
    rank = _evictable(1 + place.to(tl.int64) * stride, place < count, *state, USES, SCORES)[0]
    tl.store(sample + place, rank, mask=place < count)


@kernel()
def count_lucky(  # type: ignore[no-untyped-def]
    use_stamps, next_uses, score_bits, num_pinned, oldest_pinned, sample, found, at, count,
    USES: tl.constexpr, SCORES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the slots, of 1 to `count`, that rank up to a bound, number `at` of the sorted `sample`."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    state = (use_stamps, next_uses, score_bits, num_pinned, oldest_pinned)
    rank = _evictable(1 + place, place < count, *state, USES, SCORES)[0]
    bound = tl.minimum(tl.load(sample + at), NEVER - 1)
    tl.atomic_add(found + LUCKY, tl.sum((rank <= bound).to(tl.int64)), sem="relaxed")


@triton.jit
def _allowed(rank, sample, found, at, least):  # type: ignore[no-untyped-def]
    """Which ranks may be taken: those up to the sample's bound, if it leaves at least `least`; `at` is -1 without."""
    is_lucky = (at >= 0) & (tl.load(found + LUCKY) >= least)
    bound = tl.load(sample + at, mask=is_lucky, other=NEVER)
    return rank <= tl.minimum(bound, NEVER - 1)


@triton.jit
def _picked(digits, picks, number, size, DIGITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first `number` digits of the rank of the last of the `size` lowest slots, as one number, and how many slots
    with these digits are among the lowest. Where there are fewer slots, the digits of `NEVER`."""
    digit, is_any = tl.arange(0, DIGITS), number > 0
    counts = tl.load(digits + ((number - 1) << DIGIT_BITS) + digit, mask=(digit >= 0) & is_any, other=0)
    leading = tl.load(picks + (number << 1) - 2, mask=is_any, other=0)
    left = tl.load(picks + (number << 1) - 1, mask=is_any, other=size)
    highest = tl.where(number == 1, DIGITS // 2, DIGITS) - 1  # no rank is negative
    chosen = tl.minimum(tl.sum((tl.cumsum(counts, 0) < left).to(tl.int32)), highest)
    left -= tl.sum(tl.where(digit < chosen, counts, 0))
    return tl.where(is_any, (leading << DIGIT_BITS) + chosen, 0), left


@kernel()
def count_digits(  # type: ignore[no-untyped-def]
    use_stamps, next_uses, score_bits, num_pinned, oldest_pinned, sample, found, at, least, digits, picks, size,
    number, shift, count,
    USES: tl.constexpr, SCORES: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count slots 1 to `count` by digit `number` of their rank, `shift` bits from its end: `digits` int32 [NUM_DIGITS,
    DIGITS], zeros before. Only those that have the digits before: these, as `_picked` has them, go to `picks` int64
    [NUM_DIGITS, 2]."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    state = (use_stamps, next_uses, score_bits, num_pinned, oldest_pinned)
    rank = _evictable(1 + place, place < count, *state, USES, SCORES)[0]
    leading, left = _picked(digits, picks, number, size, DIGITS)
    if tl.program_id(0) == 0:
        tl.store(picks + (number << 1), leading)
        tl.store(picks + (number << 1) + 1, left.to(tl.int64))
    is_one = _allowed(rank, sample, found, at, least) & (rank >> shift >> DIGIT_BITS == leading)
    digit = tl.where(is_one, (rank >> shift) & (DIGITS - 1), 0).to(tl.int32)
    counts = tl.histogram(digit, DIGITS)
    value = tl.arange(0, DIGITS)
    counts -= tl.where(value == 0, tl.sum((~is_one).to(tl.int32)), 0)  # those that do not count are in the first one
    tl.atomic_add(digits + (number << DIGIT_BITS) + value, counts, mask=counts > 0, sem="relaxed")


@kernel()
def count_lowest(  # type: ignore[no-untyped-def]
    use_stamps, next_uses, score_bits, num_pinned, oldest_pinned, sample, found, at, least, digits, picks, size,
    number, counts, count,
    USES: tl.constexpr, SCORES: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count, of slots 1 to `count`, those that rank below the last of the lowest, and those that rank as it does:
    `counts` [2, programs]. `number` is that of all digits."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    state = (use_stamps, next_uses, score_bits, num_pinned, oldest_pinned)
    rank = _evictable(1 + place, place < count, *state, USES, SCORES)[0]
    last = _picked(digits, picks, number, size, DIGITS)[0]
    is_one = _allowed(rank, sample, found, at, least)
    tl.store(counts + tl.program_id(0), tl.sum((is_one & (rank < last)).to(tl.int32)))
    tl.store(counts + tl.num_programs(0) + tl.program_id(0), tl.sum((is_one & (rank == last)).to(tl.int32)))


@kernel()
def keep_lowest(  # type: ignore[no-untyped-def]
    use_stamps, next_uses, score_bits, num_pinned, oldest_pinned, sample, found, at, least, digits, picks, size,
    number, ends, ranks, slots, count,
    USES: tl.constexpr, SCORES: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write what `count_lowest` counted, of those that rank as the last one the first slots: `ranks` and `slots` int64
    [size], ascending by slot where ranks are equal; behind them `NEVER` and slot 0."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    state = (use_stamps, next_uses, score_bits, num_pinned, oldest_pinned)
    rank = _evictable(1 + place, place < count, *state, USES, SCORES)[0]
    last, left = _picked(digits, picks, number, size, DIGITS)
    is_one = _allowed(rank, sample, found, at, least)
    below, equal = is_one & (rank < last), is_one & (rank == last)
    of_below, num_below = _numbered(below, ends, 0)
    of_equal, num_equal = _numbered(equal, ends, 1)
    is_kept = below | (equal & (of_equal <= left))
    to = tl.where(below, of_below, num_below + of_equal) - 1
    tl.store(ranks + to, rank, mask=is_kept)
    tl.store(slots + to, (1 + place).to(tl.int64), mask=is_kept)
    is_behind = (place < size) & (place >= num_below + tl.minimum(num_equal, left))
    tl.store(ranks + place, NEVER, mask=is_behind)
    tl.store(slots + place, tl.zeros([BLOCK], tl.int64), mask=is_behind)


@kernel()
def keep_ranking(  # type: ignore[no-untyped-def]
    queue_ranks, order, slots, use_stamps, next_uses, queue_slots, queue_stamps, queue_uses, found, count,
    USES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the ranking of `count` entries, from its sorted ranks, whose places among `slots` were `order`."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    rank = tl.load(queue_ranks + place, mask=inside, other=NEVER)
    slot = tl.load(slots + tl.load(order + place, mask=inside, other=0), mask=inside, other=0)
    tl.store(queue_slots + place, slot, mask=inside)
    tl.store(queue_stamps + place, tl.load(use_stamps + slot, mask=inside, other=0), mask=inside)
    if USES:
        tl.store(queue_uses + place, tl.load(next_uses + slot, mask=inside, other=0), mask=inside)
    after = tl.load(queue_ranks + place + 1, mask=place + 1 < count, other=NEVER)
    is_last = inside & (rank != NEVER) & (after == NEVER)
    tl.store(found + END + tl.zeros_like(place), (place + 1).to(tl.int64), mask=is_last)
    tl.store(found + WORST + tl.zeros_like(place), rank if USES else tl.zeros_like(rank) + (NEVER - 1), mask=is_last)
    is_none = (place == 0) & (rank == NEVER)
    tl.store(found + WORST + tl.zeros_like(place), tl.zeros_like(rank) - 1, mask=is_none)


@kernel()
def mark_in_flight(  # type: ignore[no-untyped-def]
    use_stamps, next_uses, score_bits, num_pinned, oldest_pinned, found, marks, counts, batch, count,
    USES: tl.constexpr, SCORES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mark, of slots 1 to `count`, those in flight that rank no worse than the ranking's last: `marks` int8 [count],
    and their `counts`."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    state = (use_stamps, next_uses, score_bits, num_pinned, oldest_pinned)
    is_marked = _evictable(1 + place, inside, *state, USES, SCORES)[1] <= tl.load(found + WORST)
    of_batch = (tl.load(use_stamps + place + 1, mask=is_marked, other=0) >> 32) == batch
    tl.store(marks + place, is_marked.to(tl.int8), mask=inside)
    num_marked = tl.sum(is_marked.to(tl.int32))
    tl.store(counts + tl.program_id(0), num_marked)
    tl.atomic_add(found + IN_FLIGHT, num_marked.to(tl.int64), sem="relaxed")
    tl.atomic_add(found + OF_BATCH, tl.sum((is_marked & of_batch).to(tl.int64)), sem="relaxed")


@kernel()
def mark_offers(  # type: ignore[no-untyped-def]
    slots, next_uses, use_stamps, score_bits, worst, marks, counts, count, SCORES: tl.constexpr, BLOCK: tl.constexpr
):
    """Mark the slots (int64 [count]) whose rank with `next_uses` (int32 [count]; negative: none of the batch's distinct
    slots) is in the ranking: `marks` int8 [count], and their `counts`."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    next_use = tl.load(next_uses + place, mask=place < count, other=-1)
    inside = next_use >= 0
    slot = tl.load(slots + place, mask=inside, other=0)
    stamp = tl.load(use_stamps + slot, mask=inside, other=0)
    rank = _rank(slot, stamp, next_use, score_bits, inside, SCORES)
    is_offered = inside & (rank <= tl.load(worst))
    tl.store(marks + place, is_offered.to(tl.int8), mask=place < count)
    tl.store(counts + tl.program_id(0), tl.sum(is_offered.to(tl.int32)))


@kernel()
def gather(  # type: ignore[no-untyped-def]
    slots, marks, ends, use_stamps, gathered, total, width, count, LISTED: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the slots that `marks` mark, their stamps and last batches: `gathered` int64 [3, width], behind them slots
    of 0; and their number, `total` int64 [1]. The slots are those of `slots`, or if not `LISTED` 1 to `count`."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_marked = tl.load(marks + place, mask=place < count, other=0) > 0
    running, num_marked = _numbered(is_marked, ends, 0)
    at = running - 1
    slot = (1 + place).to(tl.int64)
    if LISTED:
        slot = tl.load(slots + place, mask=is_marked, other=0)
    stamp = tl.load(use_stamps + slot, mask=is_marked, other=0)
    fits = is_marked & (at < width)
    tl.store(gathered + at, slot, mask=fits)
    tl.store(gathered + width + at, stamp, mask=fits)
    tl.store(gathered + 2 * width + at, stamp >> 32, mask=fits)
    tl.store(gathered + place, tl.zeros([BLOCK], tl.int64), mask=(place >= num_marked) & (place < width))
    if tl.program_id(0) == 0:
        tl.store(total, num_marked.to(tl.int64))
