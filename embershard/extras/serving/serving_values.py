"""Raw values as an exported model reads them: as training did. Needs numpy, nothing else.

Values of one usual type are read together; others, and those that are wrong, one by one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Any

import numpy as np

_MASK = 2**64 - 1
_MOST_BYTES = 1024
#: Mappings of features whose table takes any id; and the id that a missing value has in such a table.
ID_MAPPINGS = ("ids", "text_ids")
_MISSING_ID = -(2**63) + 1
_MOST_SECONDS = 1e11  # the year 5138
_TOO_LARGE = 2.0**128 - 2.0**103  # rounds to infinity as float32
_NUMBER = r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?(nan|NaN)"
_TIME = re.compile(
    r"(?P<day>[0-9]{4}-[0-9]{2}-[0-9]{2})"
    r"((?P<clock>[ T][0-9]{2}(:[0-9]{2}(:[0-9]{2}(?P<part>[.][0-9]{1,6})?)?)?)"
    r"(Z|(?P<zone>[-+][0-9]{2}(:?[0-9]{2})?))?)?"
)
#: Lines of times in whole seconds, which numpy reads as `iso_time` does.
_TIMES = re.compile(r"((?!0000)[0-9]{4}-[0-9]{2}-[0-9]{2}([ T][0-9]{2}:[0-9]{2}:[0-9]{2})?\n)*")
_DATE_DIGITS = r"(19|20)[0-9]{2}(0[1-9]|1[0-2])(0[1-9]|[12][0-9]|3[01])"
_FIRST_DATE, _LAST_DATE = 19000101, 20991231
_NEEDED_TIME = "needed a time as 2024-12-31 or 2024-12-31 23:59:59, seconds since 1970, or nothing"
_TIME_UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
_MONEY = r"(?:[$€£¥₹₽₩₺]|USD|EUR|GBP|CHF|kr|zł)"
_HEXADECIMAL = re.compile("[0-9a-fA-F]{1,8}")
_WHOLE = re.compile(r"(-?[1-9][0-9]*)\.0*|-?(?:0\.0*|\.0+)")
_SAME = {"True": "true", "TRUE": "true", "False": "false", "FALSE": "false", "-0": "0"}


def plain(values: Sequence[Any]) -> list[Any]:
    """Return values as Python's types have them: of numpy's scalars and arrays too. None where one is missing: an empty
    text, or not a number."""
    if types_of(values) <= {int, float, str, bool, type(None)}:
        return [None if value == "" or value != value else value for value in values]
    return [_plain(value) for value in values]


def _plain(value: Any) -> Any:
    if isinstance(value, (np.datetime64, np.ndarray)) and value.dtype.kind == "M":
        value = value.astype("datetime64[us]")
        if value.ndim == 0 and isinstance(value.tolist(), int):  # before year 1, which `datetime` has not
            return value.tolist() / 1e6
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    is_missing = isinstance(value, (str, float, datetime)) and (value == "" or value != value)
    return None if is_missing else value


def types_of(values: Sequence[Any]) -> set[type]:
    """Return the types of some values."""
    return set(map(type, values))


def as_plain(values: Sequence[Any], form: str | None, mark: str | None) -> list[Any]:
    """Return values in which times that are written as `form` says are seconds since 1970, and numbers with the decimal
    mark `mark` are numbers; see `data.table.format` and `.decimal`. Values that are not written so stay."""
    values = without_blanks(values)
    if mark is not None:
        values = [_decimal(value, mark) if isinstance(value, str) else value for value in values]
    if form is not None:
        values = [value if value is None else _time_as(value, form) for value in values]
    return list(values)


def without_blanks(values: Sequence[Any]) -> Sequence[Any]:
    """Return values in which texts have no blanks around them; None in place of blanks alone."""
    if str not in types_of(values):
        return values
    return [(value.strip(" \t") or None) if isinstance(value, str) else value for value in values]


def _decimal(text: str, mark: str) -> float | str:
    other, this = (",", r"\.") if mark == "." else (r"\.", ",")
    whole = f"(?:[1-9][0-9]{{0,2}}(?:[{other}' \u00a0\u202f][0-9]{{3}})+|[0-9]+)"
    pattern = rf"[-+]?(?:{_MONEY} ?)?[-+]?(?:{whole}(?:{this}[0-9]*)?|{this}[0-9]+) ?(?:{_MONEY}|%)?"
    return float(re.sub(f"[^-0-9{this}]", "", text).replace(mark, ".")) if re.fullmatch(pattern, text) else text


def _time_as(value: Any, form: str) -> Any:
    if form in _TIME_UNITS:
        is_number = isinstance(value, (int, float)) or (isinstance(value, str) and re.fullmatch(_NUMBER, value))
        return float(value) / _TIME_UNITS[form] if is_number else value
    if isinstance(value, (int, float, str)):
        try:
            found = datetime.strptime(f"{value:.0f}" if isinstance(value, float) else str(value), form)
            return seconds_of(found)
        except ValueError:
            pass
    return value


def parts_in_brackets(text: str) -> list[str]:
    """Return the values of a list in brackets, as JSON and Python write it: the separator "[,]" of settings.

    >>> parts_in_brackets("['a', 'b, c']"), parts_in_brackets("[1 2]"), parts_in_brackets("[]")
    (['a', 'b, c'], ['1', '2'], [])
    """
    bare = re.sub(r"^\s*[\[({]\s*|\s*,?\s*[\])}]\s*$", "", text)
    if re.fullmatch(r"""['"].*['"]""", bare, re.DOTALL):
        return re.split(r"""['"]\s*,\s*['"]""", bare[1:-1])
    bare = re.sub("""['"]""", "", bare)
    return re.split(r"\s*,\s*" if "," in bare else r"\s+", bare) if bare else []


def rows_of(values: Sequence[Any], feature: dict[str, Any]) -> np.ndarray:
    """Return the rows (int64) of plain values of a sparse feature, 0 of a missing one; or, where its table takes any
    id, the ids.

    Raises:
        ValueError: a value is not what the feature needs.
    """
    if feature["mapping"] not in ("text", "text_ids") or feature.get("stripped"):
        values = without_blanks(values)
    present = [value for value in values if value is not None]
    mapping, num_rows = feature["mapping"], feature["num_rows"]
    rows = np.full(len(values), _MISSING_ID if mapping in ID_MAPPINGS else 0, np.int64)
    if mapping in ID_MAPPINGS:
        found = ids_of(present, mapping)
    elif mapping in ("hour", "weekday"):
        found = time_rows(present, mapping)
    elif mapping == "text":
        found = map_ids(text_words(present), num_rows, "modulo")
    else:
        found = map_ids(hexadecimals(present) if feature["id_base"] == 16 else integers(present), num_rows, mapping)
    rows[[value is not None for value in values]] = found
    return rows


def ids_of(values: Sequence[Any], mapping: str) -> np.ndarray:
    """Return the ids (int64) of integers, or of texts where the mapping is "text_ids".

    Raises:
        ValueError: a value is not what the mapping needs, or the one number that is no id.
    """
    if mapping == "text_ids":
        return np.maximum(text_words(values).view(np.int64), _MISSING_ID)
    ids = integers(values).view(np.int64)
    if len(ids) and ids.min() < _MISSING_ID:
        raise ValueError(f"{_MISSING_ID - 1}: needed another integer of 64 bits, or nothing: this one is reserved")
    return ids


def hexadecimals(values: Sequence[Any]) -> np.ndarray:
    """Return the numbers (uint64) of texts of 1 to 8 hexadecimal digits."""
    for value in values:
        if not isinstance(value, str) or not _HEXADECIMAL.fullmatch(value):
            raise ValueError(f"{value!r:.100}: needed 1 to 8 hexadecimal digits, or nothing")
    return np.array([int(value, 16) for value in values], np.uint64)


def integers(values: Sequence[Any]) -> np.ndarray:
    """Return the 64-bit words (uint64) of integers, and of floats and texts that are."""
    if types_of(values) <= {int}:
        try:
            return np.array(values, np.int64).view(np.uint64)
        except OverflowError:
            pass  # unsigned ones, or longer ones
    for value in values:
        is_integer = re.fullmatch("-?[0-9]+", value) if isinstance(value, str) else is_whole(value)
        if not is_integer or isinstance(value, bool) or not -(2**63) <= int(value) < 2**64:
            raise ValueError(f"{value!r:.100}: needed an integer of 64 bits, or nothing")
    return np.array([int(value) & _MASK for value in values], np.uint64)


def is_whole(value: Any) -> bool:
    """Return whether a value is an integer, or a float that is one (below 2**63)."""
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) < 2.0**63)


def scaled(values: Sequence[Any], feature: dict[str, Any]) -> np.ndarray:
    """Return a dense feature's plain values as the model gets them, float32.

    Raises:
        ValueError: a value is not what the feature needs.
    """
    if feature["scale"] == "constant":
        return np.ones(len(values), np.float32)
    values = without_blanks(values)
    present = [value for value in values if value is not None]
    numbers = np.full(len(values), np.nan)
    found = times(present) / 86400 if feature["scale"] == "days" else numbers_of(present)
    numbers[[value is not None for value in values]] = found
    missing = 0.0
    if feature["scale"] == "log1p":
        found = np.log1p(np.maximum(numbers.astype(np.float32), 0))
    elif feature["scale"] in ("standardize", "days"):
        with np.errstate(over="ignore"):
            found = ((numbers - feature["mean"]) / feature["std"]).astype(np.float32)
    elif feature["scale"] == "quantile":
        missing, places = 0.5, np.linspace(0, 1, len(feature["quantiles"]))
        found = np.interp(numbers, feature["quantiles"], places).astype(np.float32)
    else:
        found = numbers.astype(np.float32)
    if feature["scale"] in ("log1p", "quantile") and "mean" in feature:
        missing, found = 0.0, ((found.astype(np.float64) - feature["mean"]) / feature["std"]).astype(np.float32)
    found[np.isnan(numbers)] = missing
    if not np.isfinite(found).all():
        value = numbers[~np.isfinite(found)][0]
        raise ValueError(f"{value!r:.100}: needed a number that is finite after {feature['scale']}")
    return found


def numbers_of(values: Sequence[Any]) -> np.ndarray:
    """Return numbers as float64. Raises as `number`."""
    if types_of(values) <= {int, float, bool}:
        try:
            found = np.array(values, np.float64)
            if (np.abs(found) < _TOO_LARGE).all():
                return found
        except OverflowError:
            pass
    return np.array([number(value) for value in values], np.float64)


def number(value: Any) -> float:
    """Return a number; of a date or a time (in UTC where it names no zone) the seconds since 1970.

    Raises:
        ValueError: it is none, or float32 does not hold it.
    """
    found = seconds_of(value)
    if isinstance(value, str):
        found = float(value) if re.fullmatch(_NUMBER, value) else {"true": 1, "false": 0}.get(value.lower())
    if not isinstance(found, (int, float, Decimal)):
        raise ValueError(f"{value!r:.100}: needed a number, or nothing")
    if found == found and not -_TOO_LARGE < found < _TOO_LARGE:  # NaN is a missing number
        raise ValueError(f"{value!r:.100}: needed a finite number, below 3.4e38")
    return float(found)


def seconds_of(value: Any) -> Any:
    """Return the seconds since 1970 of a date or a time, which is in UTC where it names no zone; others as they are."""
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if isinstance(value, datetime):
        value = (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
    return value


def time_rows(values: Sequence[Any], mapping: str) -> np.ndarray:
    """Return 1 + the hours of times in UTC, or their weekdays (1: Monday). Raises as `seconds_of_time`."""
    hours = (times(values) // 3600).astype(np.int64)
    return 1 + (hours % 24 if mapping == "hour" else (hours // 24 + 3) % 7)


def times(values: Sequence[Any]) -> np.ndarray:
    """Return the seconds since 1970 of times, float64. Raises as `seconds_of_time`."""
    types = types_of(values)
    try:
        seconds, could_be_dates = np.empty(0), True
        if types <= {str} and _TIMES.fullmatch("".join([f"{value}\n" for value in values])):
            seconds, could_be_dates = np.array(values, "datetime64[s]").astype(np.float64), False
        elif types <= {int}:
            seconds = np.array(values, np.int64).astype(np.float64)
            could_be_dates = bool(((seconds >= _FIRST_DATE) & (seconds <= _LAST_DATE)).any())
        if not could_be_dates and (np.abs(seconds) < _MOST_SECONDS).all():
            return seconds
    except (ValueError, OverflowError):
        pass  # `seconds_of_time` says which
    return np.array([seconds_of_time(value) for value in values], np.float64)


def seconds_of_time(value: Any) -> float:
    """Return the seconds since 1970 of a time, of a text that is one, or of a number of seconds.

    Raises:
        ValueError: it is none, or after the year 5138; digits as 20241231, which could be a date, are none.
    """
    found = value
    if isinstance(value, str):
        found = float(value) if re.fullmatch(_NUMBER, value) else iso_time(value)
    seconds = seconds_of(found)
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not abs(seconds) < _MOST_SECONDS:
        raise ValueError(f"{value!r:.100}: {_NEEDED_TIME}")
    if seconds is found and re.fullmatch(_DATE_DIGITS, str(int(seconds))):
        raise ValueError(f"{value!r:.100}: {_NEEDED_TIME}")
    return float(seconds)


def iso_time(text: str) -> datetime | None:
    """Return a time as ISO 8601 writes it, with or without clock and zone; None where the text is none."""
    found = _TIME.fullmatch(text)
    if not found:
        return None
    zone = (found["zone"] or "+00").replace(":", "").ljust(5, "0")
    part = found["part"] or ""
    clock = (found["clock"] or " 00").removesuffix(part) + part.ljust(7, "0") * bool(part)
    try:
        return datetime.fromisoformat(f"{found['day']}{clock}{zone[:3]}:{zone[3:]}")
    except ValueError:
        return None


def text_words(values: Sequence[Any]) -> np.ndarray:
    """Return the 64-bit hashes (uint64) of values as text: of the number of its bytes, then of each 8 of them,
    little-endian. Raises as `text_of`."""
    places: dict[bytes, int] = {}
    taken = [places.setdefault(text_of(value), len(places)) for value in values]
    sizes = np.array([len(text) for text in places], np.uint64)
    width = -(-int(sizes.max(initial=0)) // 8)
    parts = np.frombuffer(b"".join([text.ljust(8 * width, b"\0") for text in places]), "<u8").reshape(-1, max(1, width))
    words = _mixed(np.zeros(len(sizes), np.uint64), sizes)
    for number in range(width):
        words = np.where(sizes > 8 * number, _mixed(words, parts[:, number]), words)
    return words[np.array(taken, np.int64)]


def _mixed(words: np.ndarray, parts: np.ndarray) -> np.ndarray:
    return _finalised((words + parts + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))


def _finalised(words: np.ndarray) -> np.ndarray:
    """Return what SplitMix64's finaliser makes of words (uint64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def text_of(value: Any) -> bytes:
    """Return a value as a text's bytes: a whole number as its integer, a bool as `true` or `false`, and so the texts
    `7.0` and `True`.

    Raises:
        ValueError: it is neither a text nor a whole number, or longer than 1024 bytes.
    """
    if isinstance(value, str):
        text = _SAME.get(value, value)
        if "." in text and (found := _WHOLE.fullmatch(text)):
            text = found[1] or "0"
    elif is_whole(value):
        text = str(value).lower() if isinstance(value, bool) else str(int(value))
    else:
        raise ValueError(f"{value!r:.100}: needed text or a whole number, or nothing")
    data = text.encode("utf-8", "surrogateescape")
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{text[:60]!r}...: needed at most {_MOST_BYTES:,} bytes")
    return data


def map_ids(ids: np.ndarray, num_rows: int, mapping: str) -> np.ndarray:
    """Return the rows (int64) of ids (uint64): row 0 is that of a missing id.

    "none": an id is its row. "modulo": 1 + id mod (num_rows - 1). "hash": the same of SplitMix64's finaliser.
    """
    if mapping == "none":
        if len(ids) and ids.max() >= num_rows:
            raise ValueError(f"id {ids.max()}: needed a row in 0..{num_rows - 1}")
        return ids.astype(np.int64)
    if mapping == "hash":
        ids = _finalised(ids)
    if num_rows == 1:
        return np.zeros(len(ids), np.int64)
    return (ids % np.uint64(num_rows - 1)).astype(np.int64) + 1
