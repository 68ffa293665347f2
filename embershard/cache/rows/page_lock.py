"""Page-locking of host memory, so that a GPU can address it: block by block, in a thread, while training starts.

Locking takes about as long as touching every page, so a hundred gigabytes take a while. Until all memory is locked,
rows move through buffers; where it cannot be locked, for good.

Locked memory is not inherited by processes that are forked, such as those of a loader: the system would copy all of it
at the fork, as pages that a device writes cannot be shared until one of both writes to them.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from embershard.cache.rows import memory
from embershard.errors import CacheError
from embershard.finalizers import end_with
from embershard.machine import cpus_near, host_memory
from embershard.units import size

_BLOCK_BYTES = 128 << 20  # the driver may refuse kernel launches while it locks a block
_PORTABLE, _MAPPED = 1, 2  # cudaHostRegisterPortable, cudaHostRegisterMapped


class PageLock:
    """Locks the memory of tensors in the background.

    Args:
        tensors: in host memory, on pages of their own; kept alive for as long as they are locked.
        lock: locks a block, given its address and bytes.
        unlock: unlocks blocks, given the addresses of all that were locked. It is not called at the end of the process,
            which unlocks all memory: it may have to wait for a kernel that waits for a rank which has ended.
        cpus: that the locking thread runs on. Pages not touched before are allocated in the memory next to them.
        block_bytes: size of the blocks.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        lock: Callable[[int, int], None],
        unlock: Callable[[list[int]], None],
        cpus: Iterable[int] = (),
        block_bytes: int = _BLOCK_BYTES,
    ) -> None:
        _set_inherited(tensors, False)
        blocks = [block for tensor in tensors for block in _blocks(tensor, block_bytes)]
        self._work = _Work(blocks, lock, frozenset(cpus))
        # The thread refers to the work only, so this object can be deleted while it runs.
        self._thread = threading.Thread(target=self._work.run, name="embershard-page-lock", daemon=True)
        self._thread.start()
        stop = partial(_stop, self._work, self._thread)
        atexit.register(stop)
        end_with(self, _end, stop, self._work, unlock, list(tensors))

    @property
    def is_done(self) -> bool:
        """True once all memory is locked."""
        return self._work.failure is None and len(self._work.locked) == len(self._work.blocks)

    @property
    def problem(self) -> str:
        """Why the memory cannot be locked; empty as long as nothing failed."""
        work = self._work
        if work.failure is None:
            return ""
        done, total = (sum(size for _, size in blocks) for blocks in (work.blocks[: len(work.locked)], work.blocks))
        has = host_memory()
        return (
            f"host memory could not be locked for the GPU: {work.failure} (after {size(done)} of {size(total)}; "
            f"{size(has.available_bytes)} of {size(has.total_bytes)} are available, {has.limit}). The memory of the "
            "machine or of its control group limits this; NVIDIA's driver ignores ulimit -l"
        )

    def wait(self) -> None:
        """Block until all memory is locked.

        Raises:
            CacheError: locking failed.
        """
        self._thread.join()
        if problem := self.problem:
            raise CacheError(f'{problem}. Make tables or dims smaller, or set cache.transfer="staged".')


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


def _stop(work: _Work, thread: threading.Thread) -> None:
    work.stop.set()
    thread.join()


def _end(stop: Callable[[], None], work: _Work, unlock: Callable[[list[int]], None], tensors: list[Tensor]) -> None:
    stop()
    atexit.unregister(stop)
    if work.locked:
        unlock(work.locked)
    _set_inherited(tensors, True)
    tensors.clear()  # not before: locked memory must stay allocated


def _set_inherited(tensors: Iterable[Tensor], is_inherited: bool) -> None:
    if hasattr(mmap, "MADV_DONTFORK"):
        for tensor in tensors:
            memory.advise(tensor, mmap.MADV_DOFORK if is_inherited else mmap.MADV_DONTFORK)


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

    return PageLock(tensors, lock, partial(unlock_for_cuda, device), cpus_beside(device))


def lock_for_cuda(device: torch.device, address: int, size: int) -> None:
    """Lock one block for all GPUs of a process that uses `device`.

    Raises:
        RuntimeError: CUDA refuses.
    """
    with torch.cuda.device(device):  # without it, every rank would set up the first GPU
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE | _MAPPED))


def unlock_for_cuda(device: torch.device, addresses: Iterable[int]) -> None:
    """Unlock blocks once no kernel uses them. CUDA may have shut down before, which unlocks all memory."""
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):
        torch.cuda.synchronize(device)
        for address in addresses:
            torch.cuda.cudart().cudaHostUnregister(address)


def cpus_beside(device: torch.device) -> set[int]:
    """Return the CPUs next to a GPU that this process may run on; empty if the system does not name them."""
    return cpus_near(torch.cuda.get_device_properties(device))
