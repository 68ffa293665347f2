"""Memory of a rank, in bytes as they are allocated, and the slots of its caches.

Plans, runs without a plan and the checks before a run all ask here. `rank_memory` is the sum; what follows it are its
parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from embershard.cache.config import LEAST_SLOTS, CacheConfig, CachePolicy, MapKind
from embershard.cache.key_map import ARRAY_ROW_BYTES, HASHED_SLOT_BYTES, map_kind
from embershard.cache.rows.memory import pinned_bytes
from embershard.sharding.home_sizes import Pools
from embershard.sharding.run_shape import RunShape
from embershard.sharding.shards import PoolKey, PoolPlacement
from embershard.sharding.sizes import ModelSize, PlacedShard, by_pool, names_in_pool

_MAP_SLOT_BYTES = 4 + 8  # slot -> key, use stamp
_NEXT_USE_BYTES = 8
#: Of a slot on a GPU, for a moment: a new ranking has an eighth of the slots, with rank and slot, both again in order
#: (32 bytes), and what torch's sort takes (24). It stays with half of that. Where a batch evicts more than an eighth,
#: its ranking is larger. (The plan of a batch takes some 300 bytes an id for a moment, out of the reserve of plans.)
_RANKING_BYTES = {"cuda": 7, "cpu": 0}
ID_BYTES = 8
_SMALL_ID_BYTES = 4  # of cached rows, as they arrive from other ranks
#: Of an id of cached rows in a known batch: a mark, or on a CPU the place of its distinct row; and a link in the chain,
#: which is a ring with up to twice the room.
_KNOWN_USE_BYTES = {"cuda": 1 + 2 * 4, "cpu": 4 + 2 * 4}
_LENGTH_BYTES = _FLOAT_BYTES = 4
#: Default memory for known batches; `LookAheadPipeline` knows fewer where they would take more, and says so. By this
#: model 128 batches of 65,536 samples with 26 ids take 4.9 GiB of a GPU that trains alone, and 7.5 GiB of each of two.
MAX_KNOWN_BYTES = 2**33


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank, by what for.

    Attributes:
        device: "slots", "maps", "device_tables", "replicated", "dense", "activations", "input_buffers"; on a GPU
            "rankings" of slots; also those of `RunShape.mode_memory`, and "reserve" where some is left free.
        host: "rows" and "scores" of cached tables, "id_maps" of those that take any id, and what their home keeps
            beside rows ("file_maps").
    """

    device: dict[str, int]
    host: dict[str, int]


def rank_memory(
    model: ModelSize,
    shards: Sequence[PlacedShard],
    slots: Mapping[PoolKey, int],
    shape: RunShape,
    lookups: Sequence[float],
    lookups_per_sample: float,
) -> RankMemory:
    """Return the memory of a rank.

    Args:
        shards: of the rank.
        slots: of its pools; one that is not named counts as if it had no memory on the device.
        lookups: ids that arrive at each of the shards in a step.
        lookups_per_sample: of all tables.
    """
    caches = Counter({"slots": 0, "maps": 0})
    pools = by_pool(shards)
    for key, members in pools.items():
        if key in slots:
            memory = pool_memory(members, shape)
            rankings = (slots[key] + 1) * memory.ranking_bytes
            caches["slots"] += memory.device_bytes(slots[key]) - memory.map_bytes - rankings
            caches.update({"rankings": rankings} if rankings else {})
            caches["maps"] += memory.map_bytes
    of_batches = step_bytes(model, shards, lookups, shape, lookups_per_sample)
    return RankMemory({**caches, **resident_bytes(shards), **of_batches}, host_bytes(pools, shape))


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
class PoolMemory:
    """Device memory of one pool: `map_bytes`, and `slot_bytes` for each slot and the null slot; of these
    `ranking_bytes` for a moment, while slots are ranked.

    >>> PoolMemory(rows=1000, map_bytes=4000, slot_bytes=100).slots_in(device_bytes=10_000)
    59
    """

    rows: int
    map_bytes: int
    slot_bytes: int
    ranking_bytes: int = 0

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


def slots_without_plan(
    cache: CacheConfig, memory: PoolMemory, elements: int, all_elements: int, rows: int = 0, own: float = 0
) -> int:
    """Return the slots of a pool that no plan sizes: a share of its rows, or what its share of the budget holds.

    Args:
        memory: of the pool's tables, but for those that have slots of their own.
        elements, all_elements: as for :meth:`PoolMemory.share_of`.
        rows: of all its tables, where some have slots of their own.
        own: these slots.

    >>> memory = PoolMemory(rows=1000, map_bytes=0, slot_bytes=100)
    >>> slots_without_plan(CacheConfig(ratio=0.1), memory, 16, 16)
    100
    >>> slots_without_plan(CacheConfig(device_bytes=3000), memory, elements=16, all_elements=48)
    9
    """
    rows = max(rows, memory.rows)
    if cache.device_bytes is None:
        return slots_for(rows, own + (cache.slot_ratio or 1.0) * memory.rows)
    share = memory.share_of(cache.device_bytes, elements, all_elements) if memory.rows else 0
    return max(1, min(rows, round(own) + share))


def slots_for(rows: int, wanted: float) -> int:
    """Return the slots of a pool of `rows` rows for which `wanted` slots were asked.

    >>> slots_for(rows=1000, wanted=0.05 * 1000), slots_for(rows=100, wanted=0.05 * 100), slots_for(rows=3, wanted=9)
    (50, 16, 3)
    """
    return max(1, min(rows, max(LEAST_SLOTS, round(wanted))))


def planned_slots(pools: Iterable[PoolPlacement], members_of: Pools) -> dict[PoolKey, int]:
    """Return the planned slots of the pools that these shards share."""
    slots = {(pool.rank, pool.sharding, pool.dim, pool.tables): pool.slots for pool in pools}
    return {
        key: slots[key.rank, key.sharding, key.columns, names_in_pool(members)] for key, members in members_of.items()
    }


def pool_memory(shards: Sequence[PlacedShard], shape: RunShape) -> PoolMemory:
    """Return the memory of the pool that these shards share; they have the same row payload."""
    rows = sum(shard.rows for shard in shards)
    kind = map_kind(shape.slot_map, rows, shape.device)
    return cache_memory(rows, shards[0].slot_row_bytes, shape.cache.policy, kind, shape.device)


def cache_memory(rows: int, row_bytes: int, policy: CachePolicy, slot_map: MapKind, device: str) -> PoolMemory:
    """Return the memory of a pool of so many rows with `row_bytes` of payload each."""
    ranking_bytes = _RANKING_BYTES[device]
    slot_bytes = row_bytes + _MAP_SLOT_BYTES + policy.score_bytes + ranking_bytes
    slot_bytes += _NEXT_USE_BYTES if policy.by_next_use else 0
    if slot_map == "hashed":
        return PoolMemory(rows, 0, slot_bytes + HASHED_SLOT_BYTES, ranking_bytes)
    return PoolMemory(rows, ARRAY_ROW_BYTES * rows, slot_bytes, ranking_bytes)


def host_bytes(pools: Pools, shape: RunShape) -> dict[str, int]:
    """Return the host memory of a rank's cached shards: "rows" and "scores"; "id_maps" where there are some; and what
    their home keeps beside rows ("file_maps")."""
    cached = [shard for members in pools.values() for shard in members]
    in_home = shape.home.host_bytes(pools)
    found = {
        "rows": in_home.pop("rows"),
        "scores": shape.cache.policy.score_bytes * sum(shard.rows for shard in cached),
        "id_maps": sum(shard.rows * shard.table.id_map_bytes for shard in cached),
        **in_home,
    }
    return {name: count for name, count in found.items() if count or name in ("rows", "scores")}


def growing_bytes(shard: PlacedShard, shape: RunShape) -> int:
    """Return the host memory of a rank that grows with a shard: 0 without a cache."""
    if shard.kernel != "cached":
        return 0
    beside = shape.cache.policy.score_bytes + shard.table.id_map_bytes
    return shape.home.growing_bytes(shard) + beside * shard.rows


def resident_bytes(shards: Sequence[PlacedShard]) -> dict[str, int]:
    """Return the device memory of a rank's uncached tables: "device_tables" and "replicated" (with gradients)."""
    device = sum(s.rows * s.row_bytes for s in shards if s.kernel == "device")
    replicated = sum(s.rows * (s.row_bytes + s.table.weight_bytes()) for s in shards if s.kernel == "replicated")
    return {"device_tables": device, "replicated": replicated}


def step_bytes(
    model: ModelSize,
    shards: Sequence[PlacedShard],
    lookups: Sequence[float],
    shape: RunShape,
    lookups_per_sample: float,
) -> dict[str, int]:
    """Return the device memory of a rank for its batches: "dense", "activations", "input_buffers"; what its mode takes;
    and what is left free: "reserve".

    `lookups` has the ids that arrive at each of the rank's shards in a step. Embeddings exist for the batch in
    training: sent, received, and their gradients (with gradient accumulation at most as many, as those wait). Batches
    are kept for the window, which `MAX_KNOWN_BYTES` limits; where distinct rows are exchanged, so is the place of each
    id among the distinct ones.
    """
    batch = shape.batch_size
    vectors = 2.0 * sum(table.dim * table.num_features for table in model.tables) * batch * _FLOAT_BYTES
    for shard, arriving in zip(shards, lookups, strict=True):
        samples = batch if shard.kernel == "replicated" else batch * shape.world_size
        vectors += vector_bytes(shard, samples, arriving)
    window = _window_bytes(_batch_bytes(model, shards, lookups, shape, lookups_per_sample), shape)
    if any(shard.exchange == "rows" for shard in shards):
        window += known_batches(shape)[0] * lookups_per_sample * batch * ID_BYTES
    return {
        "dense": model.dense_parameter_bytes + model.dense_state_bytes,
        "activations": round(model.activation_bytes_per_sample * shape.micro_batch_size),
        "input_buffers": round(window + 2 * lookups_per_sample * batch * ID_BYTES + vectors),
        **({} if shape.mode_memory is None else shape.mode_memory.device_bytes(model, shape.device)),
        **({"reserve": shape.reserve_bytes} if shape.reserve_bytes else {}),
    }


def known_batches(shape: RunShape) -> tuple[int, int]:
    """Return how many batches a rank keeps: as many as `MAX_KNOWN_BYTES` allows up to the first number, and at
    least the second: the one in training, those that wait to become known, and two that arrive."""
    lookahead = shape.cache.lookahead
    return lookahead + 2 + known_together(lookahead) if lookahead else 1, shape.cache.prefetch + 2


def known_batch_bytes(shard: PlacedShard, shape: RunShape, lookups: float) -> float:
    """Return the bytes that a rank keeps of a known batch for a shard at which so many ids arrive: these, their known
    uses, and the lengths of their bags. Where distinct rows are exchanged, all of a table's are one bag."""
    is_cached, is_own = shard.kernel == "cached", shard.kernel == "replicated" or shape.world_size == 1
    id_bytes = _SMALL_ID_BYTES if is_cached and not is_own and not shard.table.id_map_bytes else ID_BYTES
    samples = shape.batch_size if shard.kernel == "replicated" else shape.batch_size * shape.world_size
    bags = 0 if shard.exchange == "rows" else shard.table.num_features * samples
    if is_own and shape.device == "cuda":  # views of the rank's own batch
        id_bytes = bags = 0
    use_bytes = _KNOWN_USE_BYTES[shape.device] if is_cached else 0
    if is_cached and shape.home.is_partial and shape.device == "cpu":
        use_bytes *= 2  # places know as much as slots
    return (id_bytes + use_bytes) * lookups + _LENGTH_BYTES * bags


def own_batch_bytes(model: ModelSize, shape: RunShape, lookups_per_sample: float) -> float:
    """Return the bytes of the copy on a GPU of a rank's own batch, which is kept from its arrival to its step."""
    if shape.device != "cuda":
        return 0.0
    bags = sum(table.num_features for table in model.tables)
    of_sample = lookups_per_sample * ID_BYTES + bags * _LENGTH_BYTES + model.input_bytes_per_sample
    return of_sample * shape.batch_size


def _batch_bytes(
    model: ModelSize,
    shards: Sequence[PlacedShard],
    lookups: Sequence[float],
    shape: RunShape,
    lookups_per_sample: float,
) -> float:
    """Return the device memory of a rank for a known batch."""
    pairs = zip(shards, lookups, strict=True)
    of_shards = (known_batch_bytes(shard, shape, arriving) for shard, arriving in pairs)
    return sum(of_shards, own_batch_bytes(model, shape, lookups_per_sample))


def _window_bytes(of_batch: float, shape: RunShape) -> float:
    """Return the device memory for all known batches, of so many bytes each."""
    known, waiting = known_batches(shape)
    return min(known * of_batch, max(MAX_KNOWN_BYTES, waiting * of_batch))


def known_host_bytes(
    model: ModelSize,
    shards: Sequence[PlacedShard],
    lookups: Sequence[float],
    shape: RunShape,
    lookups_per_sample: float,
) -> int:
    """Return the host memory of a rank with a GPU and a partial home for known batches, beside the batches as they are
    read: their ids, from which the places of rows learn them, and what these know. On a CPU 0: `step_bytes` has it.
    Arguments as for that."""
    if shape.device != "cuda":
        return 0
    of_batch = _batch_bytes(model, shards, lookups, shape, lookups_per_sample)
    num_ids = sum(arriving for shard, arriving in zip(shards, lookups, strict=True) if shard.kernel == "cached")
    on_host = pinned_bytes(round(ID_BYTES * num_ids)) + _KNOWN_USE_BYTES["cpu"] * num_ids
    return round(_window_bytes(of_batch, shape) / max(1.0, of_batch) * on_host)


def vector_bytes(shard: PlacedShard, num_samples: int, lookups: float) -> float:
    """Return the bytes of what a shard gives the ranks in a step, and of the gradients: pooled embeddings of so many
    samples, or the rows of so many lookups (distinct ones, or those of sequences). Rows count twice: a rank receives
    about as many as it sends."""
    vectors = 2 * lookups if shard.exchange == "rows" or shard.table.is_sequence else num_samples
    return 2 * shard.columns * vectors * _FLOAT_BYTES
