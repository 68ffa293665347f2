"""From what columns hold to the settings of a run: suggestions, each with its reason."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from itertools import count
from math import exp, floor
from typing import Any

import numpy as np
from pyarrow import types

from embershard.data.block import short
from embershard.data.config import TIME_ROWS
from embershard.data.sources.table.decode import MOST_BYTES
from embershard.data.sources.table.raw import is_list, is_text, is_time, typed_name
from embershard.data.sources.table.survey import (
    MOST_OTHERS,
    SECONDS_PER_DAY,
    ColumnSurvey,
    DistinctCount,
    NumberSummary,
)
from embershard.errors import ConfigError

_LABELS = ("label", "click", "clicked", "is_click", "target", "converted", "conversion", "purchase", "y", "rating")
_ID_WORDS = {"id", "ids", "uid", "uuid", "key", "code", "zip", "hash", "user", "users", "item", "items", "product"}
_ID_WORDS |= {"products", "category", "categories", "genre", "genres", "brand", "gender", "country", "region", "city"}
_ID_WORDS |= {"store", "shop", "device", "campaign", "ad", "advertiser", "publisher", "site", "page"}
_LEAST_LONG = 2.0**53  # integers from here on are no numbers: float64 has not all of them
_LEAST_TOO_LARGE = 2.0**63  # no integer, for ids in floats
_TIME_WORDS = {"time", "timestamp", "ts", "at", "date", "datetime"}
_EPOCH_SECONDS = (1e8, 1e10)  # 1973 to 2286
_EPOCH_MILLISECONDS = (1e11, 1e13)
_DATE_DIGITS = (19000101, 21001231)  # as 20241231
#: A column of which nearly every row has another value is no feature.
_UNIQUE_SHARE, _UNIQUE_ROWS = 0.95, 1000
_ROWS_PER_VALUE, _MANY_VALUES, _ROWS_PER_ONE_OF_MANY = 10, 1_000_000, 2
_LEAST_ROWS = 16
_TRIED = 200
_MOST_CLASSES = 20
_VALUES_OF_CLICKS = 2
_SKEWED = 5.0  # standard deviations from the mean to the largest number
_QUANTILE_PARTS = 16
_PARTS_SHARE = 0.05
_DIGITS = 6
_SHOWN_OTHERS = 3
_UNIQUE = "nearly every row has another value"
#: Settings of features, by their names.
_Features = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Suggestion:
    """A column as features of a run.

    Attributes:
        features: settings of each feature, by its name; none where the column is left out.
        why: what the column holds, and what follows from it.
        lookups: rows that a sample looks up, at most.
        may_be_result: it has 0 and 1 only: `features` are what it would be, and it is left out.
    """

    column: str
    features: _Features
    why: str
    lookups: int
    may_be_result: bool = False


@dataclass(frozen=True)
class LabelSuggestion:
    """The column of labels.

    Attributes:
        at_least: from which number on a label would be 1; None: the column has 0 and 1.
        mean: where the numbers themselves are predicted, since the column has more than two values: their mean.
        why: what the column holds.
        classes: all numbers that it has, where these are few, whole and without a gap.
    """

    column: str
    at_least: float | None
    mean: float | None
    why: str
    classes: tuple[int, ...] = ()


def suggest_label(columns: Mapping[str, ColumnSurvey], wanted: str | None) -> LabelSuggestion:
    """Return the column of labels: `wanted`, or one that is named as labels are, or the only one of 0 and 1.

    Raises:
        ConfigError: none is, or `wanted` is no column of numbers.
    """
    numeric = {name: each for name, each in columns.items() if each.numbers.count and not is_list(each.type)}
    numeric = {name: each for name, each in numeric.items() if not is_text(each.inner) and not is_time(each.inner)}
    binary = [name for name, each in numeric.items() if (each.numbers.least, each.numbers.largest) == (0, 1)]
    binary = [name for name in binary if numeric[name].numbers.are_whole]
    named = [each for name in _LABELS for each in numeric if typed_name(each)[0].lower() == name]
    found = wanted or next(iter(named or (binary if len(binary) == 1 else [])), None)
    if found is None or found not in numeric:
        what = "no column looks like a label" if found is None else f"{found!r} is no column of numbers"
        some = ", ".join(list(numeric)[:20]) or "none"
        if found is not None and "," in found:
            what += ". Give one; for several, write label = [...] in the TOML file and leave them out of its features"
        raise ConfigError(f"--label: {what}. Name the column to predict; columns of numbers: {some}.")
    numbers = numeric[found].numbers
    said = f"{numeric[found].inner}, {numbers.least:g} to {numbers.largest:g}, mean {numbers.mean:.4g}"
    if no_label := num_bad_labels(numeric[found]):
        said += f"; {no_label:,} rows have no finite number, and are bad rows"
    if found in binary:
        return LabelSuggestion(found, None, None, said)
    middle = (numbers.least + numbers.largest) / 2
    least = float(floor(middle) + 1) if numbers.are_whole else middle
    why = f"{said}; {numbers.share_at_least(least):.1%} are at least {least:g}"
    has_many = numeric[found].values.estimate > _VALUES_OF_CLICKS
    few = range(int(numbers.least), int(numbers.largest) + 1) if numbers.are_whole else range(0)
    classes = tuple(few) if 2 < len(few) == numeric[found].values.estimate <= _MOST_CLASSES else ()
    return LabelSuggestion(found, least, _rounded(numbers.mean) if has_many else None, why, classes)


def num_bad_labels(column: ColumnSurvey) -> int:
    """Return the rows that are bad with this column as the label."""
    return column.missing + column.null_cells.total() + column.num_bad


def others_of(column: ColumnSurvey) -> str:
    """Say how many of a column's texts are of its type, and what the others are; or ""."""
    if not column.odd_cells:
        return ""
    kind = "times" if is_time(column.inner) else "integers" if types.is_integer(column.inner) else "numbers"
    present = column.present - column.null_cells.total()
    share = min(floor(1e4 * (1 - column.odd_cells.total() / present)) / 1e2, 99.99)
    some = column.odd_cells.most_common(_SHOWN_OTHERS)
    shown = ", ".join(f"{short(text)} ({count:,})" for text, count in some)
    return f"{share:g} % are {kind}; others: {shown}{', ...' if len(some) < len(column.odd_cells) else ''}"


def suggest_features(column: ColumnSurvey, taken: Container[str], wanted: Container[str] = ()) -> Suggestion:
    """Return how to use a column; `taken` are names that its features must not have, `wanted` columns that are no
    results although they hold 0 and 1."""
    plain = re.sub(r"[^\w-]+", "_", typed_name(column.name)[0]).strip("_") or "feature"
    found, why, lookups = _features(plain, column)
    endings = {each.removeprefix(plain): settings for each, settings in found.items()}
    names = (plain if number == 1 else f"{plain}_{number}" for number in count(1))
    free = next(name for name in names if not any(name + ending in taken for ending in endings))
    features = {free + ending: settings for ending, settings in endings.items()}
    for name, settings in features.items():
        if name != column.name:
            settings["column"] = column.name
    said = f"{column.title}; {distinct_values(column)} distinct, {column.missing:,} missing"
    for more in (others_of(column), ", ".join(f"{n:,} say {word}" for word, n in column.null_cells.items())):
        said += f"; {more}" if more else ""
    numbers = column.numbers
    is_flag = bool(numbers.count) and numbers.least >= 0 and numbers.largest <= 1 and numbers.are_whole
    may_be_result = column.name not in wanted and is_flag and all(v["kind"] == "dense" for v in features.values())
    if features and may_be_result:
        why = "left out: 0 and 1 only, as a result has. If it is known before the label: take the # away"
        return Suggestion(column.name, features, f"{said}; {why}", 0, may_be_result=True)
    return Suggestion(column.name, features, f"{said}; {why if features else f'left out: {why}'}", lookups)


def _features(name: str, column: ColumnSurvey) -> tuple[_Features, str, int]:
    """Return the features of a column, the first one named `name`; what follows from what it holds; and their rows per
    sample."""
    inner, numbers = column.inner, column.numbers
    words = set(re.split(r"[\W_]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", column.name).lower()))
    if column.is_bytes:
        return {}, "its values are bytes that are not UTF-8 text", 0
    if reason := _refused(column):
        return {}, reason, 0
    if not column.is_readable:
        return {}, f"no feature is made of {column.title}", 0
    if not column.values.estimate and not column.too_long[""]:
        return {}, "it has no values", 0
    if column.values.estimate == 1 and not column.missing and not column.parts:
        return {}, "it has one value in all rows", 0
    if column.declared == "float_seq":
        return {}, "no feature is made of lists of numbers", 0
    if column.declared == "token" and not types.is_integer(inner):
        return _text(name, column)
    is_whole_number = types.is_integer(inner) and not is_list(column.type)
    if is_whole_number and bool(words & _TIME_WORDS) and _are_within(numbers, _EPOCH_SECONDS):
        return _time(name, column)
    if is_time(inner) and not is_list(column.type):
        return _time(name, column)
    if is_text(inner):
        return _text(name, column)
    is_number = types.is_integer(inner) or types.is_floating(inner) or types.is_decimal(inner)
    is_long = types.is_integer(inner) and max(abs(numbers.least), abs(numbers.largest)) >= _LEAST_LONG
    is_named = bool(words & _ID_WORDS) or is_list(column.type) or column.declared == "token"
    is_named = is_named and column.declared != "float"
    if is_number and numbers.are_whole and (is_named or is_long):
        return _ids(name, column)
    if is_list(column.type):
        return {}, f"no feature is made of {column.title}", 0
    features, why = _number(name, column)
    if is_whole_number and _are_within(numbers, _DATE_DIGITS):
        why += "; if these are dates, write them as 2024-12-31"
    elif is_whole_number and bool(words & _TIME_WORDS) and _are_within(numbers, _EPOCH_MILLISECONDS):
        why += "; if these are milliseconds since 1970, divide them by 1000: seconds are taken as times"
    return features, why, 0


def _refused(column: ColumnSurvey) -> str:
    """Say which of a column's values training would refuse, and what to do; or ""."""
    remedy = "the run would stop at these rows. Mend them, or make them missing (in text files: --null CELL)"
    if column.num_bad <= MOST_OTHERS * column.present:
        return ""
    if column.num_refused and not is_text(column.inner):
        what = "times after 5138-11-16 or long before 1970" if is_time(column.inner) else "infinite or above 3.4e38"
        return f"{column.num_refused:,} of its values are {what}: {remedy}"
    long = column.too_long[""]
    if long and is_text(column.inner) and _parts(column) is None:
        return f"{long:,} of its values are longer than {MOST_BYTES:,} bytes, too long to be told apart: {remedy}"
    return ""


def _are_within(numbers: NumberSummary, limits: tuple[float, float]) -> bool:
    return limits[0] <= numbers.least <= numbers.largest <= limits[1]


def _time(name: str, column: ColumnSurvey) -> tuple[_Features, str, int]:
    """As `_features`, of a column of times: the day is told by its distance from others and the weekday, which repeat;
    the hour where there is a clock."""
    numbers, units = column.numbers, list(TIME_ROWS)
    said = f"{day_of(numbers.least)} to {day_of(numbers.largest)}, in UTC"
    if not numbers.are_days:
        why = f"a time, {said}"
        settings: dict[str, Any] = {}
    else:
        why = f"dates without a clock, {said}: the hour would be 0 in all rows"
        units.remove("hour")
        mean, std = numbers.mean / SECONDS_PER_DAY, numbers.std / SECONDS_PER_DAY or 1.0
        settings = {f"{name}_days": {"kind": "dense", "scale": "days", "mean": _rounded(mean), "std": _rounded(std)}}
    settings |= {f"{name}_{unit}": {"kind": "sparse", "mapping": unit} for unit in units}
    return settings, why, len(units)


def day_of(seconds: float) -> str:
    """Return the day of a time in seconds since 1970, in UTC.

    >>> day_of(86_400.0)
    '1970-01-02'
    """
    return str(np.datetime64(int(seconds // SECONDS_PER_DAY), "D"))


def distinct_values(column: ColumnSurvey) -> str:
    """Return the number of distinct values as text: `~` is an estimate, `?` where values cannot be told apart."""
    if not column.is_readable or column.too_long[""]:
        return "?"
    return f"{'' if column.values.is_exact else '~'}{column.values.estimate:,}"


def _text(name: str, column: ColumnSurvey) -> tuple[_Features, str, int]:
    """As `_features`, of a column of texts, or of lists of them."""
    parted = _parts(column)
    if parted is not None:
        separator, distinct, most = parted
        settings, why = _category("text", distinct, None)
        about = "" if distinct.is_exact else "~"
        why = f"up to {most} values in a cell, {about}{distinct.estimate:,} distinct; {why}"
        return {name: {**settings, "separator": separator}}, why, most
    if _is_unique(column):
        return {}, _UNIQUE, 0
    settings, why = _category("text", column.values, None)
    return {name: settings}, f"{_bag(column)}{why}", column.most


def _ids(name: str, column: ColumnSurvey) -> tuple[_Features, str, int]:
    """As `_features`, of a column of whole numbers that are ids, or of lists of them."""
    limits = column.numbers.least, column.numbers.largest
    is_large = types.is_floating(column.inner) and max(abs(limit) for limit in limits) >= _LEAST_TOO_LARGE
    if types.is_decimal(column.inner) or is_large:
        return {}, f"ids are not read of {'large ' if is_large else ''}{column.inner}: write integers, or text", 0
    if _is_unique(column):
        return {}, _UNIQUE, 0
    if types.is_integer(column.inner):
        settings, why = _category("hash", column.ids, limits)
    else:
        settings, why = _category("text", column.values, None)
    return {name: settings}, _bag(column) + why, column.most


def _is_unique(column: ColumnSurvey) -> bool:
    many = column.present >= _UNIQUE_ROWS and column.values.estimate >= _UNIQUE_SHARE * column.present
    return many and not is_list(column.type)


def _bag(column: ColumnSurvey) -> str:
    return f"up to {column.most} values in a row; " if is_list(column.type) else ""


def _number(name: str, column: ColumnSurvey) -> tuple[_Features, str]:
    numbers = column.numbers
    why = f"{numbers.least:g} to {numbers.largest:g}, mean {numbers.mean:.4g}, standard deviation {numbers.std:.4g}"
    settings: dict[str, Any] = {"kind": "dense"}
    if (numbers.least, numbers.largest) != (0, 1) or not numbers.are_whole:
        quantiles = [_rounded(each) for each in numbers.quantiles(_QUANTILE_PARTS)]
        is_skewed = numbers.largest > numbers.mean + _SKEWED * numbers.std
        if is_skewed and numbers.least >= 0:
            settings["scale"] = "log1p"
        elif is_skewed and len(set(quantiles)) > 1:
            settings |= {"scale": "quantile", "quantiles": sorted(set(quantiles))}
        elif _rounded(numbers.std) > 0:
            settings |= {"scale": "standardize", "mean": _rounded(numbers.mean), "std": _rounded(numbers.std)}
        elif numbers.least:  # one value, or none: 1, or 0
            settings |= {"scale": "standardize", "mean": 0.0, "std": abs(_rounded(numbers.least))}
    return {name: settings}, why


def _category(mapping: str, distinct: DistinctCount, span: tuple[float, float] | None) -> tuple[dict[str, Any], str]:
    """Return the settings of a sparse feature, and what they do to its values.

    Args:
        mapping: "text" or "hash", of whose values `distinct` has the hashes.
        span: least and largest integer; None: values are no integers.
    """
    count = distinct.estimate
    if span is not None and span[0] >= 0 and span[1] + 2 <= max(4 * count, _LEAST_ROWS):
        last = int(span[1])
        return {"kind": "sparse", "mapping": "modulo", "num_rows": last + 2}, f"a row for each of 0 to {last:,}"
    each = _ROWS_PER_VALUE if count <= _MANY_VALUES else _ROWS_PER_ONE_OF_MANY
    num_rows = max(each * count, _LEAST_ROWS)
    if not distinct.is_exact:
        num_rows = int(float(f"{num_rows:.1e}"))  # two digits
        why = f"about {1 - exp(-count / num_rows):.0%} of them share a row with another"
    else:
        num_rows, sharing = _fewest_collisions(distinct, num_rows)
        why = f"{sharing:,} of them share a row with another" if sharing else "no two share a row"
    return {"kind": "sparse", "mapping": mapping, "num_rows": num_rows}, why


def _fewest_collisions(distinct: DistinctCount, num_rows: int) -> tuple[int, int]:
    """Return a number of rows, `num_rows` or a few more, by which the fewest values share a row; and how many do."""
    best = (len(distinct.kept) + 1, num_rows)
    for tried in range(num_rows, num_rows + _TRIED):
        rows, counts = np.unique(distinct.kept % np.uint64(tried - 1), return_counts=True)
        best = min(best, (int(counts[counts > 1].sum()), tried))
        if len(rows) == len(distinct.kept):
            break
    return best[1], best[0]


def _parts(column: ColumnSurvey) -> tuple[str, DistinctCount, int] | None:
    """Return the separator of the values in a column's cells, those values, and the most in a cell."""
    for separator, (distinct, cells, most, _) in column.parts.items():
        cells_differ = distinct.estimate < column.values.estimate + column.too_long[""]
        is_declared = column.declared == "token_seq"
        if is_declared or (cells >= _PARTS_SHARE * column.present and cells_differ and not column.too_long[separator]):
            return separator, distinct, most
    return None


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
