"""Text files with columns as chunks of lines."""

from __future__ import annotations

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
from embershard.data.sources.text import BYTE_ORDER_MARK, NEWLINE, TextFiles, parse_lines
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
        if data.count(b"\r") != data.count(b"\r\n"):
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

    def read_good(self, data: memoryview, most_bad: int | None) -> tuple[pa.Table, Ids, dict[int, bytes]]:
        """Return the needed columns of the lines that are rows; their numbers [n]; and the other lines by number.

        Lines that must or may fail are told from the rest by their bytes, so that the rest is read at once.

        Args:
            most_bad: it may stop once so many lines failed; None: read all.
        """
        text = np.frombuffer(data, np.uint8)
        borders = np.append(0, np.flatnonzero(text == NEWLINE) + 1)
        if borders[-1] < len(text):
            borders = np.append(borders, len(text))
        num_lines = len(borders) - 1
        if self._may_be_rows(text, num_lines):
            try:
                return self.read(data, num_lines), np.arange(num_lines), {}
            except (pa.ArrowException, ValueError):
                pass
        must_fail, may_fail = self._doubtful(text, borders)
        failed = {line: bytes(data[borders[line] : borders[line + 1]]) for line in np.flatnonzero(must_fail).tolist()}
        tables, places = [], [borders[:0]]
        for is_here in (~must_fail & ~may_fail, ~must_fail & may_fail):
            group = np.flatnonzero(is_here)
            lines = text[np.repeat(is_here, np.diff(borders))].data
            found, others = parse_lines(lines, self.read, most_bad) if len(group) else ([], {})
            failed |= {int(group[line]): each for line, (each, _) in others.items()}
            tables += found
            places.append(np.delete(group, list(others))[: sum(table.num_rows for table in found)])
        numbers, table = np.concatenate(places), pa.concat_tables(tables or [self.read(memoryview(b""), 0)])
        if len(places[-1]):
            order = np.argsort(numbers)
            numbers, table = numbers[order], table.take(order)
        return table.combine_chunks(), numbers, failed

    def _may_be_rows(self, text: NDArray[np.uint8], num_lines: int) -> bool:
        """Return False where counts alone say that one of the lines is no row."""
        num_quotes = int(np.count_nonzero(text == ord('"'))) if self.settings.quoted else 0
        num_separators = int(np.count_nonzero(text == ord(self.settings.separator)))
        return num_quotes % 2 == 0 and bool(num_quotes or num_separators == (len(self.names) - 1) * num_lines)

    def _doubtful(self, text: NDArray[np.uint8], borders: Ids) -> tuple[Flags, Flags]:
        """Return which lines [L] must fail: with a carriage return, or without quotes and with too few or many cells.
        And which may: with a quote that no other closes, or too few or many cells by a count that respects quotes."""
        separator, quote = (ord(each) for each in (self.settings.separator, '"'))
        separators, quotes, returns = (np.flatnonzero(text == each) for each in (separator, quote, ord("\r")))
        quotes = quotes if self.settings.quoted else quotes[:0]
        returns = returns[returns + 1 < len(text)]  # the last line needs no line feed
        before = np.searchsorted(quotes, borders)
        if len(quotes):
            of_separators = np.searchsorted(borders, separators, "right") - 1
            separators = separators[(np.searchsorted(quotes, separators) - before[of_separators]) % 2 == 0]
        num_cells = 1 + np.diff(np.searchsorted(separators, borders))
        num_quotes, has_other_cells = np.diff(before), num_cells != len(self.names)
        must_fail = has_other_cells & (num_quotes == 0) & (np.diff(borders) > len(b"\r\n"))  # not an empty line
        must_fail[np.searchsorted(borders, returns[text[returns + 1] != NEWLINE], "right") - 1] = True
        return must_fail, has_other_cells | (num_quotes % 2 == 1)

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


def columns_of(path: Path, header: bytes, settings: TableConfig, *, needs_labels: bool) -> TextColumns:
    """Return the columns of a text file whose first line is `header`; it is not used where the settings name them.

    Raises:
        DataError: a column is missing, or the header has a name twice.
    """
    names = list(settings.columns) or header_names(path, header, settings)
    return TextColumns(settings, names, check_columns(path, names, settings, needs_labels=needs_labels))


def header_names(path: Path, header: bytes, settings: TableConfig) -> list[str]:
    """Return the names in a text file's first line.

    Raises:
        DataError: a name is there twice, or there is none for a column; or lines end in a carriage return alone.
    """
    text = _line_text(header).removeprefix(BYTE_ORDER_MARK.decode())
    if "\r" in text:
        raise DataError(f"{path}:1 {short(text)}: {_CARRIAGE_RETURN}")
    names = _cells(text, settings)
    wrong = next((name for name in names if not name or names.count(name) > 1), None)
    if wrong is not None or not names:
        problem = f"has {wrong!r} twice" if wrong else "has a column without a name"
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
            columns_of(file.path, header, settings, needs_labels=needs_labels)
            for file, header in zip(files, self._text.headers, strict=True)
        ]
        self.chunk_file, self.chunk_rows = self._text.file, self._text.rows
        self.has_lists = False
        self.notes: tuple[str, ...] = ()

    def need(self, columns: list[str]) -> None:
        for path, form in zip(self._paths, self._columns, strict=True):
            need_columns(path, form.names, columns)

    def read(self, chunk: int, most_bad: int | None, columns: list[str] | None = None) -> RawChunk:
        form, path = self._columns[self._text.file[chunk]], self._text.path(chunk)
        if columns is not None:
            form = replace(form, to_read=columns)
        first_row = int(self._text.first_row[chunk]) + 1
        table, places, failed = form.read_good(self._text.read(chunk), most_bad)
        bad = {line: BadRow(path, first_row + line, "", form.explain(text)) for line, text in failed.items()}
        return RawChunk(path, table, places, first_row, bad)
