"""The rounding of `cache.host_dtype` on stock TorchRec's tables, for a comparison: without a cache or small types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.cache.homes.full_rows import full_rows_of
from embershard.cache.homes.small_rows import SmallRows
from embershard.cache.homes.small_sizes import SmallType
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.distributed import Ranks
from embershard.extras.verify.twins import cached_sharders, configs_of, sharded_modules
from embershard.frequency import FrequencyProfile
from embershard.sharding.torchrec import cached_embeddings
from embershard.sharding.torchrec.spec import CACHED_KERNEL
from embershard.training.config import RunConfig
from embershard.training.fit.model_size import tables_of_run


@dataclass(frozen=True)
class SmallTable:
    """A table whose rows are small in the cache's home.

    Attributes:
        small_type: of its rows.
        full: rows that are not rounded, int64.
        seed: of the rounding.
    """

    name: str
    dim: int
    features: tuple[str, ...]
    small_type: SmallType
    full: Tensor
    seed: int


def small_tables_of(config: RunConfig, profile: FrequencyProfile | None) -> Iterator[SmallTable]:
    """Yield the tables of a run with small rows; `profile`: of the run."""
    for table in tables_of_run(config):
        small_type = config.cache.small_type_of(table.name)
        if small_type is not None:
            share = config.cache.full_share if small_type == "int8" else 0.0
            full = torch.from_numpy(full_rows_of(table.name, table.num_rows, share, profile))
            yield SmallTable(table.name, table.dim, tuple(table.features), small_type, full, config.train.seed)


def small_tables_in(model: DistributedModelParallel, ranks: Ranks) -> Iterator[SmallTable]:
    """Yield the tables of a program's model with small rows. Collective."""
    marked: list[dict[str, Tensor]] = ranks.all_gather_objects(
        {name: rows for pool in cached_embeddings(model) for name, rows in pool.marked_rows.items()}
    )
    for sharder in cached_sharders(model):
        for _, module in sharded_modules(model.module):
            for config in configs_of(module) if isinstance(module, sharder.sharded_module_type) else ():
                small_type = sharder.cache.small_type_of(config.name)
                is_cached = module.module_sharding_plan[config.name].compute_kernel == CACHED_KERNEL
                if small_type is not None and is_cached:
                    own = [rows[config.name].cpu() for rows in marked if config.name in rows]
                    full = torch.cat([torch.empty(0, dtype=torch.int64), *own]).unique()
                    features = tuple(config.feature_names)
                    yield SmallTable(config.name, config.embedding_dim, features, small_type, full, sharder._init_seed)


class TableRounding:
    """Rounds the rows that a step trained, but for full ones, in tables that are whole in memory.

    Rows are rounded by the same function as in slots; which rows, when, and by which row and column numbers is found
    out anew, from the batch and the shards.

    Args:
        tables: with small rows where there is a cache.
        weights: the model's state dict: references to the tables.
    """

    def __init__(self, tables: Iterable[SmallTable], weights: Mapping[str, Any], ranks: Ranks) -> None:
        self._ranks, self._shards = ranks, dict[str, list[tuple[SmallRows, int, Tensor, Tensor]]]()
        self._features: dict[str, tuple[str, ...]] = {}
        for table in tables:
            value = next(value for name, value in weights.items() if name.endswith(f".{table.name}.weight"))
            self._features[table.name] = table.features
            self._shards[table.name] = []
            for row, column, rows in _local(value):
                count, columns = rows.shape
                own = table.full[(table.full >= row) & (table.full < row + count)] - row
                places = ShardWeights(table.name, table.seed, table.dim, 0.0, 0.0, row, column)
                rounding = SmallRows(table.small_type, [count], [places], columns, own[:0], _allocate)
                self._shards[table.name].append((rounding, row, rows, own))
                _round(rounding, rows, torch.arange(count), own)

    def after_step(self, batches: Sequence[KeyedJaggedTensor]) -> None:
        """Round the rows of the tables that the ranks' batches of a step looked up. Collective.

        Args:
            batches: features by name; each feature is in one of them, or in several.
        """
        found = [batch.to_dict() for batch in batches]
        none = torch.empty(0, dtype=torch.int64)
        ids = {
            table: torch.cat(
                [none, *(each[name].values().long().cpu() for each in found for name in names if name in each)]
            ).unique()
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
