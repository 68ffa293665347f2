"""The order of samples: a function of (seed, epoch) and of how files are cut into chunks, of nothing else.

Files come in a seeded order; each is a sequence of chunks; the order of chunks is mixed inside windows of a
few dozen chunks; the rows of a chunk are mixed with each other. So whoever wants the samples at positions
[start, stop) of an epoch knows at once which chunks to parse, and no rank reads the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from embershard.data.hashing import make_key, permutation, random_words, unit_floats

_FILES, _CHUNKS, _ROWS = 1, 2, 3


@dataclass(frozen=True)
class ChunkTable:
    """How one split is cut up. Chunks of a file are adjacent and in the file's order.

    Attributes:
        file: int64 [C], the number of each chunk's file.
        rows: int64 [C], the number of each chunk's rows, at least 1.
    """

    file: NDArray[np.int64]
    rows: NDArray[np.int64]

    @property
    def num_samples(self) -> int:
        """Samples of the split."""
        return int(self.rows.sum())


class EpochOrder:
    """The order of one epoch: position (0 .. num_samples-1) -> chunk, and row of the chunk."""

    def __init__(self, chunks: ChunkTable, *, seed: int, epoch: int, shuffle: bool, window: int) -> None:
        order = _chunk_order(chunks, make_key(seed, epoch), window) if shuffle else np.arange(len(chunks.rows))
        self._chunks = order
        self._rows = chunks.rows[order]
        self._ends = np.cumsum(self._rows)
        self._key = make_key(seed, epoch) if shuffle else None
        self.num_samples = chunks.num_samples

    def locate(self, start: int, stop: int) -> list[tuple[int, NDArray[np.int64]]]:
        """Where the samples at positions [start, stop) lie: pairs of a chunk and rows of it, in order."""
        parts: list[tuple[int, NDArray[np.int64]]] = []
        place = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            size, end = int(self._rows[place]), int(self._ends[place])
            first, last = start - (end - size), min(stop, end) - (end - size)
            chunk = int(self._chunks[place])
            if self._key is None:
                rows = np.arange(first, last)
            else:
                rows = _chunk_permutation(self._key, chunk, size)[first:last]
            parts.append((chunk, rows))
            start, place = min(stop, end), place + 1
        return parts


@lru_cache(maxsize=8)
def _chunk_permutation(key: int, chunk: int, size: int) -> NDArray[np.int64]:
    """Seeded order of the rows of a chunk; neighbouring batches of a rank often share one."""
    return permutation(make_key(key, _ROWS, chunk), size)


def _chunk_order(chunks: ChunkTable, key: int, window: int) -> NDArray[np.int64]:
    """Seeded order of files, then of the chunks inside every window of ``window`` chunks."""
    num_files = int(chunks.file.max()) + 1 if len(chunks.file) else 0
    place_of_file = permutation(make_key(key, _FILES), num_files)
    order = np.argsort(place_of_file[chunks.file], kind="stable")
    numbers = np.arange(len(order))
    within = unit_floats(random_words(make_key(key, _CHUNKS), numbers))
    return order[np.lexsort((within, numbers // window))]
