"""Data-parallel tables: every rank looks its own samples up, in a cache that is the same on all ranks.

The caches are planned alike because they see the same ids: those of all ranks, which are exchanged ahead of the batch.
A rank pools its own samples' rows. The backward adds up each row's gradients over the ranks, in rank order, and all
ranks apply the same update to the same rows, so that the caches stay equal bit for bit.

```text
  a batch's ids ──▶ distinct ids ──▶ those of all ranks ──▶ slots: the same plan on every rank
        │                                                       │
        └──▶ bags over the rows ◀── this rank's rows ◀──────────┘ no row travels; gradients do
```
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable, ShardingType
from torchrec.distributed.types import Awaitable, NoWait
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.cache.config import CacheConfig
from embershard.cache.guards import CopiesGuard
from embershard.cache.homes.shared import CELLS_PER_RANK, Barriers, NodeShare
from embershard.cache.parts.part import PoolPart
from embershard.distributed.ranks import Ranks
from embershard.errors import ConfigError
from embershard.extras.data_parallel.node_memory import NodeMemory
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings
from embershard.sharding.torchrec.lookups import SEQUENCE_SHARDINGS, OwnShardingInfo
from embershard.sharding.torchrec.modes.bags import DistinctIds
from embershard.sharding.torchrec.modes.mode import Arguments, ShardingInfos, ShardingMode
from embershard.sharding.torchrec.modes.replicated_rows import trained_alike
from embershard.sharding.torchrec.modes.rows_exchange import ExchangesRows, RowsContext
from embershard.sharding.torchrec.spec import CACHED_KERNEL, first_row


@dataclass
class Union:
    """The distinct ids of all ranks in a batch, U in all, in the same order on every rank.

    Attributes:
        own: int64 [M], the places of this rank's M distinct ids among them; None until the ids have arrived.
    """

    own: Tensor | None = None


class UnionInput(nn.Module):
    """Gives every rank the distinct ids of all ranks.

    Attributes:
        union: of the newest batch.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group
        self.union = Union()

    def forward(self, distinct: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Tell the ranks how many ids of each key this rank has."""
        self.union = Union()
        return _Counts(self._group, distinct, self.union)


class _Counts(Awaitable[Awaitable[KeyedJaggedTensor]]):
    """The number of distinct ids of each key on each rank; then sends the ids."""

    def __init__(self, group: dist.ProcessGroup, distinct: KeyedJaggedTensor, union: Union) -> None:
        super().__init__()
        self._group, self._distinct, self._union = group, distinct, union
        ranks = dist.get_world_size(group)
        sent = torch.tensor(distinct.length_per_key()).repeat(ranks)
        self._counts = torch.empty_like(sent)
        self._work: Any = dist.all_to_all_single(self._counts, sent, group=group, async_op=True)

    def _wait_impl(self) -> Awaitable[KeyedJaggedTensor]:
        self._work.wait()
        counts = self._counts.view(dist.get_world_size(self._group), -1).tolist()
        return _Ids(self._group, self._distinct, counts, self._union)


class _Ids(Awaitable[KeyedJaggedTensor]):
    """The ids of all ranks, as one bag per key.

    Args:
        counts: distinct ids by rank and key.
    """

    def __init__(
        self, group: dist.ProcessGroup, distinct: KeyedJaggedTensor, counts: list[list[int]], union: Union
    ) -> None:
        super().__init__()
        self._distinct, self._counts, self._union = distinct, counts, union
        self._rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        ids = distinct.values().int()  # a cache numbers its rows by 31 bits
        from_each = [sum(of_rank) for of_rank in counts]
        self._ids = ids.new_empty(sum(from_each))
        self._work: Any = dist.all_to_all_single(
            self._ids, ids.repeat(ranks), from_each, [ids.numel()] * ranks, group=group, async_op=True
        )

    def _wait_impl(self) -> KeyedJaggedTensor:
        self._work.wait()
        by_key = list(itertools.chain.from_iterable(zip(*self._counts, strict=True)))  # of each key, rank after rank
        parts = self._ids.split(list(itertools.chain.from_iterable(self._counts)))  # of each rank, key after key
        num_keys = len(self._distinct.keys())
        ids = torch.cat([part for key in range(num_keys) for part in parts[key::num_keys]]).long()
        found = DistinctIds.of(ids, [sum(of_key) for of_key in zip(*self._counts, strict=True)])
        self._union.own = torch.cat(found.inverse.split(by_key)[self._rank :: len(self._counts)])
        return KeyedJaggedTensor(
            keys=self._distinct.keys(),
            values=found.ids,
            lengths=torch.tensor(found.counts, dtype=self._distinct.lengths().dtype),
            stride=1,
            length_per_key=found.counts,
        )


class UnionOutput(nn.Module):
    """Takes this rank's rows out of those of all ranks.

    Args:
        group: of the ranks.
        pools: that are looked up in, which get the guard of their copies.
    """

    def __init__(self, group: dist.ProcessGroup, pools: Sequence[CachedTableBatchedEmbeddings]) -> None:
        super().__init__()
        self._group = group
        tables = ", ".join(table for pool in pools for table in pool.cache.tables)
        part = PoolPart()
        part.guard = self._guard = CopiesGuard(f"rank {dist.get_rank(group)}, data-parallel tables {tables}")
        for pool in pools:
            pool.cache.parts.add(part)

    def forward(self, rows: Tensor, context: RowsContext) -> Awaitable[Tensor]:
        """Return rows [M, D] of this rank's distinct ids, of rows [U, D]. The backward is collective."""
        own = context.union.own
        assert own is not None, "the batch's ids have arrived"

        def train(_: Tensor, gradients: Tensor) -> None:  # of all rows: each is some rank's
            rows.backward(gradients)

        return NoWait(trained_alike(rows.index_select(0, own), own, self._group, self._guard, train))


class _OfAllRanks:
    def create_lookup(self, *args: Any, **kwargs: Any) -> Any:
        lookup = super().create_lookup(*args, **kwargs)  # type: ignore[misc]
        self._pools = [kernel.emb_module for kernel in lookup._emb_modules]
        return lookup

    def create_input_dist(self, device: torch.device | None = None) -> UnionInput:
        return UnionInput(self._pg)  # type: ignore[attr-defined]

    def create_output_dist(self, device: torch.device | None = None) -> UnionOutput:
        return UnionOutput(self._pg, self._pools)  # type: ignore[attr-defined]


_RowWise: Any = SEQUENCE_SHARDINGS[ShardingType.ROW_WISE.value]


class _DataParallel(ExchangesRows, _OfAllRanks, _RowWise):  # type: ignore[misc]
    """To TorchRec the tables are sharded row-wise: a rank's shard are the rows that it writes and saves."""


class DataParallelShardingInfo(OwnShardingInfo):
    """A table that every rank caches alike."""

    @staticmethod
    def make_sharding(infos: list[EmbeddingShardingInfo], **place: Any) -> EmbeddingSharding[Any, Any, Any, Any]:
        """Return the sharding of one of the groups that :class:`DataParallelMode` made."""
        return _DataParallel(sharding_infos=infos, **place)


def share_of(
    shards: Sequence[ShardedEmbeddingTable], group: dist.ProcessGroup, device: torch.device, config: CacheConfig
) -> NodeShare:
    """Return this rank's share in the host rows of a pool. Collective.

    Args:
        shards: of each table, the rows that this rank writes.
        group: of the ranks, all on one machine.

    Raises:
        ConfigError: on all ranks: they are on GPUs, or on several machines.
    """
    if device.type != "cpu":
        raise ConfigError(
            f'mode "data_parallel" on {device}: its ranks share host memory that transfers to a GPU do not know yet. '
            'Train on the CPU (train.device = "cpu"), or use mode "sharded"'
        )
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    ranks = Ranks(rank, world_size, rank, world_size, device, group)
    memory = NodeMemory(ranks, config.host_dir if config.host == "mmap" else None)
    cells = NodeMemory(ranks).zeros(2 * world_size * CELLS_PER_RANK, torch.int64).view(2, world_size, -1)
    own = [(first_row(shard), shard.local_rows) for shard in shards]
    at_plans, at_writes = (Barriers(part, rank) for part in cells)
    return NodeShare(memory.zeros, own, at_plans, at_writes, is_mapped=config.host == "mmap")


class DataParallelMode(ShardingMode):
    """`mode="data_parallel"`."""

    needs_ranks: ClassVar[bool] = True
    splits_bags = True
    types = (ShardingType.ROW_WISE.value,)
    has_whole_tables: ClassVar[bool] = True

    def __init__(self, arguments: Arguments) -> None:
        if arguments["plan"] is not None or arguments["exchange"] != "pooled":
            given = "a plan" if arguments["plan"] is not None else f"exchange={arguments['exchange']!r}"
            raise ConfigError(
                f'mode="data_parallel" with {given}: no row travels, so there is nothing to place or '
                "exchange. Remove one of the two"
            )

    def __str__(self) -> str:
        return 'mode="data_parallel"'

    def group(self, infos: ShardingInfos, spec: Any, is_sequence: bool) -> ShardingInfos:
        """Group tables by their columns: each group has one exchange of ids."""
        grouped: ShardingInfos = {}
        for kind, members in infos.items():
            for info in members:
                table, kernel = info.embedding_config, info.param_sharding.compute_kernel
                if (kind, kernel) != (ShardingType.ROW_WISE.value, CACHED_KERNEL):
                    raise ConfigError(
                        f'table {table.name!r}: mode "data_parallel" with sharding {kind!r} and compute kernel '
                        f'{kernel!r}; needed "row_wise" and {CACHED_KERNEL!r}, which say who writes its rows. Make the '
                        "plan with plan_sharding and this sharder"
                    )
                key = f"{kind}, data-parallel, of {table.embedding_dim}"
                grouped.setdefault(key, []).append(DataParallelShardingInfo(**vars(info)))
        return grouped

    def whole_tables(
        self, config: GroupedEmbeddingConfig, group: dist.ProcessGroup, device: torch.device, cache: CacheConfig
    ) -> tuple[NodeShare, GroupedEmbeddingConfig]:
        tables = [
            dataclasses.replace(shard, local_rows=shard.num_embeddings, local_metadata=None)
            for shard in config.embedding_tables
        ]
        share = share_of(config.embedding_tables, group, device, cache)
        return share, dataclasses.replace(config, embedding_tables=tables)
