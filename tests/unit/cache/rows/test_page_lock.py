"""Locking memory block by block: what is locked, when it is known, and that it is given back."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from embershard.cache.rows import memory, page_lock
from embershard.cache.rows.page_lock import PageLock, cpus_beside, parse_cpus
from embershard.errors import CacheError


class Locked:
    """Stands for CUDA: blocks by address. Waits at `gate` before the block of that number."""

    def __init__(self, gate: int | None = None, refuse: int | None = None) -> None:
        self.blocks: dict[int, int] = {}
        self.order: list[int] = []
        self.go_on = threading.Event()
        self.arrived = threading.Event()
        self._gate, self._refuse = gate, refuse

    def lock(self, address: int, size: int) -> None:
        if len(self.order) == self._gate:
            self.arrived.set()
            assert self.go_on.wait(30)
        if len(self.order) == self._refuse:
            raise RuntimeError("out of memory")
        assert address not in self.blocks
        self.blocks[address] = size
        self.order.append(address)

    def unlock(self, address: int) -> None:
        del self.blocks[address]


def tensors() -> list[torch.Tensor]:
    return [memory.zeros(2500, torch.int32, whole_pages=True), memory.zeros(1000, torch.uint8, whole_pages=True)]


@pytest.mark.slow
def test_every_byte_is_locked_once_and_given_back():
    locked, rows = Locked(), [*tensors(), torch.empty(0)]
    lock = PageLock(rows, locked.lock, locked.unlock, block_bytes=4096)
    lock.wait()
    assert lock.is_done
    first, second = rows[0].data_ptr(), rows[1].data_ptr()
    assert list(locked.blocks.items()) == [(first, 4096), (first + 4096, 4096), (first + 8192, 1808), (second, 1000)]
    del lock
    gc.collect()
    assert not locked.blocks


def test_nobody_waits_for_the_locking():
    locked = Locked(gate=2)
    lock = PageLock(tensors(), locked.lock, locked.unlock, block_bytes=4096)
    assert locked.arrived.wait(30)
    assert (lock.is_done, len(locked.blocks)) == (False, 2)
    locked.go_on.set()
    lock.wait()
    assert lock.is_done


def test_given_up_half_way_the_rest_is_not_locked():
    locked = Locked(gate=1)
    lock = PageLock(tensors(), locked.lock, locked.unlock, block_bytes=4096)
    assert locked.arrived.wait(30)
    threading.Timer(0.05, locked.go_on.set).start()
    del lock
    gc.collect()
    assert not locked.blocks
    assert len(locked.order) <= 2


def test_memory_lives_for_as_long_as_it_is_locked():
    locked, rows = Locked(gate=1), tensors()
    gone = weakref.ref(rows[0])
    lock = PageLock(rows, locked.lock, locked.unlock, block_bytes=4096)
    del rows
    assert gone() is not None
    locked.go_on.set()
    lock.wait()
    del lock
    gc.collect()
    assert gone() is None


def test_a_refusal_is_said_with_how_far_it_got_and_the_remedy():
    locked = Locked(refuse=1)
    lock = PageLock(tensors(), locked.lock, locked.unlock, block_bytes=4096)
    with pytest.raises(CacheError, match=r'out of memory \(after [0-9.]+ (Ki)?B of [0-9.]+ KiB\).*ulimit -l.*"staged"'):
        lock.wait()
    assert not lock.is_done
    del lock
    gc.collect()
    assert not locked.blocks


def test_the_thread_runs_where_it_is_told():
    seen: list[set[int]] = []
    own, cpu = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    lock = PageLock(tensors(), lambda *_: seen.append(os.sched_getaffinity(0)), lambda _: None, cpus=[cpu])
    lock.wait()
    assert seen == [{cpu}] * 2
    assert os.sched_getaffinity(0) == own


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set()), ("0-1,4-5", {0, 1, 4, 5})]
)
def test_lists_of_cpus(text, cpus):
    assert parse_cpus(text) == cpus


def test_cpus_beside_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    where = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(page_lock.torch.cuda, "get_device_properties", lambda _: where)
    assert cpus_beside(torch.device("cuda"), tmp_path) == set()
    (tmp_path / "0000:3b:00.0").mkdir()
    cpu = min(os.sched_getaffinity(0))
    (tmp_path / "0000:3b:00.0" / "local_cpulist").write_text(f"{cpu},100000\n")
    assert cpus_beside(torch.device("cuda"), tmp_path) == {cpu}
