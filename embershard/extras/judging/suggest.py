"""From what columns hold to the settings of a run: suggestions, each with its reason."""

from __future__ import annotations

import re
import shlex
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import exp, floor
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import types

from embershard.data.block import short
from embershard.data.config import TIME_ROWS
from embershard.data.sources.table.cells import TIME_FORMATS, read_cells, seconds_forms, time_form
from embershard.data.sources.table.counts import SECONDS_PER_DAY, DistinctCount, NumberSummary
from embershard.data.sources.table.decode import MOST_BYTES, MOST_SECONDS
from embershard.data.sources.table.raw import is_list, is_text, is_time, typed_name
from embershard.data.sources.table.survey import MOST_OTHERS, ColumnSurvey
from embershard.errors import ConfigError
from embershard.extras.judging.choices import ColumnChoice, LabelChoice
from embershard.extras.judging.kinds import Facts, Holds, Judgement, Parts, judge, near_lists, word_of, words

_LEAST_TOO_LARGE = 2.0**63  # no integer, for ids in floats
_ROWS_PER_VALUE, _MANY_VALUES, _ROWS_PER_ONE_OF_MANY = 10, 1_000_000, 2
_LEAST_ROWS = 16
_TRIED = 200
_MOST_CLASSES = 20
_VALUES_OF_CLICKS = 2
_SKEWED = 5.0  # standard deviations from the mean to the largest number
_QUANTILE_PARTS = 16
_DIGITS = 6
_SHOWN_OTHERS = 3
#: Settings of features, by their names.
_Features = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Suggestion:
    """A column as features of a run.

    Attributes:
        features: settings of each feature, by its name; none where the column is left out.
        why: what the column holds, and what follows from it.
        lookups: rows that a sample looks up, at most.
        judgement: what the column is for. One that is a result is left out: `features` are what it would be.
        written: of times and numbers that are not written as usual, how they are: `format` or `decimal`.
    """

    column: str
    features: _Features
    why: str
    lookups: int
    judgement: Judgement
    written: Mapping[Literal["format", "decimal"], str] = field(default_factory=dict)

    @property
    def is_used(self) -> bool:
        return bool(self.features) and self.judgement.kind != "leak"

    @property
    def use(self) -> str:
        """What becomes of the column, in words."""
        kind, sure = self.judgement.kind, self.judgement.sure
        return f"{kind}, {sure}" if self.is_used else f"left out: {kind}"


@dataclass(frozen=True)
class LabelSuggestion:
    """The column of labels.

    Attributes:
        at_least: from which number on a label would be 1; None: the column has 0 and 1.
        mean: where the numbers themselves are predicted, since the column has more than two values: their mean.
        why: what the column holds.
        classes: all numbers that it has, where these are few, whole and without a gap.
        text: the label is 1 where the column has this text.
    """

    column: str
    at_least: float | None
    mean: float | None
    why: str
    classes: tuple[int, ...] = ()
    text: str | None = None


def facts_of(column: ColumnSurvey, *, is_known: bool = False, result: str = "") -> Facts:
    """Return what of a column decides its kind.

    Args:
        is_known: the user says that it is no result.
        result: why it is one.
    """
    numbers, about = column.numbers, column.values
    name, declared = typed_name(column.name)
    distinct = max(about.estimate, column.ids.estimate if types.is_integer(column.inner) else 0)
    parts = {
        name: Parts(
            each.cells,
            each.distinct.estimate,
            each.values / max(column.present, 1),
            each.most,
            each.digits / each.values,
        )
        for name, each in column.parts.items()
        if each.cells and (not each.too_long or declared == "token_seq")
    }
    own = column.others.get(column.written)
    ties = [each for each in column.others if each in TIME_FORMATS and column.others[each] == own]
    return Facts(
        name,
        holds(column),
        rows=column.rows,
        present=column.present - column.null_cells.total(),
        distinct=distinct + column.too_long,
        declared=declared,
        least=numbers.least if numbers.count else 0.0,
        largest=numbers.largest if numbers.count else 0.0,
        sample=numbers.sample,
        has_point=not types.is_integer(column.inner),
        parts=parts,
        examples=column.examples,
        urls=column.urls / max(column.present, 1),
        time_format=column.written,
        other_format=next((each for each in ties if each != column.written), ""),
        is_known=is_known,
        result=result,
    )


def holds(column: ColumnSurvey) -> Holds:
    """Return what a column's values are."""
    inner, numbers = column.inner, column.numbers
    if is_list(column.type):
        is_float = types.is_floating(inner) or types.is_decimal(inner)
        return "lists of fractions" if is_float and not numbers.are_whole else "lists"
    if is_time(inner):
        return "times"
    if types.is_boolean(inner):
        return "bools"
    if is_text(inner):
        return "texts"
    if types.is_integer(inner):
        return "integers"
    return "integers" if numbers.count and numbers.are_whole and not column.written else "fractions"


def suggest_label(columns: Mapping[str, ColumnSurvey], wanted: LabelChoice | None) -> LabelSuggestion:
    """Return the column of labels: `wanted`, or one that is named as labels are, or the only one of 0 and 1.

    Raises:
        ConfigError: none is, or `wanted` is neither numbers nor a text of two.
    """
    numeric = {name: each for name, each in columns.items() if each.numbers.count and not is_list(each.type)}
    numeric = {name: each for name, each in numeric.items() if not is_text(each.inner) and not is_time(each.inner)}
    binary = [name for name, each in numeric.items() if (each.numbers.least, each.numbers.largest) == (0, 1)]
    binary = [name for name in binary if numeric[name].numbers.are_whole]
    yes = {name: text for name, each in columns.items() if (text := _text_of_yes(each)) is not None}
    some = ", ".join(list(numeric)[:20]) or "none"
    if wanted is None:
        plain = {each: typed_name(each)[0].lower() for each in columns}
        named = [each for name in words()["label"]["names"] for each in (*numeric, *yes) if plain[each] == name]
        named = [each for each in named if plain[each] != "y" or each in yes or each in binary]  # x, y and z are places
        results = [each for each in binary if judge([facts_of(numeric[each])])[0].kind == "leak"]
        one = next((each for each in (results, binary) if len(each) == 1), [])
        found = next(iter([*named, *one]), None)
        if found is None:
            ways = " or ".join(f"--label {shlex.quote(each)}" for each in binary[:4])
            of_two = f", of those of 0 and 1: {ways}" if ways else ""
            raise ConfigError(
                f"--label: no column looks like a label. Name the column to predict{of_two}; columns of numbers: "
                f"{some}.{_of_two_texts(columns)}"
            )
        wanted = LabelChoice(found)
    column = columns[wanted.column]
    if wanted.text is not None or (wanted.column not in numeric and wanted.column in yes):
        return _label_of_texts(column, wanted.text or yes[wanted.column])
    if wanted.column not in numeric and is_text(column.inner) and len(column.texts or ()) == 2:
        return _label_of_rarer(column)
    if wanted.column not in numeric:
        texts = [short(each) for each in list(column.texts or ())[:2]]
        hint = f" Or the text that is 1: {' or '.join(_ways(column))}" if texts else ""
        got = f", but has {' and '.join(texts)}" if texts else ""
        raise ConfigError(
            f"--label: {wanted.column!r} is no column of numbers{got}. Name the column to predict; columns of numbers: "
            f"{some}.{hint}"
        )
    return _label_of_numbers(column, wanted.at_least, is_binary=wanted.column in binary)


def _of_two_texts(columns: Mapping[str, ColumnSurvey]) -> str:
    """Name the texts of columns that have two, or else of the one that has fewest: each may be the label's 1."""
    counted = sorted((each for each in columns.values() if each.texts and is_text(each.inner)), key=_num_texts)
    chosen = [each for each in counted if _num_texts(each) == 2][:3] or counted[:1]
    ways = [way for each in chosen for way in _ways(each)]
    return f" Or the text that is 1: {' or '.join(ways)}." if ways else ""


def _num_texts(column: ColumnSurvey) -> int:
    return len(column.texts or ())


def _ways(column: ColumnSurvey) -> list[str]:
    """Return the options that take one of a column's texts for a label of 1."""
    return [f"--label {shlex.quote(f'{column.name}={text}')}" for text in list(column.texts or ())[:2]]


def _text_of_yes(column: ColumnSurvey) -> str | None:
    """Return which of a column's two texts means 1; None: it has others."""
    texts = list(column.texts or ()) if is_text(column.inner) else []
    yes = [each for each in texts if each.lower() in words()["label"]["yes"]]
    return yes[0] if len(texts) == 2 and len(yes) == 1 else None


def _label_of_rarer(column: ColumnSurvey) -> LabelSuggestion:
    """Return a label that is 1 for the rarer of a column's two texts, as what is to be predicted mostly is."""
    assert column.texts is not None
    (rarer, count), (other, _) = sorted(column.texts.items(), key=lambda each: (each[1], each[0]))
    why = f"1 where it is {short(rarer)}, as are {count / column.present:.1%}; --label COL=TEXT takes {short(other)}"
    return LabelSuggestion(column.name, None, None, why, text=rarer)


def _label_of_texts(column: ColumnSurvey, text: str) -> LabelSuggestion:
    counts = column.texts
    if counts is not None and text not in counts and is_text(column.inner):
        near = ", ".join(short(each) for each in list(counts)[:5])
        raise ConfigError(f"--label {column.name}={text}: no cell has this text; there are {near}.")
    share = f", as are {counts[text] / column.present:.1%}" if counts and text in counts else ""
    return LabelSuggestion(column.name, None, None, f"1 where it is {short(text)}{share}", text=text)


def _label_of_numbers(column: ColumnSurvey, at_least: float | None, *, is_binary: bool) -> LabelSuggestion:
    numbers = column.numbers
    said = f"{column.inner}, {numbers.least:g} to {numbers.largest:g}, mean {numbers.mean:.4g}"
    if no_label := num_bad_labels(column):
        said += f"; {no_label:,} rows have no finite number, and are bad rows"
    if at_least is not None:
        return LabelSuggestion(column.name, at_least, None, f"{said}; {numbers.share_at_least(at_least):.1%} are 1")
    if is_binary:
        return LabelSuggestion(column.name, None, None, said)
    middle = (numbers.least + numbers.largest) / 2
    least = float(floor(middle) + 1) if numbers.are_whole else middle
    why = f"{said}; {numbers.share_at_least(least):.1%} are at least {least:g}"
    has_many = column.values.estimate > _VALUES_OF_CLICKS
    few = range(int(numbers.least), int(numbers.largest) + 1) if numbers.are_whole else range(0)
    classes = tuple(few) if 2 < len(few) == column.values.estimate <= _MOST_CLASSES else ()
    return LabelSuggestion(column.name, least, _rounded(numbers.mean) if has_many else None, why, classes)


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


def near_miss(column: ColumnSurvey, judgement: Judgement | None = None) -> str:
    """Say that many, but too few, of a column's texts are times or numbers, or that they may be lists, and what makes
    them so; or ""."""
    if column.kind is not None or not is_text(column.inner):
        return ""
    if not column.others:
        return "" if judgement is None else _near_list(column, judgement)
    name = min(column.others, key=lambda each: column.others[each].total())
    others = column.others[name]
    share = 1 - others.total() / max(column.present - column.missing_words.total(), 1)
    some = [text for text, _ in others.most_common() if text != "..."][:_SHOWN_OTHERS]
    said = f"{floor(1e2 * share)} % are {{}}; others: {', '.join(map(short, some))}"
    if not is_time(column.types[name][0]):
        if word_of(column.name)[0] in ("id", "thing", "category"):
            return ""  # codes, some of which have letters
        return (
            f"{said.format('numbers')}. To take them as missing: --number {shlex.quote(column.name)}"
            if share < 1
            else ""
        )
    formats = (each for each in TIME_FORMATS if read_cells(pa.array(some), [time_form(each)])[1].sum() == 0)
    own = name if name in TIME_FORMATS else next(formats, "")
    return f"{said.format('times')}: --time {shlex.quote(f'{column.name}:{own}' if own else column.name)}"


def _near_list(column: ColumnSurvey, judgement: Judgement) -> str:
    if not (separator := near_lists(facts_of(column), judgement)):
        return ""
    share, sign = floor(1e2 * column.parts[separator].cells / column.present), repr(separator)[1:-1]
    remedy = f"--list {shlex.quote(f'{column.name}:{sign}')}"
    return f"{share} % have {short(separator)} in them: {short(column.examples[0])}. If these are lists: {remedy}"


def suggest_features(
    column: ColumnSurvey, judgement: Judgement, taken: Container[str], choice: ColumnChoice | None = None
) -> Suggestion:
    """Return how to use a column.

    Args:
        judgement: what it is for.
        taken: names that its features must not have.
        choice: what the user says, which wins.

    Raises:
        ConfigError: the column cannot be what the user says.
    """
    if choice is not None:
        judgement = _chosen(column, choice, judgement)
    plain = re.sub(r"[^\w-]+", "_", typed_name(column.name)[0]).strip("_") or "feature"
    found, why, lookups, written = _features(plain, column, judgement)
    endings = {each.removeprefix(plain): settings for each, settings in found.items()}
    names = (plain if number == 1 else f"{plain}_{number}" for number in count(1))
    free = next(name for name in names if not any(name + ending in taken for ending in endings))
    features = {free + ending: settings for ending, settings in endings.items()}
    for name, settings in features.items():
        if name != column.name:
            settings["column"] = column.name
    if choice is not None and choice.kind != "drop" and not features:
        drop = f"--drop {shlex.quote(column.name)}"
        raise ConfigError(f"--{choice.kind} {column.name}: {why}. Name another kind, or leave it out: {drop}")
    said = f"{column.title}; {distinct_values(column)} distinct, {column.missing:,} missing"
    for more in (others_of(column), ", ".join(f"{n:,} say {word}" for word, n in column.null_cells.items())):
        said += f"; {more}" if more else ""
    judged = f"{judgement.kind}, {judgement.sure}: {judgement.why}"
    if judgement.kind == "leak":
        judged += ". Left out: if it is known before the label, take the # away"
        return Suggestion(column.name, features, f"{said}; {judged}", 0, judgement)
    why = f"{judged}; {why}" if features and why else f"left out: {why or judged}"
    return Suggestion(column.name, features, f"{said}; {why}", lookups, judgement, written)


def _chosen(column: ColumnSurvey, choice: ColumnChoice, judgement: Judgement) -> Judgement:
    """Return the judgement that the user gives.

    Raises:
        ConfigError: the column holds what cannot be that.
    """
    got = ", ".join(short(each) for each in column.examples[:_SHOWN_OTHERS]) or column.title
    at, drop = f"--{choice.kind} {column.name}", f"Or leave it out: --drop {shlex.quote(column.name)}"
    why = f"--{choice.kind}"
    if choice.kind == "list":
        separator = choice.detail or judgement.separator
        if not is_list(column.type) and (separator is None or not is_text(column.type)):
            example = f"--list {shlex.quote(f'{column.name}:,')}"
            raise ConfigError(f"{at}: got {got}; needed the separator, too, for instance {example}. {drop}")
        return Judgement("list", "sure", why, separator=None if is_list(column.type) else separator)
    if choice.kind == "time":
        if is_text(column.inner) or types.is_boolean(column.inner):
            example = f"--time {shlex.quote(f'{column.name}:%d.%m.%Y')}"
            near = near_miss(column) or f"needed how they are written: {example}"
            raise ConfigError(f"{at}: got {got}; {near}. {drop}")
        form = choice.detail or column.written or (judgement.format if judgement.kind == "time" else "")
        return Judgement("time", "sure", why, format=form)
    if choice.kind == "number" and (is_list(column.type) or (is_text(column.inner) and column.kind is None)):
        raise ConfigError(f"{at}: got {got}; needed numbers. {drop}")
    return Judgement(choice.kind, "sure", why)


_Found = tuple[_Features, str, int, Mapping[Literal["format", "decimal"], str]]


def _features(name: str, column: ColumnSurvey, judgement: Judgement) -> _Found:
    """Return the features of a column, the first one named `name`; what is to be known of them; their rows per sample;
    and how its cells are written."""
    inner, kind = column.inner, judgement.would_be or judgement.kind
    if column.is_bytes:
        return {}, "its values are bytes that are not UTF-8 text", 0, {}
    if reason := _refused(column, judgement):
        return {}, reason, 0, {}
    if not column.is_readable and (kind != "constant" or not types.is_null(inner)):
        return {}, f"no feature is made of {column.title}", 0, {}
    if kind in ("constant", "drop"):
        return {}, judgement.why, 0, {}
    if kind == "time":
        return _time(name, column, judgement.format)
    if kind == "list" and judgement.separator is not None:
        return *_parted(name, column, judgement.separator), {}
    if kind == "number" and not is_text(inner) and not is_list(column.type):
        written = column.written
        return *_number(name, column), 0, {"decimal": written} if written in (".", ",") else {}
    if is_text(inner) or types.is_boolean(inner) or is_time(inner) or column.written:
        settings, why = _category("text", column.values, None)
        settings = settings | ({"stripped": True} if column.blanks and is_text(inner) else {})
        return {name: settings}, _bag(column) + why, column.most, {}
    return *_ids(name, column), {}


def _refused(column: ColumnSurvey, judgement: Judgement) -> str:
    """Say which of a column's values training would refuse, and what to do; or ""."""
    remedy = "the run would stop at these rows. Mend them, or make them missing (in text files: --null CELL)"
    if column.num_bad <= MOST_OTHERS * column.present:
        return ""
    if column.num_refused and not is_text(column.inner):
        what = "times after 5138-11-16 or long before 1970" if is_time(column.inner) else "infinite or above 3.4e38"
        return f"{column.num_refused:,} of its values are {what}: {remedy}"
    long = column.too_long
    if long and is_text(column.inner) and judgement.separator is None:
        return f"{long:,} of its values are longer than {MOST_BYTES:,} bytes, too long to be told apart: {remedy}"
    return ""


def _time(name: str, column: ColumnSurvey, written: str) -> _Found:
    """As `_features`, of a column of times: the day is told by its distance from others and the weekday, which repeat;
    the hour where there is a clock."""
    numbers, units = column.numbers, list(TIME_ROWS)
    if written and not is_time(column.inner):
        whole, numbers = pa.array(numbers.sample.astype(np.int64)), NumberSummary()
        seconds, is_wrong = read_cells(whole, seconds_forms(written)[:1])
        if is_wrong.any():
            return {}, f"{short(whole[int(is_wrong.argmax())].as_py())} is no time as {written}", 0, {}
        numbers.add(seconds.to_numpy(zero_copy_only=False))
    elif written and column.written and written != column.written:  # digits were asked for
        return {}, f"its times are written as {column.written}, not as {written}", 0, {}
    if not numbers.count or max(abs(numbers.least), abs(numbers.largest)) >= MOST_SECONDS:
        return {}, "these would be times after 5138-11-16 or long before 1970. Say how they are written", 0, {}
    is_in_floats = not written and types.is_floating(column.type)
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
    form = "s" if is_in_floats else written
    return settings, why, len(units), {"format": form} if form else {}


def day_of(seconds: float) -> str:
    """Return the day of a time in seconds since 1970, in UTC.

    >>> day_of(86_400.0)
    '1970-01-02'
    """
    return str(np.datetime64(int(seconds // SECONDS_PER_DAY), "D"))


def distinct_values(column: ColumnSurvey) -> str:
    """Return the number of distinct values as text: `~` is an estimate, `?` where values cannot be told apart."""
    if not column.is_readable or column.too_long:
        return "?"
    return f"{'' if column.values.is_exact else '~'}{column.values.estimate:,}"


def _parted(name: str, column: ColumnSurvey, separator: str) -> tuple[_Features, str, int]:
    """As `_features`, of a column of texts that are several values each."""
    parts = column.parts[separator]
    settings, why = _category("text", parts.distinct, None)
    many = f"{'' if parts.distinct.is_exact else '~'}{parts.distinct.estimate:,}"
    settings = settings | {"separator": separator} | ({"stripped": True} if parts.blanks else {})
    return {name: settings}, f"up to {parts.most} values in a cell, {many} distinct; {why}", max(parts.most, 1)


def _ids(name: str, column: ColumnSurvey) -> tuple[_Features, str, int]:
    """As `_features`, of a column of whole numbers that are ids, or of lists of them."""
    limits = column.numbers.least, column.numbers.largest
    is_large = types.is_floating(column.inner) and max(abs(limit) for limit in limits) >= _LEAST_TOO_LARGE
    if types.is_decimal(column.inner) or is_large:
        return {}, f"ids are not read of {'large ' if is_large else ''}{column.inner}: write integers, or text", 0
    if not is_text(column.type) and not column.numbers.are_whole:
        return {}, "its numbers have fractions, and are no ids", 0
    if types.is_integer(column.inner):
        settings, why = _category("hash", column.ids, limits)
    else:
        settings, why = _category("text", column.values, None)
    return {name: settings}, _bag(column) + why, column.most


def may_be_category(column: ColumnSurvey) -> bool:
    """Return whether a column that is no list can be read as a category."""
    return is_text(column.type) or bool(_ids(column.name, column)[0])


def _bag(column: ColumnSurvey) -> str:
    return f"up to {column.most} values in a row; " if is_list(column.type) else ""


def _number(name: str, column: ColumnSurvey) -> tuple[_Features, str]:
    numbers = column.numbers
    why = f"{numbers.least:g} to {numbers.largest:g}, mean {numbers.mean:.4g}, standard deviation {numbers.std:.4g}"
    settings: dict[str, Any] = {"kind": "dense"}
    if (numbers.least, numbers.largest) != (0, 1) or not numbers.are_whole:
        quantiles = sorted({_rounded(each) for each in numbers.quantiles(_QUANTILE_PARTS)})
        is_skewed = numbers.largest > numbers.mean + _SKEWED * numbers.std
        if is_skewed and numbers.least >= 0:
            settings |= _standardized({"scale": "log1p"}, np.log1p(numbers.sample))
        elif is_skewed and len(quantiles) > 1:
            places = np.interp(numbers.sample, quantiles, np.linspace(0, 1, len(quantiles)))
            settings |= _standardized({"scale": "quantile", "quantiles": quantiles}, places)
        elif _rounded(numbers.std) > 0:
            settings |= {"scale": "standardize", "mean": _rounded(numbers.mean), "std": _rounded(numbers.std)}
        elif numbers.least:  # one value, or none: 1, or 0
            settings |= {"scale": "standardize", "mean": 0.0, "std": abs(_rounded(numbers.least))}
    return {name: settings}, why


def _standardized(settings: dict[str, Any], sample: NDArray[np.float64]) -> dict[str, Any]:
    """Return settings of a scale with the mean and the deviation of what it gives, a sample of it."""
    mean, std = _rounded(sample.mean()), _rounded(sample.std())
    return settings | ({"mean": mean, "std": std} if std > 0 else {})


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


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
