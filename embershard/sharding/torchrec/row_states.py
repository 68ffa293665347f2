"""States per row of tables that a checkpoint has in another number of column shards.

TorchRec keeps a number per row (row-wise Adagrad's sum of squared gradients, averaged over the columns) for every
column shard on its own: a table of R rows in k column shards has [k * R] numbers, one shard after another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor


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
