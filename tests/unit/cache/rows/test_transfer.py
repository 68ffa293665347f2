"""The contract of every Transfer: rows arrive whole, bit for bit, and nothing else is touched."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from embershard.cache.rows.transfer import PlainTransfer, StagedTransfer, Transfer
from embershard.cache.rows.uva_transfer import UvaTransfer

IMPLEMENTATIONS: dict[str, Callable[[list[Tensor], list[Tensor]], Transfer]] = {
    "plain": PlainTransfer,
    "staged": StagedTransfer,
    "staged, one row at a time": functools.partial(StagedTransfer, buffer_bytes=1),
    "triton_uva": UvaTransfer,
}
NUM_SLOTS, NUM_ROWS = 9, 20
# Trailing shape and dtype of each payload tensor: weights, then states.
PAYLOADS = {
    "sgd": [((8,), torch.float32)],
    "rowwise_adagrad": [((8,), torch.float32), ((), torch.float32)],
    "adagrad": [((12,), torch.float32), ((12,), torch.float32)],
    "fp16": [((4,), torch.float16), ((), torch.float32), ((4,), torch.float32)],
    "odd_columns": [((5,), torch.float16), ((3,), torch.float32), ((2, 3), torch.float64)],
    "counters": [((4,), torch.float32), ((), torch.int64), ((1,), torch.int32)],
}

by_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def write_back(transfer: Transfer, slots: Tensor, keys: Tensor) -> None:
    """To the end, as the CPU sees it."""
    transfer.write_back(slots, keys)
    transfer.finish()


def bits(tensor: Tensor) -> Tensor:
    """For comparing NaN with NaN."""
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor


@pytest.fixture(params=PAYLOADS)
def payloads(request) -> tuple[list[Tensor], list[Tensor]]:
    """Slots and host rows, both of random bits (NaN, infinities and denormals among them)."""
    generator = torch.Generator().manual_seed(1)

    def rows(count: int) -> list[Tensor]:
        return [
            torch.randint(0, 256, (count * torch.Size(shape).numel() * dtype.itemsize,), generator=generator)
            .to(torch.uint8)
            .view(dtype)
            .view(count, *shape)
            for shape, dtype in PAYLOADS[request.param]
        ]

    return rows(NUM_SLOTS + 1), rows(NUM_ROWS)


def same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("keys", "slots"), [([], []), ([7], [3]), ([0, 19, 4], [9, 1, 2]), (range(9), range(9, 0, -1))]
)
@by_implementation
def test_fill_moves_whole_rows_and_nothing_else(implementation, payloads, keys, slots):
    device, host = payloads
    keys, slots = torch.tensor(keys, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64)
    untouched = [t.clone() for t in host]
    expected = [t.clone() for t in device]
    for target, source in zip(expected, host, strict=True):
        for key, slot in zip(keys.tolist(), slots.tolist(), strict=True):
            target[slot] = source[key]
    IMPLEMENTATIONS[implementation](device, host).fill(keys, slots)
    assert same(device, expected)
    assert same(host, untouched)


@pytest.mark.parametrize(
    ("slots", "keys"), [([], []), ([3], [7]), ([9, 1, 2], [0, 19, 4]), (range(9, 0, -1), range(9))]
)
@by_implementation
def test_write_back_moves_whole_rows_and_nothing_else(implementation, payloads, slots, keys):
    device, host = payloads
    keys, slots = torch.tensor(keys, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64)
    untouched = [t.clone() for t in device]
    expected = [t.clone() for t in host]
    for target, source in zip(expected, device, strict=True):
        for key, slot in zip(keys.tolist(), slots.tolist(), strict=True):
            target[key] = source[slot]
    write_back(IMPLEMENTATIONS[implementation](device, host), slots, keys)
    assert same(host, expected)
    assert same(device, untouched)


@by_implementation
def test_a_slot_s_old_row_leaves_before_its_new_row_arrives(implementation, payloads):
    """Calls take effect in their order: what a plan relies on."""
    device, host = payloads
    old = [t[2].clone() for t in device]
    new = [t[5].clone() for t in host]
    transfer = IMPLEMENTATIONS[implementation](device, host)
    write_back(transfer, torch.tensor([2]), torch.tensor([11]))
    transfer.fill(torch.tensor([5]), torch.tensor([2]))
    assert same([t[11] for t in host], old)
    assert same([t[2] for t in device], new)


@by_implementation
def test_there_and_back_is_the_identity(implementation, payloads):
    device, host = payloads
    before = [t.clone() for t in host]
    transfer = IMPLEMENTATIONS[implementation](device, host)
    keys, slots = torch.tensor([3, 8, 1]), torch.tensor([1, 5, 9])
    transfer.fill(keys, slots)
    for t in host:
        t[keys] = 0
    write_back(transfer, slots, keys)
    assert same(host, before)


@by_implementation
def test_moves_are_not_seen_by_autograd(implementation, payloads):
    """Rows are filled between a forward and its backward; and these writes are not somebody else's."""
    device, host = payloads
    views = [t.detach() for t in (*device, *host)]
    versions = [t._version for t in views]
    transfer = IMPLEMENTATIONS[implementation](device, host)
    transfer.fill(torch.tensor([3, 8]), torch.tensor([1, 5]))
    write_back(transfer, torch.tensor([5]), torch.tensor([12]))
    assert [t._version for t in views] == versions


@by_implementation
def test_payload_tensors_that_require_gradients_are_moved(implementation):
    device, host = [torch.zeros(4, 4, requires_grad=True)], [torch.ones(6, 4, requires_grad=True)]
    transfer = IMPLEMENTATIONS[implementation](device, host)
    transfer.fill(torch.tensor([3]), torch.tensor([2]))
    assert device[0].sum() == 4.0
    write_back(transfer, torch.tensor([1]), torch.tensor([0]))
    assert host[0].sum() == 20.0


@by_implementation
def test_sides_of_different_alignment_and_layout(implementation):
    """Payloads are given by FBGEMM: a tensor may start anywhere in its storage, or not be contiguous."""
    host = [torch.arange(80.0).view(20, 4)]
    shifted = torch.zeros(10 * 4 + 1)[1:].view(10, 4)
    strided = torch.zeros(10, 6)[:, :4]
    for device in (shifted, strided):
        transfer = IMPLEMENTATIONS[implementation]([device], host)
        transfer.fill(torch.tensor([3, 19]), torch.tensor([2, 9]))
        assert torch.equal(device[[2, 9]], host[0][[3, 19]])


@by_implementation
def test_different_numbers_of_payload_tensors_are_refused(implementation):
    with pytest.raises(ValueError):
        IMPLEMENTATIONS[implementation]([torch.zeros(4, 4)], [torch.zeros(6, 4), torch.zeros(6)])


@by_implementation
def test_a_side_without_rows(implementation):
    transfer = IMPLEMENTATIONS[implementation]([torch.zeros(2, 4), torch.zeros(2)], [torch.zeros(0, 4), torch.zeros(0)])
    none = torch.empty(0, dtype=torch.int64)
    transfer.fill(none, none)
    write_back(transfer, none, none)


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8]
SHAPES = st.lists(st.integers(1, 9), max_size=2).map(tuple) | st.sampled_from([(128,), (260,), (3000,)])


@st.composite
def exchanges(draw):
    """Payload shapes and types, numbers of slots and rows, and which rows move between which slots."""
    parts = draw(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=4))
    num_slots, num_rows = draw(st.integers(1, 80)), draw(st.integers(1, 80))
    most = min(num_slots, num_rows)
    count = draw(st.sampled_from([0, most]) | st.integers(0, most))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    slots, keys = (torch.randperm(size, generator=seed)[:count] for size in (num_slots, num_rows))

    def rows(size):
        return [
            torch.randint(0, 256, (size * math.prod(shape) * dtype.itemsize,), generator=seed, dtype=torch.uint8)
            .view(dtype)
            .view(size, *shape)
            for shape, dtype in parts
        ]

    return rows(num_slots), rows(num_rows), slots, keys


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "plain"])
@given(exchange=exchanges())
def test_every_transfer_does_what_the_plain_one_does(implementation, exchange):
    """Random shapes and types; no rows, some, and all of them."""
    device, host, slots, keys = exchange
    expected_device, expected_host = [t.clone() for t in device], [t.clone() for t in host]
    half = slots.numel() // 2
    for make, slots_, rows in (
        (PlainTransfer, expected_device, expected_host),
        (IMPLEMENTATIONS[implementation], device, host),
    ):
        transfer = make(slots_, rows)
        transfer.write_back(slots[:half], keys[:half])
        transfer.fill(keys[half:], slots[half:])
        transfer.write_back(slots[half:], keys[half:].flip(0))
        transfer.finish()
    assert same(device, expected_device)
    assert same(host, expected_host)
