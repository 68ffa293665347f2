"""Which map a pool has, and what it takes."""

from __future__ import annotations

from embershard.cache import SlotMap
from embershard.cache.key_map import map_kind


def test_an_array_takes_memory_by_the_keys():
    assert SlotMap(10_000, 1000).device_bytes == 4 * 10_000 + (4 + 8) * 1001


def test_large_pools_on_a_gpu_are_hashed_by_themselves():
    assert map_kind(None, 2**27, "cuda") == map_kind(None, 2**31 - 1, "cpu") == "array"
    assert map_kind(None, 2**27 + 1, "cuda") == "hashed"
    assert (map_kind("array", 2**30, "cuda"), map_kind("hashed", 10, "cuda")) == ("array", "hashed")


def test_no_pool_on_a_cpu_is_hashed():
    assert map_kind("hashed", 10, "cpu") == "array"
