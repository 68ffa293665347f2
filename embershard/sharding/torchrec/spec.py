"""What the sharder tells the kernels: carried through TorchRec inside ``fused_params``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding

from embershard.cache.config import LEAST_SLOTS, CacheConfig, CachePolicy
from embershard.cache.key_map import map_kind
from embershard.errors import ConfigError, ShardingError
from embershard.frequency.profile import FrequencyProfile
from embershard.sharding.memory_model import cache_memory

if TYPE_CHECKING:
    from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable

    from embershard.sharding.plan import Plan

SPEC_KEY = "_embershard_cache"

# Our tables carry TorchRec's label for cached tables: then its planner, state dicts, optimizer states and
# prefetch hooks all apply. CUSTOMIZED_KERNEL would leave them out of the state dict.
CACHED_KERNEL = EmbeddingComputeKernel.FUSED_UVM_CACHING.value


@dataclass(frozen=True, eq=False)
class CacheSpec:
    """One sharded module's cache settings on one rank. Hashed by identity: TorchRec groups tables by it.

    Attributes:
        config: the user's settings.
        policy: rule by which the pools choose their rows.
        profile: row counts per table, or None.
        rank: that the module is sharded for.
        rank_weights: elements of all cached tables' shards on this rank, to divide ``device_bytes`` by.
        device_type: of the slots.
        planned_slots: of every pool of this rank, by the names of its tables; None: ``config`` decides.
    """

    config: CacheConfig
    policy: CachePolicy
    profile: FrequencyProfile | None
    rank: int
    rank_weights: int
    device_type: str = "cpu"
    planned_slots: dict[tuple[str, ...], int] | None = None

    @classmethod
    def make(
        cls,
        config: CacheConfig,
        profile: FrequencyProfile | None,
        params: dict[str, ParameterSharding],
        rank: int,
        plan: Plan | None = None,
        device_type: str = "cpu",
    ) -> CacheSpec:
        """The spec of a module whose tables are placed by ``params``, which follow ``plan`` where there is one."""
        cached = [p for p in params.values() if p.compute_kernel == CACHED_KERNEL]
        shards = [shard for p in cached if p.sharding_spec for shard in p.sharding_spec.shards]
        here = [shard.shard_sizes for shard in shards if shard.placement.rank() == rank]
        return cls(
            config=config,
            policy=config.policy_for(profile is not None),
            profile=profile,
            rank=rank,
            rank_weights=sum(rows * cols for rows, cols in here),
            device_type=device_type,
            planned_slots=None if plan is None else {p.tables: p.slots for p in plan.pools if p.rank == rank},
        )

    def num_slots(self, tables: list[ShardedEmbeddingTable], row_bytes: int) -> int:
        """Slots of the pool of ``tables``, whose rows take ``row_bytes`` each.

        A plan of ours says it. Else a table's ``cache_params.load_factor`` in TorchRec's plan goes before the config:
        such a table brings its own slots to the pool, on top of the ratio's or the budget's for the others.

        Raises:
            ConfigError: the byte budget does not even hold the maps and one slot.
            ShardingError: the plan has no pool of these tables.
        """
        if self.planned_slots is not None:
            return _planned(self.planned_slots, tuple(sorted({table.name for table in tables})), self.rank)
        planned = [(table.fused_params or {}).get("cache_load_factor") for table in tables]
        own = sum(share * t.local_rows for share, t in zip(planned, tables, strict=True) if share)
        others = [table for share, table in zip(planned, tables, strict=True) if not share]
        rows = sum(table.local_rows for table in tables)
        if self.config.device_bytes is None:
            wanted = round(own + (self.config.slot_ratio or 0.0) * sum(t.local_rows for t in others))
            wanted = max(wanted, LEAST_SLOTS)
        else:
            wanted = round(own) + (self._slots_in_budget(others, row_bytes) if others and rows else 0)
        return max(1, min(rows, wanted))

    def _slots_in_budget(self, tables: list[ShardedEmbeddingTable], row_bytes: int) -> int:
        """The budget is divided among pools by their weights; maps and scores come out of each part."""
        assert self.config.device_bytes is not None
        rows = sum(table.local_rows for table in tables)
        weights = sum(table.local_rows * table.local_cols for table in tables)
        share = self.config.device_bytes * weights // self.rank_weights
        kind = map_kind(self.config.slot_map, rows, self.device_type)
        memory = cache_memory(rows, row_bytes, self.policy, kind)
        slots = (share - memory.map_bytes) // memory.slot_bytes - 1  # the null slot; more than rows may be left over
        if slots < 1:
            least = memory.device_bytes(1) * self.rank_weights // weights + 1
            names = [table.name for table in tables][:5]
            raise ConfigError(
                f"cache.device_bytes={self.config.device_bytes} does not hold the slot map and one slot of tables "
                f"{names}; give rank {self.rank} at least {least} bytes, or use more ranks"
            )
        return slots


def _planned(slots: dict[tuple[str, ...], int], names: tuple[str, ...], rank: int) -> int:
    if names not in slots:
        raise ShardingError(
            f"rank {rank}: the plan has no pool of the tables {list(names)}; its pools there are {sorted(slots)}"
        )
    return slots[names]


def take_spec(config: GroupedEmbeddingConfig) -> tuple[CacheSpec, dict[str, Any]]:
    """The spec in a group's ``fused_params``, and the rest of them."""
    fused_params = dict(config.fused_params or {})
    return fused_params.pop(SPEC_KEY), fused_params


def has_spec(fused_params: dict[str, Any] | None) -> bool:
    """Whether these ``fused_params`` belong to a cached table."""
    return fused_params is not None and SPEC_KEY in fused_params
