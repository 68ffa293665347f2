"""Columns of a chunk as numbers and rows of tables. What a value becomes does not depend on the file's format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import types

from embershard.data.bad_rows import BadRow, short
from embershard.data.hashing import Ids, Words, cell_bytes, map_ids, text_keys
from embershard.data.table.config import TIME_ROWS, TableConfig, TableFeature
from embershard.data.table.raw import RawChunk, is_list, is_text, is_time
from embershard.errors import DataError, IdOutOfRangeError

#: Longest text, so that a damaged file cannot take much memory.
MOST_BYTES = 1024
_SECONDS_PER_HOUR, _HOURS_PER_DAY, _DAYS_PER_WEEK = 3600, 24, 7
_WEEKDAY_OF_1970 = 3  # a Thursday; Monday is 0
_MOST_SECONDS = 1e11  # the year 5138
_LARGEST_WHOLE = 2.0**63
Flags = NDArray[np.bool_]


class ChunkDecoder:
    """Decodes the columns of a chunk of n rows.

    Attributes:
        bad: the rows that are no samples, by their number in the chunk; the first problem of each.
    """

    def __init__(self, chunk: RawChunk) -> None:
        self._chunk, self.bad = chunk, dict(chunk.bad)

    def _column(self, name: str) -> pa.Array:
        """Return a column in one piece."""
        return self._chunk.table.column(name).combine_chunks()

    def numbers(self, name: str) -> NDArray[np.float64]:
        """Return a column as float64 [n]: NaN where a value is missing, seconds since 1970 of times."""
        column = self._column(name)
        if is_time(column.type):
            column = seconds_since_1970(column)
        elif types.is_dictionary(column.type):
            column = column.dictionary_decode()
        numbers = self._cast(column, pa.float64(), name, "needed a number, or nothing")
        found: NDArray[np.float64] = numbers.to_numpy(zero_copy_only=False)
        with np.errstate(over="ignore"):
            is_too_large = np.isinf(found.astype(np.float32))
        self.note(is_too_large, name, found, "needed a finite number, below 3.4e38")
        return np.where(is_too_large, np.nan, found)

    def labels(self, settings: TableConfig) -> NDArray[np.float32]:
        """Return the labels [n], 0 or 1."""
        name, least = settings.label, settings.label_at_least
        numbers = self.numbers(name)
        if least is None:
            self.note(~np.isin(numbers, (0, 1)), name, numbers, "a label must be 0 or 1")
            return numbers.astype(np.float32)
        self.note(np.isnan(numbers), name, numbers, "a label must be a number")
        return (numbers >= least).astype(np.float32)

    def bags(self, feature: TableFeature, most: tuple[int, str]) -> tuple[Ids, NDArray[np.int32]]:
        """Return the rows of a sparse feature's bags, and the size [n] of each. A single value is a bag of one.

        Args:
            feature: with its column.
            most: values of a bag, and the setting that says so.
        """
        name = str(feature.column)
        column = self._column(name)
        if feature.mapping in TIME_ROWS:
            return self._times(column, feature), np.ones(len(column), np.int32)
        if feature.separator is not None and is_text(column.type):
            column = pc.split_pattern(_decoded(column), feature.separator)
        if not is_list(column.type):
            lengths = np.ones(len(column), np.int32)
            return self._rows(column, name, feature, lengths), lengths
        column = column.cast(pa.list_(column.type.value_type))
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int32)
        self.note(lengths > most[0], name, lengths, f"needed at most {most[0]:,} ({most[1]})", unit=" ids")
        rows = self._rows(column.flatten(), name, feature, lengths)
        if column.null_count:
            missing = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
            rows = np.insert(rows, np.cumsum(lengths)[missing], 0)
            lengths[missing] = 1
        return rows, lengths

    def note(self, is_wrong: Flags, name: str, values: Any, needed: str, unit: str = "") -> None:
        """Note the rows for which `is_wrong` [n] is true as bad."""
        for row in np.flatnonzero(is_wrong).tolist():
            self._note_row(row, name, f"{name}={values[row]}{unit}: {needed}")

    def _note_row(self, row: int, name: str, problem: str, error: type[DataError] = DataError) -> None:
        place, chunk = int(self._chunk.places[row]), self._chunk
        self.bad.setdefault(place, BadRow(chunk.path, chunk.first_row + place, name, problem, error))

    def _note_values(self, is_wrong: Flags, lengths: NDArray[np.int32], note: Callable[[int, int], None]) -> None:
        """Call `note(row, place)` for the first wrong value of each bag: `is_wrong` is of all bags' values."""
        wrong = np.flatnonzero(is_wrong)
        owners = np.searchsorted(np.cumsum(lengths, dtype=np.int64), wrong, side="right")
        rows, firsts = np.unique(owners, return_index=True)
        for row, place in zip(rows.tolist(), wrong[firsts].tolist(), strict=True):
            note(row, place)

    def _rows(self, values: pa.Array, name: str, feature: TableFeature, lengths: NDArray[np.int32]) -> Ids:
        """Return the rows of values in bags of these lengths; a missing one is row 0."""
        if feature.mapping == "text":
            return self._text_rows(values, name, feature, lengths)
        values = _decoded(values)
        if is_text(values.type):
            values = self._cast(values, pa.int64(), name, "needed an integer, or nothing", lengths)
        num_rows = feature.table_rows
        raw = values.fill_null(0).to_numpy(zero_copy_only=False)
        if feature.mapping == "none":
            needed = f"needed a row in 0..{num_rows - 1}"
            is_wrong = (raw < 0) | (raw >= num_rows)  # as they are in the file, unsigned ones too
            self._note_values(
                is_wrong,
                lengths,
                lambda row, at: self._note_row(row, name, f"{name}={raw[at]}: {needed}", IdOutOfRangeError),
            )
            return np.asarray(raw.astype(np.int64))
        rows = map_ids(raw, num_rows, feature.mapping)
        rows[values.is_null().to_numpy(zero_copy_only=False)] = 0
        return rows

    def _text_rows(self, values: pa.Array, name: str, feature: TableFeature, lengths: NDArray[np.int32]) -> Ids:
        if types.is_floating(values.type):  # integers with missing ones, as pandas writes them
            numbers = values.to_numpy(zero_copy_only=False)
            is_whole = (numbers == np.trunc(numbers)) & (np.abs(numbers) < _LARGEST_WHOLE)
            is_wrong = ~np.isnan(numbers) & ~is_whole
            needed = "needed text or a whole number, or nothing"
            self._note_values(
                is_wrong, lengths, lambda row, at: self._note_row(row, name, f"{name}={numbers[at]}: {needed}")
            )
            whole = np.where(is_whole, numbers, 0).astype(np.int64)
            values = pa.array(whole, mask=np.isnan(numbers))
        keys, sizes, is_missing = text_words(values)
        too_long = ~is_missing & (sizes > MOST_BYTES)
        needed = f"needed at most {MOST_BYTES:,} bytes"
        self._note_values(
            too_long, lengths, lambda row, at: self._note_row(row, name, f"{name} has {sizes[at]:,} bytes: {needed}")
        )
        rows = map_ids(keys.view(np.int64), feature.table_rows, "modulo")
        rows[is_missing] = 0
        return rows

    def _times(self, column: pa.Array, feature: TableFeature) -> Ids:
        """Return 1 + the hour, or the weekday (1: Monday) of times in UTC; 0 for a missing one."""
        column, name = _decoded(column), str(feature.column)
        needed = "needed a time as 2024-12-31 or 2024-12-31 23:59:59, seconds since 1970, or nothing"
        if is_text(column.type):
            column = self._cast(column, None, name, needed)
        found = seconds_since_1970(column) if is_time(column.type) else column.cast(pa.float64(), safe=False)
        is_missing = found.is_null().to_numpy(zero_copy_only=False)
        seconds = found.fill_null(0).to_numpy(zero_copy_only=False)
        is_time_here = np.abs(seconds) < _MOST_SECONDS  # milliseconds are not, and NaN is not
        self.note(~is_time_here, name, seconds, needed)
        hours = np.floor(np.where(is_time_here, seconds, 0)).astype(np.int64) // _SECONDS_PER_HOUR
        if feature.mapping == "hour":
            rows = 1 + hours % _HOURS_PER_DAY
        else:
            rows = 1 + (hours // _HOURS_PER_DAY + _WEEKDAY_OF_1970) % _DAYS_PER_WEEK
        return np.where(is_missing, 0, rows)

    def _cast(
        self,
        column: pa.Array,
        kind: pa.DataType | None,
        name: str,
        needed: str,
        lengths: NDArray[np.int32] | None = None,
    ) -> pa.Array:
        """Return a column as another type (None: seconds since 1970, of text); values that are none are noted, and
        missing."""
        cast = _text_seconds if kind is None else lambda values: values.cast(kind, safe=False)
        try:
            return cast(column)
        except (pa.ArrowException, UnicodeDecodeError):
            pass
        good: list[Any] = []
        is_wrong = np.zeros(len(column), np.bool_)
        for place in range(len(column)):
            try:
                good.append(cast(column[place : place + 1])[0].as_py())
            except (pa.ArrowException, UnicodeDecodeError):
                good.append(None)
                is_wrong[place] = True
        sizes = np.ones(len(column), np.int32) if lengths is None else lengths
        self._note_values(
            is_wrong, sizes, lambda row, at: self._note_row(row, name, f"{name}={_shown(column[at])}: {needed}")
        )
        return pa.array(good, kind or pa.float64())


def text_words(values: pa.Array) -> tuple[Words, Ids, Flags]:
    """Return the hash [N] of each value as text, its bytes [N], and whether it is missing or empty [N].

    An integer's text is its decimal digits, that of a bool `true` or `false`. Texts above `MOST_BYTES` get no hash.

    >>> words, _, is_missing = text_words(pa.array(["7", None, ""]))
    >>> bool(words[0] == text_words(pa.array([7]))[0][0]), is_missing.tolist()
    (True, [False, True, True])
    """
    if not types.is_dictionary(values.type):
        values = values.dictionary_encode()
    distinct, codes = values.dictionary, values.indices
    if not is_text(distinct.type):
        distinct = distinct.cast(pa.string())
    distinct = distinct.cast(pa.binary()).fill_null(b"")
    sizes = np.append(pc.binary_length(distinct).to_numpy(zero_copy_only=False).astype(np.int64), 0)
    is_hashed = sizes <= MOST_BYTES
    keys = np.zeros(len(sizes), np.uint64)
    keys[is_hashed] = text_keys(*cell_bytes(pa.concat_arrays([distinct, pa.array([b""])]).filter(pa.array(is_hashed))))
    taken = codes.fill_null(len(distinct)).to_numpy(zero_copy_only=False)
    return keys[taken], sizes[taken], sizes[taken] == 0


def _decoded(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if types.is_dictionary(column.type) else column


def seconds_since_1970(column: pa.Array) -> pa.Array:
    """Return times as float64 seconds since 1970."""
    micros = column.cast(pa.timestamp("us", column.type.tz if types.is_timestamp(column.type) else None), safe=False)
    return pc.divide(micros.cast(pa.int64()).cast(pa.float64()), 1e6)


def _text_seconds(column: pa.Array) -> pa.Array:
    """Return texts as float64 seconds since 1970: seconds, or times as ISO 8601 writes them.

    Raises:
        pa.ArrowException: a text is neither.
    """
    text = column.cast(pa.string())
    for cast in (
        lambda: text.cast(pa.float64()),
        lambda: seconds_since_1970(text.cast(pa.timestamp("us"))),
    ):
        try:
            return cast()
        except pa.ArrowInvalid:
            continue
    return seconds_since_1970(text.cast(pa.timestamp("us", "UTC")))


def _shown(value: pa.Scalar) -> str:
    found = value.as_py()
    return short(found.decode("utf-8", "backslashreplace") if isinstance(found, bytes) else found)
