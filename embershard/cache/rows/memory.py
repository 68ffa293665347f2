"""Large host allocations that are read and written at random rows."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def zeros(numel: int, dtype: torch.dtype, whole_pages: bool = False) -> Tensor:
    """A zeroed tensor [numel] in host memory, on huge pages where the system has them; with ``whole_pages`` on pages
    that it shares with nothing else, however small it is.

    Random rows of a table of gigabytes miss the TLB at nearly every access with pages of 4 KiB; with 2 MiB,
    row copies take less time (docs/decisions/0003-row-copies.md). Pages are taken as they are written.
    """
    num_bytes = numel * dtype.itemsize
    has_huge_pages = num_bytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE")
    if not numel or not (has_huge_pages or whole_pages):
        return torch.zeros(numel, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if has_huge_pages:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


def record_stream(*tensors: Tensor) -> None:
    """Nobody will use these tensors any more; what is queued on the current stream may. Without it, a GPU's memory goes
    back to the stream that it was taken on, at once."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def widest_views(*tables: Tensor) -> list[Tensor]:
    """The same memory as ``tables``, each [any number of rows, ...] of one row shape and dtype, with as few and as
    wide elements per row as they all allow.

    Indexed copies cost per element, not per byte: a row of 32 float32 moves faster as 8 elements of 16
    bytes. Only for moving bits: the numbers mean nothing in this type.
    """
    row_numel = math.prod(tables[0].shape[1:])
    if row_numel == 1:  # as they are, but not as floats: some copies of a single half quiet its NaN
        same_size = _INTEGERS[tables[0].element_size()]
        return [table.view(same_size) for table in tables]
    if not all(table.is_contiguous() for table in tables):
        return list(tables)
    row_bytes = row_numel * tables[0].element_size()
    for dtype in (torch.complex128, torch.int64, torch.int32, torch.int16):
        size = dtype.itemsize
        aligned = all(t.data_ptr() % size == 0 and t.storage_offset() * t.element_size() % size == 0 for t in tables)
        if size > tables[0].element_size() and row_bytes % size == 0 and aligned:
            return [table.view(table.shape[0], row_numel).view(dtype) for table in tables]
    return list(tables)
