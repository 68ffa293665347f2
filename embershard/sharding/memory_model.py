"""Memory of a rank, in bytes as they are allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from embershard.cache.config import LEAST_SLOTS, CachePolicy, MapKind
from embershard.cache.key_map import ARRAY_ROW_BYTES, HASHED_SLOT_BYTES, map_kind
from embershard.sharding.sizes import ModelSize, PlacedShard

_MAP_SLOT_BYTES = 4 + 8  # slot -> key, use stamp
_NEXT_USE_BYTES = 8
_ID_BYTES = 8
_KNOWN_ID_BYTES = 12  # per distinct row of a known batch, and its link in the chain
_FLOAT_BYTES = 4
#: Default memory for known batches; `LookAheadPipeline` knows fewer where they would take more.
MAX_KNOWN_BYTES = 2**30


def known_together(lookahead: int) -> int:
    """Return how many batches become known together, with this look-ahead.

    The code that makes a batch known has left the cores' caches at the next step, so for small batches most of the time
    is spent on fetching it again. Batches wait for each other, beside the `lookahead` that are known: at most a
    sixteenth of these more.

    >>> known_together(8), known_together(64)
    (1, 4)
    """
    return min(4, max(1, lookahead // 16))


@dataclass(frozen=True)
class MemorySettings:
    """Settings of a run that decide about memory.

    Attributes:
        policy: rule by which caches choose their rows.
        lookahead, prefetch: batches known, and resident, ahead of the one in training.
        batch_size: samples per rank and step.
        slot_map: kind of the maps from rows to slots; None: each pool's size decides.
        hot_bytes: copies of hot rows and their optimizer states on every rank; 0: there are none.
    """

    policy: CachePolicy
    lookahead: int
    prefetch: int
    batch_size: int
    slot_map: MapKind | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    hot_bytes: int = 0


@dataclass(frozen=True)
class PoolMemory:
    """Device memory of one pool: `map_bytes`, and `slot_bytes` for each slot and the null slot.

    >>> PoolMemory(rows=1000, map_bytes=4000, slot_bytes=100).slots_in(device_bytes=10_000)
    59
    """

    rows: int
    map_bytes: int
    slot_bytes: int

    def device_bytes(self, num_slots: int) -> int:
        """Return the bytes of a pool with so many slots."""
        return self.map_bytes + (num_slots + 1) * self.slot_bytes

    def slots_in(self, device_bytes: int) -> int:
        """Return the slots that fit beside the null slot; below 1 if none does."""
        return (device_bytes - self.map_bytes) // self.slot_bytes - 1

    def share_of(self, device_bytes: int, elements: int, all_elements: int) -> int:
        """Return the slots that fit into the pool's share of a module's budget; below 1 if none does.

        Args:
            device_bytes: what all pools of a sharded module may take on a rank: `CacheConfig.device_bytes`.
            elements, all_elements: rows times columns of the pool's shards, and of all shards of these pools.

        >>> PoolMemory(rows=1000, map_bytes=0, slot_bytes=100).share_of(3000, elements=16, all_elements=48)
        9
        """
        return self.slots_in(device_bytes * elements // all_elements)


def slots_for(rows: int, wanted: float) -> int:
    """Return the slots of a pool of `rows` rows for which `wanted` slots were asked.

    >>> slots_for(rows=1000, wanted=0.05 * 1000), slots_for(rows=100, wanted=0.05 * 100), slots_for(rows=3, wanted=9)
    (50, 16, 3)
    """
    return max(1, min(rows, max(LEAST_SLOTS, round(wanted))))


def pool_memory(shards: Sequence[PlacedShard], settings: MemorySettings) -> PoolMemory:
    """Return the memory of the pool that these shards share; they have the same row payload."""
    rows = sum(shard.rows for shard in shards)
    kind = map_kind(settings.slot_map, rows, settings.device)
    return cache_memory(rows, shards[0].row_bytes, settings.policy, kind)


def cache_memory(rows: int, row_bytes: int, policy: CachePolicy, slot_map: MapKind) -> PoolMemory:
    """Return the memory of a pool of so many rows with `row_bytes` of payload each."""
    slot_bytes = row_bytes + _MAP_SLOT_BYTES + policy.score_bytes
    slot_bytes += _NEXT_USE_BYTES if policy.by_next_use else 0
    if slot_map == "hashed":
        return PoolMemory(rows, 0, slot_bytes + HASHED_SLOT_BYTES)
    return PoolMemory(rows, ARRAY_ROW_BYTES * rows, slot_bytes)


def host_bytes(shards: Sequence[PlacedShard], settings: MemorySettings) -> dict[str, int]:
    """Return the host memory of a rank's cached shards: "rows" and "scores"."""
    cached = [shard for shard in shards if shard.kernel == "cached"]
    rows = sum(shard.rows for shard in cached)
    return {"rows": sum(s.rows * s.row_bytes for s in cached), "scores": settings.policy.score_bytes * rows}


def resident_bytes(shards: Sequence[PlacedShard]) -> dict[str, int]:
    """Return the device memory of a rank's uncached tables: "device_tables" and "replicated" (with gradients)."""
    device = sum(s.rows * s.row_bytes for s in shards if s.kernel == "device")
    replicated = sum(s.rows * (s.row_bytes + s.table.weight_bytes()) for s in shards if s.kernel == "replicated")
    return {"device_tables": device, "replicated": replicated}


def step_bytes(
    model: ModelSize,
    shards: Sequence[PlacedShard],
    lookups: Sequence[float],
    settings: MemorySettings,
    world_size: int,
    lookups_per_sample: float,
) -> dict[str, int]:
    """Return the device memory of a rank for its batches: "dense", "activations", "input_buffers"; with copies of hot
    rows, for these: "hot_rows".

    `lookups` has the ids that arrive at each of the rank's shards in a step. Embeddings exist for the batch in
    training: sent, received, and their gradients. Ids are kept for the window, which `MAX_KNOWN_BYTES` limits; where
    distinct rows are exchanged, so is the place of each id among the distinct ones.
    """
    batch = settings.batch_size
    vectors = 2.0 * sum(table.dim * table.num_features for table in model.tables) * batch * _FLOAT_BYTES
    for shard, arriving in zip(shards, lookups, strict=True):
        samples = batch if shard.kernel == "replicated" else batch * world_size
        vectors += vector_bytes(shard, samples, arriving)
    of_batch = sum(lookups) * (_ID_BYTES + _KNOWN_ID_BYTES)
    known = 1
    if settings.lookahead:  # the one in training, those that wait to become known, and two that arrive
        known = settings.lookahead + 2 + known_together(settings.lookahead)
    window = min(known * of_batch, max(MAX_KNOWN_BYTES, (settings.prefetch + 2) * of_batch))
    if any(shard.exchange == "rows" for shard in shards):
        window += known * lookups_per_sample * batch * _ID_BYTES
    return {
        "dense": model.dense_parameter_bytes + model.dense_state_bytes,
        "activations": round(model.activation_bytes_per_sample * batch),
        "input_buffers": round(window + 2 * lookups_per_sample * batch * _ID_BYTES + vectors),
        **_hot_rows_bytes(model, settings),
    }


def vector_bytes(shard: PlacedShard, num_samples: int, lookups: float) -> float:
    """Return the bytes of what a shard gives the ranks in a step, and of the gradients: pooled embeddings of so many
    samples, or the rows of so many lookups (distinct ones, or those of sequences). Rows count twice: a rank receives
    about as many as it sends."""
    vectors = 2 * lookups if shard.exchange == "rows" or shard.table.is_sequence else num_samples
    return 2 * shard.columns * vectors * _FLOAT_BYTES


def _hot_rows_bytes(model: ModelSize, settings: MemorySettings) -> dict[str, int]:
    """Return the bytes of the hot rows' copies, with the map that tells their ids: of a hashed one, the most."""
    if not settings.hot_bytes:
        return {}
    rows = sum(table.rows for table in model.tables)
    most_hot = settings.hot_bytes // min(table.row_bytes() for table in model.tables)
    is_array = map_kind(None, rows, settings.device) == "array"
    map_bytes = ARRAY_ROW_BYTES * rows if is_array else HASHED_SLOT_BYTES * most_hot
    return {"hot_rows": settings.hot_bytes + map_bytes}
