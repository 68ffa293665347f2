"""Ids without a bound in state dicts: tensors beside a table's weights, cut by rows as these are.

`ids` [rows, 2] has each row's id, mixed, and its uses; `id_candidates` [.., 2] those of ids without a row. Buckets are
whole on any number of ranks, so a checkpoint that cuts these tensors anew moves ids with their rows. What is saved
is the state behind the newest batch that trained, however many batches are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _remote_device
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties

from embershard.cache.ids.config import ID_TENSORS, Buckets, IdTable
from embershard.cache.ids.id_map import IdMap
from embershard.errors import CheckpointError
from embershard.sharding.torchrec.compat import sharding_group
from embershard.sharding.torchrec.ids.id_tables import maps_of
from embershard.sharding.torchrec.modules import pools_of_module


class IdStates:
    """The ids of a sharded module's tables, for its state dicts.

    Args:
        module: of ours, sharded.
        tables: of ids, by name: their rules, and their rows as buckets.
    """

    def __init__(self, module: Any, tables: Mapping[str, tuple[IdTable, Buckets]]) -> None:
        self._holder, self._tables, self._pools = module.holder, tables, pools_of_module(module)
        self._plan, self._group = module.module_sharding_plan, sharding_group(module._env)

    @property
    def _maps(self) -> dict[str, IdMap]:
        return {each.table: each for pool in self._pools for each in maps_of(pool)}

    def add_to(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Add the tensors to a state dict."""
        for table in self._tables:
            found = self._maps.get(table)
            tensors = {} if found is None else found.tensors()
            for name, kind in ID_TENSORS.items():
                local = torch.from_numpy(tensors[kind]) if tensors else None
                sharded = self._sharded(table, kind, local)
                if sharded is not None:
                    state_dict[self._key(prefix, table, name)] = sharded

    def take_from(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Take the tensors over from a state dict, out of which they go.

        Raises:
            CheckpointError: it has a table's rows and not whose they are.
        """
        for pool in self._pools:
            pool.drop_given_rows()
        for table in self._tables:
            given = {kind: state_dict.pop(self._key(prefix, table, name), None) for name, kind in ID_TENSORS.items()}
            if given["records"] is None:
                if self._key(prefix, table, "weight") in state_dict:
                    raise CheckpointError(
                        f"the state dict has the rows of table {table!r}, and not whose they are: no "
                        f"{self._key(prefix, table, 'ids')!r}. Load one that a model with ids saved, or leave the "
                        "table out of it"
                    )
                continue
            if table in self._maps:
                parts = {kind: _local(value) for kind, value in given.items() if value is not None}
                self._maps[table].load({kind: part.numpy() for kind, part in parts.items()})

    def _key(self, prefix: str, table: str, name: str) -> str:
        return f"{prefix}{self._holder}.{table}.{name}"

    def _sharded(self, table: str, kind: str, local: Tensor | None) -> ShardedTensor | None:
        """Return a tensor of all ranks, cut as the table; None where there are no candidates."""
        rules, buckets = self._tables[table]
        entries = buckets.rows if kind == "records" else rules.candidates_of(buckets)
        if not entries:
            return None
        shards, mine = [], []
        for place in self._plan[table].sharding_spec.shards:
            first, rows = (n // buckets.rows * entries for n in (place.shard_offsets[0], place.shard_sizes[0]))
            rank = place.placement.rank()
            metadata = ShardMetadata([first, 0], [rows, 2], _remote_device(f"rank:{rank}/cpu"))
            shards.append(metadata)
            if local is not None and rank == dist.get_rank(self._group):
                mine.append(Shard(local, metadata))
        size = torch.Size([buckets.num_buckets * entries, 2])
        whole = ShardedTensorMetadata(shards, size, TensorProperties(dtype=torch.int64))
        return ShardedTensor._init_from_local_shards_and_global_metadata(mine, whole, process_group=self._group)


def _local(value: Tensor | ShardedTensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return value.local_shards()[0].tensor if isinstance(value, ShardedTensor) else value
