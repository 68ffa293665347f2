"""Files of lines, plain or gzip, cut into chunks of lines that can be read in any order.

One pass over a file finds where its chunks start. A gzip file can only be read forward, so that pass keeps copies of
the decompressor's state every 16 MiB, and a read starts at the copy before it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from embershard.data.block import Ids
from embershard.data.sources.input_file import InputFile
from embershard.data.sources.source import RecentlyUsed
from embershard.errors import DataError

if TYPE_CHECKING:
    from zlib import _Decompress


#: Where a file begins with it, it is no part of the first line; elsewhere it is part of a cell.
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NEWLINE = 10
_SCAN_BYTES = 1 << 23
_INFLATE_BYTES = 1 << 20
_SEGMENT_BYTES = 1 << 24
_KEPT_SEGMENTS = 8


def scan_lines(blocks: Iterable[NDArray[np.uint8]], chunk_rows: int) -> tuple[Ids, Ids]:
    """Find the byte at which every `chunk_rows`-th line starts, in one pass over blocks of at least a byte.

    >>> scan_lines([np.frombuffer(b"1\\n22\\n333", np.uint8)], chunk_rows=2)
    (array([0, 5, 8]), array([2, 1]))

    Returns:
        Borders of the chunks in bytes [C + 1], and rows per chunk [C]. The last line needs no newline.
    """
    starts, size, num_lines, last = [np.zeros(1, np.int64)], 0, 0, _NEWLINE
    for block in blocks:
        ends = np.flatnonzero(block == _NEWLINE)
        starts.append(ends[-(num_lines + 1) % chunk_rows :: chunk_rows] + size + 1)
        num_lines += len(ends)
        size += len(block)
        last = int(block[-1])
    num_rows = num_lines + (last != _NEWLINE)
    firsts = np.arange(0, num_rows, chunk_rows)
    borders = np.append(np.concatenate(starts)[: len(firsts)], size)
    return borders, np.minimum(chunk_rows, num_rows - firsts)


class PlainFile:
    """The bytes of a file."""

    def __init__(self, file: InputFile) -> None:
        self._file = file

    def blocks(self) -> Iterator[NDArray[np.uint8]]:
        for data in self._file.blocks(0, _SCAN_BYTES):
            yield np.frombuffer(data, np.uint8)

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop)."""
        return self._file.read(start, stop)


class _State(NamedTuple):
    """A place to go on from: decompressed and compressed bytes before it, and the decompressor (about 50 KiB)."""

    start: int
    place: int
    inflater: _Decompress


class GzipFile:
    """The decompressed bytes of a gzip file (of one or several members), from any place on.

    `blocks` must have been read to its end before `read`.
    """

    def __init__(self, file: InputFile, kept: RecentlyUsed[tuple[GzipFile, int], bytes]) -> None:
        self._file, self._kept = file, kept
        self._states: list[_State] = []
        self._size = 0

    def blocks(self) -> Iterator[NDArray[np.uint8]]:
        """Yield all bytes, and keep states on the way."""
        for place, inflater, data in self._inflate(0, _new_inflater()):
            if not self._states or self._size - self._states[-1].start >= _SEGMENT_BYTES:
                self._states.append(_State(self._size, place, inflater))
            if data:
                self._size += len(data)
                yield np.frombuffer(data, np.uint8)

    def read(self, start: int, stop: int) -> memoryview:
        starts = [state.start for state in self._states]
        first = int(np.searchsorted(starts, start, side="right")) - 1
        last = int(np.searchsorted(starts, stop, side="left"))
        parts = [
            memoryview(self._kept.get((self, number)))[max(0, start - starts[number]) : stop - starts[number]]
            for number in range(first, last)
        ]
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def segment(self, number: int) -> bytes:
        """Return the bytes from one kept state to the next."""
        start, place, inflater = self._states[number]
        ends = [state.start for state in self._states[1:]] + [self._size]
        data = bytearray()
        for _, _, more in self._inflate(place, inflater.copy()):
            data += more
            if len(data) >= ends[number] - start:
                break
        return bytes(data[: ends[number] - start])

    def _inflate(self, place: int, inflater: _Decompress) -> Iterator[tuple[int, _Decompress, bytes]]:
        """Decompress from a state on: yield (place, state at it, bytes decompressed from there)."""
        between_members, path = False, self._file.path
        while place < self._file.num_bytes:
            for data in self._file.blocks(place, _INFLATE_BYTES):
                before = inflater.copy()
                try:
                    out = inflater.decompress(data)
                except zlib.error as error:
                    raise DataError(
                        f"{path}: not a sound gzip file ({error}, after byte {place:,}); fetch it again"
                    ) from None
                yield place, before, out
                place += len(data)
                between_members = inflater.eof
                if between_members:  # the next member begins in these data
                    place -= len(inflater.unused_data)
                    inflater = _new_inflater()
                    break
        if not between_members:
            raise DataError(f"{path}: the gzip file is truncated after byte {place:,}; fetch it again")


class TextFiles:
    """Chunks of lines of several files.

    Args:
        files: plain ones, or gzip.
        chunk_rows: lines per chunk; a file's last chunk may have fewer.
        num_workers: threads that scan files at the same time.
        has_header: the first line of every file is a header, which no chunk has.

    Attributes:
        file: int64 [C], each chunk's file.
        rows: int64 [C], its lines.
        first_row: int64 [C], the number of its first line in the file, from 0; a header counts.
        headers: each file's header, its newline included; b"" where there is none.

    Raises:
        DataError: a file has no line (but a header), or is damaged.
    """

    def __init__(self, files: list[InputFile], chunk_rows: int, num_workers: int, *, has_header: bool = False) -> None:
        kept: RecentlyUsed[tuple[GzipFile, int], bytes]
        kept = RecentlyUsed(lambda place: place[0].segment(place[1]), _KEPT_SEGMENTS)
        self._paths = [file.path for file in files]
        self._files = [GzipFile(file, kept) if file.is_gzip() else PlainFile(file) for file in files]
        found = [bytearray() for _ in files]

        def scan(number: int) -> tuple[Ids, Ids]:
            blocks = self._files[number].blocks()
            borders, rows = scan_lines(_cut_header(blocks, found[number]) if has_header else blocks, chunk_rows)
            return borders + len(found[number]), rows

        with ThreadPoolExecutor(max(1, num_workers), "embershard-scan") as pool:
            scanned = list(pool.map(scan, range(len(files))))
        for path, (_, rows) in zip(self._paths, scanned, strict=True):
            if not len(rows):
                what = "no line behind its header" if has_header else "no line in it"
                raise DataError(f"{path}: {what}; remove it, or fetch it again")
        self.headers = [bytes(header) for header in found]
        self._borders = np.concatenate([np.stack([b[:-1], b[1:]], axis=1) for b, _ in scanned])
        self.rows = np.concatenate([rows for _, rows in scanned])
        self.file = np.repeat(np.arange(len(files)), [len(rows) for _, rows in scanned])
        self.first_row = np.concatenate([np.arange(len(rows)) * chunk_rows + has_header for _, rows in scanned])

    def read(self, chunk: int) -> memoryview:
        """Return the lines of a chunk, with their ends."""
        start, stop = self._borders[chunk].tolist()
        lines = self._files[self.file[chunk]].read(start, stop)
        is_marked = start == 0 and stop > len(BYTE_ORDER_MARK) and lines[: len(BYTE_ORDER_MARK)] == BYTE_ORDER_MARK
        return lines[len(BYTE_ORDER_MARK) :] if is_marked else lines

    def path(self, chunk: int) -> Path:
        return self._paths[self.file[chunk]]


def _cut_header(blocks: Iterable[NDArray[np.uint8]], header: bytearray) -> Iterator[NDArray[np.uint8]]:
    """Put the first line into `header`, and yield what is behind it."""
    for block in blocks:
        if not header.endswith(b"\n"):
            ends = np.flatnonzero(block == _NEWLINE)
            end = int(ends[0]) + 1 if len(ends) else len(block)
            header += block[:end].tobytes()
            block = block[end:]
        if len(block):
            yield block


def _new_inflater() -> _Decompress:
    return zlib.decompressobj(wbits=31)
