"""Files of lines, cut into chunks of lines that can be read in any order: plain, or compressed by gzip.

One pass over a file finds where its chunks start. Plain files are memory-mapped. A gzip file can only be read
forward, so that pass keeps copies of the decompressor's state every 16 MiB, and a read starts at the copy
before it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embershard.data.source import RecentlyUsed
from embershard.errors import DataError

_NEWLINE = 10
_SCAN_BYTES = 1 << 23
_INFLATE_BYTES = 1 << 20
_SEGMENT_BYTES = 1 << 24
_KEPT_SEGMENTS = 8


class LineScanner:
    """Finds the byte at which every ``chunk_rows``-th line starts, in one pass over the bytes."""

    def __init__(self, chunk_rows: int) -> None:
        self._chunk_rows = chunk_rows
        self._starts: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        self._lines = 0
        self._last = _NEWLINE
        self.size = 0

    def feed(self, data: NDArray[np.uint8]) -> None:
        """The next bytes (at least one)."""
        ends = np.flatnonzero(data == _NEWLINE)
        first = -(self._lines + 1) % self._chunk_rows
        self._starts.append(ends[first :: self._chunk_rows] + self.size + 1)
        self._lines += len(ends)
        self.size += len(data)
        self._last = int(data[-1])

    def finish(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Borders of the chunks in bytes [C + 1], and rows per chunk [C]. A last line needs no newline."""
        num_rows = self._lines + (self._last != _NEWLINE)
        num_chunks = -(-num_rows // self._chunk_rows)
        starts = np.concatenate(self._starts)[:num_chunks]
        rows = np.full(num_chunks, self._chunk_rows)
        if num_chunks:
            rows[-1] = num_rows - (num_chunks - 1) * self._chunk_rows
        return np.append(starts, self.size), rows


class PlainFile:
    """The bytes of a file, memory-mapped."""

    def __init__(self, path: Path, scanner: LineScanner) -> None:
        self._bytes = np.memmap(path, np.uint8, mode="r")
        for start in range(0, len(self._bytes), _SCAN_BYTES):
            scanner.feed(self._bytes[start : start + _SCAN_BYTES])

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop), without a copy."""
        return self._bytes[start:stop].data


class GzipFile:
    """The decompressed bytes of a .gz file (of one or several members), from any place on.

    A state is (bytes before it, place in the compressed file, decompressor); about 50 KiB each.
    """

    def __init__(self, path: Path, scanner: LineScanner) -> None:
        self._path = path
        self._states: list[tuple[int, int, Any]] = []
        for place, inflater, data in self._inflate(0, _new_inflater()):
            if not self._states or scanner.size - self._states[-1][0] >= _SEGMENT_BYTES:
                self._states.append((scanner.size, place, inflater))
            if data:
                scanner.feed(np.frombuffer(data, np.uint8))
        self._ends = [start for start, _, _ in self._states[1:]] + [scanner.size]

    def segments(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Numbers of the segments that bytes [start, stop) lie in, and the byte each of them starts at."""
        starts = [state[0] for state in self._states]
        first = int(np.searchsorted(starts, start, side="right")) - 1
        last = int(np.searchsorted(starts, stop, side="left"))
        return [(number, starts[number]) for number in range(first, last)]

    def segment(self, number: int) -> bytes:
        """The decompressed bytes from one kept state to the next."""
        start, place, inflater = self._states[number]
        size = self._ends[number] - start
        parts: list[bytes] = []
        have = 0
        for _, _, data in self._inflate(place, inflater.copy()):
            parts.append(data)
            have += len(data)
            if have >= size:
                break
        return b"".join(parts)[:size]

    def _inflate(self, place: int, inflater: Any) -> Iterator[tuple[int, Any, bytes]]:
        """Decompress on from a state: yields (place, state at it, bytes decompressed from there)."""
        between_members = False
        with self._path.open("rb") as file:
            file.seek(place)
            while data := file.read(_INFLATE_BYTES):
                before = inflater.copy()
                try:
                    out = inflater.decompress(data)
                except zlib.error as error:
                    raise DataError(f"{self._path}: not a sound gzip file ({error}); fetch it again") from None
                yield place, before, out
                place += len(data)
                between_members = inflater.eof
                if between_members:
                    place -= len(inflater.unused_data)
                    file.seek(place)
                    inflater = _new_inflater()
            if not between_members:
                raise DataError(f"{self._path}: the gzip file is truncated; fetch it again")


class TextFiles:
    """Chunks of lines of several files.

    Args:
        paths: files; those whose name ends in .gz are decompressed.
        chunk_rows: lines per chunk; a file's last chunk may have fewer.
        num_workers: threads that scan files at the same time.

    Attributes:
        file: int64 [C], each chunk's file.
        rows: int64 [C], its lines.
        first_row: int64 [C], the number of its first line in the file, from 0.

    Raises:
        DataError: a file has no line, or is not sound.
    """

    def __init__(self, paths: list[Path], chunk_rows: int, num_workers: int) -> None:
        self._paths = paths
        with ThreadPoolExecutor(max(1, num_workers), "embershard-scan") as pool:
            scanned = list(pool.map(lambda path: _scan(path, chunk_rows), paths))
        self._files = [file for file, _, _ in scanned]
        self._spans = np.concatenate([np.stack([b[:-1], b[1:]], axis=1) for _, b, _ in scanned])
        self.rows = np.concatenate([rows for _, _, rows in scanned])
        self.file = np.repeat(np.arange(len(paths)), [len(rows) for _, _, rows in scanned])
        self.first_row = np.concatenate([np.arange(len(rows)) * chunk_rows for _, _, rows in scanned])
        self._segments = RecentlyUsed(self._segment, _KEPT_SEGMENTS)

    def read(self, chunk: int) -> memoryview:
        """The bytes of a chunk."""
        start, stop = (int(border) for border in self._spans[chunk])
        number = int(self.file[chunk])
        file = self._files[number]
        if isinstance(file, PlainFile):
            return file.read(start, stop)
        parts = [
            memoryview(self._segments.get((number, part)))[max(0, start - begin) : stop - begin]
            for part, begin in file.segments(start, stop)
        ]
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def path(self, chunk: int) -> Path:
        """The file of a chunk."""
        return self._paths[int(self.file[chunk])]

    def _segment(self, key: tuple[int, int]) -> bytes:
        file = self._files[key[0]]
        assert isinstance(file, GzipFile)
        return file.segment(key[1])


def _scan(path: Path, chunk_rows: int) -> tuple[PlainFile | GzipFile, NDArray[np.int64], NDArray[np.int64]]:
    scanner = LineScanner(chunk_rows)
    file = GzipFile(path, scanner) if path.suffix == ".gz" else PlainFile(path, scanner)
    borders, rows = scanner.finish()
    if not len(rows):
        raise DataError(f"{path}: no line in it; remove it, or fetch it again")
    return file, borders, rows


def _new_inflater() -> Any:
    return zlib.decompressobj(wbits=31)
