"""The lookups of a share of the rows, in the order of training: the input of replays of a cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embershard.errors import DataError

Ints = NDArray[np.int64]
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15))


@dataclass(frozen=True, eq=False)
class TableTrace:
    """One table's lookups of the rows that are followed.

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

    Which rows are followed is a function of (table, row) alone (spatially hashed sampling, Waldspurger et al.,
    FAST'15). Rows that nearly every batch uses stay in every cache, and would be most of the trace and of its sampling
    error. Where rows are sampled (`rate` < 1), these *constant* rows are left out of it, and only counted.

    >>> trace = SampledTrace(1.0, 3, {"user": TableTrace(np.array([0, 0, 2]), np.array([7, 9, 7]))}, {}, {})
    >>> trace.num_lookups
    3

    Attributes:
        rate: share of the other rows that is followed; 1: all.
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
    """Return uniform 64-bit hashes [M] of rows [M] of a table: a row is followed when its hash is below rate * 2**64.

    >>> int(row_hashes(0, np.arange(1000)).max()) > 2**63
    True
    """
    x = rows.astype(np.uint64) + np.array([table_number + 1], np.uint64) * _MIX[2]
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    return x ^ (x >> np.uint64(31))


def is_followed(hashes: NDArray[np.uint64], rate: float) -> NDArray[np.bool_]:
    """Return True for each hash of a followed row: bool [M].

    >>> int(is_followed(row_hashes(0, np.arange(1000)), rate=0.1).sum())
    101
    """
    if rate >= 1.0:
        return np.ones(len(hashes), dtype=bool)
    return hashes < np.uint64(int(rate * 2.0**64))
