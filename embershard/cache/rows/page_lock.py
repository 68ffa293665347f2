"""Locking host memory into place, so that a GPU can address it: block by block, in a thread, while training starts.

Locking costs about as much as touching every page, so a hundred gigabytes take a while. Until all of it is locked, rows
move through buffers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embershard.errors import CacheError

_BLOCK_BYTES = 128 << 20  # while the driver locks a block, it may let nobody launch a kernel
_PORTABLE, _MAPPED = 1, 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
_DEVICES = Path("/sys/bus/pci/devices")


class PageLock:
    """Locks the memory of some tensors, in the background.

    Args:
        tensors: in host memory, on pages of their own. They are kept for as long as they are locked.
        lock, unlock: for one block; ``lock`` takes its address and its bytes, ``unlock`` its address.
        cpus: that the locking thread runs on. Pages that nobody touched before are taken from the memory next to them.
        block_bytes: what is locked at a time.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        lock: Callable[[int, int], None],
        unlock: Callable[[int], None],
        cpus: Iterable[int] = (),
        block_bytes: int = _BLOCK_BYTES,
    ) -> None:
        blocks = [block for tensor in tensors for block in _blocks(tensor, block_bytes)]
        self._work = _Work(blocks, lock, frozenset(cpus))
        # The thread knows the work only: this object may go while it runs.
        self._thread = threading.Thread(target=self._work.run, name="embershard-page-lock", daemon=True)
        self._thread.start()
        weakref.finalize(self, _end, self._work, self._thread, unlock, list(tensors))

    @property
    def is_done(self) -> bool:
        """Whether everything is locked."""
        return self._work.failure is None and len(self._work.locked) == len(self._work.blocks)

    def wait(self) -> None:
        """Until everything is locked.

        Raises:
            CacheError: something could not be.
        """
        self._thread.join()
        self.check()

    def check(self) -> None:
        """Raise if locking failed.

        Raises:
            CacheError: with what to do about it.
        """
        work = self._work
        if work.failure is not None:
            done = sum(size for _, size in work.blocks[: len(work.locked)])
            total = sum(size for _, size in work.blocks)
            raise CacheError(
                f"host memory could not be locked for the GPU: {work.failure} (after {done / 1e9:.1f} of "
                f'{total / 1e9:.1f} GB). Raise the limit (ulimit -l unlimited), or set cache.transfer="staged"'
            ) from work.failure


class _Work:
    """What the thread does, and how far it is."""

    def __init__(self, blocks: list[tuple[int, int]], lock: Callable[[int, int], None], cpus: frozenset[int]) -> None:
        self.blocks, self._lock, self._cpus = blocks, lock, cpus
        self.locked: list[int] = []
        self.stop = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            if self._cpus:
                os.sched_setaffinity(0, self._cpus)  # of this thread
            for address, size in self.blocks:
                if self.stop.is_set():
                    return
                self._lock(address, size)
                self.locked.append(address)
        except BaseException as error:
            self.failure = error


def _end(work: _Work, thread: threading.Thread, unlock: Callable[[int], None], tensors: list[Tensor]) -> None:
    work.stop.set()
    if thread is not threading.current_thread():  # where the garbage collector may run, too
        thread.join()
    while work.locked:
        unlock(work.locked.pop())
    tensors.clear()  # only now


def _blocks(tensor: Tensor, block_bytes: int) -> list[tuple[int, int]]:
    """Address and size of each block of a tensor's memory, in bytes."""
    total, first = tensor.numel() * tensor.element_size(), tensor.data_ptr()
    return [(first + start, min(block_bytes, total - start)) for start in range(0, total, block_bytes)]


def lock_for(device: torch.device, tensors: Sequence[Tensor]) -> PageLock:
    """Locks tensors for a GPU, from the cores next to it."""
    if device.index is None:  # of the calling thread: another one starts with the first GPU
        device = torch.device(device.type, torch.cuda.current_device())
    lock, unlock = functools.partial(lock_for_cuda, device), functools.partial(unlock_for_cuda, device)
    return PageLock(tensors, lock, unlock, cpus_beside(device))


def lock_for_cuda(device: torch.device, address: int, size: int) -> None:
    """Lock one block for the GPUs of the process, of which it uses ``device``.

    Raises:
        RuntimeError: CUDA refuses.
    """
    with torch.cuda.device(device):  # a thread that names none would set up the first GPU, on every rank
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE | _MAPPED))


def unlock_for_cuda(device: torch.device, address: int) -> None:
    """Give one block back, which no kernel uses any more; when the process ends CUDA may be gone already, and the
    memory goes with it."""
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):
        torch.cuda.synchronize(device)
        torch.cuda.cudart().cudaHostUnregister(address)


def cpus_beside(device: torch.device, folder: Path = _DEVICES) -> set[int]:
    """CPUs next to a GPU, as the system names them and as far as this process may run there; empty where unknown."""
    properties: Any = torch.cuda.get_device_properties(device)
    bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        listed = (folder / bus / "local_cpulist").read_text()
    except OSError:
        return set()
    return parse_cpus(listed) & os.sched_getaffinity(0)


def parse_cpus(text: str) -> set[int]:
    """CPUs of a list as the system writes it.

    >>> sorted(parse_cpus("0-2,8"))
    [0, 1, 2, 8]
    """
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}
