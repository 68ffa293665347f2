"""Raw values as an exported model reads them: as training did. Needs numpy, nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Any

import numpy as np

_MASK = 2**64 - 1
_MOST_BYTES = 1024
_MOST_SECONDS = 1e11  # the year 5138
_TOO_LARGE = 2.0**128 - 2.0**103  # rounds to infinity as float32
_NUMBER = r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?(nan|NaN)"
_TIME = re.compile(
    r"(?P<day>[0-9]{4}-[0-9]{2}-[0-9]{2})"
    r"((?P<clock>[ T][0-9]{2}(:[0-9]{2}(:[0-9]{2}(?P<part>[.][0-9]{1,6})?)?)?)"
    r"(Z|(?P<zone>[-+][0-9]{2}(:?[0-9]{2})?))?)?"
)
_DATE_DIGITS = r"(19|20)[0-9]{2}(0[1-9]|1[0-2])(0[1-9]|[12][0-9]|3[01])"
_NEEDED_TIME = "needed a time as 2024-12-31 or 2024-12-31 23:59:59, seconds since 1970, or nothing"
_SAME = {"True": "true", "TRUE": "true", "False": "false", "FALSE": "false", "-0": "0"}


def plain(value: Any) -> Any:
    """Return a value as Python's types have it: of numpy's scalars and arrays too. None where it is missing: an empty
    text, or not a number."""
    if isinstance(value, (np.datetime64, np.ndarray)) and value.dtype.kind == "M":
        value = value.astype("datetime64[us]")
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    is_missing = isinstance(value, (str, float, datetime)) and (value == "" or value != value)
    return None if is_missing else value


def id_of(value: Any, feature: dict[str, Any]) -> int:
    """Return the 64-bit word, or the row, that a value of a sparse feature stands for.

    Raises:
        ValueError: the value is not what the feature needs.
    """
    if feature["mapping"] in ("hour", "weekday"):
        return time_row(value, feature["mapping"])
    if feature["mapping"] == "text":
        return text_word(value)
    if feature["id_base"] == 16:
        if not isinstance(value, str) or not re.fullmatch("[0-9a-fA-F]{1,8}", value):
            raise ValueError(f"{value!r}: needed 1 to 8 hexadecimal digits, or nothing")
        return int(value, 16)
    is_integer = re.fullmatch("-?[0-9]+", value) if isinstance(value, str) else is_whole(value)
    if not is_integer or isinstance(value, bool) or not -(2**63) <= int(value) < 2**64:
        raise ValueError(f"{value!r}: needed an integer of 64 bits, or nothing")
    return int(value) & _MASK


def is_whole(value: Any) -> bool:
    """Return whether a value is an integer, or a float that is one (below 2**63)."""
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) < 2.0**63)


def scaled(values: Sequence[Any], feature: dict[str, Any]) -> np.ndarray:
    """Return a dense feature's values as the model gets them, float32."""
    if feature["scale"] == "constant":
        return np.ones(len(values), np.float32)
    read = days if feature["scale"] == "days" else number
    try:
        numbers = np.array([np.nan if value is None else read(value) for value in values], np.float64)
    except ValueError as error:
        raise ValueError(f"{feature['name']}: {error}") from None
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
    found[np.isnan(numbers)] = missing
    if not np.isfinite(found).all():
        value = numbers[~np.isfinite(found)][0]
        raise ValueError(f"{feature['name']}: {value!r}: needed a number that is finite after {feature['scale']}")
    return found


def number(value: Any) -> float:
    """Return a number; of a date or a time (in UTC where it names no zone) the seconds since 1970.

    Raises:
        ValueError: it is none, or float32 does not hold it.
    """
    found = seconds_of(value)
    if isinstance(value, str):
        found = float(value) if re.fullmatch(_NUMBER, value) else {"true": 1, "false": 0}.get(value.lower())
    if not isinstance(found, (int, float, Decimal)):
        raise ValueError(f"{value!r}: needed a number, or nothing")
    if found == found and not -_TOO_LARGE < found < _TOO_LARGE:  # NaN is a missing number
        raise ValueError(f"{value!r}: needed a finite number, below 3.4e38")
    return float(found)


def seconds_of(value: Any) -> Any:
    """Return the seconds since 1970 of a date or a time, which is in UTC where it names no zone; others as they are."""
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if isinstance(value, datetime):
        value = (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
    return value


def time_row(value: Any, mapping: str) -> int:
    """Return 1 + the hour of a time in UTC, or its weekday (1: Monday). Raises as `seconds_of_time`."""
    hours = int(seconds_of_time(value) // 3600)
    return 1 + (hours % 24 if mapping == "hour" else (hours // 24 + 3) % 7)


def days(value: Any) -> float:
    """Return the days since 1970 of a time. Raises as `seconds_of_time`."""
    return seconds_of_time(value) / 86400


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
        raise ValueError(f"{value!r}: {_NEEDED_TIME}")
    if seconds is found and re.fullmatch(_DATE_DIGITS, str(int(seconds))):
        raise ValueError(f"{value!r}: {_NEEDED_TIME}")
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


def text_word(value: Any) -> int:
    """Return the 64-bit hash of a value as text: of the number of its bytes, then of each 8 of them, little-endian.

    Of a whole number the text is its integer, of a bool `true` or `false`, and so are `7.0` and `True` as texts.

    Raises:
        ValueError: it is neither a text nor a whole number, or longer than 1024 bytes.
    """
    if isinstance(value, str):
        text = _SAME.get(value, value)
        if found := re.fullmatch(r"(-?[1-9][0-9]*)\.0*|-?(?:0\.0*|\.0+)", text):
            text = found[1] or "0"
    elif is_whole(value):
        text = str(value).lower() if isinstance(value, bool) else str(int(value))
    else:
        raise ValueError(f"{value!r}: needed text or a whole number, or nothing")
    data = text.encode("utf-8", "surrogateescape")
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{text[:60]!r}...: needed at most {_MOST_BYTES:,} bytes")
    word = 0
    for part in (len(data), *(int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8))):
        z = ((word + part + 1) * 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        word = z ^ (z >> 31)
    return word


def map_ids(ids: np.ndarray, num_rows: int, mapping: str) -> np.ndarray:
    """Return the rows (int64) of ids (uint64): row 0 is that of a missing id.

    "none": an id is its row. "modulo": 1 + id mod (num_rows - 1). "hash": the same of SplitMix64's finaliser.
    """
    if mapping == "none":
        if len(ids) and ids.max() >= num_rows:
            raise ValueError(f"id {ids.max()}: needed a row in 0..{num_rows - 1}")
        return ids.astype(np.int64)
    if mapping == "hash":
        ids = (ids ^ (ids >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        ids = (ids ^ (ids >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        ids = ids ^ (ids >> np.uint64(31))
    if num_rows == 1:
        return np.zeros(len(ids), np.int64)
    return (ids % np.uint64(num_rows - 1)).astype(np.int64) + 1
