"""The rounding of `cache.host_dtype` on stock TorchRec's tables, for a comparison: without a cache or small types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from embershard.cache.homes.full_rows import full_rows_of
from embershard.cache.homes.small_rows import SmallRows
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.data import Batch
from embershard.distributed import Ranks
from embershard.frequency import FrequencyProfile
from embershard.training.config import RunConfig
from embershard.training.fit.model_size import tables_of_run


class TableRounding:
    """Rounds the rows that a step trained, but for full ones, in tables that are whole in memory.

    Rows are rounded by the same function as in slots; which rows, when, and by which row and column numbers is found
    out anew, from the batch and the shards.

    Args:
        config: of the run with the cache.
        profile: of the run with the cache.
        weights: the model's state dict: references to the tables.
    """

    def __init__(
        self, config: RunConfig, profile: FrequencyProfile | None, weights: Mapping[str, Any], ranks: Ranks
    ) -> None:
        self._ranks, self._shards = ranks, dict[str, list[tuple[SmallRows, int, Tensor, Tensor]]]()
        self._features: dict[str, tuple[str, ...]] = {}
        for table in tables_of_run(config):
            small_type = config.cache.small_type_of(table.name)
            if small_type is None:
                continue
            share = config.cache.full_share if small_type == "int8" else 0.0
            full = torch.from_numpy(full_rows_of(table.name, table.num_rows, share, profile))
            value = next(value for name, value in weights.items() if name.endswith(f".{table.name}.weight"))
            self._features[table.name] = tuple(table.features)
            self._shards[table.name] = []
            for row, column, rows in _local(value):
                count, columns = rows.shape
                own = full[(full >= row) & (full < row + count)] - row
                places = ShardWeights(table.name, config.train.seed, table.dim, 0.0, 0.0, row, column)
                rounding = SmallRows(small_type, [count], [places], columns, own[:0], _allocate)
                self._shards[table.name].append((rounding, row, rows, own))
                _round(rounding, rows, torch.arange(count), own)

    def after_step(self, batches: Sequence[Batch]) -> None:
        """Round the rows of the tables that the ranks' batches of a step looked up. Collective."""
        features = [batch.sparse_features.to_dict() for batch in batches]
        ids = {
            table: torch.cat([each[name].values().long() for each in features for name in names]).unique().cpu()
            for table, names in self._features.items()
        }
        gathered: list[dict[str, Tensor]] = self._ranks.all_gather_objects(ids)
        for table, shards in self._shards.items():
            every = torch.cat([each[table] for each in gathered]).unique()
            for rounding, first, rows, full in shards:
                _round(rounding, rows, every[(every >= first) & (every < first + len(rows))] - first, full)


def _round(rounding: SmallRows, rows: Tensor, numbers: Tensor, full: Tensor) -> None:
    """Round rows `numbers` of a shard but for those of `full`."""
    some = numbers[~torch.isin(numbers, full)].to(rows.device)
    rounding.round(rows, some, some, are_distinct=True)


def _local(value: Any) -> Iterator[tuple[int, int, Tensor]]:
    """Yield this rank's shards of a table: first row, first column, rows."""
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            row, column = shard.metadata.shard_offsets
            yield row, column, shard.tensor.detach()
    else:
        yield 0, 0, value.detach()


def _allocate(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype)
