"""Text files with columns as chunks of lines."""

from __future__ import annotations

import csv as text_csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import csv

from embershard.data.block import BadRow, short
from embershard.data.config import TableConfig
from embershard.data.hashing import Ids
from embershard.data.sample_bits import Flags
from embershard.data.sources.folder import one_format
from embershard.data.sources.input_file import InputFile
from embershard.data.sources.table.json_lines import JsonColumns, has_json_lines, json_form
from embershard.data.sources.table.plain_text import FEED, RETURN, first_bytes, plain_file
from embershard.data.sources.table.raw import PartColumns, RawChunk, is_list, named_once, needed_columns
from embershard.data.sources.text import (
    BYTE_ORDER_MARK,
    CARRIAGE_RETURN,
    NEWLINE,
    TextFiles,
    line_borders,
    parse_lines,
    some_lines,
)
from embershard.errors import DataError

_HEADER_BYTES = 1 << 16
#: What helps where a quote opens a cell that does not end in its line.
IF_BREAKS = (
    "If cells have line breaks: data.table.line_breaks = true (inspect, convert and train: --line-breaks; for predict, "
    "convert the file)"
)
_WORDS = {",": "comma", "\t": "tab", "|": "bar", ";": "semicolon", " ": "space"}


@dataclass(frozen=True)
class TextColumns:
    """How the lines of plain text are cut into cells.

    Attributes:
        settings: of the file.
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
            self._separator * (len(self.names) - 1) + b"\n",  # what no open quote may swallow
        ))  # fmt: skip
        if b"\r" in data and data.count(b"\r") != data.count(b"\r\n"):
            raise ValueError("a line has a carriage return in it")
        table = csv.read_csv(
            pa.py_buffer(data),
            csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=self.names),
            csv.ParseOptions(delimiter=self._separator, quote_char=quote, ignore_empty_lines=False),
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
        return _with_breaks(table.slice(0, num_lines).combine_chunks(), self.settings)

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([(name, pa.string()) for name in self.names])

    @property
    def _separator(self) -> bytes:
        return self.settings.plain["separator"].encode()

    def read_good(self, data: memoryview) -> tuple[pa.Table, Ids, dict[int, bytes]]:
        """Return the needed columns of the lines that are rows; their numbers [n]; and the other lines by number.

        The other lines are told from the rest by their bytes, so that the rest is read at once.
        """
        text = np.frombuffer(data, np.uint8)
        borders = line_borders(text)
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
        extra = np.count_nonzero(text == ord(self._separator)) - (len(self.names) - 1) * (len(borders) - 1)
        if not len(quotes):
            return bool(extra == 0)
        return bool(extra >= 0) and not (np.diff(np.searchsorted(quotes, borders)) & 1).any()

    def _judge(self, text: NDArray[np.uint8], borders: Ids) -> tuple[Flags, Flags]:
        """Return which lines [L] are rows; and which of them may be none, with a quote within a cell that none opens.

        In the other lines every other quote opens a cell, or is the second of two that stand for one.
        """
        separator, quote, carriage_return = (ord(each) for each in (self._separator, '"', "\r"))
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
            return f"{short(text)}: {CARRIAGE_RETURN}"
        separator = self.settings.separator
        cells = _cells(text, self.settings)
        if len(cells) != len(self.names):
            word = _WORDS.get(separator, repr(separator))
            hint = f". {IF_BREAKS}" if text.count('"') % 2 and not self.settings.line_breaks else ""
            needed = f"needed {len(self.names)}: {', '.join(self.names[:20])}"
            return f"has {len(cells)} {word}-separated columns; {needed}{hint}"
        return (
            f"{short(text)}: a quote opens a cell that does not end in this line. If quotes are text: "
            f"data.table.quoted = false (inspect, convert and train: --no-quotes). {IF_BREAKS}"
        )


def column_names(path: Path, header: bytes, settings: TableConfig) -> list[str]:
    """Return the names of the columns of a text file whose first line is `header`: the settings' names, if any.

    Raises:
        DataError: the header is empty.
    """
    return list(settings.columns) or header_names(path, header, settings)


def has_header(line: bytes, settings: TableConfig) -> bool:
    """Return whether the first line of a text file names the columns: where the settings name them, it is these names,
    as in the first part that `split` made."""
    return not settings.columns or named_once(_cells(_line_text(line), settings)) == list(settings.columns)


def are_json(files: Sequence[InputFile], settings: TableConfig) -> bool:
    """Return whether all text files that are not blank have JSON objects, or none has.

    Raises:
        DataError: some have.
    """
    found = [has_json_lines(file, settings) for file in files]
    if True in found and False in found:
        both = files[found.index(True)].path, files[found.index(False)].path
        raise DataError(f"{both[0]} is JSON and {both[1]} is not; {one_format(*both)}")
    return True in found


def columns_of(
    files: Sequence[InputFile], headers: Sequence[bytes], settings: TableConfig, *, is_json: bool, needs_labels: bool
) -> tuple[list[PartColumns], list[TextColumns | JsonColumns]]:
    """Return the columns of text files whose first lines are `headers`, and how the needed ones are read. JSON lines
    without labels, which are not for training, may lack keys.

    Raises:
        DataError: a header is empty, or a column that is needed is missing.
    """
    found: list[TextColumns | JsonColumns] = []
    wanted = [*needed_columns(settings), *settings.judging_columns]
    some = next(filter(None, headers), b"")  # that of another file, where a compressed one has no text at all
    for file, header in zip(files, headers, strict=True):
        if is_json:
            found.append(JsonColumns.of(file, settings, wanted))
        else:
            own = column_names(file.path, header or some, settings)
            found.append(TextColumns(settings, own, own))
    names, may_lack = [each.names for each in found], is_json and not needs_labels
    parts = PartColumns.of_files(files, names, settings, needs_labels=needs_labels, may_lack=may_lack)
    return parts, [replace(each, to_read=part.own()) for each, part in zip(found, parts, strict=True)]


def header_names(path: Path, header: bytes, settings: TableConfig) -> list[str]:
    """Return the names in a text file's first line, each once; see `named_once`.

    Raises:
        DataError: there is none; or lines end in a carriage return alone.
    """
    text, line = _line_text(header).removeprefix(BYTE_ORDER_MARK.decode()), 1 + settings.skip_lines
    if "\r" in text:
        raise DataError(f"{path}:{line} {short(text)}: {CARRIAGE_RETURN}")
    if not (names := _cells(text, settings)):
        raise DataError(
            f"{path}:{line} the header has no name; if it stands below, data.table.skip_lines = {line} leaves lines "
            "out; if there is none, data.table.columns names columns"
        )
    return named_once(names)


def _line_text(line: bytes) -> str:
    """Return a line without its end; at the end of a file, that may be a carriage return alone."""
    return line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", "backslashreplace")


def _cells(line: str, settings: TableConfig) -> list[str]:
    separator = settings.plain["separator"]
    if not settings.quoted:
        return line.split(separator)
    try:
        return next(text_csv.reader([line], delimiter=separator), [])
    except text_csv.Error:  # a cell of more than 128 KiB
        return line.split(separator)


def _with_breaks(table: pa.Table, settings: TableConfig) -> pa.Table:
    """Return the columns of plain text with the line breaks that its cells had."""
    for place, name in enumerate(table.column_names if settings.line_breaks else ()):
        column = table.column(place)
        for mark, byte in ((FEED, b"\n"), (RETURN, b"\r")):
            column = pc.replace_substring(column, mark, byte)
        table = table.set_column(place, name, column)
    return table


class TextTables:
    """Chunks of lines of text files; see `TableFiles`."""

    def __init__(
        self, files: list[InputFile], settings: TableConfig, chunk_rows: int, num_workers: int, *, needs_labels: bool
    ) -> None:
        self._paths = [file.path for file in files]
        is_json = are_json(files, settings)
        form = json_form(settings) if is_json else settings
        plain = [plain_file(file, form) for file in files]
        plain_form = replace(form, **form.plain, line_breaks=False)
        firsts = [first_bytes(file, plain_form, _HEADER_BYTES) if form.columns else b"" for file in plain]
        headers = [not is_json and has_header(first.partition(b"\n")[0], form) for first in firsts]
        self._text = TextFiles(
            plain, chunk_rows, num_workers, has_header=headers, paths=self._paths, may_lack_rows=True
        )
        self._first_row = 1 + form.skip_lines
        first_lines = self._text.headers
        self._parts, self._columns = columns_of(
            files, first_lines, settings, is_json=is_json, needs_labels=needs_labels
        )
        self.chunk_file, self.chunk_rows = self._text.file, self._text.rows
        self.has_lists = any(is_list(field.type) for each in self._columns for field in each.schema)
        self.notes = PartColumns.notes(self._parts)

    def need(self, columns: list[str]) -> None:
        for part in self._parts:
            part.need(columns)

    def read(self, chunk: int, columns: list[str] | None = None) -> RawChunk:
        file, path = self._text.file[chunk], self._text.path(chunk)
        part, form = self._parts[file], self._columns[file]
        if columns is not None:
            form = replace(form, to_read=part.own(columns))
        data, lines = self._text.read(chunk)
        lines = lines + self._first_row
        table, places, failed = form.read_good(data)
        table = part.complete(table, columns)
        bad = {row: BadRow(path, int(lines[row]), "", form.explain(text)) for row, text in failed.items()}
        return RawChunk(path, table, places, int(lines[0]), bad, lines)
