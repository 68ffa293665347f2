"""Criteo's click logs: tab-separated, 1 label, 13 integers, 26 hexadecimal categoricals, no header."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from embershard.data.batch import Schema, SparseFeature
from embershard.data.block import Block
from embershard.data.config import NUM_CRITEO_DENSE, NUM_CRITEO_SPARSE, CriteoConfig, DataConfig
from embershard.data.hashing import map_ids
from embershard.data.hexadecimal import MAX_DIGITS, parse_hex
from embershard.data.order import ChunkTable
from embershard.data.source import RecentlyUsed, Split, SplitChunks, list_files
from embershard.data.text import TextFiles
from embershard.errors import DataError

DENSE = tuple(f"I{i + 1}" for i in range(NUM_CRITEO_DENSE))
SPARSE = tuple(f"C{i + 1}" for i in range(NUM_CRITEO_SPARSE))
COLUMNS = ("label", *DENSE, *SPARSE)


class CriteoSource:
    """Criteo TSV files; see :class:`~embershard.data.CriteoConfig`.

    Row 0 of every table stands for a missing cell; ids become rows 1..num_rows-1.
    """

    def __init__(self, config: DataConfig) -> None:
        assert config.path is not None
        files = list_files(config.path, config.criteo.files, "data.criteo.files")
        share = [0.0 if config.eval_path else config.eval_fraction] * len(files)
        if config.eval_path:
            held_out = list_files(config.eval_path, config.criteo.files, "data.criteo.files")
            files, share = files + held_out, share + [1.0] * len(held_out)
        self._criteo = config.criteo
        self._text = TextFiles(files, config.chunk_rows, config.num_workers)
        self._split = SplitChunks(self._text.file, self._text.rows, share)
        self._parsed = RecentlyUsed(self._parse, capacity=4 + 2 * config.num_workers)
        pairs = zip(SPARSE, config.criteo.rows_per_table, strict=True)
        self.schema = Schema(DENSE, tuple(SparseFeature(name, rows) for name, rows in pairs))

    def chunks(self, split: Split) -> ChunkTable:
        """See :class:`~embershard.data.Source`."""
        return self._split.table(split)

    def read(self, split: Split, chunk: int, rows: NDArray[np.int64]) -> Block:
        """See :class:`~embershard.data.Source`. Parses the whole chunk, and keeps it for a while."""
        physical, first = self._split.place(split, chunk)
        return self._parsed.get(physical).take(first + rows)

    def _parse(self, chunk: int) -> Block:
        where = Place(self._text.path(chunk), int(self._text.first_row[chunk]), int(self._text.rows[chunk]))
        return parse_criteo(self._text.read(chunk), self._criteo, where)


@dataclass(frozen=True)
class Place:
    """Which lines of which file a chunk is, for messages; ``first_row`` counts from 0."""

    path: Path
    first_row: int
    num_rows: int

    def fail(self, row: int, what: str) -> NoReturn:
        raise DataError(f"{self.path}:{self.first_row + row + 1} {what}")


def parse_criteo(data: memoryview, config: CriteoConfig, where: Place) -> Block:
    """The samples of some whole lines.

    Raises:
        DataError: a line has not 40 columns, a label is not 0 or 1, an integer is not a number, or a
            categorical is not hexadecimal.
    """
    table = _read_columns(data, where)
    labels = table.column("label").to_numpy()
    if not np.isin(labels, (0, 1)).all():
        _explain(data, where)
    dense = np.stack([table.column(name).to_numpy() for name in DENSE], axis=1)
    missing = np.isnan(dense)
    if missing.sum() != sum(table.column(name).null_count for name in DENSE) or np.isinf(dense).any():
        _explain(data, where)
    dense[missing] = 0
    if config.dense_transform == "log1p":
        np.log1p(np.maximum(dense, 0, out=dense), out=dense)
    rows = _rows(table, data, config, where)
    return Block(dense, labels, tuple(rows), (1,) * NUM_CRITEO_SPARSE)


def _read_columns(data: memoryview, where: Place) -> Any:
    """A pyarrow table of one chunk per column: label and integers as float32, categoricals as they stand."""
    import pyarrow as pa
    from pyarrow import csv

    types = dict.fromkeys(COLUMNS, pa.float32()) | dict.fromkeys(SPARSE, pa.binary())
    try:
        table = csv.read_csv(
            pa.py_buffer(data),
            csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=COLUMNS),
            csv.ParseOptions(delimiter="\t", quote_char=False, double_quote=False, ignore_empty_lines=False),
            csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=False),
        )
    except pa.ArrowInvalid as error:
        _explain(data, where, error)
    if table.num_rows != where.num_rows:
        _explain(data, where, ValueError(f"{where.num_rows} lines, but {table.num_rows} rows"))
    return table.combine_chunks()


def _rows(table: Any, data: memoryview, config: CriteoConfig, where: Place) -> NDArray[np.int64]:
    """Rows of the categoricals: int64 [26, n]."""
    texts, lengths = zip(*(_cells(table.column(name).chunk(0)) for name in SPARSE), strict=True)
    values, bad = parse_hex(np.concatenate(texts), np.concatenate(lengths))
    if bad.any():
        _explain(data, where)
    num_rows = np.array(config.rows_per_table)[:, None]
    rows = map_ids(values.reshape(NUM_CRITEO_SPARSE, -1), num_rows, config.id_mapping)
    rows[np.stack(lengths) == 0] = 0
    return rows


def _cells(column: Any) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Bytes of all cells of a binary arrow array without nulls, and each cell's length."""
    _, offsets, data = column.buffers()
    borders = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    text = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return text[borders[0] : borders[-1]], np.diff(borders).astype(np.int64)


def _explain(data: memoryview, where: Place, error: Exception | None = None) -> NoReturn:
    """Find what is wrong with a chunk, line by line, and say it. Only called when something is."""
    for number, line in enumerate(bytes(data).splitlines()):
        cells = line.decode("utf-8", "backslashreplace").split("\t")
        if len(cells) != len(COLUMNS):
            where.fail(
                number,
                f"has {len(cells)} tab-separated columns; needed {len(COLUMNS)}: label, 13 integers, 26 categoricals",
            )
        for name, cell in zip(COLUMNS, cells, strict=True):
            if (problem := _cell_problem(name, cell)) is not None:
                where.fail(number, f"{name}={cell!r}: {problem}")
    raise DataError(f"{where.path}, from row {where.first_row + 1}: {error}") from error


def _cell_problem(name: str, cell: str) -> str | None:
    if name in SPARSE:
        is_hex = len(cell) <= MAX_DIGITS and all(c in "0123456789abcdefABCDEF" for c in cell)
        return None if is_hex else f"needed 1 to {MAX_DIGITS} hexadecimal digits, or nothing"
    try:
        number = float(cell) if cell or name == "label" else 0.0
    except ValueError:
        number = float("nan")
    if name == "label":
        return None if number in (0.0, 1.0) else "a label must be 0 or 1"
    return None if np.isfinite(number) else "needed a number, or nothing where it is missing"
