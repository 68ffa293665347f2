"""Cells of text as numbers, integers and times: a column at once, and a bad cell at the cost of a few.

Only Arrow's casts decide what a cell is. They fail as a whole; so of a column with a bad cell, cells that look alike
are read at once, and what still fails is read alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import types

from embershard.data.hashing import Ids
from embershard.data.sample_bits import Flags

_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6}
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
    """Return the values [n] of cells, each written in the first form that reads it; and which [n] none does.

    >>> values, is_wrong = read_cells(pa.array(["7", "x", None, "true"]), FLOATS)
    >>> values.to_pylist(), is_wrong.tolist()
    ([7.0, None, None, 1.0], [False, True, False, False])
    """
    likely = _of_first_cell(column, forms)  # a cast that fails costs the most where all cells do
    values = _first_that_reads(column, [likely])
    if values is None:
        for find in (lambda column: pc.invert(pc.match_substring_regex(column, likely.pattern)), pc.is_valid):
            is_left = pc.fill_null(find(column), False)
            values = _first_that_reads(pc.if_else(is_left, pa.scalar(None, column.type), column), [likely])
            if values is not None:
                break
        values = pc.replace_with_mask(values, is_left, _each(column.filter(is_left), forms))
    if values.null_count == column.null_count:
        return values, np.zeros(len(column), np.bool_)
    return values, _are_null(values) & ~_are_null(column)


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
