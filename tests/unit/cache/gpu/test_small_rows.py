"""Kernels of small rows: interpreted, they give the bits of the compiled loops; compiled for a GPU, without one, they
have no instruction that would give others."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embershard.cache import CacheConfig, loops
from embershard.cache.gpu import small_rows as kernels
from embershard.cache.gpu.small_rows import SmallSlots
from embershard.cache.gpu.small_transfer import SmallUvaTransfer
from embershard.cache.homes.quantised import SmallStagedTransfer, SmallTransfer
from embershard.cache.homes.small_rows import SmallRows
from embershard.cache.rows.choose_transfer import transfer_kind
from embershard.errors import CacheError, ConfigError
from tests.covering import keep, matrix
from tests.small_rounding import round_int8
from tests.unit.cache.homes.test_small_rows import DIM, ROWS, TYPES, all_sizes, bits, make_rows

CPU = torch.device("cpu")
SLOTS = torch.arange(2 * ROWS)
pytestmark = pytest.mark.slow


def full_of(small_type: str) -> Tensor | None:
    return torch.arange(0, 2 * ROWS, 7) if small_type == "int8" else None


def in_slots(rows: SmallRows, keys: Tensor, given: Tensor) -> tuple[SmallSlots, Tensor]:
    """Rows `keys` are filled, and then trained to what is given."""
    slots, weights = SmallSlots(rows, CPU), torch.zeros_like(given)
    slots.attach(weights)
    rows.make(keys)
    slots.widen(weights, SLOTS, keys)
    assert torch.equal(bits(weights), bits(rows.read(keys)))
    weights.copy_(given)
    return slots, weights


def by_loop(rows: SmallRows, keys: Tensor, given: Tensor) -> Tensor:
    found = given.clone()
    rows._round(found.numpy(), SLOTS.numpy(), keys.numpy(), np.empty(0, np.int32), 0)
    return found


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("small_type", "first_column"), [("int8", 0), matrix("int8", 32), matrix("fp16", 0), matrix("fp16", 32)]
)
def test_rounding_gives_the_bits_of_the_loop_for_all_sizes_of_numbers(small_type: str, first_column: int) -> None:
    rows, keys = make_rows(small_type, full_of(small_type), first_column), torch.randperm(2 * ROWS)
    given = all_sizes(small_type)
    given[6, 2] = -(2.0**-149)  # beside numbers for which it is nothing
    slots, weights = in_slots(rows, keys, given)
    slots.round(weights, SLOTS, keys)
    assert torch.equal(bits(weights), bits(by_loop(rows, keys, given)))
    assert (weights != given).any(1).float().mean() > 0.5
    again = weights.clone()
    slots.round(again, torch.cat([SLOTS, SLOTS]), torch.cat([keys, keys]))
    assert torch.equal(bits(again), bits(weights))


@pytest.mark.matrix
@pytest.mark.parametrize(
    "fault", keep(["not once"], ["another column", "no row is full", "not once", "whole, not lower"])
)
def test_other_bits_are_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, keys = make_rows("int8", full_of("int8")), torch.randperm(2 * ROWS)
    given = all_sizes("int8")
    slots, weights = in_slots(rows, keys, given)
    if fault == "another column":
        slots._tables[3] += 1
    elif fault == "no row is full":
        slots._marks.zero_()
    elif fault == "not once":
        slots._number = -1  # the next call takes rows for rounded
    else:
        floor = kernels._floor
        monkeypatch.setattr(kernels, "_floor", lambda numbers: floor(numbers + 0.5))
    slots.round(weights, SLOTS, keys)
    assert not torch.equal(bits(weights), bits(by_loop(rows, keys, given)))


def test_a_row_that_is_read_half_rounded_may_come_out_otherwise() -> None:
    """So one program rounds a row, whose place may repeat (`_claim`): of two largest weights, of which one is rounded
    up already, the other one is the largest no more."""
    draw = np.random.default_rng(2)
    given = draw.standard_normal((20_000, 4)).astype(np.float32)
    given[:, 0] = 4.0
    given *= draw.random((20_000, 1)).astype(np.float32) + np.float32(0.5)
    given[:, 1] = -given[:, 0]
    numbers = np.arange(len(given))
    right = round_int8(given, numbers, 5)
    half = given.copy()
    half[:, 0] = right[:, 0]
    assert not np.array_equal(round_int8(half, numbers, 5), right)


@TYPES
@pytest.mark.parametrize("bad", keep([1e31], [math.nan, math.inf, -math.inf, 1e31]))
def test_a_weight_that_is_no_number_is_named_by_a_later_call(small_type: str, bad: float) -> None:
    rows, weights = make_rows(small_type), torch.rand(9, DIM)
    slots = SmallSlots(rows, CPU)
    slots.attach(weights)
    weights[4, 7] = bad
    given = weights.clone()
    places, keys = torch.tensor([3, 4, 5]), torch.tensor([8, ROWS + 17, 9])
    slots.round(weights, places, keys)
    assert torch.equal(bits(weights[4]), bits(given[4]))
    with pytest.raises(CacheError, match=rf"'users', row 17: its largest weight is .*{small_type} rows hold"):
        slots.round(weights, places, keys)


@TYPES
def test_a_slot_that_was_not_rounded_is_named_after_its_write_back(small_type: str) -> None:
    rows, weights = make_rows(small_type), torch.rand(3, DIM)
    slots = SmallSlots(rows, CPU)
    slots.attach(weights)
    keys = torch.arange(3)
    slots.round(weights, keys, keys)
    slots.narrow(keys, weights, keys)
    slots.check()
    weights[1, 2] = torch.nextafter(weights[1, 2], torch.tensor(9.0))
    slots.narrow(keys, weights, keys)
    with pytest.raises(CacheError, match=r"row 1 of the pool of the tables .* are not what an update leaves"):
        slots.check()


@TYPES
def test_narrowing_gives_the_bits_of_the_loop(small_type: str) -> None:
    by_kernel, rows = (make_rows(small_type, full_of(small_type)) for _ in range(2))
    keys = torch.randperm(2 * ROWS)
    slots, weights = in_slots(by_kernel, keys, all_sizes(small_type))
    slots.round(weights, SLOTS, keys)
    slots.narrow(keys, weights, SLOTS)
    slots.check()
    rows.write(keys, weights, SLOTS)
    for found, right in zip(by_kernel.tensors, rows.tensors, strict=True):
        assert torch.equal(found.view(torch.uint8), right.view(torch.uint8))


def test_full_rows_stay_full_when_slots_are_added_and_numbers_run_out() -> None:
    rows, keys = make_rows("int8", torch.tensor([4])), torch.tensor([3, 4])
    slots, weights, at = SmallSlots(rows, CPU), torch.zeros(3, DIM), torch.tensor([1, 2])
    slots.attach(weights)
    rows.make(keys)
    slots.widen(weights, at, keys)
    grown = torch.zeros(6, DIM)
    grown[:3] = weights
    slots.attach(grown)
    slots._number = 2**31 - 3  # the next number is the last one: those beyond are marks of full rows
    for _ in range(3):
        grown[1:3] = torch.rand(2, DIM)
        given = grown.clone()
        slots.round(grown, at, keys)
        assert torch.equal(grown[2], given[2])
        assert not torch.equal(grown[1], given[1])
    assert slots._number == 2


TRANSFERS: dict[str, Any] = {
    "staged": SmallStagedTransfer,
    "staged, one row at a time": functools.partial(SmallStagedTransfer, buffer_bytes=1),
    "triton_uva": SmallUvaTransfer,
}


@TYPES
@pytest.mark.parametrize("num_states", [matrix(0), 1])
@pytest.mark.parametrize("name", keep(["staged", "triton_uva"], TRANSFERS))
def test_every_transfer_moves_what_the_loops_move(small_type: str, num_states: int, name: str) -> None:
    """Rows that were never written, full ones, and states beside them."""
    num_slots, generator = 60, torch.Generator().manual_seed(3)
    found = []
    order = torch.randperm(2 * ROWS, generator=generator)
    first, second = order[:40], order[30:70]  # some rows come back
    at, updates = torch.randperm(num_slots, generator=generator)[:40] + 1, torch.rand(40, DIM, generator=generator)
    for make in (SmallTransfer, TRANSFERS[name]):
        rows = make_rows(small_type, full_of(small_type))
        if make is SmallUvaTransfer:
            rows.make(torch.arange(2 * ROWS))
        states = [torch.arange(2.0 * ROWS) for _ in range(num_states)]
        slots = [torch.zeros(num_slots + 1, DIM), *(torch.zeros(num_slots + 1) for _ in range(num_states))]
        transfer = make(slots, [*rows.tensors, *states], small=rows)
        transfer.fill(first, at)
        slots[0][at] += updates
        rows.round(slots[0], at, first)
        transfer.write_back(at, first)
        transfer.write_back(at[:0], first[:0])  # only now may they be filled again
        transfer.fill(second, at)
        transfer.finish()
        found.append([*slots, *states, rows.read(torch.arange(2 * ROWS))])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


@TYPES
def test_rows_are_made_before_a_kernel_reads_them(small_type: str) -> None:
    """Block by block, as memory is locked; those that were written stay."""
    rows, other = (make_rows(small_type, full_of(small_type)) for _ in range(2))
    every, changed = torch.arange(2 * ROWS), torch.tensor([5, 700])
    weights = torch.rand(2, DIM)
    rows.round(weights, torch.arange(2), changed)
    rows.write(changed, weights)
    for tensor in rows.tensors:
        for start in range(0, tensor.nbytes, 10_000):
            rows.make_memory(tensor.data_ptr() + start, min(10_000, tensor.nbytes - start))
    expected = other.read(every)
    expected[changed] = weights
    slots, found = SmallSlots(rows, CPU), torch.zeros(2 * ROWS, DIM)
    slots.attach(found)
    slots.widen(found, every, every)
    assert torch.equal(bits(found), bits(expected))


@pytest.mark.parametrize(
    ("device", "transfer", "message"),
    [
        ("cuda", "plain", 'cache.transfer="plain" moves fp32 on a GPU'),
        ("cpu", "staged", 'cache.transfer="staged" moves them by kernels of a GPU'),
        ("cpu", "triton_uva", 'cache.transfer="triton_uva" moves them by kernels of a GPU'),
    ],
)
def test_transfers_that_know_only_rows_of_float32_are_refused(
    device: str, transfer: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match=message):
        transfer_kind(CacheConfig(host_dtype="fp16", transfer=transfer), torch.device(device))


def test_kernels_need_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embershard.cache.rows.choose_transfer.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="whose kernels need triton, and it is not installed"):
        transfer_kind(CacheConfig(host_dtype="fp16"), torch.device("cuda"))


def test_the_loops_constants_are_the_kernels() -> None:
    for name in ("_MOST_BITS", "_MOST_HALF_BITS", "_NORMAL_HALF_BITS", "_ONE_STEP", "_TURNED"):
        assert getattr(kernels, name).value == getattr(loops.small, name)
    assert kernels._LEAST_STEP.value == float(loops.small._LEAST_STEP)
