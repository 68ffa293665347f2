"""`FileRows` beside arrays: the same contents after any reads and writes; errors that end in one sentence; no leaks."""

from __future__ import annotations

import errno
import gc
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from embershard.cache import loops
from embershard.cache.file import file_rows, working_files
from embershard.cache.file.file_rows import FileRows, FileWork, PageIo
from embershard.errors import CacheError, ConfigError
from tests.covering import examples, keep
from tests.disks import BrokenIo, CountingIo, GatedIo, SlowIo

F32, F16 = torch.float32, torch.float16
#: Shapes and types of a row's parts, and the bytes of its page.
LAYOUTS: dict[str, tuple[list[tuple[tuple[int, ...], torch.dtype]], int]] = {
    "4 columns and a state": ([((4,), F32), ((), F32)], 4096),
    "12 columns and two states": ([((12,), F32), ((12,), F32), ((12,), F32)], 4096),
    "128 columns": ([((128,), F32)], 4096),
    "3 columns of fp16": ([((3,), F16)], 4096),
    "300 columns": ([((300,), F32), ((), F32)], 4096),
    "300 columns of fp16 and a state": ([((300,), F16), ((), F32)], 4096),
    "pages of 8 KiB": ([((375,), F32)], 8192),
    "pages of 12 KiB": ([((1350,), F32)], 12288),
    "pages of 16 KiB": ([((800,), F32)], 16384),
    "8192 columns": ([((8192,), F32), ((), F32)], 36864),
}
KINDS = pytest.mark.parametrize("kind", LAYOUTS)


def empty(kind: str, count: int) -> list[Tensor]:
    return [torch.zeros(count, *shape, dtype=dtype) for shape, dtype in LAYOUTS[kind][0]]


def bits(part: Tensor) -> Tensor:
    return part.view(len(part), part.shape[1:].numel()).view(torch.uint8)


class Model:
    """Rows in a file, and what they should be.

    A read may be awaited later. By contract, a row that is being read is not written meanwhile.
    """

    def __init__(self, folder: Path | str, kind: str, num_rows: int, io: PageIo | None = None, seed: int = 0) -> None:
        self.kind, self.num_rows = kind, num_rows
        self.rows = FileRows(str(folder), num_rows, empty(kind, 0), io=io)
        self.truth, self.written = empty(kind, num_rows), torch.zeros(num_rows, dtype=torch.bool)
        self._random = torch.Generator().manual_seed(seed)
        self._reads: list[tuple[FileWork, list[Tensor], list[Tensor], Tensor]] = []

    def contents(self, count: int) -> list[Tensor]:
        found = empty(self.kind, count)
        for part in found:
            bits(part).random_(0, 256, generator=self._random)
        return found

    def some(self, of: Tensor) -> Tensor:
        """Some distinct numbers, ascending."""
        count = int(torch.randint(0, of.numel() + 1, (), generator=self._random))
        return of[torch.randperm(of.numel(), generator=self._random)[:count]].sort().values

    def write(self) -> None:
        keys = self.some(torch.arange(self.num_rows))
        self.end_reads(keys)
        places = torch.randperm(self.num_rows + 3, generator=self._random)[: keys.numel()]
        tables = self.contents(self.num_rows + 3)
        self._note(keys, [table[places] for table in tables])
        self.rows.write(keys, tables, places)
        for table in tables:  # the places are used again
            bits(table).fill_(77)

    def write_block(self) -> None:
        first, stop = torch.randint(0, self.num_rows + 1, (2,), generator=self._random).sort().values.tolist()
        keys, values = torch.arange(first, stop), self.contents(stop - first)
        self.end_reads(keys)
        self._note(keys, values)
        self.rows.write_block(first, values)

    def read(self) -> None:
        keys = self.some(self.written.nonzero().flatten())
        places = torch.randperm(self.num_rows + 3, generator=self._random)[: keys.numel()]
        tables = self.contents(self.num_rows + 3)
        expected = [table.clone() for table in tables]  # other places are left alone
        for part, truth in zip(expected, self.truth, strict=True):
            bits(part)[places] = bits(truth)[keys]
        self._reads.append((self.rows.read(keys, tables, places), tables, expected, keys))

    def read_block(self) -> None:
        first, stop = torch.randint(0, self.num_rows + 1, (2,), generator=self._random).sort().values.tolist()
        tables = self.contents(stop - first + 2)
        expected = [table.clone() for table in tables]
        here = self.written[first:stop].nonzero().flatten()
        for part, truth in zip(expected, self.truth, strict=True):
            bits(part)[here] = bits(truth)[here + first]
        self.rows.read_block(first, stop, tables)
        assert_equal(tables, expected)

    def finish(self) -> None:
        self.rows.finish()

    def end_reads(self, keys: Tensor) -> None:
        """Await the reads of some rows, and compare."""
        for read in list(self._reads):
            work, tables, expected, of = read
            if torch.isin(of, keys).any() or not of.numel():
                work.wait()
                assert work.is_done
                assert_equal(tables, expected)
                self._reads.remove(read)

    def end(self) -> None:
        self.end_reads(torch.arange(self.num_rows))
        assert torch.equal(self.rows.is_written(torch.arange(self.num_rows)), self.written)
        self.rows.close()

    def _note(self, keys: Tensor, values: Sequence[Tensor]) -> None:
        for truth, part in zip(self.truth, values, strict=True):
            bits(truth)[keys] = bits(part)
        self.written[keys] = True


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(found, expected, strict=True))


operations = st.lists(st.sampled_from(["write", "write", "read", "read", "read_block", "write_block", "finish"]))


@pytest.mark.slow
@KINDS
@given(operations, st.integers(1, 150), st.integers(0, 99), st.sampled_from([0.0, 0.003]))
@examples(25)
def test_any_reads_and_writes_find_what_was_written(
    kind: str, operations: list[str], num_rows: int, seed: int, delay: float
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Model(folder, kind, num_rows, SlowIo(seed, delay) if delay else None, seed)
        for name in ["write", *operations, "read"]:
            getattr(model, name)()
        model.end()


@KINDS
def test_rows_do_not_cross_pages(tmp_path: Path, kind: str) -> None:
    model = Model(tmp_path, kind, 100)
    rows = model.rows
    assert rows.page_bytes == LAYOUTS[kind][1]
    assert rows.row_bytes == sum(part.nbytes for part in empty(kind, 1))
    assert rows.rows_per_page == rows.page_bytes // rows.row_bytes >= 1
    assert rows.file_bytes == -(-100 // rows.rows_per_page) * rows.page_bytes == os.fstat(rows._file).st_size
    for name in ("write_block", "write", "read", "read_block"):
        getattr(model, name)()
    model.end()


@pytest.mark.slow
def test_long_blocks_go_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of what a thread moves, of what waits to be written, and of what a block hands over."""
    monkeypatch.setattr(file_rows, "_CHUNK_BYTES", 3 * 4096)
    monkeypatch.setattr(file_rows, "_MOST_WRITING_BYTES", 9000)
    monkeypatch.setattr(file_rows, "_BLOCK_ROWS_BYTES", 7000)
    model = Model(tmp_path, "128 columns", 1000, SlowIo(most_seconds=0.001))
    for name in ("write", "write", "write", "read", "write_block", "read_block", "write", "read"):
        getattr(model, name)()
    model.end()


def test_no_rows_are_no_work(tmp_path: Path) -> None:
    rows, tables = FileRows(str(tmp_path), 10, empty("128 columns", 0)), empty("128 columns", 4)
    nothing = torch.empty(0, dtype=torch.int64)
    assert rows.write(nothing, tables, nothing).is_done
    assert rows.read(nothing, tables, nothing).is_done
    rows.write_block(3, empty("128 columns", 0))
    rows.read_block(3, 3, empty("128 columns", 0))
    rows.finish()
    assert (rows.rows_read, rows.pages_read, rows.rows_written, rows.pages_written) == (0, 0, 0, 0)
    rows.close()


def test_pages_are_counted_and_no_more_are_moved(tmp_path: Path) -> None:
    """A page is read before it is written only if it has a row that stays."""
    io = CountingIo()
    rows, tables = FileRows(str(tmp_path), 1000, empty("128 columns", 0), io=io), empty("128 columns", 1000)
    assert rows.rows_per_page == 8

    def moved(work: Callable[[Tensor, Sequence[Tensor], Tensor], FileWork], *keys: int) -> tuple[int, ...]:
        before = (io.pages_read, io.pages_written)
        work(torch.tensor(keys), tables, torch.arange(len(keys))).wait()
        rows.finish()
        return io.pages_read - before[0], io.pages_written - before[1]

    assert moved(rows.write, 0, 1, 8, 999) == (0, 3)  # nothing was there
    assert moved(rows.write, 0, 1) == (0, 1)  # nothing else is there
    assert moved(rows.write, 0, 8) == (1, 2)  # of which one has another row
    assert moved(rows.write, 2) == (1, 1)
    assert moved(rows.read, 0, 1, 2, 999) == (2, 0)
    assert (rows.rows_read, rows.pages_read) == (4, 2)
    assert (rows.rows_written, rows.pages_written) == (9, io.pages_written)
    rows.close()


def test_a_table_that_would_be_copied_is_refused(tmp_path: Path) -> None:
    """What is read would go to the copy, and be lost."""
    rows, table = FileRows(str(tmp_path), 10, [torch.empty(0, 4)]), torch.ones(4, 10)
    rows.write_block(0, [torch.ones(10, 4)])
    with pytest.raises(RuntimeError, match="view"):
        rows.read(torch.arange(2), [table.t()], torch.arange(2))
    rows.close()


# -- rows on their way


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[tuple[FileRows, GatedIo]]:
    """Rows 0 to 9 of one page, of which 0 to 8 are 1.0 in the file."""
    io = GatedIo()
    rows = FileRows(str(tmp_path), 10, [torch.empty(0, 4)], io=io)
    rows.write_block(0, [torch.ones(9, 4)])
    yield rows, io
    io.may_read.set()
    io.may_write.set()
    rows.close()


def test_rows_on_their_way_are_found(gated: tuple[FileRows, GatedIo]) -> None:
    """The newest, by reads of rows and of blocks; without a look at those on their way, they would be old."""
    rows, io = gated
    io.may_write.clear()
    keys, found = torch.tensor([2, 9]), torch.zeros(10, 4)
    works = [rows.write(keys, [torch.full((10, 4), value)], keys) for value in (2.0, 3.0)]
    assert not any(work.is_done for work in works)
    assert rows.is_written(torch.tensor([9])).item()
    rows.read(torch.tensor([1, 2, 9]), [found], torch.tensor([1, 2, 9])).wait()
    assert found[[1, 2, 9], 0].tolist() == [1.0, 3.0, 3.0]
    found.zero_()
    rows.read_block(0, 10, [found])
    assert found[:, 3].tolist() == [1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0]
    writing, rows._writing = rows._writing, ()
    rows.read(keys, [found], keys).wait()
    assert found[keys, 0].tolist() == [1.0, 0.0], "past what is on its way"
    rows._writing = writing
    io.may_write.set()
    rows.finish()
    assert all(work.is_done for work in works)
    assert not rows._writing
    rows.read(keys, [found], keys).wait()
    assert found[keys, 0].tolist() == [3.0, 3.0]


class _Meeting(PageIo):
    """Two writes wait for each other, if both come within a moment."""

    def __init__(self, seconds: float) -> None:
        self.barrier, self._seconds, self.has_met = threading.Barrier(2), seconds, False

    def write(self, *arguments: Any) -> None:
        with suppress(threading.BrokenBarrierError):
            self.barrier.wait(self._seconds)
            self.has_met = True
        super().write(*arguments)


def test_a_page_is_patched_by_one_thread_at_a_time(tmp_path: Path) -> None:
    """Two that patch it beside each other lose a row: both have read it before one of them writes."""
    io = _Meeting(0.1)
    rows, found = FileRows(str(tmp_path), 10, [torch.empty(0, 4)], io=io), torch.zeros(10, 4)
    rows.write_block(0, [torch.ones(10, 4)])
    for row in (3, 4):
        rows.write(torch.tensor([row]), [torch.full((1, 4), 2.0)], torch.tensor([0]))
    rows.finish()
    rows.read_block(0, 10, [found])
    assert not io.has_met
    assert found[2:6, 0].tolist() == [1.0, 2.0, 2.0, 1.0]

    io.barrier, io._seconds = threading.Barrier(2), 60
    records = np.full(4, 3, np.float32).view(np.uint8)
    one = np.array([0])  # of the page, of the record, and of the page that is shared
    threads = [threading.Thread(target=rows._patch, args=(one, np.array([row]), one, one, records)) for row in (3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert io.has_met
    is_other = False
    try:
        rows.read_block(0, 10, [found])
    except CacheError:
        is_other = True  # the page is one's, its sum the other's
    assert is_other or sorted(found[[3, 4], 0].tolist()) == [2.0, 3.0], "one of them is lost"
    rows.close()


@pytest.mark.slow
def test_a_thread_reads_blocks_beside_the_writes(tmp_path: Path) -> None:
    """It finds each row as it was when the read began, or newer; never a row that nobody wrote."""
    num_rows, begun, latest = 3000, np.zeros(3000, np.int64), np.zeros(3000, np.int64)
    rows = FileRows(str(tmp_path), num_rows, [torch.empty(0, 2, dtype=torch.int64)], io=SlowIo(most_seconds=0.002))
    wrong, ended = list[str](), threading.Event()

    def save() -> None:
        found = torch.zeros(num_rows, 2, dtype=torch.int64)
        while not ended.is_set():
            before = latest.copy()
            found.zero_()
            rows.read_block(0, num_rows, [found])
            after = begun.copy()
            low, high = found.numpy().min(1), found.numpy().max(1)
            wrong.extend(f"row {row}: {found[row]}" for row in np.flatnonzero((low < before) | (high > after)))
            is_new = (before == 0) & (low == 0) & (high > 0)
            wrong.extend(f"row {row} is torn: {found[row]}" for row in np.flatnonzero(is_new))

    saver = threading.Thread(target=save)
    saver.start()
    generator = torch.Generator().manual_seed(3)
    for step in range(1, 250):
        keys = torch.randint(num_rows, (40,), generator=generator).unique()
        latest_of, begun[keys.numpy()] = torch.full((keys.numel(), 2), step), step
        rows.write(keys, [latest_of], torch.arange(keys.numel()))
        latest[keys.numpy()] = step
    ended.set()
    saver.join()
    rows.close()
    assert not wrong, wrong[:5]


# -- errors


def use_for_long(model: Model) -> None:
    names = ["write", "read", "write_block", "read_block", "finish"]
    chooser = random.Random(5)
    for _ in range(1000):
        getattr(model, chooser.choice(names))()
        model.end_reads(torch.arange(model.num_rows))


def in_time(work: Callable[[], None], seconds: float = 60) -> None:
    """Fail, rather than hang."""
    failures = list[BaseException]()

    def run() -> None:
        try:
            work()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    if failures:
        raise failures[0]


@pytest.mark.slow
@pytest.mark.parametrize("number", keep([errno.EIO], [errno.EIO, errno.ENOSPC]))
def test_a_disk_that_fails_is_told_by_every_call_from_then_on(tmp_path: Path, number: int) -> None:
    """Wherever it fails."""

    def fail_after(works: int) -> None:
        model = Model(tmp_path, "128 columns", 100, BrokenIo(works, number))
        with pytest.raises(CacheError) as raised:
            use_for_long(model)
        failure = raised.value
        assert isinstance(failure.__cause__, OSError)
        assert failure.__cause__.errno == number
        tables, keys = model.contents(10), torch.arange(10)
        calls: list[Callable[[], Any]] = [
            lambda: model.rows.read(keys, tables, keys),
            lambda: model.rows.write(keys, tables, keys),
            model.rows.finish,
            lambda: model.rows.read_block(0, 10, tables),
            lambda: model.rows.write_block(0, tables),
        ]
        for call in calls:
            with pytest.raises(CacheError, match=r"cache.host_dir=.*could not be (read|written).*the disk failed.*res"):
                call()
        assert model.rows._failure is failure
        model.rows.close()

    for works in range(50):
        in_time(lambda works=works: fail_after(works))  # type: ignore[misc]


def test_many_writes_behind_one_that_failed_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that waits until less is on its way."""
    monkeypatch.setattr(file_rows, "_MOST_WRITING_BYTES", 2000)
    rows = FileRows(str(tmp_path), 100, [torch.empty(0, 128)], io=BrokenIo(2, errno.EIO))

    def write() -> None:
        for row in range(100):
            rows.write(torch.tensor([row]), [torch.ones(1, 128)], torch.tensor([0]))

    with pytest.raises(CacheError, match="could not be written"):
        in_time(write)
    rows.close()


def test_the_error_names_the_page(tmp_path: Path) -> None:
    """Of the system's own: of a file that may only be read."""
    rows, keys = FileRows(str(tmp_path), 100, [torch.empty(0, 128)]), torch.tensor([17])
    name = tmp_path / "another"
    name.write_bytes(bytes(rows.file_bytes))
    other = os.open(name, os.O_RDONLY)
    os.dup2(other, rows._file)
    os.close(other)
    with pytest.raises(CacheError, match=r"could not be written: \[Errno 9\] Bad file descriptor, page 2\. "):
        rows.write(keys, [torch.ones(1, 128)], torch.tensor([0])).wait()
    rows.close()


def test_what_a_file_lacks_is_an_error(tmp_path: Path) -> None:
    """A file that ends early gives fewer bytes, and no error."""
    rows, keys = FileRows(str(tmp_path), 100, [torch.empty(0, 128)]), torch.tensor([17, 50])
    rows.write(keys, [torch.ones(2, 128)], torch.tensor([0, 1])).wait()
    os.ftruncate(rows._file, 5 * 4096)
    rows.read(keys[:1], [torch.ones(1, 128)], torch.tensor([0])).wait()
    with pytest.raises(CacheError, match=r"0 of 4096 bytes of page 6 were moved"):
        rows.read(keys[1:], [torch.ones(1, 128)], torch.tensor([0])).wait()
    rows.close()


@pytest.mark.parametrize("is_cut", [False, True], ids=["read", "write"])
def test_a_call_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cut: bool) -> None:
    right, calls = loops.move_pages, list[int]()

    def cut_off(file: int, pages: Any, page_bytes: int, address: int, places: Any, writes: bool) -> int:
        if writes != is_cut:
            return right(file, pages, page_bytes, address, places, writes)
        calls.append(pages.size)
        return right(file, pages[:2], page_bytes, address, places[:2], writes)

    monkeypatch.setattr(loops, "move_pages", cut_off)
    model = Model(tmp_path, "128 columns", 3000)
    for each in ("write_block", "write", "read", "read_block"):
        getattr(model, each)()
    model.end()
    assert max(calls) > 3


# -- folders


def test_a_disk_that_is_too_small_is_refused(tiny_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its free space, and by the space that is taken: another process may have been faster."""
    model = Model(tiny_disk, "128 columns", 900)
    for name in ("write", "read", "read_block"):
        getattr(model, name)()
    model.end()
    with pytest.raises(ConfigError, match=r"cache.host_dir=.* has 512.00 KiB free, 1.00 MiB are needed on this rank"):
        FileRows(str(tiny_disk), 2048, [torch.empty(0, 128)])
    monkeypatch.setattr(file_rows, "check_room", lambda folder, num_bytes: None)
    with pytest.raises(ConfigError, match=r"1.00 MiB could not be taken: \[Errno 28\] No space left on device. Choose"):
        FileRows(str(tiny_disk), 2048, [torch.empty(0, 128)])
    assert not list(tiny_disk.iterdir())
    assert os.statvfs(tiny_disk).f_bavail * os.statvfs(tiny_disk).f_frsize == 512 << 10


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cache.host_dir=.*file/rows.* cannot be made"):
        FileRows(str(tmp_path / "file" / "rows"), 10, [torch.empty(0, 4)])


def test_a_file_system_without_direct_access_keeps_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = os.open

    def open_(path: str, flags: int, *arguments: Any) -> int:
        if flags & working_files._DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return right(path, flags, *arguments)

    monkeypatch.setattr(os, "open", open_)
    model = Model(tmp_path, "300 columns", 100)
    assert not model.rows.is_direct
    for name in ("write", "read", "write_block", "read_block"):
        getattr(model, name)()
    model.end()


# -- ends


def taken() -> tuple[int, int]:
    """Numbers of threads of files, and of open files of rows."""
    names = [thread.name for thread in threading.enumerate()]
    files = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            files += ".rows (deleted)" in os.readlink(each)
    return sum(name.startswith((file_rows._THREADS, "end-of-rows")) for name in names), files


def wait_for(expected: tuple[int, int]) -> None:
    until = time.monotonic() + 60
    while taken() != expected:
        assert time.monotonic() < until, f"{taken()} are left, needed {expected}"
        time.sleep(0.01)


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped"])
@pytest.mark.parametrize("is_busy", [True, False], ids=["while it works", "when it has ended"])
def test_nothing_is_left(tmp_path: Path, is_closed: bool, is_busy: bool) -> None:
    """Neither threads nor files; also if the last who has the rows is one of their threads."""
    gc.collect()
    before, keys = taken(), torch.arange(1000)
    rows: FileRows | None = FileRows(str(tmp_path), 1000, [torch.empty(0, 128)], io=SlowIo(most_seconds=0.1))
    assert rows is not None
    for _ in range(3):
        work = rows.write(keys, [torch.ones(1000, 128)], keys)
    if not is_busy:
        work.wait()
    assert taken()[0] > before[0]
    assert taken()[1] == before[1] + 1
    if is_closed:
        in_time(rows.close)
        assert taken() == before
    rows = None
    gc.collect()
    wait_for(before)


def test_who_waits_for_rows_that_are_closed_is_told(tmp_path: Path) -> None:
    """Rather than to wait for ever."""
    rows, keys = FileRows(str(tmp_path), 1000, [torch.empty(0, 128)], io=SlowIo(most_seconds=0.1)), torch.arange(1000)
    works = [rows.write(keys, [torch.ones(1000, 128)], keys) for _ in range(5)]
    rows.close()
    in_time(lambda: _ends(works))
    assert works[-1].is_done


def _ends(works: Sequence[FileWork]) -> None:
    for work in works:
        with suppress(Exception):
            work.wait()
