"""Counts of one part of the data, judged by another part: two profiles, or the halves of a sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from embershard.frequency.counts import RowCounts
from embershard.frequency.curves import pooled
from embershard.frequency.statistics import CountHistogram


@dataclass(frozen=True)
class TableComparison:
    """One table in two profiles, A and B. Shares are 0..1, of lookups unless said.

    Attributes:
        table: its name.
        num_top: number of rows that count as its most frequent ones.
        overlap: share of A's most frequent rows that are B's, too.
        own_hit_rate: B's lookups that go to B's most frequent rows.
        hit_rate: B's lookups that go to A's most frequent rows.
        unseen: B's lookups that go to rows that do not occur in A.
        lookups: of B.
    """

    table: str
    num_top: int
    overlap: float
    own_hit_rate: float
    hit_rate: float
    unseen: float
    lookups: int


def compare_table(table: str, num_top: int, a: RowCounts, b: RowCounts) -> TableComparison:
    """Judge the counts A of a table by the counts B."""
    top_a, top_b = a.top(num_top), b.top(num_top)
    lookups = max(b.num_lookups, 1)
    return TableComparison(
        table=table,
        num_top=num_top,
        overlap=len(np.intersect1d(top_a, top_b, assume_unique=True)) / max(len(top_a), 1),
        own_hit_rate=int(b.hits_of(top_b).sum()) / lookups,
        hit_rate=int(b.hits_of(top_a).sum()) / lookups,
        unseen=(b.num_lookups - int(b.hits_of(a.rows).sum())) / lookups,
        lookups=b.num_lookups,
    )


@dataclass(frozen=True)
class HalfSplit:
    """Static hit rates (0..1) of rows that were chosen on one half of the data, means of both ways.

    Attributes:
        own: on the half that chose them, as counts promise.
        other: on the other half.
        difference: between the halves' promises, absolute.
    """

    own: float
    other: float
    difference: float


def half_split(first: Mapping[str, RowCounts], second: Mapping[str, RowCounts], num_rows: float) -> HalfSplit:
    """Judge the `num_rows` most frequent rows of all tables together, of each half in turn."""
    own_1, other_1 = _hit_rates(first, second, num_rows)
    own_2, other_2 = _hit_rates(second, first, num_rows)
    return HalfSplit((own_1 + own_2) / 2, (other_1 + other_2) / 2, abs(own_1 - own_2))


def _hit_rates(chosen: Mapping[str, RowCounts], used: Mapping[str, RowCounts], num_rows: float) -> tuple[float, float]:
    """Return the hit rates of the rows that `chosen` chooses, on `chosen` and on `used`."""
    pool = pooled(CountHistogram.of_counts(counts.hits) for counts in chosen.values())
    below = np.cumsum(pool.rows) - pool.rows
    place = int(np.searchsorted(below, num_rows, side="left")) - 1
    if place < 0:
        return 0.0, 0.0
    # Of the rows with just the count of the last one chosen, every table has the same share.
    threshold, share = pool.counts[place], min(1.0, (num_rows - below[place]) / pool.rows[place])
    found = np.zeros(2)
    for table, counts in chosen.items():
        weights = (counts.hits > threshold) + share * (counts.hits == threshold)
        found += (weights * counts.hits).sum(), (weights * used[table].hits_of(counts.rows)).sum()
    own, other = found / [max(sum(each.num_lookups for each in half.values()), 1) for half in (chosen, used)]
    return float(own), float(other)
