"""Settings of a sharded module's caches, carried through TorchRec inside `fused_params`."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding

from embershard.cache.config import CacheConfig, CachePolicy
from embershard.cache.key_map import map_kind
from embershard.errors import ConfigError, ShardingError
from embershard.frequency.counts import RowCounts
from embershard.frequency.profile import FrequencyProfile
from embershard.frequency.statistics import Ints
from embershard.sharding.memory_model import cache_memory, slots_for

if TYPE_CHECKING:
    from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable

    from embershard.sharding.plan import Plan
    from embershard.sharding.torchrec.counter_init import CounterInit

SPEC_KEY = "_embershard_cache"

# Cached tables carry TorchRec's label for them: so its planner, state dicts, optimizer states and prefetch hooks apply.
# CUSTOMIZED_KERNEL would leave them out of the state dict.
CACHED_KERNEL = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
# Of `data_parallel` tables that the fused optimizer trains; TorchRec's own have DENSE.
REPLICATED_KERNEL = EmbeddingComputeKernel.FUSED.value


@dataclass(frozen=True, eq=False)
class CacheSpec:
    """Settings of one sharded module's caches on one rank. Hashed by identity: TorchRec groups tables by it.

    Attributes:
        config: the user's settings.
        policy: rule by which the caches choose their rows.
        profile: row counts per table, or None. The sharder holds them: they are needed until its module is built.
        rank: the rank that the module is sharded for.
        rank_weights: elements of all cached tables' shards on this rank, to divide `device_bytes` by.
        device_type: of the slots.
        planned_slots: slots of each pool of this rank, by the names of its tables; None: `config` decides.
        counter_init: initial weights of the tables, made when a row is first touched; None: TorchRec's own.
        rows_tables: tables whose distinct rows are exchanged, in place of pooled embeddings.
        is_data_parallel: every rank caches rows of the whole tables, alike; each writes the rows of its shard.
        hot_rows: int64 ascending by table: rows with copies on every rank, which no cache needs; None: no such mode.
    """

    config: CacheConfig
    policy: CachePolicy
    profile: weakref.ref[FrequencyProfile] | None
    rank: int
    rank_weights: int
    device_type: str = "cpu"
    planned_slots: dict[tuple[str, ...], int] | None = None
    counter_init: CounterInit | None = None
    rows_tables: frozenset[str] = frozenset()
    hot_rows: Mapping[str, Tensor] | None = None
    is_data_parallel: bool = False

    @classmethod
    def make(
        cls,
        config: CacheConfig,
        profile: FrequencyProfile | None,
        params: dict[str, ParameterSharding],
        rank: int,
        plan: Plan | None = None,
        device_type: str = "cpu",
        counter_init: CounterInit | None = None,
        rows_tables: frozenset[str] = frozenset(),
        hot_rows: Mapping[str, Tensor] | None = None,
        is_data_parallel: bool = False,
    ) -> CacheSpec:
        """Return the spec of a module whose tables are placed by `params`, which obey `plan` if there is one."""
        cached = [p for p in params.values() if p.compute_kernel == CACHED_KERNEL]
        shards = [shard for p in cached if p.sharding_spec for shard in p.sharding_spec.shards]
        here = [shard.shard_sizes for shard in shards if is_data_parallel or shard.placement.rank() == rank]
        return cls(
            config=config,
            policy=config.policy_for(profile is not None),
            profile=None if profile is None else weakref.ref(profile),
            rank=rank,
            rank_weights=sum(rows * cols for rows, cols in here),
            device_type=device_type,
            planned_slots=None if plan is None else {p.tables: p.slots for p in plan.pools if p.rank == rank},
            counter_init=counter_init,
            rows_tables=rows_tables,
            is_data_parallel=is_data_parallel,
            hot_rows=hot_rows,
        )

    def row_counts(self, tables: Sequence[ShardedEmbeddingTable]) -> RowCounts | None:
        """Return the profile's counts of the tables' rows on this rank; None without a profile."""
        profile = None if self.profile is None else self.profile()
        if profile is None:
            return None
        shards = (
            profile.shard(t.name, t.num_embeddings, first_row(t), t.local_rows).without(self._hot_in(t)) for t in tables
        )
        return RowCounts.of_shards(zip(shards, (t.local_rows for t in tables), strict=True))

    def _hot_in(self, table: ShardedEmbeddingTable) -> Ints:
        """Return the hot rows of a shard, numbered in it; with others, which are in no shard."""
        hot = (self.hot_rows or {}).get(table.name)
        return np.empty(0, np.int64) if hot is None else hot.numpy() - first_row(table)

    def num_slots(self, tables: Sequence[ShardedEmbeddingTable], row_bytes: int) -> int:
        """Return the slots of the pool of `tables`, whose rows take `row_bytes` each.

        A plan says it. Otherwise a table's `cache_params.load_factor` in TorchRec's plan overrides the config: such a
        table adds its own slots to those that the ratio or the budget gives the others.

        Raises:
            ConfigError: the byte budget does not hold the maps and one slot.
            ShardingError: the plan has no pool of these tables.
        """
        if self.planned_slots is not None:
            names = tuple(sorted({table.name for table in tables}))
            if names not in self.planned_slots:
                raise ShardingError(
                    f"rank {self.rank}: the plan has no pool of the tables {list(names)}; its pools there are "
                    f"{sorted(self.planned_slots)}"
                )
            return self.planned_slots[names]
        load_factors = [(table.fused_params or {}).get("cache_load_factor") for table in tables]
        own = sum(share * t.local_rows for share, t in zip(load_factors, tables, strict=True) if share)
        others = [table for share, table in zip(load_factors, tables, strict=True) if not share]
        rows = sum(table.local_rows for table in tables)
        if self.config.device_bytes is None:
            return slots_for(rows, own + (self.config.slot_ratio or 0.0) * sum(t.local_rows for t in others))
        return max(1, min(rows, round(own) + (self._slots_in_budget(others, row_bytes) if others and rows else 0)))

    def _slots_in_budget(self, tables: Sequence[ShardedEmbeddingTable], row_bytes: int) -> int:
        """Divide the budget among the pools by their weights; maps and scores come out of each pool's part."""
        assert self.config.device_bytes is not None
        rows = sum(table.local_rows for table in tables)
        weights = sum(table.local_rows * table.local_cols for table in tables)
        kind = map_kind(self.config.slot_map, rows, self.device_type)
        memory = cache_memory(rows, row_bytes, self.policy, kind)
        slots = memory.share_of(self.config.device_bytes, weights, self.rank_weights)
        if slots < 1:
            least = memory.device_bytes(1) * self.rank_weights // weights + 1
            names = [table.name for table in tables][:5]
            raise ConfigError(
                f"cache.device_bytes={self.config.device_bytes} does not hold the slot map and one slot of tables "
                f"{names}; give rank {self.rank} at least {least} bytes, or use more ranks"
            )
        return slots


def first_row(table: ShardedEmbeddingTable) -> int:
    """Return the first row of this rank's shard in the whole table."""
    return table.local_metadata.shard_offsets[0] if table.local_metadata else 0


def take_spec(config: GroupedEmbeddingConfig) -> tuple[CacheSpec, dict[str, Any]]:
    """Return the spec in a group's `fused_params`, and the rest of them."""
    fused_params = dict(config.fused_params or {})
    return fused_params.pop(SPEC_KEY), fused_params


def has_spec(fused_params: dict[str, Any] | None) -> bool:
    """Return True if these `fused_params` belong to a cached table."""
    return fused_params is not None and SPEC_KEY in fused_params
