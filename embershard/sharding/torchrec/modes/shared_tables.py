"""Tables of which a machine's ranks share one host copy, and every rank caches rows of the whole table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable

from embershard.cache.config import CacheConfig
from embershard.cache.rows.host_store import CELLS_PER_RANK, Meetings, NodeShare
from embershard.distributed.node_memory import NodeMemory
from embershard.distributed.ranks import Ranks
from embershard.errors import ConfigError
from embershard.sharding.torchrec.spec import first_row


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
    return NodeShare(memory.zeros, own, *(Meetings(part, rank) for part in cells))


def of_whole_tables(config: GroupedEmbeddingConfig) -> GroupedEmbeddingConfig:
    """Return a group of shards as the group of their whole tables."""
    tables = [
        dataclasses.replace(shard, local_rows=shard.num_embeddings, local_metadata=None)
        for shard in config.embedding_tables
    ]
    return dataclasses.replace(config, embedding_tables=tables)
