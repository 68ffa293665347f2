"""The hashed map on a GPU against an array on the CPU."""

from __future__ import annotations

import torch

from embershard.cache.gpu.key_map import PlacedHashedMap
from embershard.cache.key_map import ArrayKeyMap

NUM_KEYS = 200_000


def test_it_holds_what_an_array_holds() -> None:
    generator = torch.Generator().manual_seed(3)
    array, hashed = ArrayKeyMap(NUM_KEYS, torch.device("cpu")), PlacedHashedMap(NUM_KEYS, 5000, torch.device("cuda"))
    everywhere = torch.randperm(NUM_KEYS, generator=generator)
    for value in (1, -1, 2, 0, -3, 0, 4, 5):
        keys = torch.randint(0, NUM_KEYS, (4000,), generator=generator).unique()
        array.put(keys, value)
        hashed.put(keys.cuda(), value)
        if value == 2:
            array.clear_negative()
            hashed.clear_negative()
        assert torch.equal(hashed.get(everywhere.cuda()).cpu(), array.get(everywhere))
        assert torch.equal(hashed.dense().cpu(), array.dense())
    assert not hashed.get(everywhere[:0].cuda()).numel()
