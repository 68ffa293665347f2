"""Rows in a file of this process alone: fixed places in whole pages, read and written by threads.

The file is working storage: it has no name, so that the system frees it with the process, and no reader but this one.
A checkpoint has the rows; so nothing is forced to the disk, and nothing is recovered from it.

Memory keeps a checksum of each page as it was written last, and a page that is read is compared with it: so a bit that
the disk flips, a write that it loses and a page of another place are noticed before a row of them is used.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embershard.cache import loops
from embershard.cache.file.sizes import page_bytes_for
from embershard.cache.file.working_files import check_room, open_working_file, without_page_cache
from embershard.cache.rows.memory import INTEGERS
from embershard.errors import CacheError
from embershard.finalizers import end_with

_CHUNK_BYTES = 1 << 20  # that a thread moves in one go
_MOST_WRITING_BYTES = 64 << 20  # of rows that wait to be written
_BLOCK_ROWS_BYTES = 64 << 20  # that `write_block` hands over at a time
_THREADS = "embershard-file"
_REMEDY = 'resume from the last checkpoint with another folder, or with cache.host = "memory"'

_Numbers = NDArray[np.int64]


class PageIo:
    """Reads and writes pages of an open file; tests pass one that fails or takes long.

    >>> file = os.open("pages", os.O_RDWR | os.O_CREAT)
    >>> _ = os.write(file, bytes(range(16)))
    >>> pages, found = np.array([3, 1]), np.zeros(8, np.uint8)
    >>> PageIo().read(file, pages, 4, found, np.array([0, 1]))
    >>> found.tolist()
    [12, 13, 14, 15, 4, 5, 6, 7]
    """

    def read(self, file: int, pages: _Numbers, page_bytes: int, memory: NDArray[np.uint8], places: _Numbers) -> None:
        """Read pages [n] to places [n] of `memory`, both counted in pages.

        Raises:
            OSError: of the system; its text names the page.
        """
        self._move(False, file, pages, page_bytes, memory, places)

    def write(self, file: int, pages: _Numbers, page_bytes: int, memory: NDArray[np.uint8], places: _Numbers) -> None:
        """Write pages; as `read`."""
        self._move(True, file, pages, page_bytes, memory, places)

    @staticmethod
    def _move(
        writes: bool, file: int, pages: _Numbers, page_bytes: int, memory: NDArray[np.uint8], places: _Numbers
    ) -> None:
        one: Callable[..., int] = os.pwritev if writes else os.preadv
        done = 0
        while done < pages.size:
            done += loops.move_pages(file, pages[done:], page_bytes, memory.ctypes.data, places[done:], writes)
            if done < pages.size:  # this way the system's error has a name, and a call that was cut off goes on
                page, start = int(pages[done]), int(places[done]) * page_bytes
                try:
                    moved = one(file, [memory[start : start + page_bytes]], page * page_bytes)
                except OSError as error:
                    raise OSError(error.errno, f"{error.strerror}, page {page}") from error
                if moved != page_bytes:
                    raise OSError(errno.EIO, f"{moved} of {page_bytes} bytes of page {page} were moved")
                done += 1


class FileWork:
    """Reads or writes that run in threads.

    >>> FileWork([]).is_done
    True
    """

    def __init__(self, parts: Sequence[Future[None]]) -> None:
        self._parts = parts

    @property
    def is_done(self) -> bool:
        """True if all of it has ended."""
        return all(part.done() for part in self._parts)

    def wait(self) -> float:
        """Block until all of it has ended; return the seconds.

        Raises:
            CacheError: the file could not be read or written.
        """
        started = time.perf_counter()
        failures = [failure for part in self._parts if (failure := part.exception()) is not None]
        if failures:
            raise failures[0]
        return time.perf_counter() - started


@dataclass(frozen=True, eq=False)
class _OnTheWay:
    """Rows that are on their way to the file: `keys` [M] ascending, and their records, uint8 [M, row_bytes]."""

    keys: _Numbers
    records: NDArray[np.uint8]
    done: Future[None]

    def find(self, keys: _Numbers) -> tuple[_Numbers, _Numbers]:
        """Return the positions of those of `keys` that are among them, and their positions there."""
        places = np.minimum(np.searchsorted(self.keys, keys), self.keys.size - 1)
        found = np.flatnonzero(self.keys[places] == keys)
        return found, places[found]


class _ThreadMemory(threading.local):
    """Memory for pages, of each thread that asks: `pages`, uint8, which begins where a page of the system's does. It is
    used again and again: new memory costs a page fault for each page, which was half of a read's CPU time."""

    def __init__(self, num_bytes: int) -> None:
        self.pages = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


class FileRows:
    """R rows in a file. A row that was never written has no contents.

    Args:
        folder: for the file.
        num_rows: R.
        like: a tensor [?, ...] for each part of a row; a row of the file is one row of each.
        threads: that read and write at the same time.
        io: see `PageIo`.
        name_rows: returns words for the rows [first, stop), for errors.

    Attributes:
        row_bytes: of a row.
        page_bytes, rows_per_page: rows do not cross pages, and a page is read or written as a whole.
        file_bytes: of the file.
        is_direct: the system keeps no copies of pages in memory.
        rows_read, pages_read: asked of `read`, even if they are still on their way to the file.
        rows_written, pages_written: given to `write` and `write_block`.
        pages_patched: of the written ones, those with other rows, so that they are read first.

    What is counted follows from the calls and their order alone, not from the disk's speed.

    Once the file could not be read or written, or a page was not what was written, every call raises the same
    CacheError.

    Raises:
        ConfigError: the folder cannot be used, or its disk has too little room.

    >>> table = torch.arange(12.0).view(6, 2)
    >>> rows = FileRows(".", 100, [table])
    >>> _ = rows.write(torch.tensor([7, 50]), [table], torch.tensor([0, 5]))
    >>> _ = rows.read(torch.tensor([50]), [table], torch.tensor([2])).wait()
    >>> table[2].tolist(), rows.is_written(torch.tensor([50, 51])).tolist()
    ([10.0, 11.0], [True, False])
    >>> rows.close()
    """

    def __init__(
        self,
        folder: str,
        num_rows: int,
        like: Sequence[Tensor],
        threads: int = 16,
        io: PageIo | None = None,
        name_rows: Callable[[int, int], str] = lambda first, stop: f"rows {first} to {stop - 1}",
    ) -> None:
        part_bytes = [math.prod(part.shape[1:]) * part.itemsize for part in like]
        self._word_bytes = math.gcd(8, *part_bytes)
        self._word = torch.empty(0, dtype=INTEGERS[self._word_bytes]).numpy().dtype
        self._starts = [sum(part_bytes[:number]) for number in range(len(like))]
        self.row_bytes, self._num_rows = sum(part_bytes), num_rows
        self.page_bytes = page_bytes_for(self.row_bytes)
        self.rows_per_page = self.page_bytes // self.row_bytes
        self.file_bytes = -(-num_rows // self.rows_per_page) * self.page_bytes
        self._where, self._name_rows = f"cache.host_dir={folder!r}", name_rows
        self._io = PageIo() if io is None else io
        check_room(folder, self.file_bytes)
        self._file, self.is_direct = without_page_cache(open_working_file(folder, self.file_bytes))
        self._bits = np.zeros(num_rows // 8 + 1, np.uint8)
        self._sums = np.zeros(self.file_bytes // self.page_bytes, np.int32)
        self._being_written: tuple[_Numbers, ...] = ()  # pages that may not agree with their sums
        self._was_written = threading.Condition()
        self.rows_read = self.pages_read = self.rows_written = self.pages_written = self.pages_patched = 0
        self._memory = _ThreadMemory(max(_CHUNK_BYTES, self.page_bytes))
        self._num_threads, self._threads = threads, ThreadPoolExecutor(threads, _THREADS)
        self._writer = ThreadPoolExecutor(1, f"{_THREADS}-writer")
        self._writing: tuple[_OnTheWay, ...] = ()
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._ending = end_with(self, _end, self._file, self._threads, self._writer)
        self._compile(like)

    def _compile(self, like: Sequence[Tensor]) -> None:
        """Compile the loops, or load what was compiled: for the first step, and threads, that would have to wait."""
        none, words, no_pages = np.empty(0, np.int64), np.empty(0, self._word), np.empty(0, np.bool_)
        for view in self._views([part[:0] for part in like]):
            loops.rows_to_pages(words, none, view, none)
            loops.rows_from_pages(words, none, view, none)
        loops.set_bits(self._bits, none)
        loops.are_set(self._bits, none, no_pages)
        loops.pages_to_keep(self._bits, none, none, self.rows_per_page, self._num_rows, no_pages)

    def close(self) -> None:
        """Wait for what has begun, and close the file. A second call does nothing."""
        if self._ending.detach():
            _end(self._file, self._threads, self._writer)

    def is_written(self, keys: Tensor) -> Tensor:
        """Return which of the rows `keys` (int64 [M]) were written: bool [M]."""
        found = np.empty(keys.numel(), np.bool_)
        loops.are_set(self._bits, keys.numpy(), found)
        return torch.from_numpy(found)

    def read(self, keys: Tensor, tables: Sequence[Tensor], places: Tensor) -> FileWork:
        """Begin to read rows.

        Args:
            keys: int64 [M], ascending, distinct, all of them written.
            tables: [P, ...] for each part of a row, in host memory.
            places: int64 [M], where row i of them goes in each table. Nobody may touch these until the work has ended.

        Raises:
            CacheError: the file could not be read or written before.
        """
        self._check()
        numbers = keys.numpy()
        self.rows_read += numbers.size
        self.pages_read += int(np.count_nonzero(self._is_first(numbers)))
        return self._begin_to_read(numbers, self._views(tables), places.numpy(), self._writing)

    def write(self, keys: Tensor, tables: Sequence[Tensor], places: Tensor) -> FileWork:
        """Begin to write rows, whose contents are copied before this returns: `places` may be used again at once.
        Arguments are those of `read`.

        Raises:
            CacheError: the file could not be read or written before.
        """
        self._check()
        numbers, to = keys.numpy().copy(), places.numpy()
        if not numbers.size:
            return FileWork([])
        while (writing := self._writing) and sum(each.records.nbytes for each in writing) > _MOST_WRITING_BYTES:
            FileWork([writing[0].done]).wait()
        records = np.empty(numbers.size * self.row_bytes, np.uint8)
        starts = np.arange(numbers.size) * self.row_bytes
        for view, start in zip(self._views(tables), self._starts, strict=True):
            loops.rows_to_pages(records.view(self._word), (starts + start) // self._word_bytes, view, to)
        with self._lock:  # who sees the bits finds the rows: on their way, or in the file
            loops.set_bits(self._bits, numbers)
            is_shared = self._shared(numbers)
            done = self._writer.submit(self._write, numbers, records, is_shared)
            self._writing = (*self._writing, _OnTheWay(numbers, records, done))
        self.rows_written += numbers.size
        self.pages_written += is_shared.size
        self.pages_patched += int(np.count_nonzero(is_shared))
        return FileWork([done])

    def finish(self) -> None:
        """Wait until everything is in the file.

        Raises:
            CacheError: it could not be written.
        """
        for writing in self._writing:
            FileWork([writing.done]).wait()
        self._check()

    def read_block(self, first: int, stop: int, tables: Sequence[Tensor]) -> None:
        """Read those of the rows [first, stop) that were written to the first rows of `tables` ([B, ...] each). From
        any thread.

        Raises:
            CacheError: the file could not be read, or not written before.
        """
        self._check()
        keys = np.arange(first, stop)
        found = np.empty(keys.size, np.bool_)
        with self._lock:
            loops.are_set(self._bits, keys, found)
            writing = self._writing
        self._begin_to_read(keys[found], self._views(tables), keys[found] - first, writing).wait()

    def write_block(self, first: int, rows: Sequence[Tensor]) -> None:
        """Write the rows [first, first + n): [n, ...] for each part; return when they are in the file.

        Raises:
            CacheError: they could not be written.
        """
        count, step = rows[0].shape[0], max(1, _BLOCK_ROWS_BYTES // self.row_bytes)
        for start in range(0, count, step):
            places = torch.arange(start, min(start + step, count))
            self.write(places + first, rows, places)
        self.finish()

    def _begin_to_read(
        self, keys: _Numbers, views: Sequence[NDArray[Any]], places: _Numbers, writing: Sequence[_OnTheWay]
    ) -> FileWork:
        """Begin to read rows that were written; those on their way come from there: the file may lack their page."""
        is_left = np.ones(keys.size, np.bool_)
        for each in writing:  # the newest comes last
            found, of = each.find(keys)
            self._from_words(each.records, of * self.row_bytes, views, places[found])
            is_left[found] = False
        parts = self._chunks(keys[is_left], places[is_left])
        return FileWork([self._submit(self._read, *part, views) for part in parts])

    # -- in threads

    def _read(self, pages: _Numbers, keys: _Numbers, places: _Numbers, views: Sequence[NDArray[Any]]) -> None:
        memory = self._memory.pages
        self._read_pages(pages, memory, np.arange(pages.size))
        self._from_words(memory, self._starts_of(keys, pages), views, places)

    def _read_pages(self, pages: _Numbers, memory: NDArray[np.uint8], places: _Numbers) -> None:
        """Read pages as they were written. One that another thread writes meanwhile is read again behind that."""
        try:
            self._io.read(self._file, pages, self.page_bytes, memory, places)
            differ = self._sums[pages] != self._sums_of(memory, places)
            if not differ.any():
                return
            pages, places = pages[differ], places[differ]
            with self._was_written:
                self._was_written.wait_for(lambda: not any(np.isin(pages, each).any() for each in self._being_written))
                self._check()
                self._io.read(self._file, pages, self.page_bytes, memory, places)
                wanted, found = self._sums[pages], self._sums_of(memory, places)
        except OSError as error:
            said = f"rows in a file in {self._where} could not be read: {error}. Its disk fails; {_REMEDY}"
            self._fail(CacheError(said), error)
        if (differ := wanted != found).any():
            self._fail(self._wrong_pages(pages[differ], wanted[differ], found[differ]))

    def _write_pages(self, pages: _Numbers, memory: NDArray[np.uint8]) -> None:
        sums = self._sums_of(memory, np.arange(pages.size))
        with self._was_written:
            self._being_written = (*self._being_written, pages)
        try:
            self._io.write(self._file, pages, self.page_bytes, memory, np.arange(pages.size))
            self._sums[pages] = sums
        except OSError as error:
            said = f"rows in a file in {self._where} could not be written: {error}. Its disk is full or broken; "
            self._fail(CacheError(said + _REMEDY), error)
        finally:
            with self._was_written:
                self._being_written = tuple(each for each in self._being_written if each is not pages)
                self._was_written.notify_all()

    def _sums_of(self, memory: NDArray[np.uint8], places: _Numbers) -> NDArray[np.int32]:
        sums = np.empty(places.size, np.int32)
        loops.sum_pages(memory.view(np.int64), self.page_bytes // 8, places, sums)
        return sums

    def _wrong_pages(self, pages: _Numbers, wanted: NDArray[np.int32], found: NDArray[np.int32]) -> CacheError:
        page = int(pages[0])
        names = self._name_rows(page * self.rows_per_page, min((page + 1) * self.rows_per_page, self._num_rows))
        others = f" ({pages.size - 1} more of the pages that were read with it are wrong)" if pages.size > 1 else ""
        sums = [f"{int(each[0]) & 0xFFFFFFFF:08x}" for each in (found, wanted)]
        return CacheError(
            f"page {page} of a file in {self._where}, with {names}, is not what was written: got checksum {sums[0]}, "
            f"needed {sums[1]}{others}. No row of it was used. The disk, or what is between it and the processor, "
            f"changes bits or loses writes: {_REMEDY}"
        )

    def _write(self, keys: _Numbers, records: NDArray[np.uint8], is_shared: NDArray[np.bool_]) -> None:
        self._check()
        works, done = [], 0
        for pages, *part in self._chunks(keys, np.arange(keys.size)):
            shared = np.flatnonzero(is_shared[done : done + pages.size])
            works.append(self._submit(self._patch, pages, *part, shared, records))
            done += pages.size
        FileWork(works).wait()
        with self._lock:  # rows that could not be written stay among them
            self._writing = tuple(each for each in self._writing if each.keys is not keys)

    def _patch(
        self, pages: _Numbers, keys: _Numbers, numbers: _Numbers, shared: _Numbers, records: NDArray[np.uint8]
    ) -> None:
        """Write records `numbers`, those of `keys`, into their pages; read what else is in those at `shared` first."""
        memory = self._memory.pages
        if shared.size:
            self._read_pages(pages[shared], memory, shared)
        rows = records.view(self._word).reshape(-1, self.row_bytes // self._word_bytes)
        starts = self._starts_of(keys, pages) // self._word_bytes
        loops.rows_to_pages(memory.view(self._word), starts, rows, numbers)
        self._write_pages(pages, memory)

    def _submit(self, work: Callable[..., None], *arguments: Any) -> Future[None]:
        return self._threads.submit(self._run, work, *arguments)

    def _run(self, work: Callable[..., None], *arguments: Any) -> None:
        self._check()
        try:
            work(*arguments)
        except Exception as error:  # of a thread that nobody may wait for
            self._fail(error)

    def _fail(self, failure: Exception, cause: OSError | None = None) -> NoReturn:
        """Raise the failure that every call raises from now on: this one, unless there was another."""
        if cause is not None:
            failure.__cause__ = cause
        with self._lock:
            self._failure = self._failure or failure
        raise self._failure

    # -- places of rows

    def _is_first(self, keys: _Numbers) -> NDArray[np.bool_]:
        """Return which of ascending `keys` are the first ones of their pages."""
        of_rows = keys // self.rows_per_page
        is_first = np.ones(keys.size, np.bool_)
        np.not_equal(of_rows[1:], of_rows[:-1], out=is_first[1:])
        return is_first

    def _shared(self, keys: _Numbers) -> NDArray[np.bool_]:
        """Return which of the pages of ascending `keys` have other rows that were written."""
        firsts = np.flatnonzero(self._is_first(keys))
        counts, is_shared = np.diff(firsts, append=keys.size), np.empty(firsts.size, np.bool_)
        pages = keys[firsts] // self.rows_per_page
        loops.pages_to_keep(self._bits, pages, counts, self.rows_per_page, self._num_rows, is_shared)
        return is_shared

    def _chunks(self, keys: _Numbers, places: _Numbers) -> Iterator[tuple[_Numbers, _Numbers, _Numbers]]:
        """Yield parts of the work: distinct pages, their keys, and the keys' places."""
        of_rows, firsts = keys // self.rows_per_page, np.flatnonzero(self._is_first(keys))
        step = max(1, _CHUNK_BYTES // self.page_bytes)
        step = min(step, max(1, -(-firsts.size // self._num_threads)))
        for start in range(0, firsts.size, step):
            pages = of_rows[firsts[start : start + step]]
            stop = firsts[start + step] if start + step < firsts.size else keys.size
            yield pages, keys[firsts[start] : stop], places[firsts[start] : stop]

    def _starts_of(self, keys: _Numbers, pages: _Numbers) -> _Numbers:
        """Return the first bytes of rows in memory that holds `pages`, one after the other."""
        page, row = np.divmod(keys, self.rows_per_page)
        return np.searchsorted(pages, page) * self.page_bytes + row * self.row_bytes

    def _from_words(
        self, memory: NDArray[np.uint8], starts: _Numbers, views: Sequence[NDArray[Any]], places: _Numbers
    ) -> None:
        words = memory.view(self._word)
        for view, start in zip(views, self._starts, strict=True):
            loops.rows_from_pages(words, (starts + start) // self._word_bytes, view, places)

    def _views(self, tables: Sequence[Tensor]) -> list[NDArray[Any]]:
        """Return tables as words [P, words of the part]."""
        words = INTEGERS[self._word_bytes]
        return [table.detach().view(len(table), math.prod(table.shape[1:])).view(words).numpy() for table in tables]

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


def _end(file: int, *threads: ThreadPoolExecutor) -> None:
    for pool in threads:
        pool.shutdown(wait=True, cancel_futures=True)
    os.close(file)
