"""Criteo's click logs: tab-separated, 1 label, 13 integers, 26 hexadecimal categoricals, no header."""

from __future__ import annotations

import binascii
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv

from embershard.data.bad_rows import BadRow, ParsedChunk, short
from embershard.data.batch import Schema, SparseFeature
from embershard.data.block import Block, transform_dense
from embershard.data.config import NUM_CRITEO_DENSE, NUM_CRITEO_SPARSE, CriteoConfig, DataConfig
from embershard.data.hashing import map_ids
from embershard.data.source import FileSource, SplitChunks, list_files
from embershard.data.text import TextFiles

DENSE = tuple(f"I{i + 1}" for i in range(NUM_CRITEO_DENSE))
SPARSE = tuple(f"C{i + 1}" for i in range(NUM_CRITEO_SPARSE))
COLUMNS = ("label", *DENSE, *SPARSE)
MAX_DIGITS = 8
_NEWLINE = 10
_MOST = float(np.finfo(np.float32).max)
_NO_SAMPLES = Block(
    np.empty((0, NUM_CRITEO_DENSE), np.float32),
    np.empty(0, np.float32),
    (np.empty(0, np.int64),) * NUM_CRITEO_SPARSE,
    (1,) * NUM_CRITEO_SPARSE,
)


class CriteoSource(FileSource):
    """Criteo TSV files; see `CriteoConfig`.

    Row 0 of every table stands for a missing cell; ids become rows 1..num_rows-1.
    """

    def __init__(self, config: DataConfig) -> None:
        files, held_out = list_files(config, config.criteo.files)
        self._config = config.criteo
        self._text = TextFiles(files, config.chunk_rows, config.num_workers)
        split = SplitChunks(self._text.file, self._text.rows, held_out)
        super().__init__(
            self.schema_of(config),
            split,
            num_kept=4 + 2 * config.num_workers,
            tolerates_bad_rows=config.bad_rows != "stop",
        )

    @staticmethod
    def schema_of(config: DataConfig) -> Schema:
        return Schema(DENSE, tuple(map(SparseFeature, SPARSE, config.criteo.rows_per_table)))

    def parse(self, number: int, most_bad: int | None = None) -> ParsedChunk:
        place = self._text.path(number), int(self._text.first_row[number])
        return parse_criteo(self._text.read(number), self._config, *place, most_bad)


def parse_criteo(
    data: memoryview, config: CriteoConfig, path: Path, first_row: int, most_bad: int | None = None
) -> ParsedChunk:
    """Return the samples among some whole lines, and the lines that are none.

    A line is bad when it has not 40 columns, its label is not 0 or 1, an integer is not a number, or a categorical is
    not hexadecimal. Halves of the lines are parsed, and halves of those, until bad lines stand alone: so a line is bad
    exactly if it cannot be parsed, whatever lines are beside it.

    Args:
        path, first_row: of the first line, from 0; for messages.
        most_bad: stop when so many are found.
    """
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE) + 1
    borders = np.unique(np.concatenate([[0], ends, [len(data)]]))
    blocks: list[Block] = []
    bad: dict[int, BadRow] = {}
    parts = [(0, len(borders) - 1)]
    while parts and (most_bad is None or len(bad) < most_bad):
        start, stop = parts.pop()
        lines = data[borders[start] : borders[stop]]
        try:
            blocks.append(_parse(lines, stop - start, config))
        except (pa.ArrowException, ValueError, OverflowError) as error:
            if stop - start == 1:
                bad[start] = _explain(bytes(lines), path, first_row + start + 1, error)
            else:
                middle = (start + stop) // 2
                parts += [(middle, stop), (start, middle)]  # the first half is next
    return ParsedChunk(Block.join(blocks) if blocks else _NO_SAMPLES, bad)


def _parse(data: memoryview, num_rows: int, config: CriteoConfig) -> Block:
    """Return the samples of some whole lines; raise if one of them is none."""
    table = _read_columns(data)
    labels = table.column("label").to_numpy()
    if table.num_rows != num_rows or not np.isin(labels, (0, 1)).all():
        raise ValueError(f"{table.num_rows} rows; a label must be 0 or 1")
    dense = np.stack([table.column(name).to_numpy() for name in DENSE], axis=1)
    missing = np.isnan(dense)
    if missing.sum() != sum(table.column(name).null_count for name in DENSE) or np.isinf(dense).any():
        raise ValueError("an integer is not a number that fits 32 bits")
    dense[missing] = 0
    transform_dense(dense, config.dense_transform)
    texts, lengths = zip(*(_cells(table.column(name).chunk(0)) for name in SPARSE), strict=True)
    ids = parse_hex(np.concatenate(texts), np.concatenate(lengths)).reshape(NUM_CRITEO_SPARSE, -1)
    rows = map_ids(ids, np.array(config.rows_per_table)[:, None], config.id_mapping)
    rows[np.stack(lengths) == 0] = 0
    return Block(dense, labels, tuple(rows), (1,) * NUM_CRITEO_SPARSE)


def parse_hex(text: NDArray[np.uint8], lengths: NDArray[np.int32]) -> NDArray[np.uint32]:
    """Return the numbers [N] of cells of 0 to 8 hexadecimal digits, 0 for an empty cell.

    >>> parse_hex(np.frombuffer(b"ffA1", np.uint8), np.array([2, 0, 2])).tolist()
    [255, 0, 161]

    Args:
        text: ASCII of all cells, one after another.
        lengths: [N], characters of each cell; they sum to `len(text)`.

    Raises:
        ValueError: a cell is too long, or not hexadecimal.
    """
    digits = np.full((len(lengths), MAX_DIGITS), ord("0"), np.uint8)
    digits[np.arange(MAX_DIGITS) >= MAX_DIGITS - lengths[:, None]] = text
    return np.frombuffer(binascii.unhexlify(digits.data), ">u4")


def _read_columns(data: memoryview) -> pa.Table:
    """Return a table of one chunk per column: label and integers as float32, categoricals as they stand."""
    types = dict.fromkeys(COLUMNS, pa.float32()) | dict.fromkeys(SPARSE, pa.binary())
    table = csv.read_csv(
        pa.py_buffer(data),
        csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=COLUMNS),
        csv.ParseOptions(delimiter="\t", quote_char=False, double_quote=False, ignore_empty_lines=False),
        csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=False),
    )
    return table.combine_chunks()


def _cells(column: pa.BinaryArray) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Return the bytes of all cells of an array without nulls, and each cell's length."""
    _, offsets, data = column.buffers()
    borders = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    text = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return text[borders[0] : borders[-1]], np.diff(borders)


def _explain(line: bytes, path: Path, row: int, error: Exception) -> BadRow:
    """Return what is wrong with a line that `_parse` refused with `error`."""
    cells = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", "backslashreplace").split("\t")
    if len(cells) != len(COLUMNS):
        needed = f"needed {len(COLUMNS)}: label, 13 integers, 26 categoricals"
        return BadRow(path, row, "", f"has {len(cells)} tab-separated columns; {needed}")
    for name, cell in zip(COLUMNS, cells, strict=True):
        if (problem := _cell_problem(name, cell)) is not None:
            return BadRow(path, row, name, f"{name}={short(cell)}: {problem}")
    return BadRow(path, row, "", f"cannot be parsed: {' '.join(str(error).split())}")


def _cell_problem(name: str, cell: str) -> str | None:
    if name in SPARSE:
        is_hex = len(cell) <= MAX_DIGITS and all(c in "0123456789abcdefABCDEF" for c in cell)
        return None if is_hex else f"needed 1 to {MAX_DIGITS} hexadecimal digits, or nothing"
    try:
        number = float(cell) if cell or name == "label" else 0.0
    except ValueError:
        number = float("nan")
    if name == "label":
        return None if number in (0, 1) else "a label must be 0 or 1"
    return None if abs(number) <= _MOST else "needed a number below 3.4e38, or nothing where it is missing"
