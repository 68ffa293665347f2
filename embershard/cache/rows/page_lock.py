"""Page-locking of host memory, so that a GPU can address it: block by block, in a thread, while training starts.

Locking takes about as long as touching every page, so a hundred gigabytes take a while. Until all memory is locked,
rows move through buffers.
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
from embershard.units import size

_BLOCK_BYTES = 128 << 20  # the driver may refuse kernel launches while it locks a block
_PORTABLE, _MAPPED = 1, 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
_DEVICES = Path("/sys/bus/pci/devices")


class PageLock:
    """Locks the memory of tensors in the background.

    Args:
        tensors: in host memory, on pages of their own; kept alive for as long as they are locked.
        lock, unlock: lock a block, given its address and bytes, and unlock it, given its address.
        cpus: that the locking thread runs on. Pages not touched before are allocated in the memory next to them.
        block_bytes: size of the blocks.
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
        # The thread refers to the work only, so this object can be deleted while it runs.
        self._thread = threading.Thread(target=self._work.run, name="embershard-page-lock", daemon=True)
        self._thread.start()
        weakref.finalize(self, _end, self._work, self._thread, unlock, list(tensors))

    @property
    def is_done(self) -> bool:
        """True once all memory is locked."""
        return self._work.failure is None and len(self._work.locked) == len(self._work.blocks)

    def wait(self) -> None:
        """Block until all memory is locked.

        Raises:
            CacheError: locking failed.
        """
        self._thread.join()
        self.check()

    def check(self) -> None:
        """Raise if locking failed.

        Raises:
            CacheError: the cause and the remedy.
        """
        work = self._work
        if work.failure is not None:
            done = sum(size for _, size in work.blocks[: len(work.locked)])
            total = sum(size for _, size in work.blocks)
            raise CacheError(
                f"host memory could not be locked for the GPU: {work.failure} (after {size(done)} of "
                f'{size(total)}). Raise the limit (ulimit -l unlimited), or set cache.transfer="staged"'
            ) from work.failure


class _Work:
    """Work of the locking thread, and its progress."""

    def __init__(self, blocks: list[tuple[int, int]], lock: Callable[[int, int], None], cpus: frozenset[int]) -> None:
        self.blocks, self._lock, self._cpus = blocks, lock, cpus
        self.locked: list[int] = []
        self.stop = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            if self._cpus:
                os.sched_setaffinity(0, self._cpus)  # of this thread only
            for address, size in self.blocks:
                if self.stop.is_set():
                    return
                self._lock(address, size)
                self.locked.append(address)
        except BaseException as error:
            self.failure = error


def _end(work: _Work, thread: threading.Thread, unlock: Callable[[int], None], tensors: list[Tensor]) -> None:
    work.stop.set()
    if thread is not threading.current_thread():  # the garbage collector may run in the locking thread
        thread.join()
    while work.locked:
        unlock(work.locked.pop())
    tensors.clear()  # not before: locked memory must stay allocated


def _blocks(tensor: Tensor, block_bytes: int) -> list[tuple[int, int]]:
    """Return address and size of each block of a tensor's memory, in bytes."""
    total, first = tensor.numel() * tensor.element_size(), tensor.data_ptr()
    return [(first + start, min(block_bytes, total - start)) for start in range(0, total, block_bytes)]


def lock_for(
    device: torch.device, tensors: Sequence[Tensor], before: Callable[[int, int], None] | None = None
) -> PageLock:
    """Start locking tensors for a GPU, in a thread on the cores next to it.

    The thread calls `before`, if given, with address and bytes of each block that it is about to lock.
    """
    if device.index is None:  # resolved here: the locking thread would start with the first GPU
        device = torch.device(device.type, torch.cuda.current_device())

    def lock(address: int, size: int) -> None:
        if before is not None:
            before(address, size)
        lock_for_cuda(device, address, size)

    return PageLock(tensors, lock, functools.partial(unlock_for_cuda, device), cpus_beside(device))


def lock_for_cuda(device: torch.device, address: int, size: int) -> None:
    """Lock one block for all GPUs of a process that uses `device`.

    Raises:
        RuntimeError: CUDA refuses.
    """
    with torch.cuda.device(device):  # without it, every rank would set up the first GPU
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE | _MAPPED))


def unlock_for_cuda(device: torch.device, address: int) -> None:
    """Unlock one block once no kernel uses it. At the end of the process CUDA may have shut down before, which unlocks
    all memory."""
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):
        torch.cuda.synchronize(device)
        torch.cuda.cudart().cudaHostUnregister(address)


def cpus_beside(device: torch.device, folder: Path = _DEVICES) -> set[int]:
    """Return the CPUs next to a GPU that this process may run on; empty if the system does not name them."""
    properties: Any = torch.cuda.get_device_properties(device)
    bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        listed = (folder / bus / "local_cpulist").read_text()
    except OSError:
        return set()
    return parse_cpus(listed) & os.sched_getaffinity(0)


def parse_cpus(text: str) -> set[int]:
    """Parse a list of CPUs as Linux writes it.

    >>> sorted(parse_cpus("0-2,8"))
    [0, 1, 2, 8]
    """
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}
