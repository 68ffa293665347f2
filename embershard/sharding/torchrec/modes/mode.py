"""`ShardingMode`: what a mode may change of how a module's tables are sharded and cached; and `MODES`, all of them.

A mode is a class here and a row of `MODES`. Its module is imported when a sharder's arguments ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo

from embershard.errors import ConfigError
from embershard.frequency.statistics import Ints
from embershard.lazy_names import named

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable

    from embershard.cache.config import CacheConfig
    from embershard.cache.homes.shared import NodeShare
    from embershard.cache.row_cache import RowCache
    from embershard.sharding.torchrec.feature_keys import PoolKeys

#: The tables of a sharded module, in groups by sharding type. TorchRec makes one `EmbeddingSharding` of each group.
ShardingInfos = dict[str, list[EmbeddingShardingInfo]]
#: Values of a sharder's argument `mode`.
SharderMode = Literal["sharded", "data_parallel"]
#: Arguments of a sharder, by name.
Arguments = Mapping[str, Any]


class ShardingMode:
    """A way of its own in which tables of a module are sharded, travel and are cached; one object per sharder.

    What a mode does not override changes nothing.

    Attributes:
        needs_ranks: it has no effect on one rank, and is left out there.
        splits_bags: a sample's ids of a feature are looked up in several parts.
        types: TorchRec's sharding types that it can do; None: all.
        uses_caches_alone: it reads and writes rows through caches alone, so host rows may be fp16 or int8, and
            groups of ranks be replicas.
        has_whole_tables: each rank caches rows of the whole tables, and writes those of its shard; else it has its
            shard alone.
    """

    needs_ranks: ClassVar[bool] = False
    splits_bags = False
    types: Sequence[str] | None = None
    has_whole_tables: ClassVar[bool] = False
    uses_caches_alone: ClassVar[bool] = False

    def __init__(self, arguments: Arguments) -> None:
        """Take what the mode needs of a sharder's arguments.

        Raises:
            ConfigError: they contradict each other.
        """

    def __str__(self) -> str:
        """The arguments that ask for it, as a user writes them."""
        raise NotImplementedError

    @property
    def bags_module(self) -> type | None:
        """Class of the sharded module of bags; None: the cached one."""
        return None

    def check_beside(self, others: Sequence[ShardingMode]) -> None:
        """Raise `ConfigError` where it cannot be with the sharder's other modes."""

    def check_module(self, module: Any, device: Any) -> None:
        """Raise `ConfigError` where a module cannot be sharded so."""

    def types_of(self, table: str, num_rows: int) -> Sequence[str] | None:
        """Return the sharding types that this table may have, always cached and with pooled embeddings exchanged; None:
        the mode asks nothing of it. Such tables share no cache with others.

        Raises:
            ConfigError: the table cannot have so many rows.
        """
        return None

    def are_by_columns(self, table: str) -> bool:
        """Return True for a table that shares a group with tables of as many columns alone."""
        return False

    def group(self, infos: ShardingInfos, spec: Any, is_sequence: bool) -> ShardingInfos:
        """Give some tables of a module to groups of their own, as `OwnShardingInfo`. `spec` is its `CacheSpec`.

        Raises:
            ConfigError, ShardingError: a table is placed as the mode cannot have it.
        """
        return infos

    def whole_tables(
        self, config: GroupedEmbeddingConfig, group: dist.ProcessGroup, device: torch.device, cache: CacheConfig
    ) -> tuple[NodeShare, GroupedEmbeddingConfig]:
        """Return a rank's share of the host rows of a group of shards, which the ranks of a machine have together, and
        the group of their whole tables. Collective."""
        raise NotImplementedError

    def gives_rows(self, table: str) -> bool:
        """Return True for a table whose ids are no row numbers, but get rows as batches come; it shares no pool with
        other tables."""
        return False

    def pool_keys(
        self, spec: Any, tables: Sequence[ShardedEmbeddingTable], cache: RowCache, table_of_feature: Sequence[int]
    ) -> PoolKeys:
        """Return what gives rows of a pool of such tables to ids. `spec` is the module's `CacheSpec`."""
        raise NotImplementedError

    def note_module(self, module: Any, configs: Sequence[Any]) -> None:
        """Take note of a sharded module, which is complete, and of its tables."""

    def uncached_rows(self, table: str) -> Ints:
        """Return the rows of the whole table that no cache needs."""
        return np.empty(0, np.int64)


def _exchanges_rows(given: Arguments) -> bool:
    planned = () if given["plan"] is None else given["plan"].tables
    return given["exchange"] != "pooled" or any(table.exchange != "pooled" for table in planned)


_HERE = "embershard.sharding.torchrec"
#: Of each mode: which arguments ask for it, and its class. Groups are made in this order.
MODES: Sequence[tuple[Callable[[Arguments], bool], str]] = (
    (lambda given: given["mode"] == "data_parallel", "embershard.extras.data_parallel.mode:DataParallelMode"),
    (lambda given: given["hot_rows"] is not None, "embershard.extras.hot_cold.mode:HotColdMode"),
    (_exchanges_rows, f"{_HERE}.modes.rows_exchange:RowsExchangeMode"),
    (lambda given: bool(given["ids"]), f"{_HERE}.ids.id_shardings:IdMode"),
)


def modes_of(arguments: Arguments) -> tuple[ShardingMode, ...]:
    """Return the modes that a sharder's arguments ask for.

    Raises:
        ConfigError: the arguments contradict each other.
    """
    if arguments["mode"] not in get_args(SharderMode):
        needed = " or ".join(map(repr, get_args(SharderMode)))
        raise ConfigError(f"mode: got {arguments['mode']!r}, needed {needed}")
    found = tuple(named(name)(arguments) for asks, name in MODES if asks(arguments))
    for mode in found:
        mode.check_beside([other for other in found if other is not mode])
    return found
