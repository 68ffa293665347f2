"""The kernel and the buffers on a GPU, against plain copies on the CPU."""

from __future__ import annotations

import pytest
import torch

from embershard.cache.rows import memory
from embershard.cache.rows.page_lock import lock_for
from embershard.cache.rows.transfer import PlainTransfer, StagedTransfer
from embershard.cache.rows.uva_transfer import UvaTransfer

PAYLOADS = {
    "rowwise_adagrad, dim 128": [((128,), torch.float32), ((), torch.float32)],
    "adam, dim 64": [((64,), torch.float32), ((64,), torch.float32), ((64,), torch.float32)],
    "half, dim 12": [((12,), torch.float16), ((), torch.float32)],
    "bfloat16, dim 4": [((4,), torch.bfloat16)],
    "odd": [((5,), torch.float16), ((3,), torch.float32), ((2, 3), torch.float64)],
}


def _random(shape, dtype) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    rows = memory.zeros(numel, dtype, whole_pages=True)
    rows.view(torch.uint8).copy_(torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8))
    return rows.view(shape)


def _same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(got.cpu().view(-1).view(torch.uint8), expected.cpu().view(-1).view(torch.uint8))


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("make", [StagedTransfer, UvaTransfer])
@pytest.mark.parametrize("count", [0, 1, 1000, 40_000])
def test_exchanges(payload: str, make, count: int) -> None:
    torch.manual_seed(count)
    num_slots, num_rows = 50_000, 200_000
    host = [_random((num_rows, *shape), dtype) for shape, dtype in PAYLOADS[payload]]
    slots = [_random((num_slots, *shape), dtype).cuda() for shape, dtype in PAYLOADS[payload]]
    expected_host, expected_slots = [t.clone() for t in host], [t.cpu() for t in slots]
    lock = lock_for(torch.device("cuda", 0), host)
    lock.wait()
    rows, places = torch.randperm(num_rows), torch.randperm(num_slots)
    leaving, coming, at = rows[:count], rows[count : 2 * count], places[:count]
    plain = PlainTransfer(expected_slots, expected_host)
    transfer = make(slots, host)
    for each, to_keys, to_slots in ((plain, "cpu", "cpu"), (transfer, transfer.key_device, "cuda")):
        each.write_back(at.to(to_slots), leaving.to(to_keys))
        each.fill(coming.to(to_keys), at.to(to_slots))
        each.finish()
    torch.cuda.synchronize()
    assert all(_same(*pair) for pair in zip(slots, expected_slots, strict=True))
    assert all(_same(*pair) for pair in zip(host, expected_host, strict=True))


@pytest.mark.parametrize("make", [StagedTransfer, UvaTransfer])
def test_copies_wait_for_what_is_queued_before_them(make) -> None:
    """A row is collected after the update that is queued, and read back after it has landed."""
    host = [memory.zeros(64 * 1024, torch.float32, whole_pages=True).view(1024, 64)]
    slots = [torch.zeros(257, 64, device="cuda")]
    lock = lock_for(torch.device("cuda", 0), host)
    lock.wait()
    transfer = make(slots, host)
    keys, at = torch.arange(256, device=transfer.key_device), torch.arange(1, 257, device="cuda")
    none = at[:0]
    for turn in range(1, 20):
        torch.cuda._sleep(1_000_000)
        slots[0] += turn
        transfer.write_back(at, keys)
        transfer.fill(keys + 256, at)
        transfer.write_back(none, none.to(keys.device))
        transfer.fill(keys, at)
    transfer.finish()
    torch.cuda.synchronize()
    total = sum(range(1, 20))
    assert bool((host[0][:256] == total).all())
    assert bool((slots[0][1:] == total).all())
