"""The order of samples: a function of (seed, epoch) and of how files are cut into chunks, of nothing else.

Files come in a seeded order; each is a sequence of chunks; the order of chunks is mixed inside windows of a few dozen
chunks; the rows of a chunk are mixed with each other. So the chunks of the positions [start, stop) of an epoch are
known without reading any other chunk. In time order all this is done inside of each window of time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from embershard.data.hashing import make_key, permutation, random_words, unit_floats

_FILES, _CHUNKS, _ROWS = 1, 2, 3


@dataclass(frozen=True)
class ChunkTable:
    """The chunks of one split; the chunks of a file are adjacent and in the file's order, or, in time order, those of a
    window are, and each is of one window.

    Attributes:
        file: int64 [C], the number of each chunk's file.
        rows: int64 [C], the number of each chunk's rows, at least 1.
        window: int64 [C], in time order the number of each chunk's window, from 0, never falling; else None.
    """

    file: NDArray[np.int64]
    rows: NDArray[np.int64]
    window: NDArray[np.int64] | None = None

    @property
    def num_samples(self) -> int:
        return int(self.rows.sum())


class EpochOrder:
    """The order of one epoch: position (0 .. num_samples-1) -> chunk, and row of the chunk.

    Attributes:
        chunks: int64 [C], the chunks in the order in which they are read.
    """

    def __init__(self, chunks: ChunkTable, *, seed: int, epoch: int, shuffle: bool, window: int) -> None:
        self._key = make_key(seed, epoch) if shuffle else None
        self.chunks = np.arange(len(chunks.rows)) if self._key is None else _chunk_order(chunks, self._key, window)
        self._num_rows = chunks.rows
        self._sizes = chunks.rows[self.chunks]
        self._ends = np.cumsum(self._sizes)

    def locate(self, start: int, stop: int) -> list[tuple[int, NDArray[np.int64]]]:
        """Return the places of the samples at positions [start, stop): pairs of a chunk and rows of it, in order."""
        parts = []
        for place, first, last in spans(self._ends, self._sizes, start, stop):
            chunk = int(self.chunks[place])
            parts.append((chunk, self.rows_of(chunk)[first:last]))
        return parts

    def rows_of(self, chunk: int) -> NDArray[np.int64]:
        """Return all rows of a chunk in the order in which they are read."""
        size = int(self._num_rows[chunk])
        return np.arange(size) if self._key is None else _chunk_permutation(self._key, chunk, size)


def spans(ends: NDArray[np.int64], sizes: NDArray[np.int64], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Cut [start, stop) at `ends`, the ends of adjacent parts of these `sizes`: yield part, and first and last place.

    >>> list(spans(np.array([3, 3, 8]), np.array([3, 0, 5]), 1, 5))
    [(0, 1, 3), (2, 0, 2)]
    """
    place = int(np.searchsorted(ends, start, side="right"))
    while start < stop:
        begin = int(ends[place] - sizes[place])
        last = min(stop, int(ends[place]))
        if start < last:
            yield place, start - begin, last - begin
        start, place = last, place + 1


@lru_cache(maxsize=8)
def _chunk_permutation(key: int, chunk: int, size: int) -> NDArray[np.int64]:
    """Return the seeded order of a chunk's rows; neighbouring batches of a rank often share a chunk."""
    return permutation(make_key(key, _ROWS, chunk), size)


def _chunk_order(chunks: ChunkTable, key: int, window: int) -> NDArray[np.int64]:
    """Return the seeded order of files, then of the chunks inside every `window` chunks; in time order, of those of a
    window of time."""
    num_files = int(chunks.file.max()) + 1 if len(chunks.file) else 0
    place_of_file = permutation(make_key(key, _FILES), num_files)[chunks.file]
    time = np.zeros_like(chunks.file) if chunks.window is None else chunks.window
    order = np.lexsort(
        (place_of_file, time)
    )  # equal ones stay in their order; `time` stays as it is, which never falls
    numbers = np.arange(len(order))
    within = unit_floats(random_words(make_key(key, _CHUNKS), numbers))
    return order[np.lexsort((within, (numbers - np.searchsorted(time, time)) // window, time))]
