"""The file of a frequency profile: a `.npz` without pickle that holds the rows that occur, and JSON.

Loading reads the statistics and checks the file's checksums, but makes no array as large as a table: counts are read
when they are asked for.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embershard.errors import DataError, naming_file
from embershard.frequency.counts import RowCounts, SparseCounts
from embershard.frequency.encoding import decode, encode, smallest
from embershard.frequency.statistics import DataStatistics

FORMAT = 2
_OLD_PREFIX, _ROWS, _HITS = "counts/", "ids/", "hits/"


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
    reason: object = "it is no .npz file" if "allow_pickle" in str(error) else error
    if isinstance(error, FileNotFoundError):
        reason = "there is no such file"
    return DataError(f"{path} is not a frequency profile: {reason}. Make one with `embershard profile`")
