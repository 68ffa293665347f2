"""Large tensors in host memory that are read and written at random rows."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embershard.errors import ConfigError
from embershard.machine import host_memory, limits_of_maps
from embershard.units import size

_HUGE_PAGE_BYTES = 2 << 20
#: Maps and scores of 134 million rows. In larger ones the rows of some steps touch few of the small pages, and nearly
#: all of the huge ones, each of which takes the system milliseconds.
_MOST_HUGE_BYTES = 512 << 20
#: Of Linux on x86 and Arm; Python names it from 3.13 on.
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def zeros(numel: int, dtype: torch.dtype, whole_pages: bool = False, small_pages: bool | None = None) -> Tensor:
    """Return a zeroed tensor [numel] in host memory, on huge pages if it is large and the system has them; with
    `whole_pages`, on pages that it shares with nothing else, however small it is.

    Random rows of a table of gigabytes miss the TLB at nearly every access with pages of 4 KiB; with 2 MiB, row copies
    take less time (decision 0003). Pages are allocated as they are written, so memory that is
    written here and there, and perhaps never whole, wants `small_pages` (decision 0024). None: from 512 MiB on.

    The system is not asked to keep memory for all of it: it may be larger than the machine's.

    Raises:
        ConfigError: a limit of the process or of the system does not allow it, with figures.
    """
    num_bytes = numel * dtype.itemsize
    has_huge_pages = num_bytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE")
    if not numel or not (has_huge_pages or whole_pages):
        return torch.zeros(numel, dtype=dtype)
    small_pages = num_bytes > _MOST_HUGE_BYTES if small_pages is None else small_pages
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except OSError as error:
        limits = [
            f"{limit.name} allows {size(limit.most_bytes)} ({size(limit.taken_bytes)} taken)"
            for limit in limits_of_maps()
        ]
        has = host_memory()
        limits.append(f"{size(has.available_bytes)} of {size(has.total_bytes)} are available ({has.limit})")
        raise ConfigError(
            f"{size(num_bytes)} of host memory for rows, or for maps of rows, could not be had ({error.strerror}): "
            f"{', '.join(limits)}. Raise the limit, make tables or dims smaller, or use more machines; cache.host = "
            '"mmap" keeps rows in files.'
        ) from error
    if has_huge_pages:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_NOHUGEPAGE if small_pages else mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


def array_of(tensor: Tensor) -> NDArray[Any]:
    """Return a view of a tensor for compiled loops; of one on a GPU, where no loop runs, an array of no elements."""
    return tensor.numpy() if tensor.is_cpu else np.empty(0)


def use_huge_pages(tensor: Tensor) -> None:
    """Let the system use huge pages for a tensor made by `zeros` with `small_pages`: at once for parts without a page,
    in the background (khugepaged) for the others. Nothing happens where `zeros` would use none."""
    if tensor.nbytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        advise(tensor, mmap.MADV_HUGEPAGE)


def expect_random_reads(tensor: Tensor) -> None:
    """Keep the system from reading ahead in a mapped file: with each row that is not in memory it would read many that
    nobody wants, and drop as many that somebody does (decision 0074)."""
    if hasattr(mmap, "MADV_RANDOM"):
        advise(tensor, mmap.MADV_RANDOM)


def fetch_soon(tensor: Tensor) -> None:
    """Let the system read a part of a mapped file that is about to be read whole."""
    if hasattr(mmap, "MADV_WILLNEED"):
        advise(tensor, mmap.MADV_WILLNEED)


def advise(tensor: Tensor, advice: int) -> None:
    """Tell the system what to expect of the pages of a tensor (madvise)."""
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    num_bytes = tensor.data_ptr() + tensor.nbytes - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), advice)  # a failure changes nothing


def on_device(numbers: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers on a device. From page-locked memory they are copied without a wait of a GPU's host."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def pinned_bytes(num_bytes: int) -> int:
    """Return what a tensor of so many bytes takes of torch's page-locked memory, whose pools are powers of two.

    >>> pinned_bytes(0), pinned_bytes(4096), pinned_bytes(5000)
    (0, 4096, 8192)
    """
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return a view of the bytes of a tensor in host memory."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def copy_block(rows: Tensor, first: int, stop: int, out: Tensor) -> None:
    """Copy rows [first, stop) to the first rows of `out`, bit by bit."""
    np.copyto(bytes_of(out[: stop - first]), bytes_of(rows[first:stop]))


def record_stream(*tensors: Tensor) -> None:
    """Keep the memory of tensors that are about to be dropped until the work queued on the current stream is done.
    Otherwise the stream that a GPU tensor was allocated on could reuse its memory at once."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def widest_views(*tables: Tensor) -> list[Tensor]:
    """Return views of `tables`, each [any number of rows, ...] of one row shape and dtype, with the widest elements
    that all of them allow.

    Indexed copies cost per element, not per byte: a row of 32 float32 moves faster as 8 elements of 16 bytes. The views
    are for moving bits only: their numbers mean nothing.
    """
    row_numel = math.prod(tables[0].shape[1:])
    if row_numel == 1:  # integers of the same width: some copies of a single half quiet its NaN
        same_size = INTEGERS[tables[0].element_size()]
        return [table.view(same_size) for table in tables]
    if not all(table.is_contiguous() for table in tables):
        return list(tables)
    row_bytes = row_numel * tables[0].element_size()
    for dtype in (torch.complex128, torch.int64, torch.int32, torch.int16):
        width = dtype.itemsize
        aligned = all(t.data_ptr() % width == 0 and t.storage_offset() * t.element_size() % width == 0 for t in tables)
        if width > tables[0].element_size() and row_bytes % width == 0 and aligned:
            return [table.view(table.shape[0], row_numel).view(dtype) for table in tables]
    return list(tables)
