"""Kills (SIGKILL) of all ranks of a pool at once, before a file operation in some folders, or when asked; and
pools that outlive them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.ranks.workers import RankError, RankPool

#: Audit events of what changes files; of them "open" may read.
FILE_OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.copyfile", "shutil.rmtree"}


_TIMEOUT_SECONDS = 300.0


class RankKills:
    """Counts file operations of this process; kills all ranks before number `at`, counted from 0; None: before none.

    Attributes:
        count: operations since `watch` was called.
    """

    def __init__(self) -> None:
        self.at: int | None = None
        self.count = 0
        self._folders: tuple[str, ...] = ()
        self._processes: tuple[int, ...] = ()
        self._is_hooked = False

    def watch(self, folders: Iterable[Path], processes: Iterable[int]) -> None:
        """Count what this process does in these folders from now on.

        Args:
            processes: those of all ranks.
        """
        self._folders, self._processes = tuple(map(str, folders)), tuple(processes)
        self.at, self.count = None, 0
        if not self._is_hooked:
            sys.addaudithook(self._look)
            self._is_hooked = True

    def now(self) -> None:
        """Kill them."""
        own = os.getpid()
        for process in sorted(self._processes, key=lambda each: each == own):  # itself as the last
            os.kill(process, signal.SIGKILL)

    def add(self) -> None:
        """Count one more."""
        self.count += 1
        if self.at is not None and self.count > self.at:
            self.now()

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in FILE_OPERATIONS and str(arguments[0]).startswith(self._folders):
            self.add()


def is_writing(arguments: tuple[Any, ...]) -> bool:
    """Return whether the audit event "open" with these arguments opens a file to write."""
    _, mode, flags = arguments
    return bool(set(mode or "") & set("wax+")) or bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


#: Of this process: an audit hook stays to its end.
KILLS = RankKills()


class Pools:
    """Processes that are reused, by the number of ranks; those that were killed are replaced."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def run(self, num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any] | None:
        """Run a function on so many ranks; None: they were killed."""
        pool = self._pools.get(num_ranks)
        if pool is None:
            pool = self._pools[num_ranks] = RankPool(num_ranks, timeout_seconds=_TIMEOUT_SECONDS)
        try:
            return pool.run(function, *arguments)
        except (EOFError, OSError):
            self._pools.pop(num_ranks).close()
            return None
        except RankError:
            self._pools.pop(num_ranks).close()
            raise

    def close(self) -> None:
        while self._pools:
            self._pools.popitem()[1].close()
