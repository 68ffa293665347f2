"""The hashed map against the array: the same entries, whatever is put and in which order; and its memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.cache import SlotMap
from embershard.cache.key_map import ArrayKeyMap, HashedKeyMap, map_kind

CPU = torch.device("cpu")
NUM_KEYS = 300
some_keys = st.lists(st.integers(0, NUM_KEYS - 1), max_size=120)


def ids(values) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


@pytest.mark.slow
@given(
    st.integers(1, 60),
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), some_keys, st.integers(1, 5)),
            st.tuples(st.just("leave"), some_keys, st.integers(-5, -1)),
            st.tuples(st.just("remove"), some_keys, st.just(0)),
            st.tuples(st.just("clear"), st.just([]), st.just(0)),
        ),
        max_size=12,
    ),
)
def test_it_holds_what_an_array_holds(num_slots, changes):
    array, hashed = ArrayKeyMap(NUM_KEYS, CPU), HashedKeyMap(NUM_KEYS, num_slots, CPU)
    for what, keys, value in changes:
        if what == "clear":
            array.clear_negative(), hashed.clear_negative()
        else:
            for entries in (array, hashed):
                entries.put(ids(keys), value)
        assert torch.equal(hashed.dense(), array.dense())
        everywhere = torch.arange(NUM_KEYS).flip(0)
        assert torch.equal(hashed.get(everywhere), array.get(everywhere))
        assert int((hashed._keys >= 0).sum()) == int((array.dense() != 0).sum()), "a cell that nobody needs"


def test_of_a_key_that_occurs_several_times_one_entry_stands():
    hashed = HashedKeyMap(NUM_KEYS, 20, CPU)
    keys = ids([5, 9, 5, 5, 9, 7])
    hashed.put(keys, torch.tensor([-1, -2, -3, -4, -5, -6], dtype=torch.int32))
    five, nine, seven = hashed.get(ids([5, 9, 7])).tolist()
    assert (five in (-1, -3, -4), nine in (-2, -5), seven) == (True, True, -6)
    assert int((hashed._keys >= 0).sum()) == 3


def test_memory_follows_the_slots_and_not_the_keys():
    small, large = (SlotMap(num_keys, 1000, kind="hashed") for num_keys in (10_000, 2**31 - 1))
    assert small.device_bytes == large.device_bytes == (24 + 4 + 8) * 1001
    assert SlotMap(10_000, 1000).device_bytes == 4 * 10_000 + (4 + 8) * 1001


def test_as_many_traces_as_slots_fit_and_more_make_it_grow():
    hashed = HashedKeyMap(2**31 - 1, 10_000, CPU)
    keys = torch.randperm(10**6, generator=torch.Generator().manual_seed(1)) * 2001
    hashed.put(keys[:20_000], torch.arange(1, 20_001, dtype=torch.int32))
    assert hashed.num_bytes == 24 * 10_001
    hashed.put(keys[20_000:60_000], -1)
    assert hashed.num_bytes == 4 * 24 * 10_001
    assert torch.equal(hashed.get(keys[:20_000]), torch.arange(1, 20_001, dtype=torch.int32))
    assert bool((hashed.get(keys[20_000:60_000]) == -1).all())
    assert not hashed.get(keys[60_000:]).any()


def test_room_that_was_given_up_is_used_again():
    hashed = HashedKeyMap(10**6, 1000, CPU)
    before = hashed.num_bytes
    for turn in range(50):
        keys = torch.arange(turn * 2000, (turn + 1) * 2000)
        hashed.put(keys, 7)
        hashed.put(keys, 0)
    assert hashed.num_bytes == before


@pytest.mark.parametrize("key", [-1, 300])
def test_a_key_that_is_none_is_not_taken_for_another(key):
    with pytest.raises(IndexError, match="needed 0 to 299"):
        HashedKeyMap(NUM_KEYS, 20, CPU).get(ids([3, key]))


def test_large_pools_on_a_gpu_are_hashed_by_themselves():
    assert map_kind(None, 2**27, "cuda") == map_kind(None, 2**31 - 1, "cpu") == "array"
    assert map_kind(None, 2**27 + 1, "cuda") == "hashed"
    assert (map_kind("array", 2**30, "cuda"), map_kind("hashed", 10, "cpu")) == ("array", "hashed")
