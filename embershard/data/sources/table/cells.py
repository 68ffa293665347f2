"""Cells of text as numbers, integers and times: a column at once, and a bad cell at the cost of a few.

Only Arrow's casts decide what a cell is. They fail as a whole; so of a column with a bad cell, cells that look alike
are read at once, and what still fails is read alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import types

from embershard.data.config_fields import TIME_UNITS
from embershard.data.hashing import Ids
from embershard.data.sample_bits import Flags
from embershard.data.sources.table.raw import is_text

_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6}
_DATES = (
    *("%Y/%m/%d", "%Y.%m.%d", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%m-%d-%Y", "%d-%m-%Y"),
    *("%m/%d/%y", "%d/%m/%y", "%d.%m.%y", "%m-%d-%y", "%d-%m-%y"),
    *("%Y-%m-%d", "%Y年%m月%d日", "%Y년 %m월 %d일"),  # days and months without a zero in front, which ISO 8601 has
)
_CLOCKS = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
#: How texts write times, besides ISO 8601: formats of strptime. Of two that fit, the first one is taken.
TIME_FORMATS = (
    *(date + clock for date in _DATES for clock in _CLOCKS),
    *("%Y年%m月%d日%H时%M分", "%Y年%m月%d日%H时%M分%S秒", "%Y年%m月%d日%H:%M", "%Y年%m月%d日%H:%M:%S"),
    *("%d-%b-%y", "%d-%b-%Y", "%d %b %Y", "%d %b %Y %H:%M", "%d %B %Y"),
    *("%b %d %Y", "%b %d, %Y", "%B %d, %Y", "%m %d, %Y", "%b %d, %Y %I:%M:%S %p"),
    *("%a %b %d %H:%M:%S %z %Y", "%a %b %d %H:%M:%S %Y", "%a, %d %b %Y %H:%M:%S %z", "%d/%b/%Y:%H:%M:%S %z"),
)
#: Patterns of strptime's fields, those of `is_time_format`.
_FIELDS = {
    "%Y": "[0-9]{4}",
    "%y": "[0-9]{2}",
    "%m": "[0-9]{1,2}",
    "%d": "[0-9]{1,2}",
    "%H": "[0-9]{1,2}",
    "%I": "[0-9]{1,2}",
    "%M": "[0-9]{2}",
    "%S": "[0-9]{2}",
    "%b": "[A-Za-z]{3}",
    "%B": "[A-Za-z]{3,9}",
    "%a": "[A-Za-z]{3}",
    "%A": "[A-Za-z]{6,9}",
    "%p": "[AaPp][Mm]",
    "%z": "(?:Z|[-+][0-9]{2}:?[0-9]{2})",
}
#: Separator of a feature: a list in brackets, as JSON and Python write it.
BRACKETS = "[,]"
_BRACKETED = r"^\s*(\[.*\]|\(.*\)|\{.*\})\s*$"
_MONEY = r"(?:[$€£¥₹₽₩₺]|USD|EUR|GBP|CHF|kr|zł)"
_BLANKS = " \t"
_FEW = 32  # cells that are read one by one as fast as Arrow compiles a regular expression
_ERRORS = (pa.ArrowException, UnicodeDecodeError)


@dataclass(frozen=True)
class Form:
    """One way to write a value.

    Attributes:
        pattern: regular expression of the cells that are likely written so. Only the speed depends on it.
        read: returns the values of cells. It raises where one is not written so, or gives null for it.
    """

    pattern: str
    read: Callable[[pa.Array], pa.Array]


def read_cells(column: pa.Array, forms: Sequence[Form]) -> tuple[pa.Array, Flags]:
    """Return the values [n] of cells, each written in the first form that reads it; and which [n] none does. Blanks
    around a value are no part of it, and blanks alone are a missing one.

    >>> values, is_wrong = read_cells(pa.array(["7", "x", None, "true", " 8", " "]), FLOATS)
    >>> values.to_pylist(), is_wrong.tolist()
    ([7.0, None, None, 1.0, 8.0, None], [False, True, False, False, False, False])
    """
    likely = _of_first_cell(column, forms)  # a cast that fails costs the most where all cells do
    values = _first_that_reads(column, [likely])
    if values is None:
        bare = stripped(column)
        bare = pc.if_else(pc.equal(pc.binary_length(bare), 0), pa.scalar(None, bare.type), bare)
        if not bare.equals(column):
            return read_cells(bare, forms)
        for find in (lambda column: pc.invert(pc.match_substring_regex(column, likely.pattern)), pc.is_valid):
            is_left = pc.fill_null(find(column), False)
            values = _first_that_reads(pc.if_else(is_left, pa.scalar(None, column.type), column), [likely])
            if values is not None:
                break
        values = pc.replace_with_mask(values, is_left, _each(column.filter(is_left), forms))
    if values.null_count == column.null_count:
        return values, np.zeros(len(column), np.bool_)
    return values, _are_null(values) & ~_are_null(column)


def stripped(texts: pa.Array) -> pa.Array:
    """Return texts without the blanks around them; what are no texts, as they are.

    >>> stripped(pa.array([" a b ", None, "c"])).to_pylist()
    ['a b', None, 'c']
    """
    if types.is_dictionary(texts.type):
        return pa.DictionaryArray.from_arrays(texts.indices, stripped(texts.dictionary))
    if not is_text(texts.type):
        return texts
    kind = pa.large_string() if types.is_large_binary(texts.type) or types.is_large_string(texts.type) else pa.string()
    return pc.ascii_trim(texts.view(kind), _BLANKS).view(texts.type)


def _of_first_cell(column: pa.Array, forms: Sequence[Form]) -> Form:
    """Return the form of the first cell with a value; the first form where none reads it, or there is none."""
    cell = column.slice(int(np.argmin(_are_null(column))) if len(column) else 0, 1)
    return next((form for form in forms if _first_that_reads(cell, [form]) is not None), forms[0])


def _first_that_reads(column: pa.Array, forms: Sequence[Form]) -> pa.Array | None:
    for form in forms:
        try:
            return form.read(column)
        except _ERRORS:
            pass
    return None


def _each(column: pa.Array, forms: Sequence[Form]) -> pa.Array:
    """Return the values of cells, null where no form reads one: of each text once."""
    encoded = column.dictionary_encode()
    texts = encoded.dictionary
    left = np.arange(len(texts))
    found = [(left[:0], forms[0].read(texts.slice(0, 0)))]
    for form in forms if len(left) > _FEW else ():
        is_like = pc.match_substring_regex(texts.take(left), form.pattern).to_numpy(zero_copy_only=False)
        for places, values in _groups(texts, left[is_like], form):
            found.append((places, values))
            left = np.setdiff1d(left, places, assume_unique=True)
    for place in left:
        values = _first_that_reads(texts.slice(place, 1), forms)
        if values is not None:
            found.append((np.array([place]), values))
    order = np.full(len(texts), -1)
    order[np.concatenate([places for places, _ in found])] = np.arange(sum(len(places) for places, _ in found))
    values = pa.concat_arrays([values for _, values in found])
    return values.take(pa.array(order, mask=order < 0)).take(encoded.indices)


def _groups(texts: pa.Array, places: Ids, form: Form) -> Iterator[tuple[Ids, pa.Array]]:
    """Yield places of texts that the form reads, and their values: halves of `places`, and halves of those."""
    parts = [places] if len(places) else []
    while parts:
        part = parts.pop()
        try:
            yield part, form.read(texts.take(part))
        except _ERRORS:
            middle = len(part) // 2
            parts += [part[:middle], part[middle:]] if middle else []


def seconds_since_1970(column: pa.Array) -> pa.Array:
    """Return times as float64 seconds since 1970, with microseconds at most, rounded down: before 1970, too. No time is
    too far for that."""
    if types.is_date32(column.type):
        column = column.cast(pa.timestamp("s"))
    unit = "ms" if types.is_date64(column.type) else column.type.unit
    if unit == "ns":
        column, unit = _floored(column.cast(pa.int64()), 1000), "us"
    return pc.divide(column.cast(pa.int64()).cast(pa.float64(), safe=False), _PER_SECOND[unit])


def _floored(numbers: pa.Array, divisor: int) -> pa.Array:
    """Return integers divided, and rounded down: Arrow rounds towards 0."""
    found = pc.divide(numbers, divisor)
    return pc.subtract(found, pc.less(numbers, pc.multiply(found, divisor)).cast(pa.int64()))


def are_dates(numbers: NDArray[np.float64]) -> Flags:
    """Return [N] where a number's digits are a date, as 20241231: it is hardly meant as seconds (of August 1970)."""
    with np.errstate(invalid="ignore"):
        found: Flags = (numbers >= 1900_01_01) & (numbers < 2100_01_01)
    month, day = numbers[found] // 100 % 100, numbers[found] % 100
    found[found] = (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)
    return found


def _are_null(column: pa.Array) -> Flags:
    found: Flags = column.is_null().to_numpy(zero_copy_only=False)
    return found


def _seconds_in_digits(column: pa.Array) -> pa.Array:
    seconds = column.cast(pa.float64())
    is_date = are_dates(seconds.to_numpy(zero_copy_only=False))
    return pc.if_else(pa.array(is_date), None, seconds) if is_date.any() else seconds


_FLOAT = r"^-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$"
_TIME = (
    "^[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|[12][0-9]))"
    r"(?:[ T](?:[01][0-9]|2[0-3])(?::[0-5][0-9](?::[0-5][0-9](?:\.[0-9]{1,6})?)?)?)?"
)
#: Numbers, or bools, as float64.
FLOATS = (
    Form(_FLOAT, lambda column: column.cast(pa.float64(), safe=False)),
    Form("^(?i:true|false)$", lambda column: column.cast(pa.bool_()).cast(pa.float64())),
)
INTEGERS = (Form(r"^-?[0-9]{1,19}$|^0[xX]", lambda column: column.cast(pa.int64())),)
#: Integers of 64 bits, signed or not, as int64: of an unsigned one the same bits.
INTEGER_WORDS = (
    Form(r"^-?[0-9]{1,18}$|^-[0-9]{19}$|^0[xX]", INTEGERS[0].read),
    Form("^[0-9]{19,20}$", lambda column: column.cast(pa.uint64()).view(pa.int64())),
)
#: Seconds, or times as ISO 8601 writes them, as float64 seconds since 1970.
SECONDS = (
    Form(_FLOAT, _seconds_in_digits),
    Form(f"{_TIME}$", lambda column: seconds_since_1970(column.cast(pa.string()).cast(pa.timestamp("us")))),
    Form(
        f"{_TIME}(?:Z|[-+][0-9:]+)$",
        lambda column: seconds_since_1970(column.cast(pa.string()).cast(pa.timestamp("us", "UTC"))),
    ),
)


@cache
def time_form(written: str) -> Form:
    """Return the form of texts that strptime reads with the format `written`, as timestamps.

    >>> time_form("%d.%m.%Y").read(pa.array(["31.12.2024", "1.2.2024"])).cast(pa.int64()).to_pylist()
    [1735603200000000, 1706745600000000]
    """
    parts = re.split("(%.)", written)
    fields = "".join(_FIELDS[each] if each in _FIELDS else re.escape(each) for each in parts)
    kind = pa.timestamp("us", "UTC" if "%z" in written else None)
    return _strict(f"^{fields}$", lambda cells: pc.strptime(cells, format=written, unit="s").cast(kind))


def seconds_forms(written: str) -> tuple[Form, ...]:
    """Return the forms of times with the format `written` (of strptime, or one of `TIME_UNITS`) as float64 seconds
    since 1970. Texts may be as ISO 8601 writes times, too, unless the format is of digits alone."""
    if written in TIME_UNITS:
        return (Form(_FLOAT, lambda column: pc.divide(column.cast(pa.float64(), safe=False), TIME_UNITS[written])),)
    form = time_form(written)
    own = Form(form.pattern, lambda column: seconds_since_1970(form.read(column)))
    return (own, *(() if are_digits(written) else SECONDS[1:]))


def are_digits(written: str) -> bool:
    """Return whether times with this format are whole numbers."""
    return written in TIME_UNITS or not re.sub("%[YymdHMS]", "", written)


def time_of_seconds(column: pa.Array) -> pa.Array:
    """Return float64 seconds since 1970 as timestamps."""
    micros = pc.round(pc.multiply(column, _PER_SECOND["us"]))
    return micros.cast(pa.int64(), safe=False).cast(pa.timestamp("us"))


@cache
def decimal_form(mark: str, *, has_codes: bool = True) -> Form:
    """Return the form of numbers with this decimal mark, "." or ",", and the other one, a blank or an apostrophe
    between groups of three digits; a sign of a currency, or a percent sign, may stand beside.

    Args:
        has_codes: digits behind a zero, as `02139`, are a number, too.

    >>> decimal_form(",").read(pa.array(["12,50", "1.250 €", "-3"])).to_pylist()
    [12.5, 1250.0, -3.0]
    >>> decimal_form(".").read(pa.array(["$12.5", "1,250"])).to_pylist()
    [12.5, 1250.0]
    """
    other, this = {".": (",", r"\."), ",": (r"\.", ",")}[mark]
    groups, digits = (
        f"[1-9][0-9]{{0,2}}(?:[{other}' \u00a0\u202f][0-9]{{3}})+",
        "[0-9]+" if has_codes else "0|[1-9][0-9]*",
    )
    number = f"(?:{groups}|{digits})(?:{this}[0-9]*)?|[0-9]*{this}[0-9]+"
    pattern = f"^[-+]?(?:{_MONEY} ?)?[-+]?(?:{number}) ?(?:{_MONEY}|%)?$"

    def read(cells: pa.Array) -> pa.Array:
        bare = pc.replace_substring_regex(cells, f"[^-0-9{this}]", "")
        return pc.replace_substring(bare, mark, ".").cast(pa.float64())

    return _strict(pattern, read)


def _strict(pattern: str, read: Callable[[pa.Array], pa.Array]) -> Form:
    """Return the form of cells that have a pattern; `read` takes them as texts."""

    def checked(column: pa.Array) -> pa.Array:
        cells = column.cast(pa.string())
        if pc.all(pc.match_substring_regex(cells, pattern)).as_py() is False:
            raise pa.ArrowInvalid(f"not as {pattern}")
        return read(cells)

    return Form(pattern, checked)


def has_separator(cells: pa.Array, separator: str) -> pa.Array:
    """Return which cells have several values, with this separator between, or may have one in brackets."""
    if separator == BRACKETS:
        return pc.match_substring_regex(cells, _BRACKETED)
    return pc.match_substring(cells, separator)


def split_cells(cells: pa.Array, separator: str) -> pa.Array:
    """Return the values of each cell: lists of texts.

    >>> split_cells(pa.array(["[1, 2]", "['a', 'b, c']", "[]", None, "(7,)"]), BRACKETS).to_pylist()
    [['1', '2'], ['a', 'b, c'], [], None, ['7']]
    >>> split_cells(pa.array(["a|b"]), "|").to_pylist()
    [['a', 'b']]
    """
    if separator != BRACKETS:
        return pc.split_pattern(cells, separator)
    bare = pc.replace_substring_regex(cells.cast(pa.string()), r"^\s*[\[({]\s*|\s*,?\s*[\])}]\s*$", "")
    is_quoted = pc.match_substring_regex(bare, r"""^['"](?s:.*)['"]$""")
    quoted = pc.replace_substring_regex(bare, r"""['"]\s*,\s*['"]""", "\x1f")
    quoted = pc.replace_substring_regex(quoted, r"""^['"]|['"]$""", "")
    plain = pc.replace_substring_regex(bare, """['"]""", "")
    has_commas = pc.match_substring(plain, ",")
    commas = pc.replace_substring_regex(plain, r"\s*,\s*", "\x1f")
    plain = pc.if_else(has_commas, commas, pc.replace_substring_regex(plain, r"\s+", "\x1f"))  # as numpy prints arrays
    lists = pc.split_pattern(pc.if_else(is_quoted, quoted, plain), "\x1f")
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    is_empty = pc.fill_null(pc.equal(bare, ""), False).to_numpy(zero_copy_only=False)
    values = lists.flatten().filter(pa.array(~np.repeat(is_empty, lengths)))
    offsets = np.append(0, np.cumsum(np.where(is_empty, 0, lengths))).astype(np.int32)
    mask = lists.is_null() if lists.null_count else None
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=mask)
