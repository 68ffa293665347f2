"""Bytes that a rank needs, tier by tier, as they will be allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from embershard.sharding.sizes import ModelSize, PlacedShard

_MAP_ROW_BYTES = 4  # key -> slot, int32
_MAP_SLOT_BYTES = 4 + 8  # slot -> key, use stamp
_SCORE_BYTES = 4
_NEXT_USE_BYTES = 8
_ID_BYTES = 8
_KNOWN_ID_BYTES = 12  # per distinct row of a known batch, and its link in the chain
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class MemorySettings:
    """What of a run's settings decides about memory.

    Attributes:
        scoring: policy by which rows are compared.
        by_next_use: whether known uses choose the victims.
        lookahead, prefetch: batches known, and resident, ahead of the one in training.
        has_profile: whether the caches get row counts.
        batch_size: samples per rank and step.
    """

    scoring: Literal["frequency", "lfu", "lru"]
    by_next_use: bool
    lookahead: int
    prefetch: int
    has_profile: bool
    batch_size: int


@dataclass(frozen=True)
class PoolMemory:
    """Device bytes of one pool: ``map_bytes`` whatever its size, and ``slot_bytes`` for each slot and the null slot."""

    rows: int
    map_bytes: int
    slot_bytes: int

    def device_bytes(self, num_slots: int) -> int:
        """As the cache allocates them."""
        return self.map_bytes + (num_slots + 1) * self.slot_bytes

    def num_slots(self, device_bytes: int) -> int:
        """Most slots that fit, at most one per row; below 1 when none does."""
        return min(self.rows, (device_bytes - self.map_bytes) // self.slot_bytes - 1)


def pool_memory(shards: Sequence[PlacedShard], settings: MemorySettings) -> PoolMemory:
    """Of the pool that these shards share; they have the same row payload."""
    rows = sum(shard.rows for shard in shards)
    slot_bytes = shards[0].row_bytes + _MAP_SLOT_BYTES
    slot_bytes += 0 if settings.scoring == "lru" else _SCORE_BYTES
    slot_bytes += _NEXT_USE_BYTES if settings.by_next_use else 0
    return PoolMemory(rows, _MAP_ROW_BYTES * rows, slot_bytes)


def host_bytes(shards: Sequence[PlacedShard], settings: MemorySettings) -> dict[str, int]:
    """Host memory of a rank's cached shards: "rows" and "scores"."""
    cached = [shard for shard in shards if shard.kernel == "cached"]
    rows = sum(shard.rows for shard in cached)
    has_scores = settings.scoring != "lru" or settings.has_profile
    return {"rows": sum(s.rows * s.row_bytes for s in cached), "scores": _SCORE_BYTES * rows if has_scores else 0}


def resident_bytes(shards: Sequence[PlacedShard]) -> dict[str, int]:
    """Device memory of a rank's tables that are not cached: "device_tables" and "replicated" (with gradients)."""
    device = sum(s.rows * s.row_bytes for s in shards if s.kernel == "device")
    replicated = sum(s.rows * (s.row_bytes + s.table.weight_bytes()) for s in shards if s.kernel == "replicated")
    return {"device_tables": device, "replicated": replicated}


def step_bytes(
    model: ModelSize,
    shards: Sequence[PlacedShard],
    settings: MemorySettings,
    world_size: int,
    lookups: Mapping[str, float],
) -> dict[str, int]:
    """Device memory of a rank for its batches: "dense", "activations", "input_buffers".

    ``lookups`` are the mean lookups of a sample, by table. Ids are kept for the whole window, pooled embeddings for the
    batch in training: sent, received, and their gradients.
    """
    batch = settings.batch_size
    samples = batch * world_size
    here = sum(
        shard_buffer_bytes(s, lookups[s.table.table] * samples * s.rows / max(1, s.table.rows), settings, samples)
        for s in shards
    )
    own_ids = sum(lookups.values()) * batch
    pooled_in = sum(table.dim for table in model.tables) * batch * _FLOAT_BYTES
    return {
        "dense": model.dense_parameter_bytes + model.dense_state_bytes,
        "activations": round(model.activation_bytes_per_sample * batch),
        "input_buffers": round(here + own_ids * _ID_BYTES * 2 + 2 * pooled_in),
    }


def shard_buffer_bytes(shard: PlacedShard, lookups: float, settings: MemorySettings, num_samples: int) -> int:
    """Of a rank's buffers what one shard adds: its ids of the whole window, and its pooled embeddings for all
    ``num_samples`` of a step, with their gradients. ``lookups`` are the shard's in a step."""
    known = settings.lookahead + 2 if settings.lookahead else 1
    return round(known * lookups * (_ID_BYTES + _KNOWN_ID_BYTES)) + 2 * shard.columns * num_samples * _FLOAT_BYTES
