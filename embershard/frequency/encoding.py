"""Statistics as plain values and a few arrays, whatever the number of tables: what a file holds of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embershard.frequency.statistics import CountHistogram, DataStatistics, Drift, StackDistances, TableStatistics
from embershard.frequency.trace import SampledTrace, TableTrace

Array = NDArray[Any]
_NUMBERS, _ROWS, _STEPS = "statistics/numbers", "trace/rows", "trace/sample_steps"
_CONSTANT_ROWS, _CONSTANT_HITS = "trace/constant_rows", "trace/constant_lookups"


def encode(statistics: DataStatistics) -> tuple[dict[str, Any], dict[str, Array]]:
    """Values for JSON, and arrays by name; :func:`decode` makes the same statistics of them."""
    numbers: list[Array] = []
    trace = statistics.trace
    header = {
        "num_samples": statistics.num_samples,
        "share_of_samples": statistics.share_of_samples,
        "read_seconds_per_sample": statistics.read_seconds_per_sample,
        "origin": statistics.origin,
        "preferences": dict(statistics.preferences),
        "tables": [_encode_table(table, numbers) for table in statistics.tables.values()],
        "drift": _encode_drift(statistics.drift, numbers),
        "trace": None if trace is None else _encode_trace(trace),
    }
    arrays = {_NUMBERS: np.concatenate([np.empty(0), *numbers])}
    return header, arrays | ({} if trace is None else _trace_arrays(trace))


def decode(header: Mapping[str, Any], arrays: Mapping[str, Array]) -> DataStatistics:
    """The inverse of :func:`encode`. What is not of its making raises KeyError, TypeError, ValueError or DataError."""
    numbers = _Pieces(arrays[_NUMBERS], np.float64)
    tables = [_decode_table(values, numbers) for values in header["tables"]]
    drift = header["drift"] and _decode_drift(header["drift"], numbers)
    trace = header["trace"] and _decode_trace(header["trace"], [table.table for table in tables], arrays)
    numbers.check_end()
    return DataStatistics(
        num_samples=int(header["num_samples"]),
        share_of_samples=float(header["share_of_samples"]),
        tables={table.table: table for table in tables},
        trace=trace,
        drift=drift,
        read_seconds_per_sample=header["read_seconds_per_sample"],
        origin=str(header["origin"]),
        preferences={str(name): float(value) for name, value in header["preferences"].items()},
    )


def smallest(values: Array) -> Array:
    """The same whole numbers, none of them negative, in the narrowest type."""
    largest = int(values.max(initial=0))
    return values.astype(np.int64 if largest >= 2**32 else np.min_scalar_type(largest))


class _Pieces:
    """An array that was joined from pieces, cut again."""

    def __init__(self, values: Array, dtype: Any) -> None:
        self._values = np.asarray(values).astype(dtype, casting="safe").reshape(-1)
        self._at = 0

    def take(self, count: int) -> Array:
        stop = self._at + int(count)
        if count < 0 or stop > len(self._values):
            raise ValueError(f"{len(self._values)} numbers, but the header counts more")
        piece, self._at = self._values[self._at : stop], stop
        return piece

    def check_end(self) -> None:
        if self._at != len(self._values):
            raise ValueError(f"{len(self._values)} numbers, but the header counts {self._at}")


def _encode_table(table: TableStatistics, numbers: list[Array]) -> dict[str, Any]:
    numbers += [table.histogram.counts, table.histogram.rows, table.bag_sizes, table.window_samples, table.window_rows]
    stack = None
    if table.stack is not None:
        numbers += [table.stack.distances, table.stack.lookups]
        stack = {
            "size": len(table.stack.distances),
            "num_lookups": table.stack.num_lookups,
            "rate": table.stack.rate,
        }
    return {
        "table": table.table,
        "num_rows": table.num_rows,
        "num_lookups": table.num_lookups,
        "undercount": table.undercount,
        "sizes": [len(table.histogram.counts), len(table.bag_sizes), len(table.window_samples)],
        "stack": stack,
    }


def _decode_table(values: Mapping[str, Any], numbers: _Pieces) -> TableStatistics:
    counts, bags, windows = values["sizes"]
    histogram = CountHistogram(numbers.take(counts), numbers.take(counts))
    bag_sizes = numbers.take(bags)
    window_samples, window_rows = numbers.take(windows).astype(np.int64), numbers.take(windows)
    stack = None
    if (s := values["stack"]) is not None:
        distances, lookups = numbers.take(s["size"]), numbers.take(s["size"])
        stack = StackDistances(distances, lookups, float(s["num_lookups"]), float(s["rate"]))
    return TableStatistics(
        table=str(values["table"]),
        num_rows=int(values["num_rows"]),
        num_lookups=int(values["num_lookups"]),
        histogram=histogram,
        bag_sizes=bag_sizes,
        window_samples=window_samples,
        window_rows=window_rows,
        stack=stack,
        undercount=int(values["undercount"]),
    )


def _encode_drift(drift: Drift | None, numbers: list[Array]) -> dict[str, Any] | None:
    if drift is None:
        return None
    numbers.append(drift.hit_rates.reshape(-1))
    return {
        "parts": len(drift.hit_rates),
        "top_rows_kept": drift.top_rows_kept,
        "new_rows_share": drift.new_rows_share,
        "share_of_rows": drift.share_of_rows,
    }


def _decode_drift(values: Mapping[str, Any], numbers: _Pieces) -> Drift:
    parts = int(values["parts"])
    shares = (float(values[name]) for name in ("top_rows_kept", "new_rows_share", "share_of_rows"))
    return Drift(numbers.take(parts * parts).reshape(parts, parts), *shares)


def _encode_trace(trace: SampledTrace) -> dict[str, Any]:
    return {
        "rate": trace.rate,
        "num_samples": trace.num_samples,
        "lookups": [len(table.rows) for table in trace.tables.values()],
        "constant": [len(rows) for rows in trace.constant_rows.values()],
    }


def _trace_arrays(trace: SampledTrace) -> dict[str, Array]:
    tables = list(trace.tables.values())
    return {
        _ROWS: smallest(_join([table.rows for table in tables])),
        _STEPS: smallest(_join([np.diff(table.samples, prepend=0) for table in tables])),
        _CONSTANT_ROWS: smallest(_join(list(trace.constant_rows.values()))),
        _CONSTANT_HITS: smallest(_join(list(trace.constant_lookups.values()))),
    }


def _decode_trace(values: Mapping[str, Any], names: Sequence[str], arrays: Mapping[str, Array]) -> SampledTrace:
    rows, steps = _Pieces(arrays[_ROWS], np.int64), _Pieces(arrays[_STEPS], np.int64)
    tables = {
        name: TableTrace(np.cumsum(steps.take(count)), rows.take(count))
        for name, count in zip(names, values["lookups"], strict=True)
    }
    constant_rows, constant_hits = _Pieces(arrays[_CONSTANT_ROWS], np.int64), _Pieces(arrays[_CONSTANT_HITS], np.int64)
    constant = dict(zip(names, values["constant"], strict=True)) if values["constant"] else {}
    return SampledTrace(
        rate=float(values["rate"]),
        num_samples=int(values["num_samples"]),
        tables=tables,
        constant_rows={name: constant_rows.take(count) for name, count in constant.items()},
        constant_lookups={name: constant_hits.take(count) for name, count in constant.items()},
    )


def _join(parts: Sequence[Array]) -> Array:
    return np.concatenate([np.empty(0, np.int64), *parts])
