"""What objects leave behind ends while any thread holds any lock, and no finalizer of the package waits."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import thread
from pathlib import Path

import pytest
import torch

from embershard.cache.file.file_rows import FileRows
from embershard.cache.rows.page_lock import PageLock
from embershard.data.config import DataConfig
from embershard.data.order.stream import BatchStream
from embershard.data.sources.kinds import open_source
from embershard.data.synthetic_config import SyntheticConfig
from embershard.finalizers import end_with, wait_for_ends

#: Calls of `weakref.finalize`: that of this file's subject, and two which neither wait nor take a lock of others.
ALLOWED = {"finalizers.py", "cache/tickets.py", "pipeline/look_ahead.py"}


def file_rows(folder: Path) -> FileRows:
    rows = FileRows(str(folder), 100, [torch.zeros(0, 4)])
    rows._writer.submit(int).result()  # starts a thread
    return rows


def page_lock(folder: Path) -> PageLock:
    return PageLock([torch.zeros(4096)], lambda *_: None, lambda _: None, block_bytes=4096)


def stream(folder: Path) -> BatchStream:
    config = DataConfig(synthetic=SyntheticConfig(num_samples=200), num_workers=2)
    of_rank = {"batch_size": 10, "rank": 0, "world_size": 1, "split": "train", "epochs": 1}
    batches = BatchStream(open_source(config), config=config, **of_rank)  # type: ignore[arg-type]
    next(batches)
    return batches


@pytest.mark.slow
@pytest.mark.parametrize("make", [file_rows, page_lock, stream])
def test_they_end_where_the_last_reference_goes_under_a_lock_of_their_threads(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    """As where the garbage collector runs while Python starts a thread, which takes these locks. In a process of its
    own, which would wait for itself for ever."""
    child = os.fork()
    if not child:
        owned = [make(tmp_path)]
        with thread._global_shutdown_lock, getattr(threading, "_shutdown_locks_lock", contextlib.nullcontext()):
            owned.clear()
            gc.collect()
        wait_for_ends()
        os._exit(0)
    ends_by = time.monotonic() + 300
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < ends_by:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        ended = os.waitpid(child, 0)
    assert ended == (child, 0)


def test_a_file_of_rows_is_closed_when_they_are_gone(tmp_path: Path) -> None:
    rows = file_rows(tmp_path)
    file = rows._file
    assert os.fstat(file).st_size == rows.file_bytes
    del rows
    wait_for_ends()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_no_other_finalizer_is_made(project_dir: Path) -> None:
    package = project_dir / "embershard"
    files = {path for path in package.rglob("*.py") if re.search(r"weakref\.finalize\(|def __del__", path.read_text())}
    assert {str(path.relative_to(package)) for path in files} == ALLOWED


def test_an_end_that_fails_is_told_and_others_end(caplog: pytest.LogCaptureFixture) -> None:
    class Owner: ...

    ended: list[int] = []
    owners = [Owner(), Owner()]
    for owner, end in zip(owners, (lambda: 1 // 0, lambda: ended.append(1)), strict=True):
        end_with(owner, end)
    del owner
    owners.clear()
    wait_for_ends()
    assert ended == [1]
    assert "did not end" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_ends_come_in_a_forked_process_too(tmp_path: Path) -> None:
    class Owner: ...

    before = Owner()
    end_with(before, lambda: None)
    child = os.fork()
    if not child:
        owner = Owner()
        end_with(owner, (tmp_path / "ended").touch)
        del owner, before
        wait_for_ends()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "ended").exists()


def test_who_ends_by_itself_is_not_ended_again() -> None:
    class Owner: ...

    ended: list[int] = []
    owner = Owner()
    finalizer = end_with(owner, ended.append, 1)
    assert finalizer.detach()
    assert not finalizer.detach()
    del owner
    wait_for_ends()
    assert ended == []
