"""Locking memory block by block: what is locked, when it is known, and that it is given back."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch

from embershard.cache.rows import memory
from embershard.cache.rows.page_lock import PageLock
from embershard.errors import CacheError
from embershard.finalizers import wait_for_ends


class Locked:
    """Stands for CUDA: blocks by address. Waits at `gate` before the block of that number."""

    def __init__(self, gate: int | None = None, refuse: int | None = None) -> None:
        self.blocks: dict[int, int] = {}
        self.order: list[int] = []
        self.num_unlocks = 0
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

    def unlock(self, addresses: list[int]) -> None:
        self.num_unlocks += 1
        for address in addresses:
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
    wait_for_ends()
    assert not locked.blocks
    assert locked.num_unlocks == 1, "each waits for all that the GPU does"


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
    wait_for_ends()
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
    wait_for_ends()
    assert gone() is None


def test_a_refusal_is_said_with_how_far_it_got_and_the_remedy():
    locked = Locked(refuse=1)
    lock = PageLock(tensors(), locked.lock, locked.unlock, block_bytes=4096)
    with pytest.raises(
        CacheError, match=r'out of memory \(after [0-9.]+ (Ki)?B of [0-9.]+ KiB; .* available.*"staged"'
    ):
        lock.wait()
    assert not lock.is_done
    del lock
    gc.collect()
    wait_for_ends()
    assert not locked.blocks


def test_the_thread_runs_where_it_is_told():
    seen: list[set[int]] = []
    own, cpu = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    lock = PageLock(tensors(), lambda *_: seen.append(os.sched_getaffinity(0)), lambda _: None, cpus=[cpu])
    lock.wait()
    assert seen == [{cpu}] * 2
    assert os.sched_getaffinity(0) == own


def is_inherited(tensor: torch.Tensor) -> bool:
    """Whether a forked process would have the memory of a tensor."""
    ranges = re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags:(.*?)$", Path("/proc/self/smaps").read_text(), re.M | re.S
    )
    (flags,) = [flags for start, stop, flags in ranges if int(start, 16) <= tensor.data_ptr() < int(stop, 16)]
    return "dc" not in flags.split()


@pytest.mark.slow
def test_forked_processes_have_no_locked_memory():
    """The system would copy all of it: a loader's processes would take as much host memory as the tables."""
    locked, rows = Locked(), tensors()
    lock = PageLock(rows, locked.lock, locked.unlock, block_bytes=4096)
    assert not any(map(is_inherited, rows))
    lock.wait()
    del lock
    gc.collect()
    wait_for_ends()
    assert all(map(is_inherited, rows))


ENDS = """
import threading
import torch
from embershard.cache.rows import memory
from embershard.cache.rows.page_lock import PageLock
begun = threading.Event()
def lock(address, size):
    begun.set()
    print("locks", flush=True)
rows = [memory.zeros(1 << 20, torch.uint8, whole_pages=True)]
kept = PageLock(rows, lock, lambda addresses: print("unlocks", flush=True), block_bytes=4096)
begun.wait()
PageLock.kept = kept  # until the interpreter's end
"""


@pytest.mark.slow
def test_the_end_of_a_process_unlocks_nothing(project_dir: Path):
    """Unlocking waits for what the GPU does: for ever, where that waits for a rank that has ended."""
    done = subprocess.run([sys.executable, "-c", ENDS], cwd=project_dir, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"locks"}
