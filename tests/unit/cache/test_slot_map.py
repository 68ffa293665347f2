"""Keys to slots and back, stamps, and what fits into int32."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.cache import SlotMap
from embershard.errors import CacheError


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.fixture
def slot_map() -> SlotMap:
    return SlotMap(num_keys=10, num_slots=4)


def test_a_new_map_is_empty(slot_map):
    assert slot_map.lookup(ids(0, 9, 3)).tolist() == [0, 0, 0]
    assert (slot_map.num_used, slot_map.num_free) == (0, 4)
    assert slot_map.used_slots().tolist() == []


def take_free(slot_map: SlotMap, count: int) -> torch.Tensor:
    slots = slot_map.next_free(count)
    slot_map.claim(count)
    return slots


def test_bound_keys_are_found_and_lead_back(slot_map):
    slots = take_free(slot_map, 2)
    slot_map.bind(ids(7, 2), slots, batch=5)
    assert slots.tolist() == [1, 2]
    assert slot_map.lookup(ids(2, 7, 1, 2)).tolist() == [2, 1, 0, 2]
    assert slot_map.keys(slots).tolist() == [7, 2]
    assert slot_map.last_batch(slots).tolist() == [5, 5]
    assert (slot_map.num_used, slot_map.num_free) == (2, 2)


def test_slots_are_free_until_they_are_claimed(slot_map):
    assert slot_map.next_free(2).tolist() == slot_map.next_free(2).tolist() == [1, 2]
    assert slot_map.num_free == 4
    slot_map.bind(ids(7, 2), take_free(slot_map, 2), batch=5)
    slot_map.unbind(ids(2))
    slot_map.free(ids(2))
    assert (slot_map.num_free, slot_map.used_slots().tolist()) == (3, [1])
    assert slot_map.next_free(2).tolist() == [2, 3], "an empty slot among the used ones goes first"
    assert take_free(slot_map, 3).tolist() == [2, 3, 4]
    assert slot_map.num_free == 0


def test_a_trace_is_not_a_slot(slot_map):
    slots = take_free(slot_map, 2)
    slot_map.bind(ids(7, 2), slots, batch=5)
    slot_map.unbind(ids(7, 2), torch.tensor([-3, 0], dtype=torch.int32))
    slot_map.bind(ids(4), slots[:1], batch=6)
    assert slot_map.lookup(ids(7, 2, 4)).tolist() == [0, 0, 1]
    assert slot_map.entries(ids(7, 2, 4)).tolist() == [-3, 0, 1]
    slot_map.bind(ids(7), slots[1:], batch=6)
    assert slot_map.entries(ids(7)).tolist() == [2]


def test_growing_keeps_what_is_bound(slot_map):
    slot_map.bind(ids(7, 2, 0, 9), take_free(slot_map, 4), batch=5)
    slot_map.grow(6)
    assert slot_map.lookup(ids(7, 2, 0, 9)).tolist() == [1, 2, 3, 4]
    assert slot_map.last_batch(slot_map.used_slots()).tolist() == [5] * 4
    assert take_free(slot_map, 2).tolist() == [5, 6]
    slot_map.bind(ids(1, 3), ids(5, 6), batch=6)
    assert slot_map.keys(ids(5, 6, 1)).tolist() == [1, 3, 7]


def test_taking_more_than_is_free_is_a_bug(slot_map):
    with pytest.raises(AssertionError, match="5 slots asked for, 4 are free"):
        take_free(slot_map, 5)
    with pytest.raises(AssertionError, match="from 4 to 4"):
        slot_map.grow(4)


def test_maps_are_int32_and_their_memory_is_counted():
    slot_map = SlotMap(num_keys=1000, num_slots=10)
    assert slot_map.slot_of_key.dtype == slot_map.key_of_slot.dtype == torch.int32
    assert slot_map.device_bytes == 4 * 1000 + (4 + 8) * 11
    slot_map.grow(20)
    assert slot_map.device_bytes == 4 * 1000 + (4 + 8) * 21


def test_a_pool_that_int32_cannot_number_is_refused_before_memory_is_taken():
    with pytest.raises(CacheError, match=r"2147483648 rows passes .*; shard its tables over more ranks"):
        SlotMap(2**31, 10)


def test_an_unknown_key_is_not_read_as_another(slot_map):
    with pytest.raises((IndexError, RuntimeError)):
        slot_map.lookup(ids(10))
    with pytest.raises((IndexError, RuntimeError)):
        slot_map.lookup(ids(-1))


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 2**31 - 1))
def test_a_batch_finds_its_slots_and_stamps_each_once(keys, batch):
    slot_map = SlotMap(10, 4)
    slot_map.bind(ids(6, 3, 9, 0), take_free(slot_map, 4), batch=0)
    slot_of_key = {6: 1, 3: 2, 9: 3, 0: 4}
    slots, first_hits, missed = slot_map.find(ids(*keys), batch)
    assert slots.tolist() == [slot_of_key.get(key, 0) for key in keys]
    assert missed.tolist() == [position for position, key in enumerate(keys) if key not in slot_of_key]
    marked = [slot for slot, once in zip(slots.tolist(), first_hits.tolist(), strict=True) if once]
    assert sorted(marked) == sorted(set(slots.tolist()) - {0})
    assert slot_map.last_batch(ids(1, 2, 3, 4)).tolist() == [batch * (slot in marked) for slot in range(1, 5)]


@pytest.mark.parametrize("key", [10, -1, 2**40])
def test_a_key_out_of_range_stamps_nothing(key):
    slot_map = SlotMap(10, 4)
    slot_map.bind(ids(7, 2), take_free(slot_map, 2), batch=5)
    with pytest.raises(IndexError, match=rf"{key}.*, needed 0 to 9"):
        slot_map.find(ids(7, 2, key, 1), batch=6)
    assert slot_map.last_batch(ids(1, 2)).tolist() == [5, 5]
