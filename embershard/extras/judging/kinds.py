"""What a column is for, by its name and by what it holds; and how sure that is.

A rule decides where what a column holds leaves no choice. Whole numbers may be ids or quantities: for and against a
category, each piece of evidence has points, and their sum decides. The words are in kinds_words.toml.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from embershard.data.config_fields import TIME_UNITS
from embershard.data.sources.table.cells import BRACKETS, are_dates
from embershard.data.sources.table.counts import CONTROLS
from embershard.settings.decoding import read_toml

Kind = Literal["category", "number", "time", "list", "drop", "leak", "constant"]
Holds = Literal["integers", "fractions", "bools", "texts", "times", "lists", "lists of fractions"]
Sure = Literal["sure", "likely", "guess"]
#: Points, for or against a category, from which on a decision is sure, and likely.
_SURE, _LIKELY = 4.0, 2.0
_AGAINST = {
    "id": 3.0,
    "thing": 3.0,
    "category": 3.0,
    "number": 3.0,
}  # most points that values have against a known word
_OWN_SHARE = 0.4  # of a column's points; the rest is the mean of its family, columns as feat_1, feat_2, ...
_FAMILY, _FRACTIONS_OF_FAMILY = 3, 0.3
_UNIQUE_SHARE, _UNIQUE_ROWS, _FEW_ROWS = 0.95, 1000, 20
_EPOCH = {unit: (1e8 * each, 5e9 * each) for unit, each in TIME_UNITS.items()}
_LIKELY_EPOCH, _LIKELY_EPOCH_SPAN = (9e8, 2.1e9), 3.2e8  # of a column whose name says nothing: ten years in 1998..2036
_TEN_DIGITS, _LEAST_LONG = 1e9, 2.0**53
_DIGITS_OF_DATES = {"%Y%m%d": 8, "%Y%m%d%H": 10, "%Y%m%d%H%M": 12, "%Y%m%d%H%M%S": 14, "%y%m%d%H": 8}
_URLS = 0.9
_ALWAYS = (*CONTROLS, "^")  # separators that texts have for no other reason
_USUAL = (BRACKETS, "|", ";", "\t")
_UNSURE = (" ", ",", "/", ":")  # separators that texts of one value have, too: titles, places, dates, paths
_LISTED, _BRACKETED, _PARTS_PER_CELL, _PARTS_OF_LISTS, _OFTEN, _FEW_PARTS = 0.05, 0.5, 0.7, 0.4, 0.5, 0.1
_FEW_VALUES, _MANY_VALUES, _ORDERED, _SMOOTH, _ENDS_IN_0 = 100, 200, 8, 0.5, 1 / 3
_MOSTLY_0, _BEYOND_CHANCE = 0.6, 1.5
_MONTHS, _DAYS = 12, 31


@dataclass(frozen=True)
class Parts:
    """What a separator cuts the cells of a column into.

    Attributes:
        cells: have the separator.
        distinct: values.
        mean, most: values of a cell.
        digits: share of values that are digits alone.
    """

    cells: int
    distinct: int
    mean: float
    most: int = 2
    digits: float = 0.0


@dataclass(frozen=True)
class Facts:
    """A column, as far as its kind depends on it.

    Attributes:
        name: without the type that RecBole's headers have, which is `declared`.
        holds: what its values are. "integers" may be floats that are whole, where `has_point`.
        rows: of the file; `present` of them have a value.
        distinct: values.
        least, largest: of numbers.
        sample: numbers, evenly spaced in the file.
        parts: of texts, by separator.
        examples: some of the texts.
        urls: share of texts that are web addresses.
        time_format: of texts that are times, where it is not ISO 8601.
        other_format: another one that fits them as well.
        is_known: the user says that it is no result.
        result: why the column is a result, from a comparison with the label; or "".
    """

    name: str
    holds: Holds
    rows: int = 0
    present: int = 0
    distinct: int = 0
    declared: str = ""
    least: float = 0.0
    largest: float = 0.0
    sample: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    has_point: bool = False
    parts: Mapping[str, Parts] = field(default_factory=dict)
    examples: Sequence[str] = ()
    urls: float = 0.0
    time_format: str = ""
    other_format: str = ""
    is_known: bool = False
    result: str = ""

    @property
    def is_unique(self) -> bool:
        return self.present >= _FEW_ROWS and self.distinct >= _UNIQUE_SHARE * self.present


@dataclass(frozen=True)
class Judgement:
    """A decision.

    Attributes:
        why: the reason, in words.
        separator: between the values of a list in text.
        format: of times that are not ISO 8601, nor seconds.
        other_format: another one that fits as well.
        score: points for a category, of whole numbers.
        would_be: of a leak, what it would be if it were known before the label.
    """

    kind: Kind
    sure: Sure
    why: str
    separator: str | None = None
    format: str = ""
    other_format: str = ""
    score: float = 0.0
    would_be: Kind | None = None


@cache
def words() -> dict[str, Any]:
    """Return kinds_words.toml."""
    return read_toml(Path(__file__).with_name("kinds_words.toml"))


def judge(columns: Sequence[Facts]) -> list[Judgement]:
    """Return what each column is for, in order; the label is not among them.

    >>> judge([Facts("userid", "integers", 100, 100, 60, sample=np.arange(60.0))])[0].kind
    'category'
    """
    are_events = len([each for each in columns if _is_id(each)]) > 1
    found = [_alone(each, are_events) for each in columns]
    for members in _families([each.name for each in columns]):
        with_fractions = [columns[each].name for each in members if columns[each].holds == "fractions"]
        scored = [each for each in members if found[each].score]
        if len(with_fractions) >= _FRACTIONS_OF_FAMILY * len(members):
            for place in scored:
                found[place] = Judgement("number", "sure", f"{with_fractions[0]}, of its family, has fractions")
            continue
        mean = sum(found[each].score for each in scored) / max(len(scored), 1)
        for place in scored:
            score = _OWN_SHARE * found[place].score + (1 - _OWN_SHARE) * mean
            found[place] = _by_score(score, f"{found[place].why}; as its family of {len(members)}")
    return found


def _families(names: Sequence[str]) -> list[list[int]]:
    """Return the places of names that are the same but for digits, where these are many."""
    found: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        if re.search(r"\d", name):
            found.setdefault(re.sub(r"\d+", "0", name), []).append(place)
    return [members for members in found.values() if len(members) >= _FAMILY]


def _is_id(column: Facts) -> bool:
    """Return whether a column names a thing that may come again in other rows: "user", "article_id", "ean"."""
    of_rows, tokens = words()["id"]["of_rows"], _tokens(column.name)
    is_of_row = tokens == ["id"] or bool({*tokens, *(token.removesuffix("id") for token in tokens)} & set(of_rows))
    return _is_named_id(column) and not is_of_row


def _is_named_id(column: Facts) -> bool:
    group, is_text = word_of(column.name)[0], column.holds == "texts"
    is_code = is_text and group == "category" and _are_codes(column.examples, " ")
    return is_code or (group in ("id", "thing") and (is_text or column.holds == "integers"))


def _unique_id(column: Facts, are_events: bool) -> Judgement | None:
    """Return the judgement of an id that nearly every row has another one of: in a file of events, each of which has
    several ids, or in one of few rows, it may come again; else it names the row."""
    if not column.is_unique or not _is_named_id(column) or column.declared:
        return None
    why = "nearly every row has another value"
    if _is_id(column) and (are_events or column.distinct < column.present or column.present < _UNIQUE_ROWS):
        return Judgement("category", "guess", f"{why}, and it may come again")
    return Judgement("drop", "sure" if column.distinct == column.present else "likely", f"an id: {why}")


def _alone(column: Facts, are_events: bool) -> Judgement:
    """Judge a column without its family."""
    found = _by_what_it_holds(column)
    if found.kind in ("category", "number") or (found.kind, found.sure) == ("drop", "likely"):
        found = _unique_id(column, are_events) or found
    why = column.result
    if not why and _is_result(column):
        why = "its name is that of a result, which is not known before the label"
    if not why or column.is_known or found.kind in ("constant", "drop"):
        return found
    return replace(found, kind="leak", sure="likely", why=why, score=0.0, would_be=found.kind)


def _by_what_it_holds(column: Facts) -> Judgement:
    if not column.present:
        return Judgement("constant", "sure", "it has no values")
    is_at_0 = column.holds == "integers" and column.least == column.largest == 0
    if column.distinct == 1 and not column.parts and (column.present == column.rows or is_at_0):
        return Judgement("constant", "sure", "it has one value in all rows" if not is_at_0 else "0, or missing")
    if column.holds == "lists of fractions" or column.declared == "float_seq":
        return Judgement("drop", "sure", "no feature is made of lists of numbers")
    if column.holds == "lists":
        return Judgement("list", "sure", "lists")
    if column.holds == "times":
        if column.other_format:
            why, forms = f"times, if not as {column.other_format}", (column.time_format, column.other_format)
            return Judgement("time", "guess", why, format=forms[0], other_format=forms[1])
        return Judgement("time", "sure", "times", format=column.time_format)
    if column.declared == "token_seq":
        return Judgement("list", "sure", "its header says token_seq", separator=" ")
    if column.holds == "texts":
        return _texts(column)
    if column.holds == "bools":
        return Judgement("category", "sure", "true or false")
    if column.holds == "fractions":
        is_time = column.declared != "token" and word_of(column.name)[0] == "time" and _are_within(column, _EPOCH["s"])
        return Judgement("time" if is_time else "number", "sure", "seconds since 1970" if is_time else "fractions")
    return _integers(column)


def _texts(column: Facts) -> Judgement:
    group, _ = word_of(column.name)
    is_named = group in ("id", "thing", "category") or _letters_of(column.name) in words()["category"]["letters"]
    if column.declared != "token":
        if column.urls >= _URLS:
            return Judgement("drop", "sure", "web addresses")
        if (separator := _separator(column)) is not None:
            recurs = _recurrence(column, separator) < _PARTS_OF_LISTS
            is_sure = separator in (*_ALWAYS, BRACKETS) or (
                recurs and (separator == "|" or _is_list_name(column.name, separator))
            )
            return Judgement("list", "sure" if is_sure else "likely", "several values in a cell", separator=separator)
    if column.is_unique:
        if column.declared == "token" and column.present < _UNIQUE_ROWS:
            return Judgement("category", "guess", "nearly every row has another value; but its header says token")
        return Judgement("drop", "likely", "nearly every row has another value")
    repeats = 2 * column.distinct < column.present
    return Judgement("category", "sure" if repeats or is_named or column.declared else "likely", "text")


def _separator(column: Facts) -> str | None:
    """Return what stands between the values of a text's cells; None: a cell is a value."""
    return next((each for each, parts in column.parts.items() if _cuts(column, each, parts)), None)


def _cuts(column: Facts, separator: str, parts: Parts) -> bool:
    """Return whether a separator makes lists of a column's cells: values come again in other cells. Where texts of one
    value have such signs, too, the name must say so, or the values be ids; and the cells differ in their sizes."""
    if separator in (*_ALWAYS, BRACKETS):
        return parts.cells >= (_BRACKETED if separator == BRACKETS else _LISTED) * column.present
    if parts.cells < _LISTED * column.present or _recurrence(column, separator) >= _PARTS_PER_CELL:
        return False
    has_sizes = parts.mean * column.present < parts.cells * parts.most + column.present - parts.cells
    is_named = _is_list_name(column.name, separator)
    recurs = _recurrence(column, separator) < _PARTS_OF_LISTS
    if separator in (" ", ","):
        are_few = separator == "," and has_sizes and _recurrence(column, separator) < _FEW_PARTS
        return is_named or are_few or _are_codes(column.examples, separator)
    if separator in _UNSURE:
        return has_sizes and (is_named or (not parts.digits and _are_codes(column.examples, separator)))
    if separator in _USUAL:
        return is_named or has_sizes or recurs
    return is_named or (has_sizes and recurs and parts.digits < _OFTEN)


def _recurrence(column: Facts, separator: str) -> float:
    """Return the share of new values among those that the different cells have: 1 where none comes again."""
    parts = column.parts[separator]
    return parts.distinct / max(column.distinct * parts.mean, 1)


def near_lists(column: Facts, judgement: Judgement) -> str:
    """Return a separator that most cells of a category have, whose values come again in other cells; or ""."""
    for separator, parts in column.parts.items():
        is_often = parts.cells >= _OFTEN * column.present and separator not in (" ", ":", BRACKETS)
        if judgement.kind in ("category", "drop") and is_often and _recurrence(column, separator) < _PARTS_PER_CELL:
            return separator
    return ""


def _are_codes(cells: Sequence[str], separator: str) -> bool:
    """Return True where all values between the separator are words with digits in them, as ids are."""
    parts = [each.strip() for cell in cells for each in cell.split(separator)]
    return bool(cells) and all(re.fullmatch(r"\w*\d\w*", each) for each in parts)


def _is_list_name(name: str, separator: str) -> bool:
    """Return whether a column of this name may have several values in a cell, with this between them."""
    tokens, known = _tokens(name), words()["list"]
    names = {*known["words"], *(known["of_texts"] if separator != " " else [])}
    return bool(names & set(tokens)) or (separator == "," and tokens[-1:] != [] and tokens[-1] in known["of_one"])


def _integers(column: Facts) -> Judgement:
    """Judge whole numbers."""
    name, (group, word) = column.name, word_of(column.name)
    if column.declared == "token":
        return Judgement("category", "sure", "its header says token")
    if (found := _time_in_digits(column, group, word)) is not None:
        return found
    if column.declared == "float":
        return Judgement("number", "sure", "its header says float")
    plain = name.strip().lower()
    rows, bare = np.diff(column.sample), re.sub(r"\W+\d*$", "", plain)  # "Unnamed: 0"
    ascends = len(rows) > 0 and bool((rows > 0).all())
    is_long = column.is_unique and column.present >= _UNIQUE_ROWS
    counts = is_long and column.largest - column.least < column.rows  # no number is left out
    if ascends and (counts or bare in words()["index"]["names"]):
        return Judgement("drop", "sure", "it numbers the rows")
    if max(abs(column.least), abs(column.largest)) >= _LEAST_LONG:
        return Judgement("category", "sure", "integers of 16 digits and more")
    of_name, of_values = list(_points_of_name(column, group, word)), list(_points_of_values(column))
    said = sorted([*of_name, *of_values], key=lambda each: -abs(each[0]))[:3]
    score = sum(number for number, _ in of_values)
    if group in _AGAINST:  # what a name says, values question and do not turn
        score = max(score, -_AGAINST[group]) if group != "number" else min(score, _AGAINST[group])
    score += sum(number for number, _ in of_name)
    return _by_score(score, ", ".join(f"{why} ({number:+g})" for number, why in said) or "whole numbers")


def _by_score(score: float, why: str) -> Judgement:
    how: Sure = "sure" if abs(score) >= _SURE else "likely" if abs(score) >= _LIKELY else "guess"
    return Judgement("category" if score > 0 else "number", how, why, score=score or -0.01)


def _are_within(column: Facts, limits: tuple[float, float]) -> bool:
    return limits[0] <= column.least <= column.largest <= limits[1]


def _time_in_digits(column: Facts, group: str, word: str) -> Judgement | None:
    """Return the judgement of whole numbers that are times: seconds since 1970 or parts of them, or digits of dates."""
    has_word = bool(set(_tokens(column.name)) & set(words()["time"]["words"]))  # not as the last one: time_ms
    is_named = group == "time" or (has_word and group != "id")
    calendar = is_named or word in words()["category"]["calendar"]
    for unit, limits in _EPOCH.items():
        if is_named and _are_within(column, limits):
            return Judgement("time", "sure", f"{unit} since 1970", format="" if unit == "s" else unit)
    for form, digits in _DIGITS_OF_DATES.items():
        has_digits = 10 ** (digits - 1) <= column.least <= column.largest < 10**digits and column.distinct > 1
        if has_digits and (calendar or form == "%Y%m%d") and _are_digits_of_dates(column.sample, form):
            return Judgement("time", "sure" if calendar else "likely", f"dates as {form}", format=form)
    span = column.largest - column.least
    for unit, each in TIME_UNITS.items():
        least, largest = (each * limit for limit in _LIKELY_EPOCH)
        if not group and least <= column.least < column.largest <= largest and span <= each * _LIKELY_EPOCH_SPAN:
            return Judgement("time", "guess", f"they would be {unit} since 1970", format="" if unit == "s" else unit)
    return None


def _are_digits_of_dates(numbers: NDArray[np.float64], form: str) -> bool:
    whole = numbers.astype(np.int64)
    if form == "%y%m%d%H":
        hours, whole = whole % 100, 2000_00_00 + whole // 100
    else:
        behind = 10 ** (_DIGITS_OF_DATES[form] - _DIGITS_OF_DATES["%Y%m%d"])
        rest, whole = whole % behind, whole // behind
        hours = rest // max(behind // 100, 1) if behind > 1 else rest
    return bool(are_dates(whole.astype(np.float64)).all() and (hours < 24).all())


def _points_of_name(column: Facts, group: str, word: str) -> Iterable[tuple[float, str]]:
    calendar: dict[str, int] = words()["category"]["calendar"]
    if group == "id":
        yield 6, "named id"
    elif word in calendar and (column.largest > calendar[word] or column.least < 0):
        yield -4, f"beyond a {word}"
    elif (group, word) == ("category", "number"):
        yield 1, "named number"
    elif group in ("thing", "category"):
        yield 4 + (word in calendar), f"named {word}"
    elif group == "either":
        yield 2, f"named {word}"
    elif group == "plural":
        yield -1.5, f"named {word}: several"
    elif group == "number":
        yield -5, f"named {word}"
    elif group == "time":
        yield -4, f"named {word}, and no time since 1970"
    elif letters := _letters_of(column.name):
        for kind, points in (("category", 4), ("number", -4)):
            if letters in words()[kind]["letters"]:
                yield points, f"named {letters} and a number"
        if len(letters) > 1:
            yield 2, "named without a meaning"
    elif re.fullmatch(r"\d{3,}(_\d+)?", column.name):  # 0, 1, 2 are places in an array
        yield 3.5, "named by a number"


def _letters_of(name: str) -> str:
    """Return the letters of a name that is letters and a number, as C7; or ""."""
    found = re.fullmatch(r"([a-z]+)_?[\d_]+", name.lower())
    return found[1] if found else ""


def _points_of_values(column: Facts) -> Iterable[tuple[float, str]]:
    numbers, least, largest = column.sample, column.least, column.largest
    span, repeats = largest - least, 2 * column.distinct < column.present
    is_dense, from_0 = column.distinct >= 0.95 * (span + 1), least in (0, 1)
    if len(numbers) and np.median(numbers) >= _TEN_DIGITS:
        yield 5, "ten digits or more"
    if least < -1:
        yield -3, "negative"
    if column.has_point:
        yield -1, "written with a point"
    if column.distinct == 2:
        yield 0.5, "two values"
    elif is_dense and from_0 and column.distinct <= _FEW_VALUES:
        yield 1, "few values, none left out"
    is_coded = is_dense and from_0 and column.distinct >= _MANY_VALUES and repeats
    if is_coded:
        yield 2, "many values, none left out"
    if repeats and least > span:
        yield 3, "far from 0"
    large = np.abs(numbers[np.abs(numbers) >= 10])
    if len(large) > len(numbers) / 2 and (large % 10 == 0).mean() >= _ENDS_IN_0:
        yield -2, "many end in 0"
    if repeats and column.distinct >= _ORDERED:
        yield from _points_of_order(numbers, is_coded=is_coded, is_dense=is_dense)


def _points_of_order(numbers: NDArray[np.float64], *, is_coded: bool, is_dense: bool) -> Iterable[tuple[float, str]]:
    """Judge how frequencies follow the order of the values: those of quantities change slowly, those of codes do as
    they like."""
    values, counts = np.unique(numbers, return_counts=True)
    if len(values) < _ORDERED:
        return
    logs, places = np.log(counts), np.arange(len(values))
    if np.ptp(logs) == 0:
        return
    falls = np.corrcoef(places, logs)[0, 1] < -_SMOOTH and counts.argmax() <= len(values) // 10
    is_smooth = np.ptp(logs[:-1]) > 0 and np.ptp(logs[1:]) > 0 and np.corrcoef(logs[:-1], logs[1:])[0, 1] > _SMOOTH
    if falls and not is_coded:
        yield -3, "the larger, the rarer"
    elif is_smooth and not falls:
        yield -2, "near values are alike frequent"
    elif not is_smooth and not is_dense and not falls and _differ_beyond_chance(counts):
        yield 2, "frequencies without order"


def _differ_beyond_chance(counts: NDArray[np.int64]) -> bool:
    """Return whether frequencies of neighbours differ more than those of a sample of equally frequent values."""
    changes, sums = np.diff(counts), counts[:-1] + counts[1:]
    return bool((changes**2).sum() > _BEYOND_CHANCE * sums.sum())


def _is_result(column: Facts) -> bool:
    """Return True for a column whose name and values are those of a result."""
    outcome, tokens = words()["outcome"], _tokens(column.name)
    if column.holds not in ("integers", "fractions", "bools") or not tokens:
        return False
    left = [each for each in tokens if each not in outcome["beside"]]
    ends = [each for each in left if each in outcome["durations"]]
    rest = [each for each in left if each not in outcome["durations"]]
    if not rest or not set(rest) <= set(outcome["words"]):
        return False
    if ends:
        return bool(set(rest) & set(outcome["of_durations"]))
    if column.holds == "bools" or (column.least >= 0 and column.largest <= 1 and column.holds == "integers"):
        return True
    return column.least >= 0 and len(column.sample) > 0 and bool((column.sample == 0).mean() >= _MOSTLY_0)


def _tokens(name: str) -> list[str]:
    """Return the words of a name, in small letters, without numbers.

    >>> _tokens("userAge_2"), _tokens("商品ID")
    (['user', 'age'], ['商品', 'id'])
    """
    apart = re.sub(r"([a-z])([A-Z])|([A-Z])([A-Z][a-z])|([^\x00-\x7f])([A-Za-z])", _with_gap, name)
    return [each for each in re.split(r"[\W_\d]+", apart.lower()) if each]


def _with_gap(found: re.Match[str]) -> str:
    first, second = (each for each in found.groups() if each is not None)
    return f"{first}_{second}"


@cache
def word_of(name: str) -> tuple[str, str]:
    """Return the group of kinds_words.toml, and the word of it, that a name means; "" and "" where it has no known one.

    >>> word_of("follow_user_num"), word_of("adgroupid"), word_of("n_items"), word_of("paid")
    (('number', 'num'), ('id', 'id'), ('number', 'n'), ('', ''))
    """
    tokens = _tokens(name)
    if tokens == ["number"] or "%" in name:
        return "number", "number" if tokens == ["number"] else "%"
    found = next((each for token in reversed(tokens) if (each := _group_of(token))[0]), ("", ""))
    plurals = [each for each in tokens if not _group_of(each)[0] and re.fullmatch("[a-z]+[^aiosu]s", each)]
    plurals = [each for each in plurals if each not in words()["plural"]["none"]]
    if plurals and (not found[0] or (plurals[-1] == tokens[-1] and found[0] in ("either", "thing", "category"))):
        found = "plural", plurals[-1]
    first = tokens[0] if len(tokens) > 1 else ""
    if first in words()["number"]["first"] and found[0] != "id":
        return "number", first
    is_numbered = len(tokens) > 1 and tokens[-1] in ("number", "no", "nr")
    return ("category", tokens[-1]) if is_numbered and _group_of(tokens[-2])[0] != "number" else found


@cache
def _group_of(token: str) -> tuple[str, str]:
    singular = [token, token.removesuffix("s"), token.removesuffix("es"), re.sub("ies$", "y", token)]
    groups = ("id", "number", "either", "thing", "category", "time")
    for each in dict.fromkeys(singular):
        for group in groups:
            if each in words()[group]["words"]:
                return ("plural", token) if group in ("either", "thing") and each != token else (group, each)
    for ending in ("id", "ids"):
        if token.endswith(ending) and token != ending and token.removesuffix("s") not in words()["id"]["no_id"]:
            return "id", "id"
    known = [
        (group, each) for group in groups for each in words()[group]["words"] if len(each) >= 4 or not each.isascii()
    ]
    ends = [(group, each) for group, each in known if token.endswith(each) or (not each.isascii() and each in token)]
    return max(ends, key=lambda each: (token.rfind(each[1]) + len(each[1]), len(each[1])), default=("", ""))
