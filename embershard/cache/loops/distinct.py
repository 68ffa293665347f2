"""Compiled loop that numbers the distinct ids of each table in a batch."""

from __future__ import annotations

import numpy as np

from embershard.cache.loops.compiled import Int64s, compiled

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
