"""Settings of a sharded module's caches, carried through TorchRec inside `fused_params`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
    ShardingType,
)
from torchrec.distributed.types import ParameterSharding

from embershard.cache.config import CacheConfig, CachePolicy
from embershard.cache.homes.full_rows import full_rows_of
from embershard.cache.key_map import map_kind
from embershard.errors import ConfigError, ShardingError
from embershard.frequency.counts import RowCounts
from embershard.frequency.profile import FrequencyProfile
from embershard.sharding.home_sizes import places_in
from embershard.sharding.memory_model import cache_memory, slots_without_plan
from embershard.sharding.plan import Plan
from embershard.sharding.torchrec.counter_init import CounterInit
from embershard.sharding.torchrec.modes.mode import ShardingMode

SPEC_KEY = "_embershard_cache"
#: Of tables that get any ids as they are: TorchRec groups tables by it. Those without get row numbers, or mixed ids.
RAW_IDS_KEY = "_embershard_raw_ids"
#: Of tables whose rows are small in host memory: TorchRec groups tables by it.
HOST_DTYPE_KEY = "_embershard_host_dtype"

# Cached tables carry TorchRec's label for them: so its planner, state dicts, optimizer states and prefetch hooks apply.
# CUSTOMIZED_KERNEL would leave them out of the state dict.
CACHED_KERNEL = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
#: Of tables with a copy on every rank, as TorchRec calls their sharding type.
REPLICATED = ShardingType.DATA_PARALLEL.value
# Of such tables that the fused optimizer trains; TorchRec's own have DENSE.
REPLICATED_KERNEL = EmbeddingComputeKernel.FUSED.value


@dataclass(frozen=True, eq=False)
class CacheSpec:
    """Settings of one sharded module's caches on one rank. Hashed by identity: TorchRec groups tables by it.

    Attributes:
        config: the user's settings.
        policy: rule by which the caches choose their rows.
        profile: row counts per table, or None. The sharder holds them: they are needed until its module is built.
        rank: the rank that the module is sharded for, among all.
        rank_weights: elements of all cached tables' shards on this rank, to divide `device_bytes` by.
        device_type: of the slots.
        planned_slots: slots of each pool of this rank, by the names of its tables; None: `config` decides.
        counter_init: initial weights of the tables, made when a row is first touched; None: TorchRec's own.
        modes: that change how tables are sharded and cached.
        trains: False for tables whose rows stay as they are.
    """

    config: CacheConfig
    policy: CachePolicy
    profile: weakref.ref[FrequencyProfile] | None
    rank: int
    rank_weights: int
    device_type: str = "cpu"
    planned_slots: dict[tuple[str, ...], int] | None = None
    counter_init: CounterInit | None = None
    modes: tuple[ShardingMode, ...] = ()
    trains: bool = True

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
        modes: tuple[ShardingMode, ...] = (),
        rank_of_plan: int | None = None,
    ) -> CacheSpec:
        """Return the spec of a module whose tables are placed by `params`, which obey `plan` if there is one: of this
        many ranks as shard the tables, among which this one is `rank_of_plan`; None: as `rank`."""
        number = rank if rank_of_plan is None else rank_of_plan
        cached = [p for p in params.values() if p.compute_kernel == CACHED_KERNEL]
        shards = [shard for p in cached if p.sharding_spec for shard in p.sharding_spec.shards]
        has_all = any(mode.has_whole_tables for mode in modes)
        here = [shard.shard_sizes for shard in shards if has_all or shard.placement.rank() == rank]
        return cls(
            config=config,
            policy=config.policy_for(profile is not None),
            profile=None if profile is None else weakref.ref(profile),
            rank=rank,
            rank_weights=sum(rows * cols for rows, cols in here),
            device_type=device_type,
            planned_slots=None if plan is None else {p.tables: p.slots for p in plan.pools if p.rank == number},
            counter_init=counter_init,
            modes=modes,
        )

    @property
    def mode_of_whole_tables(self) -> ShardingMode | None:
        """The mode by which each rank caches rows of the whole tables; None: it caches those of its shards."""
        return next((mode for mode in self.modes if mode.has_whole_tables), None)

    def mode_that_gives_rows(self, tables: Sequence[ShardedEmbeddingTable]) -> ShardingMode | None:
        """The mode that gives rows to the ids of a group of tables; None: ids are row numbers."""
        return next((mode for mode in self.modes if mode.gives_rows(tables[0].name)), None)

    def row_counts(self, tables: Sequence[ShardedEmbeddingTable]) -> RowCounts | None:
        """Return the profile's counts of the tables' rows on this rank; None without a profile."""
        profile = None if self.profile is None else self.profile()
        if profile is None:
            return None
        shards = (
            profile.shard(t.name, t.num_embeddings, first_row(t), t.local_rows).without(
                np.concatenate([np.empty(0, np.int64), *(m.uncached_rows(t.name) for m in self.modes)]) - first_row(t)
            )
            for t in tables
        )
        return RowCounts.of_shards(zip(shards, (t.local_rows for t in tables), strict=True))

    def of_table(self, table: str) -> dict[str, Any]:
        """Return what a table's `fused_params` have of it, by which TorchRec groups tables."""
        own_type = {HOST_DTYPE_KEY: str(self.config.small_type_of(table))} if self.config.host_dtypes else {}
        return {SPEC_KEY: self, **own_type}

    def home_arguments(self, tables: Sequence[ShardedEmbeddingTable], row_bytes: int) -> dict[str, Any]:
        """Return what a `HomeRequest` has of a group's type of rows, and of their places, for slots of `row_bytes`.

        Full rows are chosen in the whole table, so that no rank or plan matters.
        """
        small_type = self.config.small_type_of(tables[0].name)
        if self.config.host_bytes is not None:
            return {"num_places": self._num_places(tables, row_bytes, self.num_slots(tables, row_bytes))}
        if small_type is None:
            return {}
        found, offset = [np.empty(0, np.int64)], 0
        for table in tables if small_type == "int8" else ():
            profile = None if self.profile is None else self.profile()
            rows = full_rows_of(table.name, table.num_embeddings, self.config.full_share, profile)
            first = first_row(table)
            low, high = np.searchsorted(rows, (first, first + table.local_rows))
            found.append(rows[low:high] - first + offset)
            offset += table.local_rows
        return {"small_type": small_type, "full_keys": torch.from_numpy(np.concatenate(found))}

    def _num_places(self, tables: Sequence[ShardedEmbeddingTable], row_bytes: int, num_slots: int) -> int:
        """Return the rows of the pool of `tables` that `cache.host_bytes` holds in memory.

        Raises:
            ConfigError: it holds fewer than twice the rows of the slots.
        """
        assert self.config.host_bytes is not None, "only rows in a file have places"
        weights = sum(table.local_rows * table.local_cols for table in tables)
        found = places_in(self.config.host_bytes, row_bytes, weights, self.rank_weights)
        if found < min(2 * num_slots, sum(table.local_rows for table in tables)):
            least = -(-2 * num_slots * row_bytes * self.rank_weights // weights)
            raise ConfigError(
                f"cache.host_bytes={self.config.host_bytes} holds {found} rows of the tables "
                f"{[table.name for table in tables][:5]}, and {num_slots} of them are on the device: needed are "
                f"twice as many. Give rank {self.rank} at least {least} bytes, or a smaller cache"
            )
        return found

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
        weights = sum(table.local_rows * table.local_cols for table in others)
        rows, budget = sum(table.local_rows for table in others), self.config.device_bytes
        kind = map_kind(self.config.slot_map, rows, self.device_type)
        memory = cache_memory(rows, row_bytes, self.policy, kind, self.device_type)
        # Maps and scores come out of each pool's part of the budget, and a slot must be left.
        if weights and budget is not None and memory.share_of(budget, weights, self.rank_weights) < 1:
            least = memory.device_bytes(1) * self.rank_weights // weights + 1
            raise ConfigError(
                f"cache.device_bytes={budget} does not hold the slot map and one slot of tables "
                f"{[table.name for table in others][:5]}; give rank {self.rank} at least {least} bytes, or use more "
                "ranks"
            )
        all_rows = sum(table.local_rows for table in tables)
        return slots_without_plan(self.config, memory, weights, self.rank_weights, all_rows, own)


def first_row(table: ShardedEmbeddingTable) -> int:
    """Return the first row of this rank's shard in the whole table."""
    return table.local_metadata.shard_offsets[0] if table.local_metadata else 0


def first_column(table: ShardedEmbeddingTable) -> int:
    """Return the first column of this rank's shard in the whole table."""
    return table.local_metadata.shard_offsets[1] if table.local_metadata else 0


def take_spec(config: GroupedEmbeddingConfig) -> tuple[CacheSpec, dict[str, Any]]:
    """Return the spec in a group's `fused_params`, and FBGEMM's part of them."""
    fused_params = dict(config.fused_params or {})
    fused_params.pop(RAW_IDS_KEY, None)
    fused_params.pop(HOST_DTYPE_KEY, None)
    return fused_params.pop(SPEC_KEY), fused_params


def has_spec(fused_params: dict[str, Any] | None) -> bool:
    """Return True if these `fused_params` belong to a cached table."""
    return fused_params is not None and SPEC_KEY in fused_params
