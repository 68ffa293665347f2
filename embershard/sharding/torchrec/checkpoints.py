"""What a checkpoint needs of a sharded model beside its state dict, so that any other layout of the tables can load it.

The cached rows warm up the caches of the next run. States per row fit another number of column shards: TorchRec keeps a
number per row (row-wise Adagrad's sum of squared gradients, averaged over the columns) for every column shard on its
own, so a table of R rows in k column shards has [k * R] numbers, one shard after another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from embershard.cache.slot_state import CacheContents
from embershard.sharding.torchrec.inspection import pools_by_module

_FIELDS = ("rows", "ages", "scores")


def saved_contents(model: nn.Module, rank: int) -> dict[str, Tensor]:
    """Return the cached rows of this rank's pools as tensors, named by module, table, rank and field.

    >>> sorted(saved_contents(model, rank=0))  # a sharded model
    ['tables.clicks.0.ages', 'tables.clicks.0.rows', 'tables.clicks.0.scores']
    """
    parts: dict[str, list[CacheContents]] = {}
    for path, pool in pools_by_module(model):
        for table, contents in pool.contents():
            parts.setdefault(f"{path}.{table}.{rank}", []).append(contents)
    joined = {place: CacheContents.join(found) for place, found in parts.items()}
    return {
        f"{place}.{name}": getattr(contents, name)
        for place, contents in joined.items()
        if len(contents.rows)
        for name in _FIELDS
    }


def restore_contents(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Let the caches of this rank begin with rows that `saved_contents` returned on any ranks.

    >>> restore_contents(model, {})  # a sharded model
    """
    parts: dict[str, list[CacheContents]] = {}
    for place in sorted({name.rpartition(".")[0] for name in saved}):  # in the same order on all ranks
        table = place.rpartition(".")[0]
        parts.setdefault(table, []).append(CacheContents(*(saved[f"{place}.{name}"] for name in _FIELDS)))
    joined = {table: CacheContents.join(found) for table, found in parts.items()}
    for path, pool in pools_by_module(model):
        prefix = f"{path}."
        pool.restore({name.removeprefix(prefix): joined[name] for name in joined if name.startswith(prefix)})


class RowStates:
    """The states of a model's tables that cannot be loaded as they are saved.

    Args:
        states: of the optimizer of the tables, by parameter and name.
        saved_sizes: sizes of the saved states, by "parameter.name".
        num_rows: rows of every table, by parameter.

    Attributes:
        to_load: `states` with a tensor of the saved size in place of each of these.

    >>> states = {"t.weight": {"t.momentum1": torch.zeros(4)}}
    >>> row_states = RowStates(states, {"t.weight.t.momentum1": torch.Size([2])}, {"t.weight": 2})
    >>> _ = row_states.to_load["t.weight"]["t.momentum1"].copy_(torch.tensor([1.0, 3.0]))
    >>> row_states.spread()
    >>> states["t.weight"]["t.momentum1"].tolist()  # in two column shards, saved as one
    [1.0, 3.0, 1.0, 3.0]
    """

    def __init__(
        self,
        states: Mapping[str, Mapping[str, Any]],
        saved_sizes: Mapping[str, torch.Size],
        num_rows: Mapping[str, int],
    ) -> None:
        self.to_load = {parameter: dict(values) for parameter, values in states.items()}
        self._others: list[tuple[Tensor, Any, int]] = []
        for parameter, values in self.to_load.items():
            rows = num_rows.get(parameter, 0)
            for name, value in values.items():
                size = saved_sizes.get(f"{parameter}.{name}")
                if size is None or size == value.size() or not rows or len(size) != 1 or size[0] % rows:
                    continue
                values[name] = torch.empty(size, dtype=value.dtype)
                self._others.append((values[name], value, rows))

    def spread(self) -> None:
        """Fill the states with what was loaded: each column shard gets the mean over the saved ones, which for one
        saved shard is its value and for one shard now is the state of the whole row."""
        for loaded, value, num_rows in self._others:
            per_row = loaded.view(-1, num_rows).mean(0)
            parts = [(0, value)]
            if isinstance(value, ShardedTensor):
                parts = [(shard.metadata.shard_offsets[0], shard.tensor) for shard in value.local_shards()]
            for start, part in parts:
                rows = torch.arange(start, start + part.numel()) % num_rows
                part.copy_(per_row[rows].view_as(part))
