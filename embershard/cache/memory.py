"""Large host allocations that are read and written at random rows."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20


def zeros(numel: int, dtype: torch.dtype) -> Tensor:
    """A zeroed tensor [numel] in host memory, on huge pages where the system has them.

    Random rows of a table of gigabytes miss the TLB at nearly every access with pages of 4 KiB; with 2 MiB,
    row copies take about half the time (docs/LOG.md). Pages are taken as they are written.
    """
    num_bytes = numel * dtype.itemsize
    if num_bytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(numel, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        return torch.zeros(numel, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype)


def widest_view(rows: Tensor) -> Tensor:
    """The same memory as ``rows`` [R, ...], contiguous, with as few and as wide elements per row as possible.

    Indexed copies cost per element, not per byte: a row of 32 float32 moves six times as fast as 8 elements
    of 16 bytes. Only for moving bits: the numbers mean nothing in this type.
    """
    if not rows.is_contiguous() or rows.dim() == 1:
        return rows
    flat = rows.view(rows.shape[0], -1)
    row_bytes = flat.shape[1] * flat.element_size()
    wide: Sequence[torch.dtype] = (torch.complex128, torch.int64, torch.int32, torch.int16)
    for dtype in wide:
        aligned = (
            flat.data_ptr() % dtype.itemsize == 0
            and flat.storage_offset() * flat.element_size() % dtype.itemsize == 0
        )
        if dtype.itemsize > flat.element_size() and row_bytes % dtype.itemsize == 0 and aligned:
            return flat.view(dtype)
    return flat
