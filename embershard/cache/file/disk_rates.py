"""How fast a disk is for rows in a file: random pages, and pages in order."""

from __future__ import annotations

import time

import torch

from embershard.cache.file.file_rows import FileRows

_NUM_PAGES, _PAGE_FLOATS = 16384, 1024
_SECONDS = 0.4
_TOGETHER, _EACH = 4, 128  # works in flight, and pages of each: few of them are neighbours


def disk_rates(folder: str, seconds: float = _SECONDS) -> tuple[float, float]:
    """Return the random pages (4 KiB) that 16 threads read per second, and the bytes per second in order, as `FileRows`
    reads them, of a file of 64 MiB without a name.

    A disk may have that much memory of its own, and a virtual one that of its host: then a larger file is read slower.

    Args:
        seconds: for the random pages; the whole takes about a second more on a disk of 100 MB/s.

    Raises:
        ConfigError: the folder cannot be used, or its disk has too little room.
        CacheError: it could not be read or written.

    >>> pages_per_second, bytes_per_second = disk_rates(".", seconds=0.01)
    >>> bytes_per_second > 0 < pages_per_second
    True
    """
    rows = FileRows(folder, _NUM_PAGES, [torch.empty(0, _PAGE_FLOATS)])
    try:
        tables = [torch.rand(_NUM_PAGES, _PAGE_FLOATS)]
        rows.write_block(0, tables)
        started = time.perf_counter()
        rows.read_block(0, _NUM_PAGES, tables)
        bytes_per_second = rows.file_bytes / (time.perf_counter() - started)
        generator, started, passed = torch.Generator().manual_seed(0), time.perf_counter(), 0.0
        while passed < seconds:
            order = torch.randperm(_NUM_PAGES, generator=generator)[: _TOGETHER * _EACH].view(_TOGETHER, _EACH)
            works = [rows.read(keys, tables, keys) for keys in order.sort().values]
            for work in works:
                work.wait()
            passed = time.perf_counter() - started
        return rows.pages_read / passed, bytes_per_second
    finally:
        rows.close()
