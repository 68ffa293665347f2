"""Triton kernels that choose victims: what `loops.take_lowest` and `loops.lowest_ranks` do, with numbers that stay on
the device (`slot_map.py`).

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


@kernel()
def _limits(numbers, num_free, width, is_whole):  # type: ignore[no-untyped-def]
    """Victims needed, and the entries of the ranking that may be taken."""
    needed = tl.maximum(tl.load(numbers + FILLS) - num_free, 0)
    return needed, tl.where(is_whole > 0, width, tl.minimum(2 * needed, width))


@kernel()
def rank_candidates(  # type: ignore[no-untyped-def]
    queue_slots,
    queue_stamps,
    queue_ranks,
    queue_uses,
    offered,
    use_stamps,
    next_uses,
    score_bits,
    worst,
    numbers,
    ranks,
    stride,
    oldest_pinned,
    num_free,
    width,
    is_whole,
    count,
    USES: tl.constexpr,
    SCORES: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    tl.atomic_add(numbers + USABLE, tl.sum(usable.to(tl.int64)))


@triton.jit
def _slot_of(candidate, queue_slots, offered, width, inside):  # type: ignore[no-untyped-def]
    queued = candidate < 2 * width
    at = tl.where(candidate < width, candidate, candidate - width)
    from_queue = tl.load(queue_slots + at, mask=inside & queued, other=0)
    return tl.where(queued, from_queue, tl.load(offered + candidate - 2 * width, mask=inside & ~queued, other=0))


@kernel()
def mark_victims(  # type: ignore[no-untyped-def]
    queue_slots,
    offered,
    ranks,
    ascending,
    use_stamps,
    numbers,
    flags,
    clean_through,
    num_free,
    width,
    count,
    BLOCK: tl.constexpr,
):
    """Mark the candidates below the rank of the last victim, those of that rank, and both again where the slot's row
    must be written back: `flags` int32 [4, count]. `ascending` [count] are the sorted ranks."""
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
    at = flags + candidate
    tl.store(at, below.to(tl.int32), mask=inside)
    tl.store(at + count, equal.to(tl.int32), mask=inside)
    tl.store(at + 2 * count, (below & dirty).to(tl.int32), mask=inside)
    tl.store(at + 3 * count, (equal & dirty).to(tl.int32), mask=inside)


@kernel()
def choose_victims(  # type: ignore[no-untyped-def]
    queue_slots,
    offered,
    flags,
    running,
    key_of_slot,
    numbers,
    ranks,
    victims,
    num_free,
    width,
    is_whole,
    count,
    BLOCK: tl.constexpr,
):
    """Write the victims' slots and keys, and slots and keys of those to write back: `victims` int64 [4, count].
    `running` [4, count] are the running sums of `flags`. The ranks of victims become `NEVER`."""
    candidate = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = candidate < count
    needed, limit = _limits(numbers, num_free, width, is_whole)
    below = tl.load(flags + candidate, mask=inside, other=0) > 0
    equal = tl.load(flags + count + candidate, mask=inside, other=0) > 0
    num_below = tl.load(running + count - 1).to(tl.int64)
    num_equal = tl.load(running + count + candidate, mask=inside, other=0)
    chosen = below | (equal & (num_below + num_equal <= needed))
    at = tl.where(below, tl.load(running + candidate, mask=inside, other=0), num_below + num_equal) - 1
    slot = _slot_of(candidate, queue_slots, offered, width, inside)
    key = tl.load(key_of_slot + slot, mask=chosen, other=0).to(tl.int64)
    tl.store(victims + at, slot, mask=chosen)
    tl.store(victims + count + at, key, mask=chosen)
    dirty_below = tl.load(flags + 2 * count + candidate, mask=inside, other=0) > 0
    dirty = chosen & (dirty_below | (tl.load(flags + 3 * count + candidate, mask=inside, other=0) > 0))
    of_below = tl.load(running + 2 * count + candidate, mask=inside, other=0)
    of_equal = tl.load(running + 3 * count - 1) + tl.load(running + 3 * count + candidate, mask=inside, other=0)
    at = tl.where(below, of_below, of_equal) - 1
    tl.store(victims + 2 * count + at, slot, mask=dirty)
    tl.store(victims + 3 * count + at, key, mask=dirty)
    tl.atomic_add(numbers + VICTIMS, tl.sum(chosen.to(tl.int64)))
    tl.atomic_add(numbers + DIRTY, tl.sum(dirty.to(tl.int64)))
    rank = tl.load(ranks + candidate, mask=inside, other=NEVER)
    is_left = inside & (candidate < width) & (rank != NEVER) & ~chosen
    tl.atomic_max(numbers + LEFT, tl.max(tl.where(is_left, limit - candidate, 0).to(tl.int64)))
    tl.store(ranks + candidate, NEVER, mask=chosen)


@kernel()
def mark_waiting(  # type: ignore[no-untyped-def]
    offered,
    ranks,
    numbers,
    flags,
    stride,
    oldest_pinned,
    num_free,
    width,
    is_whole,
    count,
    BLOCK: tl.constexpr,
):
    """Mark, of the W entries and the O offered slots, those that wait outside of the ranking, and offered ones that are
    still pinned: `flags` int32 [2, W + O]. Entries that are not passed are still in the ranking."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, queued = place < count, place < width
    passed = _limits(numbers, num_free, width, is_whole)[1] - tl.load(numbers + LEFT)
    rank = tl.load(ranks + width + place, mask=inside, other=NEVER)
    waits = (rank != NEVER) & (~queued | (place < passed))
    at = offered + place - width
    slot = tl.load(at, mask=inside & ~queued, other=0)
    stamp = tl.load(at + stride, mask=inside & ~queued, other=-1)
    is_pinned = (slot > 0) & ((stamp >> 32) >= oldest_pinned)
    tl.store(flags + place, waits.to(tl.int32), mask=inside)
    tl.store(flags + count + place, is_pinned.to(tl.int32), mask=inside)


@kernel()
def keep_waiting(  # type: ignore[no-untyped-def]
    queue_slots,
    queue_stamps,
    offered,
    ranks,
    flags,
    running,
    numbers,
    kept,
    stride,
    width,
    count,
    BLOCK: tl.constexpr,
):
    """Write what `mark_waiting` marked, first what waits: slots, stamps and ranks, `kept` int64 [3, W + O]."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, queued = place < count, place < width
    waits = tl.load(flags + place, mask=inside, other=0) > 0
    is_pinned = tl.load(flags + count + place, mask=inside, other=0) > 0
    num_waiting = tl.load(running + count - 1)
    at = offered + place - width
    old = inside & ~queued
    slot = tl.load(queue_slots + place, mask=queued, other=0) + tl.load(at, mask=old, other=0)
    stamp = tl.load(queue_stamps + place, mask=queued, other=0) + tl.load(at + stride, mask=old, other=0)
    of_pinned = num_waiting + tl.load(running + count + place, mask=inside, other=0)
    to = tl.where(waits, tl.load(running + place, mask=inside, other=0), of_pinned) - 1
    tl.store(kept + to, slot, mask=waits | is_pinned)
    tl.store(kept + count + to, stamp, mask=waits | is_pinned)
    tl.store(kept + 2 * count + to, tl.load(ranks + width + place, mask=inside, other=NEVER), mask=waits | is_pinned)
    is_last = place == count - 1
    ends = tl.zeros_like(place)
    tl.store(numbers + WAITING + ends, num_waiting + ends.to(tl.int64), mask=is_last)
    num_pinned = tl.load(running + 2 * count - 1)
    tl.store(numbers + PINNED + ends, num_pinned + ends.to(tl.int64), mask=is_last)


@kernel()
def rank_slots(  # type: ignore[no-untyped-def]
    use_stamps,
    next_uses,
    score_bits,
    ranks,
    pinned_ranks,
    num_pinned,
    oldest_pinned,
    count,
    USES: tl.constexpr,
    SCORES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rank slots 1 to `count`: `ranks` [count] of those that may be evicted, and `pinned_ranks` [count] of those that
    batches in flight pin; `NEVER` elsewhere."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    slot = place + 1
    stamp = tl.load(use_stamps + slot, mask=inside, other=0)
    next_use = tl.zeros_like(slot)
    if USES:
        next_use = tl.load(next_uses + slot, mask=inside, other=0)
    rank = _rank(slot, stamp, next_use, score_bits, inside, SCORES)
    is_free = (stamp >> 32) < oldest_pinned
    stays = slot <= num_pinned
    tl.store(ranks + place, tl.where(is_free & ~stays, rank, NEVER), mask=inside)
    in_flight = ~is_free & ~stays & (stamp != NEVER)
    tl.store(pinned_ranks + place, tl.where(in_flight, rank, NEVER), mask=inside)


@kernel()
def mark_offers(  # type: ignore[no-untyped-def]
    slots, next_uses, use_stamps, score_bits, worst, flags, count, SCORES: tl.constexpr, BLOCK: tl.constexpr
):
    """Mark the slots (int64 [count]) whose rank with `next_uses` (int32 [count]; negative: none of the batch's distinct
    slots) is in the ranking: `flags` int32 [count]."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    next_use = tl.load(next_uses + place, mask=place < count, other=-1)
    inside = next_use >= 0
    slot = tl.load(slots + place, mask=inside, other=0)
    stamp = tl.load(use_stamps + slot, mask=inside, other=0)
    rank = _rank(slot, stamp, next_use, score_bits, inside, SCORES)
    tl.store(flags + place, (inside & (rank <= tl.load(worst))).to(tl.int32), mask=place < count)


@kernel()
def gather(  # type: ignore[no-untyped-def]
    slots, flags, running, use_stamps, found, first_slot, width, count, LISTED: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the slots that `flags` mark, and their stamps: `found` int64 [3, width]. The slots are those of `slots`, or
    if not `LISTED` the `count` ones from `first_slot`."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_marked = tl.load(flags + place, mask=place < count, other=0) > 0
    at = tl.load(running + place, mask=is_marked, other=0) - 1
    slot = (first_slot + place).to(tl.int64)
    if LISTED:
        slot = tl.load(slots + place, mask=is_marked, other=0)
    tl.store(found + at, slot, mask=is_marked & (at < width))
    stamp = tl.load(use_stamps + slot, mask=is_marked, other=0)
    tl.store(found + width + at, stamp, mask=is_marked & (at < width))
