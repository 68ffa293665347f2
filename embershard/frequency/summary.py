"""From counts and a trace to the statistics that a plan needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embershard.frequency.counts import RowCounts, histogram_of
from embershard.frequency.curves import pooled
from embershard.frequency.downsampling import downsampled
from embershard.frequency.drift import measure_drift
from embershard.frequency.stack_distances import from_followed
from embershard.frequency.statistics import CountHistogram, DataStatistics, StackDistances, TableStatistics
from embershard.frequency.trace import SampledTrace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Windows:
    """Mean number of distinct rows (``rows`` [K]) in so many consecutive samples (``samples`` [K], ascending)."""

    samples: Ints
    rows: Floats


def summarize(
    *,
    num_samples: int,
    num_rows: Mapping[str, int],
    counts: Mapping[str, RowCounts],
    num_lookups: Mapping[str, int],
    undercounts: Mapping[str, int],
    bags: Mapping[str, NDArray[np.float64] | Ints],
    windows: Mapping[str, Windows],
    trace: SampledTrace | None,
    share_of_samples: float,
    read_seconds_per_sample: float | None,
    origin: str,
) -> DataStatistics:
    """The statistics of all tables; mappings are by table, ``bags`` are samples by the size of their bag."""
    tables = {}
    for name, rows in num_rows.items():
        window = windows[name]
        if not undercounts[name]:
            window = with_whole(window, num_samples, len(counts[name].rows))
        histogram = histogram_of(counts[name], rows, num_lookups[name])
        stack = None
        if trace is not None:
            stack = stack_of(trace.tables[name].rows, trace.rate, num_lookups[name], histogram)
        tables[name] = TableStatistics(
            table=name,
            num_rows=rows,
            num_lookups=num_lookups[name],
            histogram=histogram,
            bag_sizes=bags[name] / max(float(bags[name].sum()), 1.0),
            window_samples=window.samples,
            window_rows=window.rows,
            stack=stack,
            undercount=undercounts[name],
        )
    return DataStatistics(
        num_samples=num_samples,
        share_of_samples=share_of_samples,
        tables=tables,
        trace=trace,
        drift=None if trace is None else measure_drift(trace),
        read_seconds_per_sample=read_seconds_per_sample,
        origin=origin,
    )


def with_whole(windows: Windows, num_samples: int, distinct: int) -> Windows:
    """All samples as the last window, where none is as large."""
    if not num_samples or (len(windows.samples) and windows.samples[-1] >= num_samples):
        return windows
    return Windows(np.append(windows.samples, num_samples), np.append(windows.rows, float(distinct)))


def stack_of(rows: Ints, rate: float, num_lookups: int, histogram: CountHistogram) -> StackDistances:
    """Stack distances from the lookups [M] of the rows that were followed, in order.

    Constant rows are not among those; the histogram has them.
    """
    is_complete = abs(histogram.num_lookups - num_lookups) <= 0.001 * num_lookups
    return from_followed(rows, rate, float(num_lookups), histogram if is_complete else None)


def stack_of_all(statistics: DataStatistics, max_lookups: int = 1_000_000) -> StackDistances | None:
    """Stack distances of all tables in one cache; None without a trace. At most so many lookups are followed."""
    if statistics.trace is None:
        return None
    trace = downsampled(statistics.trace, max_lookups)
    tables = list(statistics.tables.values())
    starts = np.cumsum([0, *(table.num_rows for table in tables)])
    rows = np.concatenate([trace.tables[t.table].rows + start for t, start in zip(tables, starts, strict=False)])
    order = np.argsort(np.concatenate([trace.tables[table.table].samples for table in tables]), kind="stable")
    num_lookups = sum(table.num_lookups for table in tables)
    return stack_of(rows[order], trace.rate, num_lookups, pooled(table.histogram for table in tables))
