"""Merges the statistics of several passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from embershard.frequency.compare import measure_drift
from embershard.frequency.counts import RowCounts
from embershard.frequency.downsampling import Following, TraceBuilder
from embershard.frequency.statistics import DataStatistics, TableStatistics
from embershard.frequency.summary import padded_sum, summarize_table
from embershard.frequency.trace import SampledTrace


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
    builder = TraceBuilder(tables, max_lookups, Following(min(trace.rate for trace in traces), constant))
    for trace in traces:
        builder.add([trace.tables[table] for table in tables], trace.num_samples)
    by_number = [counts[table] for table in tables]
    if builder.is_too_long:
        builder.downsample(by_number)
    return builder.finish(by_number)
