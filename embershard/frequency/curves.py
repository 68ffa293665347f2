"""Hit rates, misses and distinct rows as functions of a cache's size and of a batch's, from counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from embershard.frequency.statistics import CountHistogram, TableStatistics

Floats = NDArray[np.float64]


def pooled(histograms: Iterable[CountHistogram]) -> CountHistogram:
    """Return the histogram of the rows of all tables together. Their counts must be of the same samples."""
    parts = list(histograms)
    none = np.empty(0)
    counts = np.concatenate([none, *(part.counts for part in parts)])
    return CountHistogram.joined(counts, np.concatenate([none, *(part.rows for part in parts)]))


def static_curve(histogram: CountHistogram, num_rows: Floats) -> Floats:
    """Return the share of the counted lookups that go to the `num_rows` (any shape) most frequent rows.

    It is the hit rate of a cache whose rows never change, on the lookups that chose them. New lookups hit less often.
    """
    rows = np.concatenate([[0.0], np.cumsum(histogram.rows)])
    hits = np.concatenate([[0.0], np.cumsum(histogram.rows * histogram.counts)])
    return np.interp(num_rows, rows, hits) / max(float(hits[-1]), 1.0)


def first_touch_share(histogram: CountHistogram) -> float:
    """Return the share of the counted lookups that are the first of their row: a cache that starts empty misses them,
    whatever its size."""
    return histogram.num_rows / max(histogram.num_lookups, 1.0)


def unseen_share(histogram: CountHistogram) -> float:
    """Return the share of further lookups that go to rows not seen so far: rows seen once, per lookup (Good and
    Turing)."""
    once = histogram.rows[histogram.counts == 1.0].sum()
    return float(once) / max(histogram.num_lookups, 1.0)


def distinct_rows(table: TableStatistics, num_samples: float, total_samples: int) -> float:
    """Return the expected distinct rows in `num_samples` consecutive samples, of `total_samples` that were counted.

    The counts give the number for lookups in random order; the windows that were counted correct it. For more samples
    than were counted, the result is the rows that occur, which is too few.
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
    """Return the expected rows of every count that occur in this share of the samples, drawn at random: [K]."""
    if share_of_samples >= 1.0:
        return histogram.rows
    return histogram.rows * -np.expm1(histogram.counts * np.log1p(-share_of_samples))


@dataclass(frozen=True, eq=False)
class BatchMisses:
    """Misses of a static cache of one table in a batch, per distinct row: the terms of TorchRec's cache statistics.

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
        """Return the misses in batches of `batch_size` samples, over all ranks together."""
        weights = touched(table.histogram, batch_size / max(total_samples, 1))
        kept = np.concatenate([[0.0], np.cumsum(weights)])
        shares = np.concatenate([[0.0], np.cumsum(table.histogram.rows)]) / max(table.num_rows, 1)
        shares, misses = np.minimum(shares, 1.0), 1.0 - kept / max(float(kept[-1]), 1e-12)
        if len(shares) == 1 or shares[-1] < 1.0:  # no lookups at all, or rows that never occur: with all rows, no miss
            shares, misses = np.append(shares, 1.0), np.append(misses, 0.0)
        return cls(distinct_rows(table, batch_size, total_samples), shares, misses)

    def expected_miss_rate(self, clf: float) -> float:
        """Return the share of a batch's distinct rows that a cache of `clf` times the table's rows misses."""
        return float(np.interp(clf, self.shares, self.misses))

    @property
    def cacheability(self) -> float:
        """Area under the miss curve: 0 is easy to cache, 1 cannot be."""
        middle = (self.misses[1:] + self.misses[:-1]) / 2
        return float((middle * np.diff(self.shares)).sum())
