"""What a column holds: type, missing values, distinct values, numbers. In one pass, in bounded memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import methodcaller
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import types

from embershard.data.hashing import Ids, mix64
from embershard.data.sample_bits import Flags
from embershard.data.sources.table.cells import (
    BRACKETS,
    INTEGER_WORDS,
    TIME_FORMATS,
    Form,
    decimal_form,
    read_cells,
    seconds_forms,
    seconds_since_1970,
    stripped,
    time_form,
    time_of_seconds,
)
from embershard.data.sources.table.counts import CONTROLS, DistinctCount, NumberSummary, PartCounts
from embershard.data.sources.table.decode import MOST_BYTES, MOST_SECONDS, text_words
from embershard.data.sources.table.raw import is_list, is_text, is_time, typed_name

_INTEGER = r"^(0|-?[1-9][0-9]*)$"
_LAST_EXACT = 2.0**53  #: float64 has every integer up to here
_LEAST_LONG = 16  # digits that an integer above it has
_UNSIGNED = r"^(0|[1-9][0-9]*)$"
_NUMBER = r"^-?(0|[1-9][0-9]*)?(\.[0-9]*)?([eE][-+]?[0-9]+)?$"  # 02139 is a code, not a number
_IS_CODE = re.compile(r"0[0-9]+").fullmatch
_IS_NUMBER = re.compile(_NUMBER).match
_TIME = r"^\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d{1,6})?)?)?$"
_ZONED_TIME = r"^\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[-+]\d\d(:?\d\d)?)$"
_BOOL = r"^(true|True|TRUE|false|False|FALSE)$"
_SEPARATORS = (*CONTROLS, "^", BRACKETS, "|", ";", "\t", "::", "~", "#", ",", ">", "&", "/", ":", " ")
_LISTED, _LEAST_LISTED = 0.01, 1000  # a separator that fewer of so many cells have is given up
#: What other programs write for a missing value.
_MISSING_WORDS = [
    "NaN",
    "nan",
    "NA",
    "<NA>",
    "N/A",
    "n/a",
    "#N/A",
    "null",
    "NULL",
    "Null",
    "None",
    "none",
    "\\N",
    "-",
    "?",
]
#: Share of a column's cells that may be none of the type that all others are: these make bad rows.
MOST_OTHERS = 0.01
_KEPT_OTHERS = 1000  # distinct ones of a column, by type
_FIRST_ROWS = 20_000  # are compared with the label
_KEPT_TEXTS, _TRIED_TEXTS, _LEAST_ALIKE, _MOST_WORDS = 64, 64, 0.25, 5
#: Types that texts may have, the first that fits: "unsigned" are integers that int64 does not hold.
_TYPES = {
    "integer": pa.int64(),
    "unsigned": pa.uint64(),
    "number": pa.float64(),
    "bool": pa.bool_(),
    "time": pa.timestamp("us"),
    "zoned": pa.timestamp("us", "UTC"),
}
_PATTERNS = {
    "integer": _INTEGER,
    "unsigned": _UNSIGNED,
    "number": _NUMBER,
    "bool": _BOOL,
    "time": _TIME,
    "zoned": _ZONED_TIME,
}
#: How texts of each of these types are written.
FORMS = {kind: Form(_PATTERNS[name], methodcaller("cast", kind)) for name, kind in _TYPES.items()}
#: Texts that are of none of these: times and numbers as others write them, by the name that settings have for that.
_WRITTEN = {
    **{name: (pa.timestamp("us", "UTC" if "%z" in name else None), time_form(name)) for name in TIME_FORMATS},
    **{mark: (pa.float64(), decimal_form(mark, has_codes=False)) for mark in (".", ",")},
}
_PLAIN = {name: (kind, FORMS[kind]) for name, kind in _TYPES.items()}
#: Which of these are as the user says that a column is.
_NUMBERS = ("integer", "unsigned", "number", "bool", ".", ",")


@dataclass
class ColumnSurvey:
    """What a column holds.

    Attributes:
        name: of the column.
        type: in the file; texts in text files.
        rows: of the file; `missing` of them have no value.
        most: values of a row, at most.
        values: distinct values as `mapping = "text"` takes them; of lists, those in them.
        ids: the same as "hash" takes them, where all values are integers.
        summaries: of numbers, or of times the seconds since 1970; of texts by the type that they may have.
        parts: what each separator cuts the cells of texts into.
        blanks: how many texts have blanks around them, which `values` and `parts` have not.
        others: of texts, by the names of types that may fit (`_TYPES`, formats of times, decimal marks): how many
            cells, by text, are not of that type. Of many texts, some are counted as "...".
        texts: of texts, how many cells have each; None where these are many.
        examples: of texts, some of the first ones.
        urls: of texts, how many are web addresses.
        firsts: cells of the first rows, as texts.
        wanted: what the user says that it holds: "number", "time" or "list"; or "".
        form: format that the user says its times have; separator that its lists have.
        only_types: of texts, only their types are wanted: nothing else is counted.
        missing_words: how many cells are each of `_MISSING_WORDS`, where others fit a type.
        refused: numbers that are infinite or too large for float32, and times at `MOST_SECONDS` or farther, which
            `numbers` has not, as `summaries`: bad rows in training.
        has_null_values: settings can make words missing: those of text files.
        too_long: texts above `MOST_BYTES`, which `values` has not.
        is_bytes: values are no UTF-8, and nothing else is known of them.
        digits: of texts, those of the longest integer among them.
    """

    name: str
    type: pa.DataType
    rows: int = 0
    missing: int = 0
    most: int = 0
    values: DistinctCount = field(default_factory=DistinctCount)
    ids: DistinctCount = field(default_factory=DistinctCount)
    summaries: dict[str, NumberSummary] = field(default_factory=lambda: {"number": NumberSummary()})
    parts: dict[str, PartCounts] = field(default_factory=dict)
    blanks: int = 0
    others: dict[str, Counter[str]] = field(default_factory=dict)
    texts: Counter[str] | None = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    urls: int = 0
    firsts: list[pa.Array] = field(default_factory=list)
    wanted: str = ""
    form: str = ""
    only_types: bool = False
    has_null_values: bool = True
    missing_words: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    too_long: int = 0
    is_bytes: bool = False
    digits: int = 0

    def __post_init__(self) -> None:
        written = _WRITTEN
        if self.wanted == "time" and self.form:
            written = {self.form: (pa.timestamp("us"), _time_or_iso(self.form))}
        elif self.wanted == "number":
            written = {mark: (pa.float64(), decimal_form(mark)) for mark in (".", ",")}
        self.types = {**_PLAIN, **written}
        self.parts = {each: PartCounts(each) for each in self._separators}
        if self.declared not in ("token_seq", "float_seq"):
            self.others = {name: Counter() for name in self.types}
        if self.declared == "float":
            self.wanted = self.wanted or "number"

    @property
    def declared(self) -> str:
        """The type that the name has; see `typed_name`."""
        return typed_name(self.name)[1]

    @property
    def _separators(self) -> tuple[str, ...]:
        """What may stand between the values in a cell."""
        if self.wanted == "list":
            return (self.form,)
        return (" ",) if self.declared.endswith("_seq") else _SEPARATORS

    def add(self, column: pa.Array) -> None:
        """Add some rows."""
        if self.rows < _FIRST_ROWS:
            self.firsts.append(column.slice(0, _FIRST_ROWS - self.rows))
        self.rows += len(column)
        self.missing += column.null_count
        if is_list(column.type):
            self.most = max(self.most, pc.max(pc.list_value_length(column)).as_py() or 0)
            column = column.flatten()
        else:
            self.most = max(self.most, 1)
        if types.is_dictionary(column.type):
            column = column.dictionary_decode()
        column = column.drop_null()
        if is_text(column.type) and (self.others or not self.only_types):
            self._add_texts(column)
        elif is_time(column.type):
            self._add_times(column)
            self.values.add(
                mix64(column.cast(pa.timestamp("us"), safe=False).cast(pa.int64()).to_numpy().view(np.uint64))
            )
        elif types.is_integer(column.type) or types.is_boolean(column.type):
            self._add_numbers(column)
            self.values.add(text_words(column)[0])
            self.ids.add(mix64(column.cast(pa.int64(), safe=False).to_numpy(zero_copy_only=False).view(np.uint64)))
        elif types.is_floating(column.type) or types.is_decimal(column.type):
            numbers = self._add_numbers(column)
            self.values.add(mix64(numbers.view(np.uint64)))

    def _add_texts(self, column: pa.Array) -> None:
        """Add texts: what a distinct one is, is found once."""
        encoded = column.dictionary_encode()
        cells, codes = encoded.dictionary, encoded.indices.to_numpy().astype(np.int64)
        bare, counts = stripped(cells), np.bincount(codes, minlength=len(encoded.dictionary))
        if self.only_types:
            self._add_typed_texts(cells, bare, codes, counts)
            return
        texts, num_cells, has_blanks = bare, counts, _flags(pc.not_equal(bare, cells))
        if has_blanks.any():
            self.blanks += int(counts[has_blanks].sum())
            merged = bare.dictionary_encode()
            texts = merged.dictionary
            num_cells = np.bincount(merged.indices.to_numpy(), counts).astype(np.int64)
        words, sizes, is_empty = text_words(pa.DictionaryArray.from_arrays(np.arange(len(texts)), texts))
        self.missing += int(num_cells[is_empty].sum())
        if not len(column) or self.is_bytes:
            return
        try:
            cells, bare, texts = (each.cast(pa.string()) for each in (cells, bare, texts))
        except pa.ArrowInvalid:
            self.is_bytes = True
            self.others.clear()
            return
        is_short = sizes <= MOST_BYTES
        self.values.add(words[~is_empty & is_short])
        self.too_long += int(num_cells[~is_short].sum())
        self._add_typed_texts(cells, bare, codes, counts)
        texts, words, num_cells = texts.filter(pa.array(~is_empty)), words[~is_empty], num_cells[~is_empty]
        if self.texts is not None:
            self.texts.update(dict(_pairs(texts, num_cells)))
            self.texts = self.texts if len(self.texts) <= _KEPT_TEXTS else None
        self.examples += texts.slice(0, _KEPT_TEXTS - len(self.examples)).to_pylist()
        self.urls += int(num_cells[_flags(pc.starts_with(texts, "http"))].sum())
        may_be_list = self.kind is None or self.written in (".", ",") or self.wanted == "list"
        for separator, parts in list(self.parts.items()) if may_be_list else ():
            parts.add(texts, words, num_cells)
            is_given_up = self.present >= _LEAST_LISTED and parts.cells < _LISTED * self.present
            if is_given_up and len(self._separators) > 1:
                del self.parts[separator]

    def _add_typed_texts(self, cells: pa.Array, bare: pa.Array, codes: Ids, counts: Ids) -> None:
        """Add distinct cells, which are `bare` without the blanks around them; `codes` are the places of the rows'
        cells. A word for a missing value has no blanks."""
        if not self.others:
            return
        is_word = _flags(pc.is_in(cells, value_set=pa.array(_MISSING_WORDS)))
        self.missing_words.update(dict(_pairs(cells, counts, is_word)))
        is_value = ~is_word & _flags(pc.not_equal(bare, ""))
        if not is_value.all():
            codes = (np.cumsum(is_value) - 1)[codes[is_value[codes]]]
            bare, counts = bare.filter(pa.array(is_value)), counts[is_value]
        if len(codes):
            self._add_typed(bare, codes, counts)

    def _add_typed(self, texts: pa.Array, codes: Ids, counts: Ids) -> None:
        """Count the texts that are not of a type, and add the others as what they are. A type that fewer than half of
        the texts have is given up."""
        longest = texts.filter(pc.greater_equal(pc.binary_length(texts), _LEAST_LONG))
        longest = longest.filter(pc.match_substring_regex(longest, _INTEGER)).cast(pa.float64())
        if pc.any(pc.greater_equal(pc.abs(longest), _LAST_EXACT)).as_py():
            for name in ("number", ".", ","):
                self.others.pop(name, None)
        if not any(len(others) for others in self.others.values()):
            self._drop_unlike(texts, codes)
        plain: pa.Array | None = None  # the numbers, where all texts are
        fits: tuple[str, ...] = ()  # types whose values these are, too
        for name in list(self.others):
            found = plain if name in fits else self._read(texts, counts, name)
            if found is None:
                del self.others[name]
                continue
            if not self.only_types:
                add = self._add_times if is_time(self.types[name][0]) else self._add_numbers
                add(found.take(codes).drop_null(), name)
            if name in ("integer", "number") and plain is None and not found.null_count:
                plain, fits = found, (".",)
                if name == "integer":
                    fits = ("number", ".", ",", *(["unsigned"] if pc.min(plain).as_py() >= 0 else []))
        if self.others.keys() & {*_NUMBERS}:
            may_be_integers = plain is None or types.is_integer(plain.type) or pc.equal(plain, pc.trunc(plain))
            self._add_digits(texts if may_be_integers is True else texts.filter(may_be_integers))

    def _read(self, texts: pa.Array, counts: Ids, name: str) -> pa.Array | None:
        """Return the values that texts have as a type, null for those that are not of it, which are counted; None where
        fewer than half are."""
        others, form = self.others[name], self.types[name][1]
        is_like = _flags(pc.match_substring_regex(texts, form.pattern))
        if others.total() + int(counts[~is_like].sum()) > self.present / 2:
            return None
        likely = texts if is_like.all() else pc.if_else(is_like, texts, pa.scalar(None, texts.type))
        found, is_wrong = read_cells(likely, [form])
        for is_other in (~is_like, is_wrong):
            for text, count in _pairs(texts, counts, is_other):
                others[text if text in others or len(others) < _KEPT_OTHERS else "..."] += count
        return found if others.total() <= self.present / 2 else None

    def _add_digits(self, texts: pa.Array) -> None:
        integers = texts.filter(pc.match_substring_regex(texts, _INTEGER))
        self.digits = max(self.digits, pc.max(pc.binary_length(integers)).as_py() or 0)
        if not self.only_types and self.others.keys() & {"integer", "unsigned"}:
            words = read_cells(integers, INTEGER_WORDS)[0].drop_null()
            self.ids.add(mix64(words.to_numpy(zero_copy_only=False).view(np.uint64)))

    def _drop_unlike(self, texts: pa.Array, codes: Ids) -> None:
        """Drop the formats that few of some texts have, since there are many formats."""
        places = np.unique(np.linspace(0, len(codes) - 1, _TRIED_TEXTS).astype(np.int64))
        some = texts.take(codes[places]).to_pylist()
        likely = (".", ",") if sum(_IS_NUMBER(text) is not None for text in some) > len(some) / 2 else _WRITTEN
        for name in self.others.keys() & _WRITTEN.keys():
            if name not in likely:
                del self.others[name]
                continue
            pattern = re.compile(self.types[name][1].pattern)
            if sum(pattern.match(text) is not None for text in some) < _LEAST_ALIKE * len(some):
                del self.others[name]

    def _add_numbers(self, column: pa.Array, name: str = "number") -> NDArray[np.float64]:
        numbers: NDArray[np.float64] = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        is_missing = np.isnan(numbers)
        with np.errstate(over="ignore"):
            is_held = np.isfinite(numbers.astype(np.float32))
        self.missing += int(is_missing.sum())
        self.refused[name] += int((~is_held & ~is_missing).sum())
        self.summaries.setdefault(name, NumberSummary()).add(numbers[is_held])
        return numbers[is_held]

    def _add_times(self, column: pa.Array, name: str = "number") -> None:
        seconds = seconds_since_1970(column).to_numpy(zero_copy_only=False)
        is_far = np.abs(seconds) >= MOST_SECONDS
        self._add_numbers(pa.array(seconds[~is_far]), name)
        self.refused[name] += int(is_far.sum())

    def first(self) -> pa.Array | None:
        """Return the cells of the first rows as texts; None where they are lists, or no texts."""
        try:
            return pa.concat_arrays([each.cast(pa.string()) for each in self.firsts])
        except pa.ArrowException:
            return None

    @property
    def kind(self) -> str | None:
        """Of texts: the type that the fewest are not of, at most a share of `MOST_OTHERS`; of a bool none. Where the
        user says what they are, as many as there are."""
        if not is_text(self._stored) or not self.present or self.wanted == "list":
            return None
        words = 0 if self.has_null_values else self.missing_words.total()
        most = MOST_OTHERS * (self.present - self.missing_words.total() + words)
        counts = {name: others.total() + words for name, others in self.others.items() if self._may_be(name)}
        fit = [name for name in counts if self.wanted or counts[name] <= (0 if name == "bool" else most)]
        return min(fit, key=counts.__getitem__, default=None)

    def _may_be(self, name: str) -> bool:
        """Return whether a type is what the user says that the column holds, or may be, if no digits are those of
        codes: `02139` beside `10001`."""
        is_of_times = is_time(self.types[name][0])
        if self.wanted == "time":
            return name == self.form if self.form else is_of_times or name == "integer"
        if self.wanted or is_of_times:
            return not self.wanted or name in _NUMBERS
        return not any(len(text) == self.digits and _IS_CODE(text) for text in self.others[name])

    @property
    def written(self) -> str:
        """How texts write their times or numbers, if not as usual: a format of strptime, or a decimal mark."""
        return self.kind if self.kind in self.types.keys() - _TYPES.keys() else ""

    @property
    def numbers(self) -> NumberSummary:
        """Of numbers, or of times the seconds since 1970; and of texts that are."""
        return self.summaries.get(self.kind or "number", NumberSummary())

    @property
    def num_refused(self) -> int:
        """Numbers and times that training would refuse."""
        return self.refused[self.kind or "number"]

    @property
    def odd_cells(self) -> Counter[str]:
        """The texts that are not of the column's type, and no missing values."""
        if self.kind is None or self._others_are_words:
            return Counter()
        return self.others[self.kind] + (Counter() if self.has_null_values else self.missing_words)

    @property
    def _others_are_words(self) -> bool:
        """Whether texts of another type stand for a missing value: a few words, where the user, or the header, says
        what the others are."""
        few = self.has_null_values and bool(self.wanted) and self.kind is not None
        return few and len(self.others[str(self.kind)]) <= _MOST_WORDS

    @property
    def null_cells(self) -> Counter[str]:
        """Words for a missing value among texts of another type, which settings can make missing."""
        if self.kind is None or not self.has_null_values:
            return Counter()
        return self.missing_words + (self.others[self.kind] if self._others_are_words else Counter())

    @property
    def num_bad(self) -> int:
        """Rows that the column makes bad in training, as long as `null_cells` are missing values."""
        long = self.too_long if is_text(self.inner) else 0
        return self.odd_cells.total() + (self.num_refused if not is_text(self.inner) else long)

    @property
    def present(self) -> int:
        """Rows with a value."""
        return self.rows - self.missing

    @property
    def is_readable(self) -> bool:
        """False for a type of which no feature is made, and no value is counted."""
        kind = self.inner
        if self.is_bytes:
            return False
        is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
        return is_number or is_text(kind) or is_time(kind) or types.is_boolean(kind) or types.is_null(kind)

    @property
    def title(self) -> str:
        """The type in words: `list of string`; of texts that all fit another type, `int64 in text`."""
        kind = self._stored
        within = str(kind) if kind == self.inner else f"{self.inner} in text"
        return f"list of {within}" if is_list(self.type) else within

    @property
    def inner(self) -> pa.DataType:
        """The type of a value: of lists, that in them; of texts that are of another type, that."""
        return self._stored if self.kind is None else self.types[self.kind][0]

    @property
    def exact(self) -> pa.DataType:
        """As `inner`, where every text fits, and Arrow reads it."""
        return self._stored if self.odd_cells or self.missing_words or self.written else self.inner

    @property
    def _stored(self) -> pa.DataType:
        kind = self.type.value_type if is_list(self.type) else self.type
        return kind.value_type if types.is_dictionary(kind) else kind


def _flags(found: pa.Array) -> Flags:
    flags: Flags = found.to_numpy(zero_copy_only=False)
    return flags


def _pairs(texts: pa.Array, counts: Ids, which: Flags | None = None) -> Iterator[tuple[str, int]]:
    """Return texts, or some of them, with their counts."""
    if which is not None:
        texts, counts = texts.filter(pa.array(which)), counts[which]
    return zip(texts.to_pylist(), counts.tolist(), strict=True)


def _time_or_iso(written: str) -> Form:
    forms = seconds_forms(written)

    def read(cells: pa.Array) -> pa.Array:
        seconds, is_wrong = read_cells(cells, forms)
        if is_wrong.any():
            raise pa.ArrowInvalid(f"not as {written}")
        return time_of_seconds(seconds)

    return Form("|".join(f"(?:{form.pattern})" for form in forms), read)


def survey(
    schema: pa.Schema,
    batches: Iterator[pa.RecordBatch],
    *,
    has_null_values: bool = True,
    only_types: bool = False,
    wanted: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> dict[str, ColumnSurvey]:
    """Return what each column holds, by name, in order.

    Args:
        only_types: see `ColumnSurvey`.
        wanted: of columns, what the user says: `wanted` and `form` of `ColumnSurvey`.
    """
    found = {}
    for each in schema:
        kind, form = wanted.get(each.name, ("", ""))
        column = ColumnSurvey(each.name, each.type, has_null_values=has_null_values, wanted=kind, form=form)
        column.only_types = only_types
        found[each.name] = column
    for batch in batches:
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            found[name].add(column)
    return found
