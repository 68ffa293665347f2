"""Statistics from table sizes and an assumed skew, for data that are not at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embershard.errors import ConfigError
from embershard.frequency.statistics import CountHistogram, DataStatistics, TableStatistics

_BINS = 600


@dataclass(frozen=True)
class AssumedTable:
    """A table whose row of popularity rank j gets lookups in proportion to `j ** -zipf_exponent`.

    Attributes:
        bag_size: lookups of a sample. As in MLPerf's multi-hot data each id brings its own fixed bag, so that the rows
            of a popular id's bag are as popular.
    """

    table: str
    num_rows: int
    zipf_exponent: float = 1.0
    bag_size: int = 1

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.bag_size < 1 or not 0 <= self.zipf_exponent <= 5:
            raise ConfigError(
                f"table {self.table!r}: got {self.num_rows} rows, bags of {self.bag_size} and a Zipf exponent of "
                f"{self.zipf_exponent}; needed at least 1 row, at least 1 lookup, and an exponent in [0, 5]"
            )


def assumed_statistics(tables: Sequence[AssumedTable], num_samples: int) -> DataStatistics:
    """Expected counts of `num_samples` samples; without a trace, so hit rates are predicted from counts alone."""
    found = {each.table: _table(each, num_samples) for each in tables}
    skews = sorted({each.zipf_exponent for each in tables})
    origin = f"assumed: Zipf exponents from {skews[0]:g} to {skews[-1]:g}, {num_samples:,} samples"
    return DataStatistics(num_samples=num_samples, share_of_samples=1.0, tables=found, origin=origin)


def _table(table: AssumedTable, num_samples: int) -> TableStatistics:
    ids = max(1, -(-table.num_rows // table.bag_size))  # as many ids as have bags of their own
    edges = np.unique(np.concatenate([np.arange(1, min(ids, 200) + 1), np.geomspace(1, ids, _BINS).round()]))
    edges = np.append(edges, ids + 1.0)
    ranks, power = edges - 0.5, 1.0 - table.zipf_exponent
    mass = np.diff(np.log(ranks) if abs(power) < 1e-9 else ranks**power / power)  # integral of rank ** -zipf_exponent
    counts = num_samples * mass / mass.sum() / np.diff(edges)
    rows = np.diff(edges) * table.num_rows / ids
    counts = counts * ids * table.bag_size / table.num_rows  # the last bag may be shorter
    histogram = CountHistogram.joined(counts, rows)
    bags = np.zeros(table.bag_size + 1)
    bags[-1] = 1.0
    windows = np.array([256, 1024, 4096, 16384, 65536], dtype=np.int64)
    # Logarithm of the chance that a sample does not have a row.
    absent = np.log1p(-np.minimum(histogram.counts / num_samples, 1.0 - 1e-12))
    return TableStatistics(
        table=table.table,
        num_rows=table.num_rows,
        num_lookups=num_samples * table.bag_size,
        histogram=histogram,
        bag_sizes=bags,
        window_samples=windows,
        window_rows=np.array([(histogram.rows * -np.expm1(window * absent)).sum() for window in windows]),
    )
