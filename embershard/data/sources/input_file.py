"""`InputFile`: a file of samples that must not change while a run reads it; and the files at a path."""

from __future__ import annotations

import fnmatch
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from embershard.errors import DataError, os_problem

_GZIP_MAGIC = b"\x1f\x8b"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InputFile:
    """A file as it was when it was opened. Nothing is memory-mapped: a page of a truncated file kills the process.

    Attributes:
        path: of the file.
        num_bytes: its size.
        modified_ns: its time of modification.
    """

    path: Path
    num_bytes: int
    modified_ns: int

    @staticmethod
    def at(path: Path) -> InputFile:
        """Return the file at `path` as it is now.

        Raises:
            DataError: it is empty, cannot be read, or is no file that can be read twice.
        """
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
                raise DataError(f"{path}: not a regular file; needed one: samples are read in any order, and again")
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
        except OSError as error:
            raise DataError(os_problem(error, path)) from error
        if status.st_size == 0:
            raise DataError(f"{path}: the file is empty (0 bytes); remove it, or fetch it again")
        return InputFile(path, status.st_size, status.st_mtime_ns)

    def is_gzip(self) -> bool:
        """Return True if the name or the first bytes are those of a gzip file."""
        return self.path.suffix == ".gz" or bytes(self.read(0, min(2, self.num_bytes))) == _GZIP_MAGIC

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop).

        Raises:
            DataError: the file has changed, or cannot be read.
        """
        for data in self.blocks(start, stop - start, stop):
            return memoryview(data)
        return memoryview(b"")

    def blocks(self, start: int, block_bytes: int, stop: int | None = None) -> Iterator[bytes]:
        """Yield bytes [start, stop) in blocks; `stop` None: to the end of the file as it was.

        Raises:
            DataError: the file has changed, or cannot be read.
        """
        stop = self.num_bytes if stop is None else stop
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                while start < stop:
                    data = file.read(min(block_bytes, stop - start))
                    self.check(start)
                    if not data:
                        raise DataError(f"{self.path}: ended at byte {start:,} of {self.num_bytes:,}; fetch it again")
                    start += len(data)
                    yield data
        except OSError as error:
            raise DataError(os_problem(error, self.path)) from error

    def check(self, place: int) -> None:
        """Raise `DataError` if the file is not as it was; `place` is the byte that was read, for the message."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise DataError(os_problem(error, self.path)) from error
        if (status.st_size, status.st_mtime_ns) == (self.num_bytes, self.modified_ns):
            return
        now = f"has {status.st_size:,} now" if status.st_size != self.num_bytes else "was written to since"
        raise DataError(
            f"{self.path}: changed while it was read, at byte {place:,}: it had {self.num_bytes:,} bytes, and {now}. "
            "Bring it back as it was, time of modification included, or start a new run"
        )


def files_at(path: str, patterns: tuple[str, ...], kind: str) -> list[InputFile]:
    """Return the file at `path`, or the folder's files that match a pattern, by name."""
    root = Path(path).expanduser()
    if not root.exists():
        raise DataError(f"{root}: no such file or folder; check data.path and data.eval_path")
    files = [root]
    if root.is_dir():
        there = sorted(p for p in root.iterdir() if p.is_file() and not p.name.startswith((".", "_")))
        files = [p for p in there if any(fnmatch.fnmatch(p.name, pattern) for pattern in patterns)]
        skipped = [p.name for p in there if p not in files]
        if not files:
            raise DataError(
                f"{root}: none of its {len(there)} files matches {', '.join(patterns)} "
                f"(there are: {', '.join(skipped[:5]) or 'none'}); set data.{kind}.files to the names of your files"
            )
        if skipped:
            _log.info("%s: not read, as no pattern of data.%s.files matches: %s", root, kind, ", ".join(skipped))
    return [InputFile.at(file) for file in files]
