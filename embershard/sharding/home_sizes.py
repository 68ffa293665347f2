"""What rows take of host memory in their home. Plans and checks of memory ask it of `RunShape.home`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from embershard.cache.config import CacheConfig
from embershard.cache.file.sizes import FILE_BUFFER_BYTES, PLACE_BYTES, filed_row_bytes
from embershard.errors import ShardingError
from embershard.sharding.shards import PoolKey
from embershard.sharding.sizes import PlacedShard, names_in_pool

#: Cached shards by the cache that they share.
Pools = Mapping[PoolKey, Sequence[PlacedShard]]


@dataclass(frozen=True)
class HomeSizes:
    """A home that has all rows in host memory, or mapped there.

    Attributes:
        is_partial: only some rows are in memory, those that are used next.
    """

    is_partial = False

    def host_bytes(self, pools: Pools) -> dict[str, int]:
        """Return the host memory of the rows of a rank's pools: "rows"; and by name what is kept beside them."""
        return {"rows": sum(shard.host_bytes for members in pools.values() for shard in members)}

    def growing_bytes(self, shard: PlacedShard) -> int:
        """Return the host memory of a rank that grows with a cached shard."""
        return shard.host_bytes

    def left_of(self, node_bytes: int, num_ranks: int) -> int:
        """Return what is left of a node's host memory for what grows with the shards of its ranks."""
        return node_bytes

    def places(self, pools: Pools) -> dict[PoolKey, int]:
        """Return the rows of each pool that are in memory at a time; empty where all are."""
        return {}

    def check_slots(self, pools: Pools, slots: Mapping[PoolKey, int]) -> None:
        """Raise `ShardingError` where the home cannot serve caches with so many slots."""


@dataclass(frozen=True)
class FiledSizes(HomeSizes):
    """Rows in a file; those that are used next are in memory.

    Attributes:
        bytes_in_memory: of these, of a rank: `CacheConfig.host_bytes`.
    """

    bytes_in_memory: int
    is_partial = True

    def host_bytes(self, pools: Pools) -> dict[str, int]:
        """Return "rows", those in memory, and "file_maps", what is kept of all rows."""
        places, shards = self.places(pools), [shard for members in pools.values() for shard in members]
        in_memory = sum((count + 1) * pools[key][0].host_row_bytes for key, count in places.items())
        beside = int(sum(filed_row_bytes(shard.host_row_bytes) * shard.rows for shard in shards))
        beside += PLACE_BYTES * sum(places.values()) + min(in_memory // 8, FILE_BUFFER_BYTES)
        return {"rows": in_memory, "file_maps": beside if places else 0}

    def growing_bytes(self, shard: PlacedShard) -> int:
        return int(filed_row_bytes(shard.host_row_bytes) * shard.rows)

    def left_of(self, node_bytes: int, num_ranks: int) -> int:
        return max(1, node_bytes - self.bytes_in_memory * num_ranks)

    def places(self, pools: Pools) -> dict[PoolKey, int]:
        all_elements = Counter[tuple[int, bool]]()  # tables of sequences are in a module of their own
        for key, members in pools.items():
            all_elements[key.rank, members[0].table.is_sequence] += _elements(members)
        found = {}
        for key, members in pools.items():
            elements, of_module = _elements(members), all_elements[key.rank, members[0].table.is_sequence]
            count = places_in(self.bytes_in_memory, members[0].host_row_bytes, elements, of_module) if elements else 0
            found[key] = min(count, sum(shard.rows for shard in members))
        return found

    def check_slots(self, pools: Pools, slots: Mapping[PoolKey, int]) -> None:
        """Raise `ShardingError` where memory does not hold twice the rows of a cache: training would."""
        for key, places in self.places(pools).items():
            if places < min(twice := 2 * slots[key], sum(shard.rows for shard in pools[key])):
                raise ShardingError(
                    f"cache.host_bytes={self.bytes_in_memory} holds {places} rows of the tables "
                    f"{list(names_in_pool(pools[key]))[:5]} on rank {key.rank}, whose cache has {slots[key]} slots: "
                    "needed are twice as many. Give it about "
                    f"{-(-twice * self.bytes_in_memory // max(1, places))} bytes, or the cache less"
                )


def home_sizes(cache: CacheConfig) -> HomeSizes:
    """Return the sizes of the home that these settings choose."""
    return HomeSizes() if cache.host_bytes is None or not cache.enabled else FiledSizes(cache.host_bytes)


def places_in(host_bytes: int, row_bytes: int, elements: int, all_elements: int) -> int:
    """Return the rows that a pool's share of a module's memory in front of a file holds.

    Args:
        host_bytes: what the rows of all pools of a sharded module may take on a rank: `CacheConfig.host_bytes`.
        row_bytes: of a row, optimizer states included.
        elements, all_elements: rows times columns of the pool's shards, and of all shards of these pools.

    >>> places_in(host_bytes=4000, row_bytes=20, elements=16, all_elements=32)
    100
    """
    return host_bytes * elements // (all_elements * row_bytes)


def _elements(shards: Iterable[PlacedShard]) -> int:
    return sum(shard.rows * shard.columns for shard in shards)
