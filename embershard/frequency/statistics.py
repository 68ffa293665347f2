"""Statistics of a pass over the data, per table: small values, whatever the number of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from embershard.errors import DataError

Ints = NDArray[np.int64]
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15))
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TableTrace:
    """One table's lookups of the rows that are sampled.

    >>> TableTrace(samples=np.array([0, 0, 2]), rows=np.array([7, 9, 7])).rows.tolist()
    [7, 9, 7]

    Attributes:
        samples: int64 [M] number of the sample, in the order of training, not falling.
        rows: int64 [M] row.
    """

    samples: Ints
    rows: Ints


@dataclass(frozen=True, eq=False)
class SampledTrace:
    """A smaller data set with the same locality: a cache with `rate` times the slots misses as often on it.

    Which rows are sampled is a function of (table, row) alone (spatially hashed sampling, Waldspurger et al.,
    FAST'15). Rows that nearly every batch uses stay in every cache, and would be most of the trace and of its sampling
    error. Where rows are sampled (`rate` < 1), these *constant* rows are left out of it, and only counted.

    >>> trace = SampledTrace(1.0, 3, {"user": TableTrace(np.array([0, 0, 2]), np.array([7, 9, 7]))}, {}, {})
    >>> trace.num_lookups
    3

    Attributes:
        rate: share of the other rows that is sampled; 1: all.
        num_samples: samples that the trace covers.
        tables: by name; a table without lookups has empty arrays.
        constant_rows: by table, rows that were left out as constant: int64 [C].
        constant_lookups: by table, their numbers of lookups: int64 [C].
    """

    rate: float
    num_samples: int
    tables: Mapping[str, TableTrace]
    constant_rows: Mapping[str, Ints]
    constant_lookups: Mapping[str, Ints]

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise DataError(f"a trace follows a share of the rows in (0, 1], got rate={self.rate}")

    @property
    def num_lookups(self) -> int:
        return sum(len(table.rows) for table in self.tables.values())


def row_hashes(table_number: int, rows: Ints) -> NDArray[np.uint64]:
    """Return uniform 64-bit hashes [M] of rows [M] of a table: a row is sampled when its hash is below rate * 2**64.

    >>> int(row_hashes(0, np.arange(1000)).max()) > 2**63
    True
    """
    x = rows.astype(np.uint64) + np.array([table_number + 1], np.uint64) * _MIX[2]
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    return x ^ (x >> np.uint64(31))


def is_sampled(hashes: NDArray[np.uint64], rate: float) -> NDArray[np.bool_]:
    """Return True for each hash of a sampled row: bool [M].

    >>> int(is_sampled(row_hashes(0, np.arange(1000)), rate=0.1).sum())
    101
    """
    if rate >= 1.0:
        return np.ones(len(hashes), dtype=bool)
    return hashes < np.uint64(int(rate * 2.0**64))


@dataclass(frozen=True, eq=False)
class CountHistogram:
    """Numbers of rows of a table by their number of lookups; K distinct counts.

    >>> histogram = CountHistogram.of_counts(np.array([3, 0, 1, 1]))
    >>> histogram.counts.tolist(), histogram.rows.tolist(), histogram.num_lookups
    ([3.0, 1.0], [1.0, 2.0], 5.0)

    Attributes:
        counts: [K] lookups of a row, descending, above 0.
        rows: [K] rows with so many lookups. Not whole numbers where they are estimates.
    """

    counts: Floats
    rows: Floats

    def __post_init__(self) -> None:
        ordered = bool((np.diff(self.counts) < 0).all()) and bool((self.counts > 0).all())
        if self.counts.shape != self.rows.shape or self.counts.ndim != 1 or not ordered or (self.rows < 0).any():
            raise DataError(
                f"a count histogram needs falling counts above 0, with as many numbers of rows; got counts "
                f"{self.counts[:5]}... and rows {self.rows[:5]}..."
            )

    @classmethod
    def of_counts(cls, counts: NDArray[np.integer]) -> CountHistogram:
        """Return the histogram of every row's lookups, of any shape; rows without lookups are left out."""
        values, rows = np.unique(counts[counts > 0], return_counts=True)
        return cls(values[::-1].astype(np.float64), rows[::-1].astype(np.float64))

    @classmethod
    def joined(cls, counts: Floats, rows: Floats) -> CountHistogram:
        """Return the histogram of entries in any order; entries of equal counts become one."""
        values, places = np.unique(counts, return_inverse=True)
        return cls(values[::-1].copy(), np.bincount(places, rows, len(values))[::-1].astype(np.float64))

    @property
    def num_rows(self) -> float:
        return float(self.rows.sum())

    @property
    def num_lookups(self) -> float:
        return float((self.counts * self.rows).sum())


@dataclass(frozen=True, eq=False)
class StackDistances:
    """Stack distances, the numbers of distinct rows since a row's last use: the LRU hit rate of every cache size.

    >>> StackDistances(np.array([0.0, 4.0]), np.array([6.0, 2.0]), num_lookups=10, rate=1.0).hit_rate(np.array([4, 5]))
    array([0.6, 0.8])

    Attributes:
        distances: [K] stack distances, ascending; 0 is the row used just before. Scaled to the whole table where only a
            share of the rows was sampled.
        lookups: [K] lookups with this distance (or between it and the one before it).
        num_lookups: all lookups, first uses included.
        rate: share of the rows that was sampled; 1: exact.
    """

    distances: Floats
    lookups: Floats
    num_lookups: float
    rate: float

    def hit_rate(self, num_slots: Floats) -> Floats:
        """Return the share of lookups that an LRU cache of `num_slots` rows (same shape) would find."""
        found = np.concatenate([[0.0], np.cumsum(self.lookups)])
        hits = found[np.searchsorted(self.distances, num_slots, side="left")]
        return np.clip(hits / max(self.num_lookups, 1.0), 0.0, 1.0)


@dataclass(frozen=True, eq=False)
class TableStatistics:
    """One table.

    >>> histogram = CountHistogram.of_counts(np.array([3, 0, 1, 1]))
    >>> table = TableStatistics("user", 4, 5, histogram, np.array([0.5, 0.0, 0.5]), np.array([256]), np.array([3.0]))
    >>> table.lookups_per_sample
    1.0

    Attributes:
        table: its name.
        num_rows: its rows, occurring or not.
        num_lookups: lookups that were counted.
        histogram: counts of its rows.
        bag_sizes: [longest + 1] share of samples with so many lookups.
        window_samples: [K] ascending numbers of consecutive samples, and
        window_rows: [K] the mean number of distinct rows in so many samples.
        stack: stack distances of lookups, None where they were not sampled.
        undercount: a row's count may be too low by this much (memory was bounded); 0: exact.
    """

    table: str
    num_rows: int
    num_lookups: int
    histogram: CountHistogram
    bag_sizes: Floats
    window_samples: Ints
    window_rows: Floats
    stack: StackDistances | None = None
    undercount: int = 0

    @property
    def lookups_per_sample(self) -> float:
        """Mean size of a bag."""
        return float((self.bag_sizes * np.arange(len(self.bag_sizes))).sum())


@dataclass(frozen=True, eq=False)
class Drift:
    """Change of popularity between parts of the data, in the order of training; P parts.

    >>> Drift(np.array([[0.8, 0.6], [0.5, 0.9]]), 0.7, 0.1, share_of_rows=0.01).hit_rates[0, -1].item()
    0.6

    Attributes:
        hit_rates: [P, P] share of part j's lookups that go to the most frequent rows of part i; as many rows as
            `share_of_rows` of those that occur.
        top_rows_kept: share of the first part's most frequent rows that still are most frequent in the last part.
        new_rows_share: share of the last part's lookups that go to rows unseen in the first half of the data.
        share_of_rows: share of the occurring rows that counts as most frequent.
    """

    hit_rates: Floats
    top_rows_kept: float
    new_rows_share: float
    share_of_rows: float


@dataclass(frozen=True, eq=False)
class DataStatistics:
    """All tables of a data set.

    >>> DataStatistics(num_samples=1000, share_of_samples=0.1, tables={}, origin="a tenth of Monday").trace is None
    True

    Attributes:
        num_samples: samples that were counted.
        share_of_samples: their share of the training samples.
        tables: by name, in the model's order.
        trace: lookups of a share of the rows, in the order of training.
        drift: None where the data are too small to be cut into parts.
        read_seconds_per_sample: one core's time to read and parse a sample, on the machine that counted.
        origin: a description of the data, for people.
        preferences: misses per lookup that each policy had in a replay of the trace: see `cache.preference`.
    """

    num_samples: int
    share_of_samples: float
    tables: Mapping[str, TableStatistics]
    trace: SampledTrace | None = None
    drift: Drift | None = None
    read_seconds_per_sample: float | None = None
    origin: str = ""
    preferences: Mapping[str, float] = field(default_factory=dict)
