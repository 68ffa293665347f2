"""Text files with columns as chunks of lines."""

from __future__ import annotations

import codecs
import csv as text_csv
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv

from embershard.data.block import BadRow, short
from embershard.data.config import TableConfig
from embershard.data.hashing import Ids
from embershard.data.sample_bits import Flags
from embershard.data.sources.input_file import InputFile
from embershard.data.sources.table.raw import RawChunk, check_columns, need_columns
from embershard.data.sources.text import BYTE_ORDER_MARK, NEWLINE, TextFiles, parse_lines, some_lines
from embershard.errors import DataError

_CARRIAGE_RETURN = "has a carriage return in it; lines must end in a line feed: tr '\\r' '\\n' < FILE > NEW"
_WORDS = {",": "comma", "\t": "tab", "|": "bar", ";": "semicolon", " ": "space"}


@dataclass(frozen=True)
class TextColumns:
    """How the lines of a file are cut into cells.

    Attributes:
        names: of all columns, in order.
        to_read: those that are needed.
    """

    settings: TableConfig
    names: list[str]
    to_read: list[str]

    def read(self, lines: memoryview, num_lines: int) -> pa.Table:
        """Return the needed columns of whole lines as bytes, each in one piece; a missing cell is null.

        A cell that swallows the end of its line leaves fewer rows than lines, since nothing leaves more: only a lone
        carriage return would end a row within a line, and is refused.

        Raises:
            pa.ArrowException: a line has not as many cells as there are columns.
            ValueError: a quoted cell does not end in its line, or a line has a carriage return in it.
        """
        quote = '"' if self.settings.quoted else False
        data = b"".join((
            BYTE_ORDER_MARK,  # Arrow drops it, and would drop one that the first cell begins with
            lines,
            b"" if not len(lines) or lines[-1] == NEWLINE else b"\n",
            self.settings.separator.encode() * (len(self.names) - 1) + b"\n",  # what no open quote may swallow
        ))  # fmt: skip
        if b"\r" in data and data.count(b"\r") != data.count(b"\r\n"):
            raise ValueError("a line has a carriage return in it")
        table = csv.read_csv(
            pa.py_buffer(data),
            csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=self.names),
            csv.ParseOptions(delimiter=self.settings.separator, quote_char=quote, ignore_empty_lines=False),
            csv.ConvertOptions(
                check_utf8=False,
                column_types=dict.fromkeys(self.to_read, pa.binary()),
                include_columns=self.to_read,
                null_values=list(self.settings.null_values),
                strings_can_be_null=True,
            ),
        )
        if table.num_rows != num_lines + 1:
            raise ValueError("a quoted cell does not end in its line")
        return table.slice(0, num_lines).combine_chunks()

    def read_good(self, data: memoryview) -> tuple[pa.Table, Ids, dict[int, bytes]]:
        """Return the needed columns of the lines that are rows; their numbers [n]; and the other lines by number.

        The other lines are told from the rest by their bytes, so that the rest is read at once.
        """
        text = np.frombuffer(data, np.uint8)
        borders = np.append(0, np.flatnonzero(text == NEWLINE) + 1)
        if borders[-1] < len(text):
            borders = np.append(borders, len(text))
        if self._may_be_rows(text, borders):
            try:
                return self.read(data, len(borders) - 1), np.arange(len(borders) - 1), {}
            except (pa.ArrowException, ValueError):
                pass
        is_row, is_unclear = self._judge(text, borders)
        try:
            rows = np.flatnonzero(is_row)
            table = self.read(some_lines(data, borders, rows), len(rows))
        except (pa.ArrowException, ValueError):
            unclear = np.flatnonzero(is_unclear)
            _, bad = parse_lines(some_lines(data, borders, unclear), self.read)
            rows = np.setdiff1d(rows, unclear[list(bad)], assume_unique=True)
            table = self.read(some_lines(data, borders, rows), len(rows))
        others = np.setdiff1d(np.arange(len(is_row)), rows, assume_unique=True).tolist()
        return table, rows, {line: bytes(data[borders[line] : borders[line + 1]]) for line in others}

    def _may_be_rows(self, text: NDArray[np.uint8], borders: Ids) -> bool:
        """Return False where counts alone say that one of the lines is no row, or make it likely."""
        quotes = np.flatnonzero(text == ord('"')) if self.settings.quoted else borders[:0]
        extra = np.count_nonzero(text == ord(self.settings.separator)) - (len(self.names) - 1) * (len(borders) - 1)
        if not len(quotes):
            return bool(extra == 0)
        return bool(extra >= 0) and not (np.diff(np.searchsorted(quotes, borders)) & 1).any()

    def _judge(self, text: NDArray[np.uint8], borders: Ids) -> tuple[Flags, Flags]:
        """Return which lines [L] are rows; and which of them may be none, with a quote within a cell that none opens.

        In the other lines every other quote opens a cell, or is the second of two that stand for one.
        """
        separator, quote, carriage_return = (ord(each) for each in (self.settings.separator, '"', "\r"))
        separators, returns = np.flatnonzero(text == separator), np.flatnonzero(text[:-1] == carriage_return)
        quotes = np.flatnonzero(text == quote) if self.settings.quoted else borders[:0]
        starts, before = borders[:-1], np.searchsorted(quotes, borders)
        line = np.repeat(np.arange(len(starts)), np.diff(before))
        opens = (np.arange(len(quotes)) - before[line]) & 1 == 0
        last, is_unclear = text[quotes - 1], np.zeros(len(starts), np.bool_)
        is_unclear[line[opens & (last != separator) & (last != quote) & (quotes != starts[line])]] = True
        at = np.searchsorted(separators, quotes)
        of_text = np.append(0, np.cumsum(np.where(opens, -at, at)))  # separators between two quotes
        num_separators = np.diff(np.searchsorted(separators, borders)) - np.diff(of_text[before])
        has_other_cells = (num_separators != len(self.names) - 1) & ~np.isin(text[starts], (NEWLINE, carriage_return))
        is_row = is_unclear | ~(has_other_cells | (np.diff(before) & 1 == 1))  # an empty line has missing cells
        is_row[np.searchsorted(borders, returns[text[returns + 1] != NEWLINE], "right") - 1] = False
        return is_row, is_row & is_unclear

    def explain(self, line: bytes) -> str:
        """Say what is wrong with a line that cannot be cut into cells."""
        text = _line_text(line)
        if "\r" in text:
            return f"{short(text)}: {_CARRIAGE_RETURN}"
        separator = self.settings.separator
        cells = _cells(text, self.settings)
        if len(cells) != len(self.names):
            word = _WORDS.get(separator, repr(separator))
            hint = ". If cells have line breaks: embershard data convert" if text.count('"') % 2 else ""
            needed = f"needed {len(self.names)}: {', '.join(self.names[:20])}"
            return f"has {len(cells)} {word}-separated columns; {needed}{hint}"
        return (
            f"{short(text)}: a quote opens a cell that does not end in this line. If quotes are text: "
            "data.table.quoted = false. If cells have line breaks: embershard data convert"
        )


def first_bytes(file: InputFile, count: int) -> bytes:
    """Return the first `count` bytes of a text file, plain or gzip, decompressed, without a byte order mark.

    Raises:
        DataError: it is damaged.
    """
    try:
        with pa.input_stream(str(file.path), compression="gzip" if file.is_gzip() else None) as stream:
            data: bytes = stream.read(count + len(BYTE_ORDER_MARK))
            return data.removeprefix(BYTE_ORDER_MARK)[:count]
    except (pa.ArrowException, OSError) as error:
        file.check(0)
        raise DataError(f"{file.path}: cannot be read ({' '.join(str(error).split())}); fetch it again") from None


def as_utf8(data: bytes | memoryview, encoding: str) -> bytes | memoryview:
    """Return text in UTF-8; bytes that are none of the encoding become `\\xff`."""
    if codecs.lookup(encoding).name == "utf-8":
        return data
    return bytes(data).decode(encoding, "backslashreplace").encode()


def columns_of(path: Path, header: bytes, settings: TableConfig, *, needs_labels: bool) -> TextColumns:
    """Return the columns of a text file whose first line is `header`; it is not used where the settings name them.

    Raises:
        DataError: a column is missing, or the header has a name twice.
    """
    names = list(settings.columns) or header_names(path, header, settings)
    return TextColumns(settings, names, check_columns(path, names, settings, needs_labels=needs_labels))


def header_names(path: Path, header: bytes, settings: TableConfig) -> list[str]:
    """Return the names in a text file's first line; "Unnamed: 0" of a column without one, at place 0.

    Raises:
        DataError: a name is there twice; or lines end in a carriage return alone.
    """
    text = _line_text(header).removeprefix(BYTE_ORDER_MARK.decode())
    if "\r" in text:
        raise DataError(f"{path}:1 {short(text)}: {_CARRIAGE_RETURN}")
    names = [name or f"Unnamed: {place}" for place, name in enumerate(_cells(text, settings))]  # as pandas calls them
    wrong = next((name for name in names if names.count(name) > 1), None)
    if wrong is not None or not names:
        problem = f"has {wrong!r} twice" if wrong else "has no name"
        raise DataError(
            f"{path}:1 the header {problem}: {short(text)}. If the file has no header: data.table.columns names them"
        )
    return names


def _line_text(line: bytes) -> str:
    """Return a line without its end; at the end of a file, that may be a carriage return alone."""
    return line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", "backslashreplace")


def _cells(line: str, settings: TableConfig) -> list[str]:
    if not settings.quoted:
        return line.split(settings.separator)
    try:
        return next(text_csv.reader([line], delimiter=settings.separator), [])
    except text_csv.Error:  # a cell of more than 128 KiB
        return line.split(settings.separator)


class TextTables:
    """Chunks of lines of text files; see `TableFiles`."""

    def __init__(
        self, files: list[InputFile], settings: TableConfig, chunk_rows: int, num_workers: int, *, needs_labels: bool
    ) -> None:
        self._text = TextFiles(files, chunk_rows, num_workers, has_header=not settings.columns)
        self._paths = [file.path for file in files]
        self._columns = [
            columns_of(file.path, bytes(as_utf8(header, settings.encoding)), settings, needs_labels=needs_labels)
            for file, header in zip(files, self._text.headers, strict=True)
        ]
        self.chunk_file, self.chunk_rows = self._text.file, self._text.rows
        self.has_lists = False
        self.notes: tuple[str, ...] = ()

    def need(self, columns: list[str]) -> None:
        for path, form in zip(self._paths, self._columns, strict=True):
            need_columns(path, form.names, columns)

    def read(self, chunk: int, columns: list[str] | None = None) -> RawChunk:
        form, path = self._columns[self._text.file[chunk]], self._text.path(chunk)
        if columns is not None:
            form = replace(form, to_read=columns)
        first_row = int(self._text.first_row[chunk]) + 1
        lines = as_utf8(self._text.read(chunk), form.settings.encoding)
        table, places, failed = form.read_good(memoryview(lines))
        bad = {line: BadRow(path, first_row + line, "", form.explain(text)) for line, text in failed.items()}
        return RawChunk(path, table, places, first_row, bad)
