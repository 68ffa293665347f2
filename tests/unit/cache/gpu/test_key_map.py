"""The maps for kernels, in Triton's interpreter, against an array: the same entries, whatever is put."""

from __future__ import annotations

import pytest
import torch

from embershard.cache.gpu import key_map
from embershard.cache.gpu.key_map import SPILL_CELLS, PlacedArrayMap, PlacedHashedMap
from embershard.cache.gpu.launch import launch
from embershard.cache.gpu.slot_map import _bind
from embershard.cache.key_map import ArrayKeyMap
from embershard.errors import CacheError

CPU = torch.device("cpu")
NUM_KEYS = 600


def some_keys(seed: int, count: int, num_keys: int = NUM_KEYS) -> torch.Tensor:
    return torch.randint(0, num_keys, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [PlacedArrayMap, PlacedHashedMap])
def test_it_holds_what_an_array_holds(kind) -> None:
    array = ArrayKeyMap(NUM_KEYS, CPU)
    placed = PlacedArrayMap(NUM_KEYS, CPU) if kind is PlacedArrayMap else PlacedHashedMap(NUM_KEYS, 60, CPU)
    everywhere = torch.randperm(NUM_KEYS, generator=torch.Generator().manual_seed(9))
    for step, value in enumerate((1, -1, 2, 0, -3, 0, 4, 5)):
        keys = some_keys(step, 129).unique()[torch.randperm(some_keys(step, 129).unique().numel())]
        for entries in (array, placed):
            entries.put(keys, value)
            if value == 2:
                entries.clear_negative()
        assert torch.equal(placed.get(everywhere), array.get(everywhere))
        assert torch.equal(placed.dense(), array.dense())
        assert placed.tallies is None or placed.tallies.tolist() == [int((array.dense() != 0).sum()), 0]


@pytest.mark.slow
def test_repeats_share_a_place_and_every_key_gets_one() -> None:
    hashed = PlacedHashedMap(2**31 - 1, 200, CPU)
    held = some_keys(0, 100, 2**31 - 1).unique()
    hashed.put(held, torch.arange(1, held.numel() + 1, dtype=torch.int32))
    keys = torch.cat([held[:30], some_keys(1, 90, 2**31 - 1), some_keys(1, 90, 2**31 - 1)])
    hashed.claim_absent(keys)
    places = hashed._look_up(keys)[0]
    assert int(places.min()) >= 0
    assert places.unique().numel() == keys.unique().numel()
    assert torch.equal(hashed.get(held), torch.arange(1, held.numel() + 1, dtype=torch.int32))
    assert hashed.tallies.tolist() == [torch.cat([held, keys]).unique().numel(), 0]


@pytest.mark.slow
def test_a_map_without_room_grows_and_one_that_lost_keys_refuses(monkeypatch) -> None:
    hashed = PlacedHashedMap(2**31 - 1, 10, CPU)
    before, keys = hashed.num_bytes, some_keys(3, 200, 2**31 - 1).unique()
    hashed.put(keys, 7)
    assert hashed.num_bytes > 4 * before
    assert bool((hashed.get(keys) == 7).all())
    monkeypatch.setattr(key_map, "LOAD", 100)
    lost = PlacedHashedMap(2**31 - 1, 10, CPU)
    lost.put(keys, 7)
    assert int((lost.get(keys) == 7).sum()) == lost._num_buckets * 8 + SPILL_CELLS
    with pytest.raises(CacheError, match=rf"lost {keys.numel() - lost._num_buckets * 8 - SPILL_CELLS} of"):
        lost.note_tallies(lost.tallies.tolist())


def test_memory_follows_the_slots_and_not_the_keys() -> None:
    small, large = (PlacedHashedMap(num_keys, 1000, CPU) for num_keys in (10_000, 2**31 - 1))
    assert small.num_bytes == large.num_bytes == 24 * 1001 + 8 * (SPILL_CELLS + 1)


@pytest.mark.slow
def test_room_that_was_given_up_is_used_again() -> None:
    hashed = PlacedHashedMap(10**6, 60, CPU)
    before = hashed.num_bytes
    for turn in range(8):
        keys = torch.arange(turn * 50, (turn + 1) * 50)
        hashed.put(keys, 7)
        hashed.put(keys, 0)
        hashed.note_tallies(hashed.tallies.tolist())
    assert hashed.num_bytes == before


def test_a_key_without_a_place_is_bound_without_a_write_before_the_map() -> None:
    around = torch.full((6,), 7, dtype=torch.int32)
    keys, slots = torch.tensor([3, 5]), torch.tensor([1, 2])
    key_of_slot, stamps = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    state = (around[1:], key_of_slot, stamps, torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32))
    launch(_bind, 2, keys, torch.tensor([-1, 4]), slots, *state, 9, 0, USES=True)
    assert around.tolist() == [7, 7, 7, 7, 7, 2]
