"""Columns of a chunk as numbers and rows of tables.

What a value becomes does not depend on the file's format: of Parquet's 7, 7.0 and True, and of the cells `7`, `7.0` and
`True` of a text file, `_same_words` makes the same texts. But a cell with an exponent (`1e3`) stays the text it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import types

from embershard.data.block import BadRow, short
from embershard.data.config import TIME_ROWS, TableConfig, TableFeature
from embershard.data.hashing import MISSING_ID, RESERVED_ID, Ids, Words, cell_bytes, map_ids, text_keys
from embershard.data.sample_bits import Flags
from embershard.data.schema import Task
from embershard.data.sources.table.cells import (
    FLOATS,
    INTEGER_WORDS,
    INTEGERS,
    SECONDS,
    Form,
    are_dates,
    are_digits,
    decimal_form,
    read_cells,
    seconds_forms,
    seconds_since_1970,
    split_cells,
    stripped,
)
from embershard.data.sources.table.raw import RawChunk, is_list, is_text, is_time
from embershard.errors import DataError, IdOutOfRangeError

#: Longest text, so that a damaged file cannot take much memory.
MOST_BYTES = 1024
#: Since 1970. Times are below that: the last day is 5138-11-16.
MOST_SECONDS = 1e11
_SECONDS_PER_HOUR, _HOURS_PER_DAY, _DAYS_PER_WEEK = 3600, 24, 7
_SECONDS_PER_DAY = _SECONDS_PER_HOUR * _HOURS_PER_DAY
_WEEKDAY_OF_1970 = 3  # a Thursday; Monday is 0
_MOST_SECONDS_IN_MICROS = 2.0**63 / 1e6
_LARGEST_WHOLE = 2.0**63
_NEEDED_TIME = "needed a time as 2024-12-31 or 2024-12-31 23:59:59, seconds since 1970, or nothing"
_NEEDED_EARLIER = (
    "is beyond the last time, 5138-11-16. If it stands for a missing time, name it in data.table.null_values (of text "
    "files). If it is milliseconds, divide by 1000"
)
#: Texts, as regular expressions, that are a whole number with a point, and the text that stands for them.
_WHOLE = {r"^-?(?:0\.0*|\.0+)$": "0", r"^(-?[1-9][0-9]*)\.0*$": r"\1"}
_SAME = {b"True": b"true", b"TRUE": b"true", b"False": b"false", b"FALSE": b"false", b"-0": b"0"}
_NEEDED_LABEL = (
    'a label must be 0 or 1; data.kind = "table" takes other numbers, by label_at_least or task = "regression"'
)
_MISSING_LABEL = '; of several labels, data.table.missing_labels = "masked" trains on those that are there'
Float32s = NDArray[np.float32]


class ChunkDecoder:
    """Decodes the columns of a chunk of n rows.

    Attributes:
        bad: the rows that are no samples, by their number in the chunk; the first problem of each.
        is_sample: bool [n], whether the row is none of these.
        beyond: of features with the mapping "modulo", by column, how many ids their tables have no row for; they share
            one with another id.
    """

    def __init__(self, chunk: RawChunk, settings: TableConfig) -> None:
        self._chunk, self._settings, self.bad = chunk, settings, dict(chunk.bad)
        self.is_sample = np.ones(chunk.table.num_rows, np.bool_)
        self.beyond: dict[str, int] = {}
        self._seconds_of: dict[str, NDArray[np.float64]] = {}

    def _column(self, name: str) -> pa.Array:
        column = self._chunk.table.column(name).combine_chunks()
        return column.cast(pa.string()) if types.is_null(column.type) else column  # as writers type what is missing

    def numbers(self, name: str) -> NDArray[np.float64]:
        """Return a column as float64 [n]: NaN where a value is missing, seconds since 1970 of times."""
        column = _decoded(self._column(name))
        is_of_times = is_time(column.type)
        if is_of_times:
            column = seconds_since_1970(column)
        mark = self._settings.decimal.get(name)
        forms = FLOATS if mark is None or not is_text(column.type) else (decimal_form(mark),)
        numbers = self._read(column, forms, name, "needed a number, or nothing")
        found: NDArray[np.float64] = numbers.to_numpy(zero_copy_only=False)
        if is_of_times:
            is_far = np.abs(found) >= _MOST_SECONDS_IN_MICROS
            self.note(is_far, name, found, "needed a time that 64 bits of microseconds since 1970 hold")
        with np.errstate(over="ignore"):
            is_too_large = np.isinf(found.astype(np.float32))
        self.note(is_too_large, name, found, "needed a finite number, below 3.4e38")
        return np.where(is_too_large, np.nan, found)

    def is_text(self, name: str, text: str) -> NDArray[np.float32]:
        """Return where a column's cells are a text: 1, else 0 [n]; NaN where one is missing, which is a bad row."""
        words, _, is_missing = text_words(_decoded(self._column(name)))
        self.note(is_missing, name, np.full(len(words), "nothing"), "a label must be a text (data.table.label_is)")
        found = (words == text_words(pa.array([text]))[0]).astype(np.float32)
        return np.where(is_missing, np.float32(np.nan), found)

    def dense(self, feature: TableFeature) -> NDArray[np.float32]:
        """Return a dense feature [n], scaled; `feature` is with its column."""
        name = str(feature.column)
        if feature.scale == "days":
            numbers = self.seconds(name) / _SECONDS_PER_DAY
        else:
            numbers = self.numbers(name)
        with np.errstate(over="ignore"):
            found = scaled(numbers, feature)
        self.note(~np.isfinite(found), name, numbers, f"needed a number that is finite after {feature.scale}")
        return found

    def bags(self, feature: TableFeature, most: tuple[int, str]) -> tuple[Ids, NDArray[np.int32]]:
        """Return the rows, or ids, of a feature's bags, and the size [n] of each. A single value is a bag of one.

        Args:
            feature: with its column.
            most: values of a bag, and the setting that says so.
        """
        name = str(feature.column)
        column = self._column(name)
        if feature.mapping in TIME_ROWS:
            return self._times(feature), np.ones(len(column), np.int32)
        if feature.separator is not None and is_text(column.type):
            column = split_cells(_decoded(column), feature.separator)
        if not is_list(column.type):
            lengths = np.ones(len(column), np.int32)
            return self._rows(column, name, feature, lengths), lengths
        column = column.cast(pa.list_(column.type.value_type))
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int32)
        self.note(lengths > most[0], name, lengths, f"needed at most {most[0]:,} ({most[1]})", unit=" ids")
        rows = self._rows(column.flatten(), name, feature, lengths)
        if column.null_count:
            missing = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
            rows = np.insert(rows, np.cumsum(lengths)[missing], MISSING_ID if feature.takes_ids else 0)
            lengths[missing] = 1
        return rows, lengths

    def note(self, is_wrong: Flags, name: str, values: Any, needed: str, unit: str = "") -> None:
        """Note the rows for which `is_wrong` [n] is true as bad."""
        for row in np.flatnonzero(is_wrong).tolist():
            self._note_row(row, name, f"{name}={values[row]}{unit}: {needed}")

    def _note_row(self, row: int, name: str, problem: str, error: type[DataError] = DataError) -> None:
        place, chunk = int(self._chunk.places[row]), self._chunk
        self.is_sample[row] = False
        self.bad.setdefault(place, BadRow(chunk.path, chunk.row(place), name, problem, error))

    def _note_values(self, is_wrong: Flags, lengths: NDArray[np.int32], note: Callable[[int, int], None]) -> None:
        """Call `note(row, place)` for the first wrong value of each bag: `is_wrong` is of all bags' values."""
        wrong = np.flatnonzero(is_wrong)
        if not len(wrong):
            return
        owners = np.searchsorted(np.cumsum(lengths, dtype=np.int64), wrong, side="right")
        rows, firsts = np.unique(owners, return_index=True)
        for row, place in zip(rows.tolist(), wrong[firsts].tolist(), strict=True):
            note(row, place)

    def _rows(self, values: pa.Array, name: str, feature: TableFeature, lengths: NDArray[np.int32]) -> Ids:
        """Return the rows of values in bags of these lengths, of which a missing one is row 0; or ids."""
        if feature.mapping in ("text", "text_ids"):
            return self._text_rows(values, name, feature, lengths)
        values = _decoded(values)
        if is_text(values.type):
            forms = INTEGERS if feature.mapping == "none" else INTEGER_WORDS
            values = self._read(values, forms, name, "needed an integer, or nothing", lengths)
        if feature.mapping == "ids":
            return self._ids(values, name, lengths)
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
        if feature.mapping == "modulo" and (count := int(((raw < 0) | (raw > num_rows - 2)).sum())):
            self.beyond[name] = count
        rows = map_ids(raw, num_rows, feature.mapping)
        rows[values.is_null().to_numpy(zero_copy_only=False)] = 0
        return rows

    def _ids(self, values: pa.Array, name: str, lengths: NDArray[np.int32]) -> Ids:
        """Return integers as they are, and `MISSING_ID` for a missing one."""
        ids = values.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        needed = f"needed another integer of 64 bits, or nothing: {RESERVED_ID} is reserved"
        self._note_values(
            ids == RESERVED_ID, lengths, lambda row, at: self._note_row(row, name, f"{name}={values[at]}: {needed}")
        )
        ids[values.is_null().to_numpy(zero_copy_only=False)] = MISSING_ID
        return ids

    def _text_rows(self, values: pa.Array, name: str, feature: TableFeature, lengths: NDArray[np.int32]) -> Ids:
        if types.is_floating(values.type):  # integers with missing ones, as pandas writes them
            numbers = values.to_numpy(zero_copy_only=False).astype(np.float64)
            is_whole = (numbers == np.trunc(numbers)) & (np.abs(numbers) < _LARGEST_WHOLE)
            is_wrong = ~np.isnan(numbers) & ~is_whole
            needed = "needed text or a whole number, or nothing"
            self._note_values(
                is_wrong, lengths, lambda row, at: self._note_row(row, name, f"{name}={numbers[at]}: {needed}")
            )
            whole = np.where(is_whole, numbers, 0).astype(np.int64)
            values = pa.array(whole, mask=np.isnan(numbers))
        elif feature.stripped:
            values = stripped(values)
        keys, sizes, is_missing = text_words(values)
        too_long = ~is_missing & (sizes > MOST_BYTES)
        needed = f"needed at most {MOST_BYTES:,} bytes"
        self._note_values(
            too_long, lengths, lambda row, at: self._note_row(row, name, f"{name} has {sizes[at]:,} bytes: {needed}")
        )
        if feature.mapping == "text_ids":
            return np.where(is_missing, MISSING_ID, np.maximum(keys.view(np.int64), MISSING_ID))
        rows = map_ids(keys.view(np.int64), feature.table_rows, "modulo")
        rows[is_missing] = 0
        return rows

    def _times(self, feature: TableFeature) -> Ids:
        """Return 1 + the hour, or the weekday (1: Monday) of times in UTC; 0 for a missing one."""
        seconds = self.seconds(str(feature.column))
        is_missing = np.isnan(seconds)
        hours = np.floor(np.where(is_missing, 0, seconds)).astype(np.int64) // _SECONDS_PER_HOUR
        if feature.mapping == "hour":
            rows = 1 + hours % _HOURS_PER_DAY
        else:
            rows = 1 + (hours // _HOURS_PER_DAY + _WEEKDAY_OF_1970) % _DAYS_PER_WEEK
        return np.where(is_missing, 0, rows)

    def seconds(self, name: str) -> NDArray[np.float64]:
        """Return times, seconds, or texts that are either, as seconds since 1970; NaN for a missing or a bad one."""
        if name not in self._seconds_of:  # the hour and the weekday are of one column
            self._seconds_of[name] = self._read_seconds(name)
        return self._seconds_of[name]

    def _read_seconds(self, name: str) -> NDArray[np.float64]:
        given = column = _decoded(self._column(name))
        written = self._settings.format.get(name)
        needed = _NEEDED_TIME if written is None else f"needed a time as data.table.format.{name} says, or nothing"
        if written is not None and are_digits(written) and not is_time(column.type):
            whole = column if is_text(column.type) or types.is_integer(column.type) else column.cast(pa.int64())
            column = self._read(whole, seconds_forms(written), name, needed)
        elif is_text(column.type):
            column = self._read(column, SECONDS if written is None else seconds_forms(written), name, needed)
        is_number = types.is_integer(column.type) or types.is_floating(given.type)
        found = seconds_since_1970(column) if is_time(column.type) else column.cast(pa.float64(), safe=False)
        is_missing = found.is_null().to_numpy(zero_copy_only=False)
        seconds = found.fill_null(0).to_numpy(zero_copy_only=False)
        is_time_here = np.abs(seconds) < MOST_SECONDS  # milliseconds are not, and NaN is not
        if is_number:
            is_time_here &= ~are_dates(seconds)
        for row in np.flatnonzero((seconds >= MOST_SECONDS) & np.isfinite(seconds)).tolist():
            cell = np.datetime64(int(seconds[row]), "s") if is_time(given.type) else _shown(given[row])
            self._note_row(row, name, f"{name}={cell}: {_NEEDED_EARLIER}")
        self.note(~is_time_here, name, seconds, needed)
        return np.where(is_time_here & ~is_missing, seconds, np.nan)

    def _read(
        self,
        column: pa.Array,
        forms: Sequence[Form],
        name: str,
        needed: str,
        lengths: NDArray[np.int32] | None = None,
    ) -> pa.Array:
        """Return the values of a column's cells; cells of none of the forms are noted, and missing."""
        values, is_wrong = read_cells(column, forms)
        sizes = np.ones(len(column), np.int32) if lengths is None else lengths
        self._note_values(
            is_wrong, sizes, lambda row, at: self._note_row(row, name, f"{name}={_shown(column[at])}: {needed}")
        )
        return values


def is_sound(column: pa.ChunkedArray, feature: TableFeature) -> bool:
    """Return whether `ChunkDecoder` takes every cell of a feature's column, where its type says so, or the longest of
    its texts: much faster than to decode it."""
    if types.is_integer(column.type):
        scales, mappings = ("none", "log1p", "quantile"), ("text", "text_ids", "hash", "modulo")
        return feature.scale in scales if feature.kind == "dense" else feature.mapping in mappings
    if feature.mapping not in ("text", "text_ids") or feature.kind == "dense" or feature.separator is not None:
        return False
    if types.is_dictionary(column.type) or not is_text(column.type):
        return False
    return (pc.max(pc.binary_length(column)).as_py() or 0) <= MOST_BYTES


def text_words(values: pa.Array) -> tuple[Words, Ids, Flags]:
    """Return the hash [N] of each value as text, its bytes [N], and whether it is missing or empty [N].

    An integer's text is its decimal digits, that of a bool `true` or `false`; texts that say the same in another way,
    as `7.0` or `True`, count as these. Texts above `MOST_BYTES` get no hash.

    >>> words, _, is_missing = text_words(pa.array(["7", None, "", "7.0"]))
    >>> (words[[0, 3]] == text_words(pa.array([7]))[0]).tolist(), is_missing.tolist()
    ([True, True], [False, True, True, False])
    """
    if not types.is_dictionary(values.type):
        values = values.dictionary_encode()
    distinct, codes = values.dictionary, values.indices
    if not is_text(distinct.type):
        distinct = distinct.cast(pa.string())
    distinct = _same_words(distinct.cast(pa.binary()).fill_null(b""))
    sizes = np.append(pc.binary_length(distinct).to_numpy(zero_copy_only=False).astype(np.int64), 0)
    is_hashed = sizes <= MOST_BYTES
    keys = np.zeros(len(sizes), np.uint64)
    keys[is_hashed] = text_keys(*cell_bytes(pa.concat_arrays([distinct, pa.array([b""])]).filter(pa.array(is_hashed))))
    taken = codes.fill_null(len(distinct)).to_numpy(zero_copy_only=False)
    return keys[taken], sizes[taken], sizes[taken] == 0


def cell_words(cells: pa.Array) -> pa.DictionaryArray:
    """Return cells as texts [n] that are equal where a feature would take the cells for equal; null where it would take
    them for missing: an empty text, and a number that is NaN.

    Raises:
        pa.ArrowException: they are lists, or other cells that are no texts.

    >>> cell_words(pa.array(["7.0", "", None, "True"])).to_pylist()
    ['7', None, None, 'true']
    >>> cell_words(pa.array([7.0, float("nan")])).to_pylist()
    ['7', None]
    """
    if not types.is_dictionary(cells.type):
        cells = cells.dictionary_encode()
    distinct = cells.dictionary
    if types.is_floating(distinct.type):
        distinct = pc.if_else(pc.is_nan(distinct), pa.scalar(None, distinct.type), distinct)
    if not is_text(distinct.type):
        distinct = distinct.cast(pa.string())
    words = _decoded(_same_words(distinct.cast(pa.binary())))
    words = readable(pa.chunked_array([words])).combine_chunks().dictionary_encode()
    return pa.DictionaryArray.from_arrays(words.indices.take(cells.indices).cast(pa.int32()), words.dictionary)


def readable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the cells of a text file as texts; others as they are."""
    if not types.is_binary(column.type):
        return column
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        cells = column.to_pylist()
        return pa.chunked_array([[cell and cell.decode("utf-8", "backslashreplace") for cell in cells]], pa.string())


def _same_words(texts: pa.Array) -> pa.Array:
    """Return texts as bytes: of a whole number with a point its integer, and a bool in lower letters."""
    if pc.any(pc.match_substring(texts, ".")).as_py():
        for pattern, word in _WHOLE.items():
            texts = pc.replace_substring_regex(texts, pattern, word)
    places = pc.index_in(texts, value_set=pa.array(list(_SAME)))
    if places.null_count == len(texts):
        return texts
    return pc.coalesce(pa.array(list(_SAME.values())).take(places), texts)


def _decoded(column: pa.Array) -> pa.Array:
    """Return a column without a dictionary; an empty text in it is a missing value."""
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_text(column.type):
        column = pc.if_else(pc.equal(pc.binary_length(column), 0), pa.scalar(None, column.type), column)
    return column


def _shown(value: pa.Scalar) -> str:
    found = value.as_py()
    return short(found.decode("utf-8", "backslashreplace") if isinstance(found, bytes) else found)


def scaled(numbers: NDArray[np.float64], feature: TableFeature) -> NDArray[np.float32]:
    """Return the numbers [n], for "days" of days, as the model gets them; a missing one (NaN) is 0, with "quantile"
    and no `mean` 0.5.

    embershard/extras/serving/serving_model.py does the same for programs without embershard.

    >>> age = TableFeature("dense", scale="quantile", quantiles=(0.0, 10.0, 100.0))
    >>> scaled(np.array([5.0, 55.0, 1000.0, np.nan]), age).tolist()
    [0.25, 0.75, 1.0, 0.5]
    """
    missing = 0.0
    if feature.scale == "log1p":
        found = np.log1p(np.maximum(numbers.astype(np.float32), 0))
    elif feature.scale in ("standardize", "days"):
        assert feature.mean is not None
        assert feature.std is not None
        found = ((numbers - feature.mean) / feature.std).astype(np.float32)
    elif feature.scale == "quantile":
        missing = 0.5
        found = np.interp(numbers, feature.quantiles, np.linspace(0, 1, len(feature.quantiles))).astype(np.float32)
    else:
        found = numbers.astype(np.float32)
    if feature.scale in ("log1p", "quantile") and feature.mean is not None:
        assert feature.std is not None
        missing, found = 0.0, ((found.astype(np.float64) - feature.mean) / feature.std).astype(np.float32)
    found[np.isnan(numbers)] = missing
    return found


def labels_and_weights(
    chunk: RawChunk, decoder: ChunkDecoder, settings: TableConfig
) -> tuple[Float32s, Float32s | None]:
    """Return the labels [n], or [n, T] of several, and the weights [n] of a chunk's samples.

    They are NaN where a file has not their column; there are no weights where the settings have none.
    """
    there = chunk.table.column_names
    missing = np.full(chunk.table.num_rows, np.nan, np.float32)
    masks = settings.label_masks or ("",) * len(settings.labels)
    each = zip(settings.labels, settings.tasks, settings.thresholds(), masks, strict=True)
    found: dict[str, Float32s] = {}
    for name, task, least, mask in each:
        found[name] = missing
        if name in there and (not mask or mask in there):
            is_masked = _is_masked(decoder, mask, found)
            if settings.missing_labels == "masked":
                is_masked |= np.isnan(decoder.numbers(name))
            if settings.label_is is not None:
                found[name] = decoder.is_text(name, settings.label_is)
                continue
            found[name] = _label(decoder, name, task, least, settings.classes.get(name, ()), is_masked)
    columns = [column for name, values in found.items() for column in _by_class(values, settings.classes.get(name, ()))]
    labels = columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
    if settings.weight is None:
        return labels, None
    return labels, _weights(decoder, settings.weight) if settings.weight in there else missing


def _is_masked(decoder: ChunkDecoder, mask: str, labels: Mapping[str, Float32s]) -> NDArray[np.bool_]:
    """Return which samples have not a label, by its mask: one of the labels before it, or a column; "" for none."""
    if not mask:
        return np.zeros(len(decoder.is_sample), np.bool_)
    if mask in labels:
        return np.asarray((labels[mask] == 0) | np.isnan(labels[mask]), np.bool_)
    numbers = decoder.numbers(mask)
    decoder.note(np.isnan(numbers), mask, numbers, "a mask must be a number")
    return np.asarray(numbers == 0, np.bool_)


def _label(
    decoder: ChunkDecoder,
    name: str,
    task: Task,
    least: float | None,
    classes: Sequence[float],
    is_masked: NDArray[np.bool_],
) -> Float32s:
    numbers = decoder.numbers(name)
    is_missing = np.isnan(numbers) & ~is_masked
    is_click = task == "binary" and least is None
    decoder.note(is_missing, name, numbers, f"a label must be {'0 or 1' if is_click else 'a number'}{_MISSING_LABEL}")
    found = numbers.astype(np.float32) if least is None else (numbers >= least).astype(np.float32)
    if is_click:
        decoder.note(~np.isin(numbers, (0, 1)) & ~is_missing & ~is_masked, name, numbers, _NEEDED_LABEL)
    elif classes:
        needed = f"a label must be one of data.table.classes.{name} = {list(classes)}"
        decoder.note(~np.isin(found, np.asarray(classes, np.float32)) & ~is_missing & ~is_masked, name, numbers, needed)
    found[is_masked] = np.nan
    return found


def _by_class(label: Float32s, classes: Sequence[float]) -> list[Float32s]:
    """Return a label [n] as the columns of the target: one, or one of 0 and 1 for each class; NaN stays."""
    if not classes:
        return [label]
    is_missing = np.isnan(label)
    return [np.where(is_missing, label, label == np.float32(each)).astype(np.float32) for each in classes]


def _weights(decoder: ChunkDecoder, name: str) -> Float32s:
    numbers = decoder.numbers(name)
    decoder.note(~(numbers >= 0), name, numbers, "a weight must be a number of at least 0")
    return numbers.astype(np.float32)
