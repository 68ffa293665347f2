"""Statistics from counts and a trace, of one pass over the data or of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embershard.frequency.compare import measure_drift
from embershard.frequency.counts import RowCounts, histogram_of
from embershard.frequency.curves import pooled
from embershard.frequency.downsampling import SampledRows, TraceBuilder, downsampled
from embershard.frequency.stack_distances import from_sampled
from embershard.frequency.statistics import (
    CountHistogram,
    DataStatistics,
    SampledTrace,
    StackDistances,
    TableStatistics,
)


def summarize_table(
    name: str,
    num_rows: int,
    counts: RowCounts,
    *,
    num_lookups: int,
    undercount: int,
    bags: NDArray[Any],
    windows: Mapping[int, float],
    num_samples: int,
    trace: SampledTrace | None,
) -> TableStatistics:
    """Return a table's statistics; the last window is all samples, where no other is as large.

    Args:
        name: of the table.
        num_rows: its rows, occurring or not.
        counts: lookups of the rows that occur.
        num_lookups: all lookups; more than `counts` has where `undercount` is not 0.
        undercount: a row's count may be too low by this much.
        bags: [longest + 1] samples by the size of their bag, in any unit.
        windows: number of consecutive samples -> mean number of distinct rows in them, ascending.
        num_samples: samples that were counted.
        trace: of all tables.
    """
    if num_samples > max(windows, default=0) and not undercount:
        windows = {**windows, num_samples: len(counts.rows)}
    histogram = histogram_of(counts, num_rows, num_lookups)
    stack = None
    if trace is not None:
        stack = _stack_of(trace.tables[name].rows, trace.rate, num_lookups, histogram)
    return TableStatistics(
        table=name,
        num_rows=num_rows,
        num_lookups=num_lookups,
        histogram=histogram,
        bag_sizes=bags / max(float(bags.sum()), 1.0),
        window_samples=np.array(list(windows), np.int64),
        window_rows=np.array(list(windows.values()), np.float64),
        stack=stack,
        undercount=undercount,
    )


def padded_sum(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Add arrays of different lengths, padded with 0.

    >>> padded_sum([np.array([1, 2]), np.array([10, 20, 30])])
    array([11, 22, 30])
    """
    total = np.zeros(max(map(len, arrays)), np.result_type(*arrays))
    for each in arrays:
        total[: len(each)] += each
    return total


def stack_of_all(statistics: DataStatistics, max_lookups: int = 1_000_000) -> StackDistances | None:
    """Return the stack distances of all tables in one cache; None without a trace. At most so many lookups are
    sampled."""
    if statistics.trace is None:
        return None
    trace = downsampled(statistics.trace, max_lookups)
    tables = list(statistics.tables.values())
    starts = np.cumsum([0, *(table.num_rows for table in tables)])
    rows = np.concatenate([trace.tables[t.table].rows + start for t, start in zip(tables, starts, strict=False)])
    order = np.argsort(np.concatenate([trace.tables[table.table].samples for table in tables]), kind="stable")
    num_lookups = sum(table.num_lookups for table in tables)
    return _stack_of(rows[order], trace.rate, num_lookups, pooled(table.histogram for table in tables))


def _stack_of(rows: NDArray[np.int64], rate: float, num_lookups: int, histogram: CountHistogram) -> StackDistances:
    """Return stack distances from the lookups [M] of the rows that were sampled, in order.

    Constant rows are not among these rows; the histogram has them.
    """
    is_complete = abs(histogram.num_lookups - num_lookups) <= 0.001 * num_lookups
    return from_sampled(rows, rate, float(num_lookups), histogram if is_complete else None)


def merge_statistics(
    parts: Sequence[DataStatistics], counts: Mapping[str, RowCounts], max_lookups: int
) -> DataStatistics:
    """Return the statistics of all samples, the parts' order being the order of training.

    `counts` are those of all parts together; statistics that follow from counts are computed anew. Distinct rows of
    windows are means over all samples. The trace follows the rows that the sparsest trace follows, and fewer where it
    would have more than `max_lookups`.
    """
    num_samples = sum(part.num_samples for part in parts)
    traces = [part.trace for part in parts if part.trace is not None]
    trace = _merge_traces(traces, counts, max_lookups) if len(traces) == len(parts) else None
    whole_data = sum(part.num_samples / part.share_of_samples for part in parts)
    timed = [(part.num_samples, part.read_seconds_per_sample) for part in parts if part.read_seconds_per_sample]
    seconds = sum(samples * per_sample for samples, per_sample in timed)
    return DataStatistics(
        num_samples=num_samples,
        share_of_samples=num_samples / whole_data if whole_data else 1.0,
        tables={table: _merge_table(parts, table, counts[table], trace) for table in parts[0].tables},
        trace=trace,
        drift=measure_drift(trace),
        read_seconds_per_sample=seconds / sum(samples for samples, _ in timed) if seconds else None,
        origin=" + ".join(part.origin for part in parts),
    )


def _merge_table(
    parts: Sequence[DataStatistics], name: str, counts: RowCounts, trace: SampledTrace | None
) -> TableStatistics:
    tables, weights = [part.tables[name] for part in parts], [part.num_samples for part in parts]
    curves = [dict(zip(table.window_samples.tolist(), table.window_rows, strict=True)) for table in tables]
    common = [size for size in curves[0] if all(size in curve for curve in curves)]
    return summarize_table(
        name,
        tables[0].num_rows,
        counts,
        num_lookups=sum(table.num_lookups for table in tables),
        undercount=sum(table.undercount for table in tables),
        bags=padded_sum([table.bag_sizes * weight for table, weight in zip(tables, weights, strict=True)]),
        windows={size: np.average([curve[size] for curve in curves], weights=weights) for size in common},
        num_samples=sum(weights),
        trace=trace,
    )


def _merge_traces(traces: Sequence[SampledTrace], counts: Mapping[str, RowCounts], max_lookups: int) -> SampledTrace:
    tables = list(traces[0].tables)
    none = np.empty(0, np.int64)
    constant = {
        number: np.unique(np.concatenate([trace.constant_rows.get(table, none) for trace in traces]))
        for number, table in enumerate(tables)
    }
    constant = constant if any(len(rows) for rows in constant.values()) else {}
    builder = TraceBuilder(tables, max_lookups, SampledRows(min(trace.rate for trace in traces), constant))
    for trace in traces:
        builder.add([trace.tables[table] for table in tables], trace.num_samples)
    by_number = [counts[table] for table in tables]
    if builder.is_too_long:
        builder.downsample(by_number)
    return builder.finish(by_number)
