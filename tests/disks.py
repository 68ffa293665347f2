"""Disks of tests: pages that take long, fail, are counted, or wait for the test."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

from embershard.cache.file.file_rows import PageIo


class SlowIo(PageIo):
    """A disk that takes a random time for each part of the work."""

    def __init__(self, seed: int = 0, most_seconds: float = 0.004) -> None:
        self._random, self._most_seconds = random.Random(seed), most_seconds

    def read(self, *arguments: Any) -> None:
        time.sleep(self._most_seconds * self._random.random())
        super().read(*arguments)

    def write(self, *arguments: Any) -> None:
        time.sleep(self._most_seconds * self._random.random())
        super().write(*arguments)


class BrokenIo(PageIo):
    """A disk of which part number `works` of the work, and any later one, fails."""

    def __init__(self, works: int, number: int) -> None:
        self._left, self._number, self._lock = works, number, threading.Lock()

    def _count(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left < 0:
                raise OSError(self._number, "the disk failed")

    def read(self, *arguments: Any) -> None:
        self._count()
        super().read(*arguments)

    def write(self, *arguments: Any) -> None:
        self._count()
        super().write(*arguments)


class FlippingIo(PageIo):
    """A disk that changes a bit in each page that is written by part number `works` of the work, or a later one.

    A low bit of a number of 4 bytes, which stays finite: what would train.
    """

    def __init__(self, works: int, seed: int = 0) -> None:
        self._left, self._random, self._lock = works, random.Random(seed), threading.Lock()

    def write(self, file: int, pages: Any, page_bytes: int, memory: Any, places: Any) -> None:
        with self._lock:
            self._left -= 1
            if self._left < 0:
                for place in places:
                    byte = self._random.randrange(page_bytes) & ~2
                    memory[place * page_bytes + byte] ^= 1 << self._random.randrange(8)
        super().write(file, pages, page_bytes, memory, places)


class CountingIo(PageIo):
    """A disk that counts the pages that are read and written."""

    def __init__(self) -> None:
        self.pages_read = self.pages_written = 0
        self._lock = threading.Lock()

    def read(self, *arguments: Any) -> None:
        with self._lock:
            self.pages_read += arguments[1].size
        super().read(*arguments)

    def write(self, *arguments: Any) -> None:
        with self._lock:
            self.pages_written += arguments[1].size
        super().write(*arguments)


class GatedIo(PageIo):
    """A disk that writes while `may_write` is set, and reads while `may_read` is."""

    def __init__(self) -> None:
        self.may_read, self.may_write = threading.Event(), threading.Event()
        self.may_read.set()
        self.may_write.set()

    def read(self, *arguments: Any) -> None:
        self.may_read.wait(60)
        super().read(*arguments)

    def write(self, *arguments: Any) -> None:
        self.may_write.wait(60)
        super().write(*arguments)


class HeldIo(PageIo):
    """A disk that does not read pages that are `held`."""

    def __init__(self) -> None:
        self._held, self._changed = set[int](), threading.Condition()

    def hold(self, *pages: int) -> None:
        """Hold these pages, and no others."""
        with self._changed:
            self._held = set(pages)
            self._changed.notify_all()

    def read(self, *arguments: Any) -> None:
        pages = set(arguments[1].tolist())
        with self._changed:
            assert self._changed.wait_for(lambda: not pages & self._held, 60), "pages are held for ever"
        super().read(*arguments)
