"""The file of a frequency profile: a `.npz` without pickle that holds the rows that occur, and JSON.

Loading reads the statistics and checks the file's checksums, but makes no array as large as a table: counts are read
when they are asked for.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from embershard.errors import DataError, naming_file, near_file, os_problem
from embershard.frequency.counts import RowCounts, SparseCounts
from embershard.frequency.statistics import (
    CountHistogram,
    DataStatistics,
    Drift,
    SampledTrace,
    StackDistances,
    TableStatistics,
    TableTrace,
)

FORMAT = 2
_OLD_PREFIX, _ROWS, _HITS = "counts/", "ids/", "hits/"
_NUMBERS, _TRACE_ROWS, _STEPS = "statistics/numbers", "trace/rows", "trace/sample_steps"
_CONSTANT_ROWS, _CONSTANT_HITS = "trace/constant_rows", "trace/constant_lookups"
_DRIFT_SHARES = ("top_rows_kept", "new_rows_share", "share_of_rows")
Array = NDArray[Any]


def write(
    path: Path,
    num_rows: Mapping[str, int],
    sparse: Callable[[str], RowCounts],
    num_batches: int,
    statistics: DataStatistics | None,
) -> None:
    """Write the file; `sparse` returns the rows of a table that occur."""
    header: dict[str, Any] = {"tables": dict(num_rows), "statistics": None}
    arrays: Mapping[str, NDArray[Any]] = {}
    if statistics is not None:
        header["statistics"], arrays = encode(statistics)
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with naming_file(path), zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        _write_array(file, "format", np.array([FORMAT, num_batches], dtype=np.int64))
        _write_array(file, "header", text)
        for name, values in arrays.items():
            _write_array(file, name, values)
        for table in num_rows:
            found = sparse(table)
            _write_array(file, _ROWS + table, smallest(found.rows))
            _write_array(file, _HITS + table, smallest(found.hits))


def read(path: Path) -> tuple[Mapping[str, Tensor], int, DataStatistics | None]:
    """Return counts, number of batches and statistics; nothing is unpickled.

    Raises:
        DataError: the file is missing, damaged, or not a profile.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            version, num_batches = (int(value) for value in file["format"])
            if version == 1:
                return _read_old(path, file), num_batches, None
            if version != FORMAT:
                raise DataError(f"{path} is a frequency profile of format {version}, this version reads 1 and {FORMAT}")
            header = json.loads(file["header"].tobytes())
            num_rows = {str(name): int(rows) for name, rows in header["tables"].items()}
            lazy = {prefix + table for table in num_rows for prefix in (_ROWS, _HITS)}
            if missing := sorted(lazy.difference(file.files)):
                raise ValueError(f"{missing[0]!r} is not in the file")
            statistics = None
            if header["statistics"] is not None:
                arrays = {name: file[name] for name in file.files if name not in lazy and name != "header"}
                statistics = decode(header["statistics"], arrays)
                if {name: table.num_rows for name, table in statistics.tables.items()} != num_rows:
                    raise ValueError("the statistics are of other tables than the counts")
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"the checksum of {damaged!r} is wrong")
    except DataError as error:
        raise (error if str(error).startswith(str(path)) else _no_profile(path, error)) from None
    except Exception as error:  # damage shows as errors of many kinds
        raise _no_profile(path, error) from error
    return SparseCounts(num_rows, partial(_read_counts, path.absolute(), num_rows)), num_batches, statistics


def _read_counts(path: Path, num_rows: Mapping[str, int], table: str) -> RowCounts:
    """Read the rows of a table that occur.

    Raises:
        DataError: the file is not there any more, or was changed.
    """
    size = num_rows[table]
    try:
        with np.load(path, allow_pickle=False) as file:
            rows, hits = (file[prefix + table].astype(np.int64, casting="safe") for prefix in (_ROWS, _HITS))
        in_order = rows.ndim == 1 and bool((np.diff(rows) > 0).all())
        if not in_order or rows.shape != hits.shape or (len(rows) and not 0 <= rows[0] <= rows[-1] < size):
            raise ValueError(f"the rows of table {table!r} are not rising numbers below {size}")
        if (hits < 1).any():
            raise ValueError(f"counts of table {table!r} are below 1")
    except Exception as error:  # damage shows as errors of many kinds
        raise _no_profile(path, error) from error
    return RowCounts(rows, hits)


def _read_old(path: Path, file: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    """Read the counts of all rows from a file of format 1."""
    counts = {
        name.removeprefix(_OLD_PREFIX): torch.from_numpy(file[name]) for name in file if name.startswith(_OLD_PREFIX)
    }
    for table, values in counts.items():
        if values.dtype != torch.int64 or values.dim() != 1 or bool((values < 0).any()):
            raise DataError(
                f"{path}: the counts of table {table!r} are {values.dtype} {list(values.shape)}; needed are "
                "int64 [rows], none of them negative. Make the profile again"
            )
    return counts


def _write_array(file: zipfile.ZipFile, name: str, values: NDArray[Any]) -> None:
    with file.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array(member, values, allow_pickle=False)


def _no_profile(path: Path, error: BaseException) -> DataError:
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError) and error.errno is not None:
        return DataError(os_problem(error, path))
    reason: object = "it is no .npz file" if "allow_pickle" in str(error) else error
    near = ""
    if isinstance(error, FileNotFoundError):
        reason, near = "there is no such file", near_file(path)
    return DataError(f"{path} is not a frequency profile: {reason}. Make one with `embershard profile`{near}")


def encode(statistics: DataStatistics) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return values for JSON, and arrays by name; `decode` makes the same statistics of them."""
    numbers: list[Array] = [np.empty(0)]
    trace, drift = statistics.trace, statistics.drift
    header: dict[str, Any] = {
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
        sampled = list(trace.tables.values())
        header["trace"] = {
            "rate": trace.rate,
            "num_samples": trace.num_samples,
            "lookups": [len(table.rows) for table in sampled],
            "constant": [len(rows) for rows in trace.constant_rows.values()],
        }
        arrays[_TRACE_ROWS] = _packed([table.rows for table in sampled])
        arrays[_STEPS] = _packed([np.diff(table.samples, prepend=0) for table in sampled])
        arrays[_CONSTANT_ROWS] = _packed(list(trace.constant_rows.values()))
        arrays[_CONSTANT_HITS] = _packed(list(trace.constant_lookups.values()))
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


def _decode_trace(values: Mapping[str, Any], names: Sequence[str], arrays: Mapping[str, Array]) -> SampledTrace:
    rows, steps = _Pieces(arrays[_TRACE_ROWS], np.int64), _Pieces(arrays[_STEPS], np.int64)
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
