"""Most frequent rows of one part of the data, on another part: two profiles, halves of a sample, parts of a trace."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from embershard.frequency.counts import RowCounts
from embershard.frequency.curves import pooled
from embershard.frequency.statistics import CountHistogram, Drift, SampledTrace

MAX_PARTS = 8
#: Fewer lookups than this make a part's most frequent rows a matter of chance.
MIN_LOOKUPS = 1000


@dataclass(frozen=True)
class ProfileComparison:
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


def compare_table(table: str, num_top: int, a: RowCounts, b: RowCounts) -> ProfileComparison:
    """Compare the counts A and B of a table."""
    top_a, top_b = a.top(num_top), b.top(num_top)
    lookups = max(b.num_lookups, 1)
    return ProfileComparison(
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
    """Measure the `num_rows` most frequent rows of all tables together, of each half in turn, on both halves."""
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


def measure_drift(trace: SampledTrace | None, share_of_rows: float = 0.01) -> Drift | None:
    """Return the drift between up to eight parts of equal numbers of samples; None where there is too little for two.

    All tables are ranked together, and a share `share_of_rows` of the rows that occur counts as most frequent.
    Constant rows are among them in every part.
    """
    num_parts = 0 if trace is None else min(MAX_PARTS, trace.num_lookups // MIN_LOOKUPS, trace.num_samples)
    if trace is None or num_parts < 2:
        return None
    edges = np.linspace(0, trace.num_samples, num_parts + 1).round().astype(np.int64)
    blocks = []
    for table in trace.tables.values():
        distinct, places = np.unique(table.rows, return_inverse=True)
        parts = itertools.pairwise(np.searchsorted(table.samples, edges))
        of_parts = [np.bincount(places[start:stop], minlength=len(distinct)) for start, stop in parts]
        blocks.append(np.stack(of_parts).astype(np.int32))
    counts = np.concatenate(blocks, axis=1)  # [P, rows that were sampled, all tables one after another]
    num_constant = sum(len(rows) for rows in trace.constant_rows.values())
    constant_hits = sum(int(hits.sum()) for hits in trace.constant_lookups.values()) / num_parts
    occurring = counts.shape[1] / trace.rate + num_constant
    num_top = max(1, round((share_of_rows * occurring - num_constant) * trace.rate))
    top = [np.argsort(-part, kind="stable")[:num_top] for part in counts]
    lookups = counts.sum(1) / trace.rate + constant_hits
    found = np.array([counts[:, rows].sum(1) for rows in top]) / trace.rate + constant_hits
    kept = len(np.intersect1d(top[0], top[-1])) / trace.rate + num_constant
    unseen = counts[-1][counts[: num_parts // 2].sum(0) == 0].sum() / trace.rate
    return Drift(
        hit_rates=found / np.maximum(lookups, 1e-9),
        top_rows_kept=float(kept / (num_top / trace.rate + num_constant)),
        new_rows_share=float(unseen / max(lookups[-1], 1e-9)),
        share_of_rows=share_of_rows,
    )
