"""Checksums of pages: a bit that changes in the file is told before a row of its page is used, and nothing else is."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embershard.cache import loops
from embershard.cache.file.file_rows import FileRows, PageIo
from embershard.cache.file.filed_rows import FiledRows
from embershard.cache.homes.shape import PoolShape
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.errors import CacheError
from tests.unit.cache.file.test_file_rows import KINDS, assert_equal, bits, empty

NUM_ROWS = 700


def written(folder: Path, kind: str, seed: int, io: PageIo | None = None) -> tuple[FileRows, list[Tensor]]:
    """Rows in a file of which all are there, and their contents."""
    rows, tables = FileRows(str(folder), NUM_ROWS, empty(kind, 0), io=io), empty(kind, NUM_ROWS)
    for part in tables:
        bits(part).random_(0, 256, generator=torch.Generator().manual_seed(seed))
    rows.write_block(0, tables)
    return rows, tables


def flip(rows: FileRows, byte: int, bit: int) -> None:
    """Change a bit of the file, as a disk might; bytes past the page cache go in whole pages."""
    page, at = mmap.mmap(-1, rows.page_bytes), byte // rows.page_bytes * rows.page_bytes
    os.preadv(rows._file, [page], at)
    page[byte - at] ^= 1 << bit
    os.pwritev(rows._file, [page], at)


def read_rows(rows: FileRows, keys: Tensor, tables: list[Tensor]) -> None:
    rows.read(keys, tables, keys).wait()


def read_block(rows: FileRows, keys: Tensor, tables: list[Tensor]) -> None:
    first, stop = int(keys[0]), int(keys[-1]) + 1
    rows.read_block(first, stop, [part[first:] for part in tables])


def write_another_row(rows: FileRows, keys: Tensor, tables: list[Tensor]) -> None:
    """With the rest of a wrong page, a new sum would make it right."""
    rows.write(keys[:1], tables, keys[:1]).wait()


@pytest.mark.slow
@pytest.mark.parametrize("use", [read_rows, read_block, write_another_row])
@KINDS
def test_a_bit_that_changes_is_told(
    tmp_path: Path, kind: str, use: Callable[[FileRows, Tensor, list[Tensor]], None]
) -> None:
    """Wherever it is: in rows that are wanted, in others, behind them; no row of the page is used."""
    chooser = random.Random(kind)
    for seed in range(4):
        rows, _ = written(tmp_path, kind, seed)
        byte, bit = chooser.randrange(rows.file_bytes), chooser.randrange(8)
        first = byte // rows.page_bytes * rows.rows_per_page
        if use is write_another_row and rows.rows_per_page == 1:
            rows.close()
            continue  # which is never read before it is written
        flip(rows, byte, bit)
        keys, found = torch.arange(first, min(first + rows.rows_per_page, NUM_ROWS)), empty(kind, NUM_ROWS)
        with pytest.raises(
            CacheError, match=rf"page {byte // rows.page_bytes} of a file.*rows {first} .*not what was w"
        ):
            use(rows, keys, found)
        assert not any(bits(part).any() for part in found)
        with pytest.raises(CacheError, match="not what was written"):  # of any page, from then on
            rows.read(torch.tensor([0]), found, torch.tensor([0]))
        rows.close()


@pytest.mark.slow
@KINDS
def test_bits_that_change_nowhere_or_elsewhere_are_no_fault(tmp_path: Path, kind: str) -> None:
    """The control: rows of other pages are as they were."""
    rows, tables = written(tmp_path, kind, 1)
    found = empty(kind, NUM_ROWS)
    rows.read_block(0, NUM_ROWS, found)
    assert_equal(found, tables)
    flip(rows, rows.page_bytes, 0)  # of the second page
    keys = torch.arange(NUM_ROWS)
    read_rows(rows, keys[keys // rows.rows_per_page != 1], found)
    flip(rows, rows.page_bytes, 0)  # back
    read_rows(rows, torch.arange(NUM_ROWS), found)
    rows.close()


def test_a_write_that_is_lost_is_told(tmp_path: Path) -> None:
    """What was there before has a sum of its own."""
    rows, tables = written(tmp_path, "128 columns", 1)
    right, rows._io = rows._io, PageIo()
    rows._io.write = lambda *_: None  # type: ignore[method-assign]
    rows.write(torch.arange(8, 16), tables, torch.arange(8)).wait()
    rows._io = right
    with pytest.raises(CacheError, match=r"page 1 of .*with rows 8 to 15, is not what was written"):
        read_rows(rows, torch.tensor([9]), tables)
    rows.close()


def test_a_page_may_be_wrong_only_once(tmp_path: Path) -> None:
    """Read again, it is right: a fault on the way, not of the disk."""
    rows, tables = written(tmp_path, "128 columns", 1)
    found, calls = empty("128 columns", NUM_ROWS), list[int]()

    class OnceWrong(PageIo):
        def read(self, *arguments: Any) -> None:
            super().read(*arguments)
            calls.append(arguments[1].size)
            if len(calls) == 1:
                arguments[3][50] ^= 4

    rows._io = OnceWrong()
    rows.read(torch.arange(24), found, torch.arange(24)).wait()
    assert_equal([found[0][:24]], [tables[0][:24]])
    assert sum(calls) == 4
    rows.close()


class Torn(PageIo):
    """While it `holds`, a write has reached the file in part only; it ends as `end` says."""

    def __init__(self) -> None:
        self.is_torn, self.goes_on, self.holds = threading.Event(), threading.Event(), False
        self.end: Callable[..., None] = super().write

    def write(self, *arguments: Any) -> None:
        if self.holds:
            file, pages, page_bytes, memory, places = arguments
            part = np.frombuffer(mmap.mmap(-1, memory.size), np.uint8)
            part[: page_bytes // 2] = memory[: page_bytes // 2]
            super().write(file, pages[:1], page_bytes, part, places[:1])
            self.is_torn.set()
            assert self.goes_on.wait(60)
        self.end(*arguments)


@pytest.fixture
def torn(tmp_path: Path) -> tuple[FileRows, Torn, list[Tensor], Callable[[], None]]:
    """Rows of which number 3 is being written; and what reads others of its page, and ends behind that."""
    io = Torn()
    rows, tables = written(tmp_path, "128 columns", 1, io)
    io.holds, failures = True, list[BaseException]()
    rows.write(torch.tensor([3]), tables, torch.tensor([4]))
    assert io.is_torn.wait(60)

    def read() -> None:
        try:
            found = empty("128 columns", NUM_ROWS)
            read_rows(rows, torch.tensor([2, 7, 30]), found)
            assert_equal([found[0][[2, 7, 30]]], [tables[0][[2, 7, 30]]])
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=read)
    thread.start()

    def end() -> None:
        io.goes_on.set()
        thread.join()
        rows.close()
        if failures:
            raise failures[0]

    return rows, io, tables, end


def test_a_page_that_is_being_written_is_no_fault(
    torn: tuple[FileRows, Torn, list[Tensor], Callable[[], None]],
) -> None:
    torn[-1]()


def test_a_write_that_fails_is_told_as_that(torn: tuple[FileRows, Torn, list[Tensor], Callable[[], None]]) -> None:
    """Not as a page that was read, and is half of it."""

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    torn[1].end = fail
    with pytest.raises(CacheError, match=r"could not be written: .*No space left on device.*full or broken"):
        torn[-1]()


def test_a_read_that_fails_before_a_write_is_told_as_a_read(tmp_path: Path) -> None:
    rows, tables = written(tmp_path, "128 columns", 1)

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error, page 0")

    rows._io.read = fail  # type: ignore[method-assign]
    with pytest.raises(CacheError, match=r"could not be read: .*Input/output error, page 0") as raised:
        rows.write(torch.tensor([3]), tables, torch.tensor([4])).wait()
    assert "full" not in str(raised.value)
    rows.close()


def test_the_tables_of_a_page_are_named(tmp_path: Path) -> None:
    """By their own rows, of which a shard has some."""
    shards = [ShardWeights(name, 7, 128, -0.5, 0.5, 100 * at) for at, name in enumerate(["clicks", "users", "shops"])]
    filed = FiledRows(PoolShape((5, 1, 60), 128, initial=shards), 20, str(tmp_path))
    filed.put_block(0, [torch.ones(66, 128)])
    flip(filed._file, 600, 3)
    said = (
        r"page 0 .*with rows 0 to 4 of table 'clicks', row 100 of table 'users', rows 200 to 201 of table 'shops', is"
    )
    with pytest.raises(CacheError, match=said):
        filed.read(torch.tensor([40, 5]))


def test_sums_are_those_of_xxhash() -> None:
    """The lower half of XXH64, as xxhash 4.1.0 for Python gives it."""
    page = np.array([(7 * at + at // 256) % 256 for at in range(4096)], np.uint8)
    for words, expected in ((page, 0xB4B78856), (np.tile(page, 2), 0x83AF7A79), (np.zeros(64, np.uint8), 0x47B82A19)):
        sums = np.empty(1, np.int32)
        loops.sum_pages(words.view(np.int64), words.size // 8, np.array([0]), sums)
        assert int(sums[0]) & 0xFFFFFFFF == expected
