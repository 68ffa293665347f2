"""Hit rates, misses and distinct rows as functions of a cache's size and of a batch's, from counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from embershard.frequency.statistics import CountHistogram, TableStatistics

Floats = NDArray[np.float64]


def pooled(histograms: Iterable[CountHistogram]) -> CountHistogram:
    """Of the rows of all tables together. Their counts must be of the same samples."""
    parts = list(histograms)
    none = np.empty(0)
    counts = np.concatenate([none, *(part.counts for part in parts)])
    rows = np.concatenate([none, *(part.rows for part in parts)])
    values, places = np.unique(counts, return_inverse=True)
    return CountHistogram(values[::-1].copy(), np.bincount(places, rows, len(values))[::-1].astype(np.float64))


def static_curve(histogram: CountHistogram, num_rows: Floats) -> Floats:
    """Share of the counted lookups that go to the ``num_rows`` (any shape) most frequent rows: what a cache finds
    whose rows never change. The counts chose the rows, so this is what they promise; new lookups keep less."""
    rows = np.concatenate([[0.0], np.cumsum(histogram.rows)])
    hits = np.concatenate([[0.0], np.cumsum(histogram.rows * histogram.counts)])
    return np.interp(num_rows, rows, hits) / max(float(hits[-1]), 1.0)


def static_hit_rate(histograms: Sequence[CountHistogram], num_rows: float) -> tuple[Floats, float]:
    """The ``num_rows`` most frequent rows of all tables, ranked together: how the tables share them.

    Returns:
        The share [tables] of each table's lookups that go to those rows, and the count from which on a row is among
        them. Of the rows with just that count every table has the same share in it.
    """
    if not histograms:
        return np.empty(0), 0.0
    pool = pooled(histograms)
    below = np.cumsum(pool.rows) - pool.rows
    place = int(np.searchsorted(below, num_rows, side="left")) - 1
    if place < 0 or not len(pool.counts):
        return np.zeros(len(histograms)), float("inf")
    threshold = float(pool.counts[place])
    share = min(1.0, (num_rows - below[place]) / pool.rows[place])
    rates = []
    for each in histograms:
        weights = np.where(each.counts > threshold, 1.0, np.where(each.counts == threshold, share, 0.0))
        rates.append(float((weights * each.rows * each.counts).sum()) / max(each.num_lookups, 1.0))
    return np.array(rates), threshold


def unseen_share(histogram: CountHistogram) -> float:
    """Share of further lookups that go to rows not seen so far: rows seen once, per lookup (Good and Turing)."""
    once = histogram.rows[histogram.counts == 1.0].sum()
    return float(once) / max(histogram.num_lookups, 1.0)


def distinct_rows(table: TableStatistics, num_samples: float, total_samples: int) -> float:
    """Expected distinct rows in ``num_samples`` consecutive samples, of ``total_samples`` that were counted.

    From the counts, as if lookups came in any order, and corrected by what windows of about that size were found to
    have. Of more samples than were counted: the rows that occur, which is too few.
    """
    if num_samples <= 0 or not table.num_lookups:
        return 0.0
    total = max(total_samples, 1)
    at_random = float(touched(table.histogram, num_samples / total).sum())
    if len(table.window_samples):
        formula = [float(touched(table.histogram, size / total).sum()) for size in table.window_samples]
        found = table.window_rows / np.maximum(formula, 1e-9)
        at_random *= float(np.interp(np.log(num_samples), np.log(table.window_samples), found))
    return min(at_random, float(table.num_rows), table.lookups_per_sample * num_samples)


def touched(histogram: CountHistogram, share_of_samples: float) -> Floats:
    """Expected rows of every count that occur in this share of the samples, if these are drawn at random: [K]."""
    if share_of_samples >= 1.0:
        return histogram.rows
    return histogram.rows * -np.expm1(histogram.counts * np.log1p(-share_of_samples))


@dataclass(frozen=True, eq=False)
class BatchMisses:
    """What a static cache of one table misses in a batch, per distinct row: the terms of TorchRec's cache statistics.

    Attributes:
        expected_lookups: distinct rows of a batch.
        shares: [K + 1] shares of the table's rows, ascending from 0 to 1, and
        misses: [K + 1] the share of a batch's distinct rows that are not among so many most frequent ones.
    """

    expected_lookups: float
    shares: Floats = field(repr=False)
    misses: Floats = field(repr=False)

    @classmethod
    def of(cls, table: TableStatistics, batch_size: int, total_samples: int) -> BatchMisses:
        """For batches of ``batch_size`` samples, over all ranks together."""
        weights = touched(table.histogram, batch_size / max(total_samples, 1))
        kept = np.concatenate([[0.0], np.cumsum(weights)])
        shares = np.concatenate([[0.0], np.cumsum(table.histogram.rows)]) / max(table.num_rows, 1)
        shares, misses = np.minimum(shares, 1.0), 1.0 - kept / max(float(kept[-1]), 1e-12)
        if len(shares) == 1 or shares[-1] < 1.0:  # no lookups at all, or rows that never occur: with all rows, no miss
            shares, misses = np.append(shares, 1.0), np.append(misses, 0.0)
        return cls(distinct_rows(table, batch_size, total_samples), shares, misses)

    def expected_miss_rate(self, clf: float) -> float:
        """Share of a batch's distinct rows that a cache of ``clf`` times the table's rows misses."""
        return float(np.interp(clf, self.shares, self.misses))

    @property
    def cacheability(self) -> float:
        """Area under the miss curve: 0 is easy to cache, 1 cannot be."""
        middle = (self.misses[1:] + self.misses[:-1]) / 2
        return float((middle * np.diff(self.shares)).sum())
