"""Text files in which a line is a sample: chunks are parsed as a whole, and lines that are no sample are found."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv

from embershard.data.bad_rows import BadRow, ParsedChunk, short
from embershard.data.block import Block
from embershard.data.config import DataConfig
from embershard.data.hashing import Ids, cell_bytes
from embershard.data.schema import Schema
from embershard.data.sources.source import FileSource, SplitChunks, list_files
from embershard.data.sources.text import BYTE_ORDER_MARK, TextFiles
from embershard.errors import DataError

_NEWLINE = 10
T = TypeVar("T")


@dataclass(frozen=True)
class LineFormat:
    """How a line is made up.

    Attributes:
        separator: between cells, and its word in messages.
        columns: names, in order.
        numbers: columns that are numbers, the label among them; the others are bytes.
        contents: the columns in words, for messages.
        has_header: the first line of every file names the columns.
    """

    separator: tuple[str, str]
    columns: tuple[str, ...]
    numbers: tuple[str, ...]
    contents: str
    has_header: bool = False

    def read(self, lines: memoryview) -> pa.Table:
        """Return the columns of whole lines, each in one chunk: numbers as float32, the others as bytes.

        Raises:
            pa.ArrowException: a line has not as many cells as there are columns, or a number is none.
        """
        types = dict.fromkeys(self.columns, pa.binary()) | dict.fromkeys(self.numbers, pa.float32())
        is_marked = lines[: len(BYTE_ORDER_MARK)] == BYTE_ORDER_MARK
        data = BYTE_ORDER_MARK + bytes(lines) if is_marked else lines  # Arrow drops the first one
        table = csv.read_csv(
            pa.py_buffer(data),
            csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=self.columns),
            csv.ParseOptions(
                delimiter=self.separator[0], quote_char=False, double_quote=False, ignore_empty_lines=False
            ),
            csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=False),
        )
        return table.combine_chunks()

    def check_header(self, path: Path, line: bytes) -> None:
        """Raise `DataError` if a file's first line does not name the columns."""
        found, needed = line.decode("utf-8", "backslashreplace").rstrip("\r\n"), self.separator[0].join(self.columns)
        if found != needed:
            raise DataError(f"{path}:1 the header is {short(found)}; needed {needed}")


class LineSource(FileSource):
    """Base of sources whose samples are lines, with one id for every sparse feature."""

    def __init__(self, config: DataConfig, schema: Schema, patterns: tuple[str, ...], form: LineFormat) -> None:
        files, held_out = list_files(config, patterns)
        self._form, (self._label,) = form, schema.target.labels
        self._text = TextFiles(files, config.chunk_rows, config.num_workers, has_header=form.has_header)
        for file, header in zip(files, self._text.headers, strict=True):
            if form.has_header:
                form.check_header(file.path, header)
        split = SplitChunks(self._text.file, self._text.rows, held_out)
        num_kept = 4 + 2 * config.num_workers
        super().__init__(schema, split, num_kept, tolerates_bad_rows=config.bad_rows != "stop")

    @abstractmethod
    def parse_cells(self, table: pa.Table) -> tuple[NDArray[np.float32], Sequence[Ids]]:
        """Return dense values [n, D] and the rows [n] of each sparse feature.

        Raises:
            ValueError: a cell is not what its column needs.
        """

    @abstractmethod
    def cell_problem(self, name: str, cell: str) -> str | None:
        """Say what a cell of a line that cannot be parsed would have to be; None if it is right."""

    def parse(self, number: int, most_bad: int | None = None) -> ParsedChunk:
        """Return samples and bad lines of a chunk.

        A line is bad exactly if it cannot be parsed, whatever lines are beside it.
        """
        first_row = int(self._text.first_row[number])
        blocks, failed = parse_lines(self._text.read(number), self._parse_lines, most_bad)
        bad: dict[int, BadRow] = {}
        for line, (text, error) in failed.items():
            column, problem = self._explain(text, error)
            bad[line] = BadRow(self._text.path(number), first_row + line + 1, column, problem)
        return ParsedChunk(Block.join(blocks) if blocks else self._no_samples(), bad)

    def _parse_lines(self, lines: memoryview, num_rows: int) -> Block:
        """Return the samples of some whole lines; raise if one of them is none."""
        table = self._form.read(lines)
        labels = table.column(self._label).to_numpy()
        if table.num_rows != num_rows or not np.isin(labels, (0, 1)).all():
            raise ValueError(f"{table.num_rows} rows; a label must be 0 or 1")
        dense, rows = self.parse_cells(table)
        return Block(dense, labels, tuple(rows), (1,) * len(rows))

    def _no_samples(self) -> Block:
        num_sparse = len(self.schema.sparse)
        dense = np.empty((0, self.schema.num_dense), np.float32)
        return Block(dense, np.empty(0, np.float32), (np.empty(0, np.int64),) * num_sparse, (1,) * num_sparse)

    def _explain(self, line: bytes, error: Exception) -> tuple[str, str]:
        """Return the column that is wrong in a line that could not be parsed ("": the whole line), and the problem."""
        form, text = self._form, line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", "backslashreplace")
        separator, word = form.separator
        cells = text.split(separator)
        if len(cells) != len(form.columns):
            return "", f"has {len(cells)} {word}-separated columns; needed {len(form.columns)}: {form.contents}"
        for name, cell in zip(form.columns, cells, strict=True):
            problem = _label_problem(cell) if name == self._label else self.cell_problem(name, cell)
            if problem is not None:
                return name, f"{name}={short(cell)}: {problem}"
        return "", f"cannot be parsed: {' '.join(str(error).split())}"


def parse_lines(
    data: memoryview, parse: Callable[[memoryview, int], T], most_bad: int | None = None
) -> tuple[list[T], dict[int, tuple[bytes, Exception]]]:
    """Parse lines by a function of some whole lines and their number, which raises if one of them is bad.

    Halves of the lines are parsed, and halves of those, until bad lines stand alone.

    >>> parse_lines(memoryview(b"1\\n2\\nx\\n4\\n"), lambda lines, count: sum(map(int, bytes(lines).split())))[0]
    [3, 4]

    Args:
        most_bad: stop once so many bad lines are found; None: parse all.

    Returns:
        What `parse` returned, in order; and each bad line by its number, with its exception.
    """
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE) + 1
    borders = np.unique(np.concatenate([[0], ends, [len(data)]]))
    good: list[T] = []
    bad: dict[int, tuple[bytes, Exception]] = {}
    parts = [(0, len(borders) - 1)]
    while parts and (most_bad is None or len(bad) < most_bad):
        start, stop = parts.pop()
        lines = data[borders[start] : borders[stop]]
        try:
            good.append(parse(lines, stop - start))
        except (pa.ArrowException, ValueError, OverflowError) as error:
            if stop - start == 1:
                bad[start] = bytes(lines), error
            else:
                middle = (start + stop) // 2
                parts += [(middle, stop), (start, middle)]  # the first half is next
    return good, bad


def joined_cells(table: pa.Table, names: Sequence[str]) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Return the bytes of all cells of some columns of bytes, column after column, and each cell's length [F * n]."""
    texts, lengths = zip(*(cell_bytes(table.column(name).chunk(0)) for name in names), strict=True)
    return np.concatenate(texts), np.concatenate(lengths)


def _label_problem(cell: str) -> str | None:
    try:
        is_label = float(cell) in (0, 1)
    except ValueError:
        is_label = False
    return None if is_label else "a label must be 0 or 1"
