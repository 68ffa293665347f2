"""Rows that a table begins with, from a file of vectors: read and checked before a model is built, and filled in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from embershard.cache.ids.config import IdTable
from embershard.data import DataConfig
from embershard.data.config import columns_of_files
from embershard.data.sources.table.decode import ChunkDecoder
from embershard.data.sources.table.raw import RawChunk
from embershard.distributed.checkpoint.boxes import Box, Saved, fill_rows
from embershard.errors import ConfigError, DataError
from embershard.extras.warm_start.id_moves import LiveIds, place_ids
from embershard.models import ModelTable
from embershard.models.config import PretrainedTable
from embershard.training.config import RunConfig
from embershard.training.fit.id_rules import id_rules
from embershard.training.fit.model_size import named_tables, tables_of_run

_Ints = NDArray[np.int64]
_VECTORS = "vectors"


@dataclass(frozen=True, eq=False)
class Vectors(Saved):
    """The vectors of a file, which a table's rows begin with.

    Attributes:
        table: of the model.
        keys: int64 [n], the row of each vector, or its id where the table takes any id; each once.
        values: float32 [n, dim].
        rules: of a table of ids; else None.
        num_shared: vectors that were left out, since another value before it has the same row.
    """

    table: ModelTable
    keys: _Ints
    values: Tensor
    rules: IdTable | None = None
    num_shared: int = 0

    def sizes(self) -> Mapping[str, torch.Size]:
        return {_VECTORS: self.values.shape}

    def read(self, name: str, box: Box) -> Tensor:
        return box.of(self.values).clone()

    def fill(self, tensors: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
        """Fill a model's tensors on this rank, of the group "model" of a checkpoint. Of a table of ids, return how many
        ids got a row here, and how many found none."""
        name = self.table.tensor
        target, numbers = tensors[name], np.arange(len(self.keys))
        if self.rules is None:
            fill_rows(target, self, _VECTORS, numbers, self.keys)
            return {}
        layout = self.rules.buckets_of(self.table.name, self.table.num_rows)
        records = tensors[f"{name.removesuffix('weight')}ids"]
        live = LiveIds.of_ids(self.keys, numbers)
        return {self.table.name: place_ids(records, live, layout, {_VECTORS: target}, self)}

    @property
    def title(self) -> str:
        """What is found and missing, for a reader."""
        shared = f"; {self.num_shared:,} left out: another value has their row" if self.num_shared else ""
        rest = f" of {self.table.num_rows:,} rows" if self.rules is None else " ids"
        return f"table {self.table.name}: vectors of {len(self.keys):,}{rest}, the others as of the seed{shared}."


def read_pretrained(config: RunConfig, without: Collection[str] = ()) -> list[Vectors]:
    """Read the files of `model.pretrained`, whole.

    Args:
        without: tables that something else fills.

    >>> from embershard.models import ModelConfig
    >>> np.savez("items.npz", row=np.arange(2), embedding=np.ones((2, 16)))
    >>> settings = {"C1": PretrainedTable("items.npz", rows="row")}
    >>> print(read_pretrained(RunConfig(model=ModelConfig(pretrained=settings)))[0].title)
    table t_C1: vectors of 2 of 15 rows, the others as of the seed.

    Raises:
        ConfigError: a table is not there, a file has not the columns, or vectors are of another length.
        DataError: a value is not what the feature needs, comes twice, or a vector is not finite.
    """
    tables, rules = {table.name: table for table in tables_of_run(config)}, id_rules(config)
    named = named_tables("model.pretrained", config.model.pretrained, tables.values())
    return [
        _read(f"model.pretrained.{name}", config.model.pretrained[name], tables[table], config, rules.get(table))
        for table, name in named.items()
        if table not in without
    ]


def _read(
    setting: str, settings: PretrainedTable, table: ModelTable, config: RunConfig, rules: IdTable | None
) -> Vectors:
    path = Path(settings.file)
    key = settings.values or settings.rows or ""
    column, values = _columns(setting, path, key, settings.vectors)
    if values.dim() != 2 or values.shape != (len(column), table.dim):
        raise ConfigError(
            f"{setting}: {path}: got {settings.vectors!r} of shape {list(values.shape)}, needed "
            f"[{len(column)}, {table.dim}]: a vector for each {key!r}, of as many numbers as rows of {table.name} have."
        )
    if not values.isfinite().all():
        row = int((~values.isfinite()).any(dim=1).nonzero()[0])
        raise DataError(f"{path}, row {row + 1}: {settings.vectors} has a number that is not finite. Remove the row.")
    if settings.rows is not None:
        if rules is not None:
            raise ConfigError(f"{setting}.rows has no effect: {table.name} takes any id. Give the ids: values = NAME.")
        keys = _row_numbers(path, key, column, table.num_rows)
    else:
        keys = _keys_of_values(setting, path, key, column, table, config.data)
    raw = np.array([str(each) for each in column.to_pylist()], dtype=object)
    _, firsts, counts = np.unique(raw, return_index=True, return_counts=True)
    if (counts > 1).any():
        place = firsts[counts > 1].min()
        raise DataError(f"{path}, row {place + 1}: {key} = {raw[place]!r} comes again later. Give each value once.")
    _, kept = np.unique(keys, return_index=True)
    kept.sort()
    return Vectors(table, keys[kept], values[torch.from_numpy(kept)], rules, len(keys) - len(kept))


def _columns(setting: str, path: Path, key: str, vectors: str) -> tuple[pa.Array, Tensor]:
    """Return a column of values or rows, and vectors as float32 [n, dim]."""
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                _need(setting, path, arrays.files, key, vectors)
                return pa.array(arrays[key]), torch.from_numpy(np.ascontiguousarray(arrays[vectors], np.float32))
        _need(setting, path, pq.read_schema(path).names, key, vectors)
        table = pq.read_table(path, columns=[key, vectors], use_threads=False)
        column, lists = (table.column(name).combine_chunks() for name in (key, vectors))
        lists = lists.cast(pa.list_(lists.type.value_type))
        numbers = np.asarray(lists.flatten().to_numpy(zero_copy_only=False), np.float32)
        if len(lists) and len(numbers) % len(lists) == 0 and (np.diff(lists.offsets) == lists[0].__len__()).all():
            return column, torch.from_numpy(numbers.copy()).view(len(lists), -1)
        return column, torch.from_numpy(numbers.copy())  # of unequal lengths: no table
    except (OSError, ValueError, pa.ArrowException) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{setting}: {path} cannot be read: {error}. Give a Parquet file, or an npz.") from error


def _need(setting: str, path: Path, names: list[str], *wanted: str) -> None:
    for name in wanted:
        if name not in names:
            raise ConfigError(f"{setting}: {path} has no {name!r}; it has {', '.join(names)}.")


def _row_numbers(path: Path, key: str, column: pa.Array, num_rows: int) -> _Ints:
    rows = np.asarray(column.to_numpy(zero_copy_only=False))
    if rows.dtype.kind not in "iu":
        raise DataError(f"{path}: {key} is of type {column.type}; needed whole numbers, and none missing.")
    is_wrong = (rows < 0) | (rows >= num_rows)
    if is_wrong.any():
        place = int(np.flatnonzero(is_wrong)[0])
        raise DataError(f"{path}, row {place + 1}: {key} = {rows[place]}; needed a row in 0..{num_rows - 1}.")
    return rows.astype(np.int64)


def _keys_of_values(setting: str, path: Path, key: str, column: pa.Array, table: ModelTable, data: DataConfig) -> _Ints:
    """Return the row, or the id, of each value, as training finds it."""
    if not data.has_names:
        raise ConfigError(
            f'{setting}.values: data of kind "{data.kind}" have no columns of values. Give row numbers: rows = NAME.'
        )
    features = columns_of_files(data).of_kind("sparse")
    feature = replace(features[table.features[0]], column=key, separator=None)
    chunk = RawChunk(path, pa.table({key: column}), np.arange(len(column)), 1)
    decoder = ChunkDecoder(chunk, columns_of_files(data))
    keys, lengths = decoder.bags(feature, (1, "a vector is of one value"))
    if decoder.bad:
        _, bad = min(decoder.bad.items())
        raise DataError(f"{bad}. Give a value as the feature {table.features[0]!r} has them.")
    if (lengths != 1).any():
        raise DataError(f"{path}: {key} has lists; needed one value for each vector.")
    return keys
