"""Kernels of small rows on a GPU, against the compiled loops, and training beside stock TorchRec that is rounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embershard.cache.gpu.small_rows import SmallSlots
from embershard.cache.gpu.small_transfer import SmallUvaTransfer
from embershard.cache.homes.quantised import SmallStagedTransfer, SmallTransfer
from embershard.cache.homes.small_rows import SmallRows
from embershard.cache.rows import memory
from embershard.cache.rows.page_lock import lock_for
from embershard.cache.rows.transfer import Buffer
from embershard.errors import CacheError
from tests.gpu import cases
from tests.ranks.workers import RankPool
from tests.unit.cache.homes.test_small_rows import DIM, ROWS, TYPES, all_sizes, bits, make_rows

DEVICE = torch.device("cuda", 0)
EVERY = torch.arange(2 * ROWS)


def _rows(small_type: str) -> SmallRows:
    """In memory that can be locked."""
    full = torch.arange(0, 2 * ROWS, 7) if small_type == "int8" else None

    def allocate(numel: int, dtype: torch.dtype) -> Tensor:
        return memory.zeros(numel, dtype, whole_pages=True)

    return make_rows(small_type, full, allocate=allocate)


@TYPES
def test_rounding_gives_the_bits_of_the_loop_for_all_sizes_of_numbers(small_type: str) -> None:
    """Each place three times, in any order: one program rounds it."""
    torch.manual_seed(1)
    rows, keys = _rows(small_type), torch.randperm(2 * ROWS)
    given = all_sizes(small_type)
    given[6, 2] = -(2.0**-149)
    slots, weights = SmallSlots(rows, DEVICE), torch.zeros_like(given, device="cuda")
    slots.attach(weights)
    buffer = Buffer(rows.tensors, 2 * ROWS, pinned=True).parts
    rows.gather(keys, buffer)
    slots.widen(weights, EVERY.cuda(), buffer)
    assert torch.equal(bits(weights.cpu()), bits(rows.read(keys)))
    weights.copy_(given)
    again = torch.cat([EVERY, EVERY, EVERY])[torch.randperm(6 * ROWS)]
    slots.round(weights, again.cuda(), keys[again].cuda())
    expected = given.clone()
    rows._round(expected.numpy(), EVERY.numpy(), keys.numpy(), np.empty(0, np.int32), 0)
    assert torch.equal(bits(weights.cpu()), bits(expected))
    torch.cuda.synchronize()
    slots.check()


@TYPES
@pytest.mark.parametrize("make", [SmallStagedTransfer, SmallUvaTransfer])
@pytest.mark.parametrize("count", [1, 2000])
def test_transfers_move_what_the_loops_move(small_type: str, make: Any, count: int) -> None:
    """Rows that are full, that come back, and that were never written."""
    torch.manual_seed(count)
    found = []
    order, at = torch.randperm(2 * ROWS), torch.randperm(2500)[:count] + 1
    first, second, updates = order[:count], order[count // 2 : count // 2 + count], torch.rand(count, DIM)
    for transfer_of, device in ((SmallTransfer, "cpu"), (make, "cuda")):
        rows = _rows(small_type)
        states = memory.zeros(2 * ROWS, torch.float32, whole_pages=True)
        states.copy_(EVERY)
        if make is SmallUvaTransfer and device == "cuda":
            rows.make(EVERY)
            lock = lock_for(DEVICE, [*rows.tensors, states])
            lock.wait()
        slots = [torch.zeros(2501, DIM, device=device), torch.zeros(2501, device=device)]
        transfer, places = transfer_of(slots, [*rows.tensors, states], small=rows), at.to(device)
        transfer.fill(first.to(transfer.key_device), places)
        slots[0][places] += updates.to(device)
        rows.round(slots[0], places, first.to(device))
        transfer.write_back(places, first.to(transfer.key_device))
        transfer.write_back(places[:0], first[:0].to(transfer.key_device))  # only now may they be filled again
        transfer.fill(second.to(transfer.key_device), places)
        transfer.finish()
        found.append([*(slot.cpu() for slot in slots), states.clone(), rows.read(EVERY)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(bits(one), bits(other))


@TYPES
def test_a_weight_that_is_no_number_is_named(small_type: str) -> None:
    rows, weights = _rows(small_type), torch.rand(9, DIM, device="cuda")
    weights[4, 7] = torch.inf
    places, keys = torch.tensor([3, 4, 5], device="cuda"), torch.tensor([8, ROWS + 18, 9], device="cuda")
    rows.round(weights, places, keys)
    torch.cuda.synchronize()
    with pytest.raises(CacheError, match="'users', row 18: its largest weight is inf"):
        rows.round(weights, places, keys)


@pytest.mark.parametrize("name", cases.SMALL_ROWS)
def test_rows_are_those_of_rounded_stock(gpu_rank: RankPool, name: str) -> None:
    cases.check_small_rows(gpu_rank, name, "cuda")
