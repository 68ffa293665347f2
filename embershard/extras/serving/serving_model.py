"""A model that `embershard export` wrote, for a program that serves. Needs torch, numpy and model_values.py.

    model = load("exported")                       # the folder of this file
    logits = model(*model.encode([{"age": 31, "item": 4711}, {"age": None, "item": [3, 5]}]))
    scores = logits.sigmoid()

The tables are mapped into memory, so they are read from disk as their rows are used, and processes share them.
"""

from __future__ import annotations

import difflib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embershard.extras.serving.serving_values import (
    ID_MAPPINGS,
    as_plain,
    parts_in_brackets,
    plain,
    rows_of,
    scaled,
    types_of,
)

_INT8_TAIL, _INT4_TAIL = 8, 4  # bytes of scale and offset at the end of a row: two float32, or two float16
_MOST = 2**63 - 1
_MOST_NAMED, _MOST_SHOWN = 3, 100  # unknown keys in an error, and characters of each
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def load(folder: str | Path) -> Model:
    """Return the model in an export's folder, on the CPU.

    It is a torch module from dense features [B, D], and for each sparse feature its rows [N], or the ids themselves if
    its table is one of ids, and the places [B + 1] at
    which the bags begin and the last one ends, to logits [B]; of several labels, whose names are in export.json,
    [B, T]; with task "regression" to predicted numbers in place of logits.
    """
    root = Path(folder)
    about = json.loads((root / "export.json").read_text())
    inputs = json.loads((root / "inputs.json").read_text())
    paths = {name: root / "tables" / f"{name}.safetensors" for name in table_names(inputs)}
    tables = [StoredTable(read_tensor(path), about["dtype"]) for path in paths.values()]
    places: dict[str, nn.Module] = {}
    for (name, path), table in zip(paths.items(), tables, strict=True):
        if name in inputs.get("id_tables", {}):
            found, buckets = (
                read_tensors(path.with_name(f"{name}.ids.safetensors")),
                inputs["id_tables"][name]["buckets"],
            )
            places[name] = IdPlaces(found["ids"], found["rows"], len(table.stored), buckets)
    dense = torch.export.load(root / "dense.pt2").module()
    if (newer := root / "dense.safetensors").exists():  # of a base that was made of deltas
        set_weights(dense, read_tensors(newer))
    return Model(tables, dense, inputs, places)


def weights_of(dense: nn.Module) -> dict[str, Tensor]:
    """Return the weights of the layers around the tables, by their names in training."""
    return {name.removeprefix("model."): weight for name, weight in dense.state_dict().items()}


def set_weights(dense: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights, by name, into the layers around the tables."""
    with torch.no_grad():
        for name, weight in weights_of(dense).items():
            weight.copy_(weights[name])


class StoredTable(nn.Module):
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

    def forward(self, ids: Tensor, offsets: Tensor, pooling: str) -> list[Tensor]:
        """Return the sum or the mean of the rows of each bag, float32 [B, dim]; without pooling all rows [N, dim], and
        how many are each sample's [B]."""
        if not pooling:
            return [self.rows(ids), offsets.diff()]
        places = torch.arange(ids.shape[0])
        sums = nn.functional.embedding_bag(places, self.rows(ids), offsets, mode="sum", include_last_offset=True)
        if pooling == "sum":
            return [sums]
        return [sums * (1 / offsets.diff().clamp(min=1).float()).unsqueeze(1)]  # rounds as FBGEMM does


class IdPlaces(nn.Module):
    """From ids of 64 bits to rows of a table; ids without a row have that of their bucket.

    >>> places = IdPlaces(torch.tensor([-5, 10**18]), torch.tensor([2, 1]), num_rows=16, num_buckets=2)
    >>> places(torch.tensor([10**18, 1, -5, 4])).tolist()
    [1, 8, 2, 0]

    Args:
        ids: [n] ascending.
        rows: [n] of each.
        num_rows, num_buckets: of the table.
    """

    ids: Tensor
    rows: Tensor

    def __init__(self, ids: Tensor, rows: Tensor, num_rows: int, num_buckets: int) -> None:
        super().__init__()
        self.register_buffer("ids", ids)
        self.register_buffer("rows", rows)
        self._buckets, self._rows_of_bucket = num_buckets, num_rows // num_buckets

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows [N] of ids [N]."""
        mixed = ids  # SplitMix64's finaliser; torch shifts with the sign
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
            mixed = (mixed ^ ((mixed >> shift) & ((1 << 64 - shift) - 1))) * factor
        bucket = ((mixed & _MOST) % self._buckets + (mixed < 0) * (2**63 % self._buckets)) % self._buckets
        rows = bucket * self._rows_of_bucket
        if self.ids.shape[0] == 0:
            return rows
        places = torch.searchsorted(self.ids, ids).clamp(max=self.ids.shape[0] - 1)
        return torch.where(self.ids[places] == ids, self.rows[places].long(), rows)


def table_names(inputs: dict[str, Any]) -> list[str]:
    """Return the names of the tables, each once, in the order of their lookups."""
    return list(dict.fromkeys(each["table"] for each in inputs.get("lookups", ()) if each["table"]))


class Model(nn.Module):
    """Tables in the order of `table_names`, the layers around them, and of tables of ids, by name, where each id is."""

    def __init__(
        self,
        tables: Iterable[StoredTable],
        dense: nn.Module,
        inputs: dict[str, Any],
        places: Mapping[str, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.tables, self.dense, self.inputs = nn.ModuleList(tables), dense, inputs
        self.places = nn.ModuleList((places or {}).get(name, nn.Identity()) for name in table_names(inputs))
        names, features = table_names(inputs), [feature["name"] for feature in inputs["sparse"]]
        self._lookups = [
            (names.index(each["table"]) if each["table"] else None, features.index(each["feature"]), each["pooling"])
            for each in inputs.get("lookups", ())
        ]

    def forward(self, dense: Tensor, ids: Sequence[Tensor], offsets: Sequence[Tensor]) -> Tensor:
        found = []
        for table, feature, pooling in self._lookups:
            if table is None:  # the layers read the ids themselves
                found += [ids[feature], offsets[feature].diff()]
            else:
                rows = self.places[table](ids[feature])
                found += self.tables[table](rows, offsets[feature], pooling)
        return self.dense(dense, found)

    def encode(self, samples: Sequence[dict[str, Any]]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the inputs of the model for samples as dicts of raw values, as the training read them.

        A dict has a key for each of `columns`. A missing value is None, NaN or an empty text; a bag of values is a
        list, an array, or a text where the data had such texts. Times are datetimes, texts, or seconds since 1970.

        Raises:
            ValueError: the samples are no list of dicts, a key is unknown or absent, or a value is not what its feature
                needs, with both.
        """
        self._check_keys(samples)
        columns = {name: self._column(samples, name) for name in self.columns}
        dense = np.stack([self._dense(each, columns, len(samples)) for each in self.inputs["dense"]], axis=1)
        bags = [self._bags(feature, columns[feature["column"]]) for feature in self.inputs["sparse"]]
        return torch.from_numpy(dense), [ids for ids, _ in bags], [offsets for _, offsets in bags]

    @property
    def columns(self) -> list[str]:
        """The columns that `encode` reads."""
        features = [*self.inputs["dense"], *self.inputs["sparse"]]
        return list(dict.fromkeys(each["column"] for each in features if each.get("scale") != "constant"))

    def _check_keys(self, samples: Sequence[dict[str, Any]]) -> None:
        if isinstance(samples, Mapping):
            raise ValueError("got one dict; needed a list of dicts, one per sample, so [sample] for one")
        columns = self.columns
        needed = set(columns)
        for number, sample in enumerate(samples):
            if not isinstance(sample, Mapping):
                needs = f"needed a dict with the keys {', '.join(columns)}"
                raise ValueError(f"sample {number}: got {sample!r:.60}; {needs}")
            if sample.keys() == needed:
                continue
            absent = [name for name in columns if name not in sample]
            problems = [f"{name!r} is absent, and a missing value is None" for name in absent]
            for name in islice(sample.keys() - needed, _MOST_NAMED):
                near = difflib.get_close_matches(str(name)[:_MOST_SHOWN], absent or columns, 1)
                hint = f"did you mean {near[0]!r}?" if near else "leave it out"
                problems.insert(0, f"{name!r:.{_MOST_SHOWN}} is not read by the model, {hint}")
            raise ValueError(f"sample {number}: {'; '.join(problems)}. Needed the keys {', '.join(columns)}")

    def _dense(self, feature: dict[str, Any], columns: dict[str, list[Any]], num_samples: int) -> np.ndarray:
        try:
            return scaled(columns.get(feature["column"], [None] * num_samples), feature)
        except ValueError as error:
            raise ValueError(f"{feature['name']}: {error}") from None

    def _bags(self, feature: dict[str, Any], values: list[Any]) -> tuple[Tensor, Tensor]:
        mapping = feature["mapping"]
        if mapping not in ("none", "modulo", "hash", "text", "hour", "weekday", *ID_MAPPINGS):
            raise ValueError(f"{feature['name']}: {mapping!r} is not mapped here; give rows to the model")
        if separator := feature.get("separator"):
            cut = parts_in_brackets if separator == "[,]" else partial(str.split, sep=separator)
            values = [cut(value) if isinstance(value, str) and value else value for value in values]
        offsets = torch.arange(len(values) + 1)
        if types_of(values) & {list, tuple}:
            bags = [value if isinstance(value, (list, tuple)) else [value] for value in values]
            offsets = torch.tensor([0, *map(len, bags)]).cumsum(0)
            values = plain([value for bag in bags for value in bag])
        try:
            return torch.from_numpy(rows_of(values, feature)), offsets
        except ValueError as error:
            raise ValueError(f"{feature['name']}: {error}") from None

    def _column(self, samples: Sequence[dict[str, Any]], name: str) -> list[Any]:
        """Return the samples' plain values of a column; None where one is missing."""
        values, nulls = plain([sample[name] for sample in samples]), set(self.inputs.get("null_values", ()))
        if nulls and str in types_of(values):
            values = [None if isinstance(value, str) and value in nulls else value for value in values]
        written = [self.inputs.get(key, {}).get(name) for key in ("format", "decimal")]
        return as_plain(values, *written) if any(written) else values


def read_tensor(path: str | Path) -> Tensor:
    """Return the tensor "rows" of a safetensors file, mapped into memory; changes of it stay in this process."""
    return read_tensors(path)["rows"]


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, mapped into memory; changes of them stay in this process."""
    with open(path, "rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        entries = json.loads(file.read(size))
    found, first = {}, 8 + size
    data = torch.from_file(str(path), shared=False, size=Path(path).stat().st_size, dtype=torch.uint8)[first:]
    for name, entry in entries.items():
        start, stop = entry["data_offsets"]
        part, dtype = data[start:stop], _TYPES[entry["dtype"]]
        part = part if (first + start) % dtype.itemsize == 0 else part.clone()
        found[name] = part.view(dtype).view(entry["shape"])
    return found
