"""Statistics as plain values and a few arrays, whatever the number of tables: the form they have in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from embershard.frequency.statistics import CountHistogram, DataStatistics, Drift, StackDistances, TableStatistics
from embershard.frequency.trace import SampledTrace, TableTrace

Array = NDArray[Any]
_NUMBERS, _ROWS, _STEPS = "statistics/numbers", "trace/rows", "trace/sample_steps"
_CONSTANT_ROWS, _CONSTANT_HITS = "trace/constant_rows", "trace/constant_lookups"
_DRIFT_SHARES = ("top_rows_kept", "new_rows_share", "share_of_rows")


def encode(statistics: DataStatistics) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return values for JSON, and arrays by name; `decode` makes the same statistics of them."""
    numbers: list[Array] = [np.empty(0)]
    trace, drift = statistics.trace, statistics.drift
    header = {
        "num_samples": statistics.num_samples,
        "share_of_samples": statistics.share_of_samples,
        "read_seconds_per_sample": statistics.read_seconds_per_sample,
        "origin": statistics.origin,
        "preferences": dict(statistics.preferences),
        "tables": [_encode_table(table, numbers) for table in statistics.tables.values()],
        "drift": None,
        "trace": None,
    }
    if drift is not None:
        numbers.append(drift.hit_rates.reshape(-1))
        header["drift"] = {"parts": len(drift.hit_rates)} | {name: getattr(drift, name) for name in _DRIFT_SHARES}
    arrays = {_NUMBERS: np.concatenate(numbers)}
    if trace is not None:
        header["trace"], more = _encode_trace(trace)
        arrays |= more
    return header, arrays


def decode(header: Mapping[str, Any], arrays: Mapping[str, Array]) -> DataStatistics:
    """Return the statistics that `encode` was given.

    Other values and arrays raise KeyError, TypeError, ValueError or DataError.
    """
    numbers = _Pieces(arrays[_NUMBERS], np.float64)
    tables = [_decode_table(values, numbers) for values in header["tables"]]
    drift = trace = None
    if found := header["drift"]:
        parts = int(found["parts"])
        rates = numbers.take(parts * parts).reshape(parts, parts)
        drift = Drift(rates, *(float(found[name]) for name in _DRIFT_SHARES))
    if found := header["trace"]:
        trace = _decode_trace(found, [table.table for table in tables], arrays)
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
    """Return the same whole numbers, none of them negative, in the narrowest type."""
    largest = int(values.max(initial=0))
    return values.astype(np.int64 if largest >= 2**32 else np.min_scalar_type(largest))


class _Pieces:
    """An array that was joined from pieces, cut again."""

    def __init__(self, values: Array, dtype: DTypeLike) -> None:
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
    histogram, stack = table.histogram, table.stack
    numbers += [histogram.counts, histogram.rows, table.bag_sizes, table.window_samples, table.window_rows]
    values: dict[str, Any] = {
        "table": table.table,
        "num_rows": table.num_rows,
        "num_lookups": table.num_lookups,
        "undercount": table.undercount,
        "sizes": [len(histogram.counts), len(table.bag_sizes), len(table.window_samples)],
        "stack": None,
    }
    if stack is not None:
        numbers += [stack.distances, stack.lookups]
        values["stack"] = {"size": len(stack.distances), "num_lookups": stack.num_lookups, "rate": stack.rate}
    return values


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


def _encode_trace(trace: SampledTrace) -> tuple[dict[str, Any], dict[str, Array]]:
    tables = list(trace.tables.values())
    values = {
        "rate": trace.rate,
        "num_samples": trace.num_samples,
        "lookups": [len(table.rows) for table in tables],
        "constant": [len(rows) for rows in trace.constant_rows.values()],
    }
    return values, {
        _ROWS: _packed([table.rows for table in tables]),
        _STEPS: _packed([np.diff(table.samples, prepend=0) for table in tables]),
        _CONSTANT_ROWS: _packed(list(trace.constant_rows.values())),
        _CONSTANT_HITS: _packed(list(trace.constant_lookups.values())),
    }


def _decode_trace(values: Mapping[str, Any], names: Sequence[str], arrays: Mapping[str, Array]) -> SampledTrace:
    rows, steps = _Pieces(arrays[_ROWS], np.int64), _Pieces(arrays[_STEPS], np.int64)
    constant_rows, constant_hits = _Pieces(arrays[_CONSTANT_ROWS], np.int64), _Pieces(arrays[_CONSTANT_HITS], np.int64)
    lookups = zip(names, values["lookups"], strict=True)
    constant = dict(zip(names, values["constant"], strict=True)) if values["constant"] else {}
    return SampledTrace(
        rate=float(values["rate"]),
        num_samples=int(values["num_samples"]),
        tables={name: TableTrace(np.cumsum(steps.take(count)), rows.take(count)) for name, count in lookups},
        constant_rows={name: constant_rows.take(count) for name, count in constant.items()},
        constant_lookups={name: constant_hits.take(count) for name, count in constant.items()},
    )


def _packed(parts: Sequence[Array]) -> Array:
    return smallest(np.concatenate([np.empty(0, np.int64), *parts]))
