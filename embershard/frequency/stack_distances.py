"""Stack distances, the numbers of other rows used since a row's last use: the LRU hit rate of every cache size.

Exact distances come from an offline count without a loop over lookups. Estimates come from the lookups of a hashed
share of the rows (SHARDS: Waldspurger et al., FAST'15). On skewed tables the error of estimates is mostly luck: whether
a few hot rows are sampled. Where the lookups of every row are counted, the luck is known and taken out again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from embershard.errors import DataError
from embershard.frequency.statistics import CountHistogram, Floats, StackDistances

_NUM_SINGLE = 1000
"""So many distances keep a bin of their own, the shortest; the others share bins that are 1 % wide."""
_BIN_WIDTH = 0.01
_BLOCK_BITS = 17
_HIGH_BITS = 32
_NUM_WINDOWS = 600


def exact(rows: NDArray[np.int64]) -> StackDistances:
    """Return the stack distances of all lookups of a table, in order: 10 seconds and 0.5 GB for 10 million.

    >>> exact(np.array([7, 8, 7, 7])).distances.tolist()
    [0.0, 1.0]

    Raises:
        DataError: 2**31 lookups or more.
    """
    distances, lookups = _count(_reuse_distances(rows))
    return StackDistances(*_compact(distances, lookups), num_lookups=float(len(rows)), rate=1.0)


def from_sampled(
    rows: NDArray[np.int64], rate: float, num_lookups: float, counts: CountHistogram | None = None
) -> StackDistances:
    """Estimate stack distances from the lookups of the rows that were sampled, in order.

    Without `counts` this is SHARDS with its adjustment: distances and lookups are divided by the rate, and the lookups
    that are then missing count as lookups of the shortest distance.

    With `counts` the estimate is a difference (a control variate). If each row's lookups lay at random places, the
    curve would follow from the counts alone, for all rows as for those sampled. The difference between SHARDS and this
    formula on the rows sampled is added to the formula's curve for all rows. The (1 - rate) / rate hottest rows are
    taken out of `rows` first, and left to the formula: the chance of sampling one of them or not adds more error than
    order does. They may be missing from the start.

    Args:
        rows: int64 [M], all lookups of these rows.
        rate: share of the rows that is sampled.
        num_lookups: lookups of all rows of the table, sampled or not.
        counts: of all rows of the table.

    Raises:
        DataError: a rate outside (0, 1], or counts of other lookups than these.
    """
    if not 0 < rate <= 1:
        raise DataError(f"stack distances follow a share of the rows in (0, 1], got rate={rate}")
    if rate == 1 and len(rows) == num_lookups:
        return exact(rows)
    if counts is not None:
        return _corrected(rows, rate, num_lookups, counts)
    distances, lookups = _count(_reuse_distances(rows))
    found = np.maximum(np.cumsum(lookups) / rate + num_lookups - len(rows) / rate, 0.0)
    binned = _compact(distances / rate, np.diff(found, prepend=0.0))
    return StackDistances(*binned, num_lookups=float(num_lookups), rate=rate)


def _corrected(rows: NDArray[np.int64], rate: float, num_lookups: float, counts: CountHistogram) -> StackDistances:
    if abs(counts.num_lookups - num_lookups) > 0.01 * num_lookups:
        raise DataError(
            f"the counts hold {counts.num_lookups:.0f} lookups and the table has {num_lookups:.0f}; needed the counts "
            "of all rows over the same lookups (leave the counts out where they are not complete)"
        )
    place = int(np.searchsorted(np.cumsum(counts.rows), (1.0 - rate) / rate, side="right"))
    hottest = counts.counts[place] if place < len(counts.counts) else 0.0  # rows with more lookups are left out
    _, row_of, hits = np.unique(rows, return_inverse=True, return_counts=True)
    sampled = CountHistogram.of_counts(hits[hits <= hottest])
    distances, lookups = _count(_reuse_distances(rows[(hits <= hottest)[row_of]]))
    num_slots = _sizes(counts.num_rows)
    found = np.interp(num_slots * rate, np.append(0.0, distances + 1), np.append(0.0, np.cumsum(lookups) / rate))
    sampled = CountHistogram(sampled.counts, sampled.rows * (1 / rate))
    found += _hits_by_counts(counts, num_slots) - _hits_by_counts(sampled, num_slots)
    most = counts.num_lookups - counts.num_rows  # all rows fit: only first uses miss
    found[-1:] = most
    # What is found by few slots is the least certain, so it gives way where more slots would find less.
    found = np.minimum.accumulate(np.clip(found, 0.0, most)[::-1])[::-1]
    return StackDistances(num_slots - 1, np.diff(found, prepend=0.0), num_lookups=float(num_lookups), rate=rate)


# -- exact distances


def _reuse_distances(rows: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the distance of every lookup that is not its row's first, in no particular order.

    Between two uses of a row lie as many distinct rows as there are lookups whose row is not used again before the
    second use. So a distance is the number of lookups in between, less the pairs (use, next use) in between.
    """
    if len(rows) >= 2**31:
        raise DataError(f"got {len(rows)} lookups; exact stack distances need fewer than 2**31 (follow fewer rows)")
    order = np.argsort(rows, kind="stable").astype(np.int32)
    by_row = rows[order]
    again = by_row[1:] == by_row[:-1]
    del by_row
    next_use = np.zeros(len(rows), dtype=np.int32)
    next_use[order[:-1][again]] = order[1:][again]
    del order, again
    uses = np.flatnonzero(next_use)[::-1].astype(np.int32)  # latest first: those before it in this order start later
    next_uses = next_use[uses]
    is_next = np.zeros(len(rows), dtype=np.bool_)
    is_next[next_uses] = True
    del next_use
    end_ranks = np.cumsum(is_next, dtype=np.int32)[next_uses] - 1
    return next_uses - uses - 1 - _smaller_before(end_ranks)[end_ranks]


def _smaller_before(numbers: NDArray[np.int32]) -> NDArray[np.int32]:
    """Count the smaller numbers before each number of a permutation of 0..U-1; [U], by number.

    Numbers are sorted stably by their bits, the highest first. Two numbers that differ first in a bit are in one group
    when that bit is sorted, so each pair is counted once. Small groups are sorted block by block, which
    stays in the processor's cache.
    """
    pairs = numbers.astype(np.int64) << _HIGH_BITS  # the number, and below it how many were counted
    num_bits = int(max(len(pairs) - 1, 0)).bit_length()
    for bit in reversed(range(_BLOCK_BITS, num_bits)):
        pairs = _split(pairs, bit)
    for start in range(0, len(pairs), 1 << _BLOCK_BITS):
        block = pairs[start : start + (1 << _BLOCK_BITS)]
        for bit in reversed(range(min(_BLOCK_BITS, num_bits))):
            block = _split(block, bit)
        pairs[start : start + (1 << _BLOCK_BITS)] = block
    return (pairs & 0xFFFFFFFF).astype(np.int32)


def _split(pairs: NDArray[np.int64], bit: int) -> NDArray[np.int64]:
    """Sort each group of `2**(bit+1)` numbers by this bit; those with it count those without it before them.

    All groups are full but the last one, which lacks numbers of its upper half.
    """
    half = 1 << bit
    is_lower = pairs & (half << _HIGH_BITS) == 0
    is_upper = ~is_lower
    lower, upper = pairs[is_lower], pairs[is_upper]
    before = np.cumsum(is_lower, dtype=np.int32)[is_upper]
    before -= np.arange(len(upper), dtype=np.int32) >> bit << bit  # those of earlier groups
    upper += before
    num_full = len(upper) >> bit
    split = np.empty_like(pairs)
    full = split[: num_full * 2 * half].reshape(num_full, 2, half)
    full[:, 0] = lower[: num_full * half].reshape(num_full, half)
    full[:, 1] = upper[: num_full * half].reshape(num_full, half)
    split[full.size :] = np.concatenate([lower[num_full * half :], upper[num_full * half :]])
    return split


# -- bins and curves


def _count(distances: NDArray[np.int32]) -> tuple[Floats, Floats]:
    """Return the distinct distances, ascending, and the lookups with each."""
    lookups = np.bincount(distances)
    present = np.flatnonzero(lookups)
    return present.astype(np.float64), lookups[present].astype(np.float64)


def _compact(distances: Floats, lookups: Floats) -> tuple[Floats, Floats]:
    """Bin ascending distances; a bin has the longest of its distances, so that no hit is promised too early."""
    if len(distances) <= _NUM_SINGLE:
        return distances, lookups
    bins = np.floor(np.log(np.maximum(distances, 1.0)) / np.log1p(_BIN_WIDTH))
    starts = np.flatnonzero(np.diff(bins[_NUM_SINGLE:], prepend=-1.0)) + _NUM_SINGLE
    starts = np.concatenate([np.arange(_NUM_SINGLE), starts])
    return distances[np.append(starts[1:], len(distances)) - 1], np.add.reduceat(lookups, starts)


def _sizes(num_rows: float) -> Floats:
    """Return the numbers of slots from 1 to all rows, ascending, at which a curve is kept."""
    most = np.ceil(num_rows)
    num_steps = int(np.ceil(np.log(max(most / _NUM_SINGLE, 1.0)) / np.log1p(_BIN_WIDTH)))
    wide = np.geomspace(_NUM_SINGLE, max(most, _NUM_SINGLE), num_steps + 1).round()
    return np.concatenate([np.arange(1.0, min(most, _NUM_SINGLE) + 1), wide[1:]])


def _hits_by_counts(counts: CountHistogram, num_slots: Floats) -> Floats:
    """Return the lookups that an LRU cache of each of `num_slots` would find if lookups lay at random places.

    A row of n lookups occurs in a window of the share s of the lookups unless all of them lie elsewhere: with
    1 - (1 - s)**n. The sum over rows is the number of slots that keep such a window's rows, and each lookup but the
    first finds its row with the same probability (after Che et al., IEEE JSAC 2002, for a stream that ends).
    """
    windows = np.geomspace(0.1 / max(counts.num_lookups, 1.0), 1.0, _NUM_WINDOWS)
    slots, found = np.zeros((2, _NUM_WINDOWS + 1))
    for place, window in enumerate(windows, start=1):
        occurring = counts.rows * (1.0 - (1.0 - window) ** counts.counts)
        slots[place], found[place] = occurring.sum(), (occurring * (counts.counts - 1.0)).sum()
    return np.interp(num_slots, slots, found)
