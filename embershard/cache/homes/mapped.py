"""`MappedRows`: rows in files that are mapped into memory; the system chooses which of them stay there."""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from embershard.cache.file.working_files import check_room, open_working_file
from embershard.cache.homes.memory import MemoryRows, RowPages
from embershard.cache.homes.shape import PoolShape
from embershard.cache.rows import memory


class MappedPages(RowPages):
    """Gives zeroed memory in unlinked files, which the system frees with the process.

    Their disk space is allocated at once: if the disk were full at the first write to a page of a sparse file, the
    system would kill the process.

    Args:
        folder: for the files.
        total_bytes: of all that will be allocated.
    """

    def __init__(self, folder: str, total_bytes: int) -> None:
        super().__init__()
        self._folder = folder
        check_room(folder, total_bytes)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """As all pages."""
        if numel == 0:
            return torch.zeros(0, dtype=dtype)
        file = open_working_file(self._folder, numel * dtype.itemsize)
        try:
            found = torch.frombuffer(mmap.mmap(file, numel * dtype.itemsize), dtype=dtype)
        finally:
            os.close(file)
        memory.expect_random_reads(found)
        return found

    def _writes_at_once(self, shape: PoolShape) -> bool:
        return False

    def fetch(self, rows: Tensor) -> None:
        """As all pages."""
        memory.fetch_soon(rows)


class MappedRows(MemoryRows):
    """Rows in files that are mapped into memory.

    Args:
        shape: of the pool.
        folder: for the files.

    Raises:
        ConfigError: the folder cannot be made, or its disk has too little room.

    >>> MappedRows(PoolShape([3], dim=4), ".").read(torch.tensor([2]))
    tensor([[0., 0., 0., 0.]])
    """

    def __init__(self, shape: PoolShape, folder: str) -> None:
        super().__init__(shape, pages=MappedPages(folder, shape.num_rows * shape.row_bytes))
