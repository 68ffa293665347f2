"""A model that `embershard export` wrote, for a program that serves. Needs torch and numpy, nothing else.

    model = load("exported")                       # the folder of this file
    logits = model(*model.encode([{"age": 31, "item": 4711}, {"item": [3, 5]}]))
    scores = logits.sigmoid()

The tables are mapped into memory, so they are read from disk as their rows are used, and processes share them.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Sequence
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_INT8_TAIL, _INT4_TAIL = 8, 4  # bytes of scale and offset at the end of a row: two float32, or two float16
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
_TYPES = {"F32": torch.float32, "F16": torch.float16, "U8": torch.uint8}


def load(folder: str | Path) -> Model:
    """Return the model in an export's folder, on the CPU.

    It is a torch module from dense features [B, D], and for each sparse feature its rows [N] and the places [B + 1] at
    which the bags begin and the last one ends, to logits [B]; of several labels, whose names are in export.json,
    [B, T]; with task "regression" to predicted numbers in place of logits.
    """
    root = Path(folder)
    about = json.loads((root / "export.json").read_text())
    inputs = json.loads((root / "inputs.json").read_text())
    paths = [root / "tables" / f"{feature['table']}.safetensors" for feature in inputs["sparse"]]
    shared = {path: Table(read_tensor(path), about["dtype"]) for path in paths}
    tables = [shared[path] for path in paths]
    dense = torch.export.load(root / "dense.pt2").module()
    return Model(tables, dense, inputs)


class Table(nn.Module):
    """Rows of an embedding table: float32, float16, or quantized to int8 or int4 row by row."""

    stored: Tensor

    def __init__(self, rows: Tensor, dtype: str) -> None:
        super().__init__()
        self.register_buffer("stored", rows)
        self.dtype = dtype

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows `ids` [N] as float32 [N, dim]."""
        rows = self.stored.index_select(0, ids)
        if self.dtype == "int8":
            scale, offset = rows[:, -_INT8_TAIL:].contiguous().view(torch.float32).split(1, dim=1)
            return rows[:, :-_INT8_TAIL].float() * scale + offset
        if self.dtype == "int4":
            scale, offset = rows[:, -_INT4_TAIL:].contiguous().view(torch.float16).float().split(1, dim=1)
            pairs = rows[:, :-_INT4_TAIL]
            return torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1).float() * scale + offset
        return rows.float()

    def forward(self, ids: Tensor, offsets: Tensor, pooling: str = "sum") -> Tensor:
        """Return the sum, or the mean, of the rows of each bag, float32 [B, dim]."""
        places = torch.arange(ids.shape[0])
        sums = nn.functional.embedding_bag(places, self.rows(ids), offsets, mode="sum", include_last_offset=True)
        if pooling == "sum":
            return sums
        return sums * (1.0 / offsets.diff().clamp(min=1).unsqueeze(1))  # as FBGEMM: not a division


class Model(nn.Module):
    """Tables, and the layers behind them."""

    def __init__(self, tables: Iterable[Table], dense: nn.Module, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.tables, self.dense, self.inputs = nn.ModuleList(tables), dense, inputs

    def forward(self, dense: Tensor, ids: Sequence[Tensor], offsets: Sequence[Tensor]) -> Tensor:
        pooling = [feature.get("pooling", "sum") for feature in self.inputs["sparse"]]
        pooled = [table(*bag) for table, *bag in zip(self.tables, ids, offsets, pooling, strict=True)]
        return self.dense(dense, torch.stack(pooled, dim=1))

    def encode(self, samples: Sequence[dict[str, Any]]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the inputs of the model for samples as dicts of raw values, as the training read them.

        A dict has the columns of the data. A missing value is absent, None or NaN; a bag of values is a list, an
        array, or a text where the data had such texts. Times are datetimes, texts, or seconds since 1970.

        Raises:
            ValueError: a value is not what its feature needs, with both.
        """
        columns = [[self._given(sample, each) for sample in samples] for each in self.inputs["dense"]]
        pairs = zip(self.inputs["dense"], columns, strict=True)
        dense = np.stack([scaled(values, feature) for feature, values in pairs], axis=1)
        bags = [self._bags(feature, samples) for feature in self.inputs["sparse"]]
        return torch.from_numpy(dense), [ids for ids, _ in bags], [offsets for _, offsets in bags]

    def _bags(self, feature: dict[str, Any], samples: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        mapping = feature["mapping"]
        if mapping not in ("none", "modulo", "hash", "text", "hour", "weekday"):
            raise ValueError(f"{feature['name']}: {mapping!r} is not mapped here; give rows to the model")
        values = [self._given(sample, feature) for sample in samples]
        if separator := feature.get("separator"):
            values = [value.split(separator) if isinstance(value, str) and value else value for value in values]
        bags = [value if isinstance(value, (list, tuple)) else [value] for value in values]
        offsets = torch.tensor([0, *(len(bag) for bag in bags)]).cumsum(0)
        raw = [plain(value) for bag in bags for value in bag]
        try:
            ids = [0 if value is None else id_of(value, feature) for value in raw]
            mapping = {"text": "modulo", "hour": "none", "weekday": "none"}.get(mapping, mapping)
            rows = map_ids(np.array(ids, np.uint64), feature["num_rows"], mapping)
        except ValueError as error:
            raise ValueError(f"{feature['name']}: {error}") from None
        rows[[value is None for value in raw]] = 0
        return torch.from_numpy(rows), offsets

    def _given(self, sample: dict[str, Any], feature: dict[str, Any]) -> Any:
        """Return a sample's value for a feature; None where it is missing."""
        value = plain(sample.get(feature["column"]))
        is_null = isinstance(value, str) and value in self.inputs.get("null_values", ())
        return None if is_null else value


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
    try:
        numbers = np.array([np.nan if value is None else number(value) for value in values], np.float64)
    except ValueError as error:
        raise ValueError(f"{feature['name']}: {error}") from None
    missing = 0.0
    if feature["scale"] == "log1p":
        found = np.log1p(np.maximum(numbers.astype(np.float32), 0))
    elif feature["scale"] == "standardize":
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
    """Return 1 + the hour of a time in UTC, or its weekday (1: Monday).

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
    hours = int(seconds // 3600)
    return 1 + (hours % 24 if mapping == "hour" else (hours // 24 + 3) % 7)


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


def read_tensor(path: str | Path) -> Tensor:
    """Return the tensor "rows" of a safetensors file, mapped into memory; changes of it stay in this process."""
    with open(path, "rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        entry = json.loads(file.read(size))["rows"]
    start, stop = (8 + size + place for place in entry["data_offsets"])
    data = torch.from_file(str(path), shared=False, size=stop, dtype=torch.uint8)
    return data[start:stop].view(_TYPES[entry["dtype"]]).view(entry["shape"])
