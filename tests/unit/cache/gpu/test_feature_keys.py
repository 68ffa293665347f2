"""Keys by the kernel, in Triton's interpreter, are those of the loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embershard.cache import loops
from embershard.cache.gpu.feature_keys import keys_of_ids


@pytest.mark.parametrize("per_bag", [0, 1, 40])
def test_keys_are_those_of_the_loop(per_bag: int) -> None:
    """Of several programs; with features of no ids in front, between and behind."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(0, per_bag + 1, (6, 30), generator=generator)
    lengths[[0, 3, 5]] = 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    ids = torch.randint(0, 100, (int(offsets[-1]),), generator=generator)
    first_keys = torch.tensor([0, 100, 2**40, 300, 100, 7])
    keys, counts = np.empty(ids.numel(), np.int64), np.empty(6, np.int64)
    loops.keys_of_ids(ids.numpy(), offsets.numpy(), first_keys.numpy(), keys, counts)
    for type_of_ids in (torch.int64, torch.int32):
        found = keys_of_ids(ids.to(type_of_ids), offsets.to(type_of_ids), first_keys)
        assert [part.tolist() for part in found] == [keys.tolist(), counts.tolist()]
