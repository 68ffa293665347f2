"""Checksums of files: SHA-256 of each block, so that one large file can be checked by many threads."""

from __future__ import annotations

import hashlib
import io
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem

#: Bytes that one checksum covers.
BLOCK_BYTES = 64 << 20
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class FileEntry:
    """Size of a file in bytes, and the SHA-256 of each of its blocks in hexadecimal."""

    bytes: int
    sha256: tuple[str, ...]


@dataclass
class BlockDigests:
    """The checksums of bytes that come in pieces.

    >>> digests = BlockDigests(block_bytes=4)
    >>> digests.update(b"abcd"), digests.update(b"ef")
    (None, None)
    >>> entry = digests.finish()
    >>> entry.bytes, len(entry.sha256)
    (6, 2)
    """

    block_bytes: int = BLOCK_BYTES
    num_bytes: int = 0
    _done: list[str] = field(default_factory=list)
    _open: Any = field(default_factory=hashlib.sha256)

    def update(self, data: Any) -> None:
        """Append bytes."""
        view = memoryview(data).cast("B")
        while len(view):
            piece = view[: self.block_bytes - self.num_bytes % self.block_bytes]
            self._open.update(piece)
            self.num_bytes += len(piece)
            if self.num_bytes % self.block_bytes == 0:
                self._done.append(self._open.hexdigest())
                self._open = hashlib.sha256()
            view = view[len(piece) :]

    def finish(self) -> FileEntry:
        """Return the size, and the checksum of every block; the last block may be shorter."""
        last = [self._open.hexdigest()] if self.num_bytes % self.block_bytes else []
        return FileEntry(self.num_bytes, (*self._done, *last))


def file_entry(path: Path) -> FileEntry:
    """Return size and checksums of a file."""
    digests = BlockDigests()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(READ_BYTES):
            digests.update(piece)
    return digests.finish()


def block_digest(path: Path, start: int, num_bytes: int) -> str:
    """Return the checksum of up to `num_bytes` of a file, from `start`."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while num_bytes and (piece := file.read(min(num_bytes, READ_BYTES))):
            digest.update(piece)
            num_bytes -= len(piece)
    return digest.hexdigest()


class DigestingFileSystem(FileSystem):
    """Files for torch's checkpoint writer, whose checksums are taken while they are written.

    Attributes:
        digests: by file name.
        error: the first write that failed. torch reports a failed write as an error of its own format.
    """

    def __init__(self) -> None:
        self.digests: dict[str, BlockDigests] = {}
        self.error: OSError | None = None

    def create_stream(self, path: str | os.PathLike[str], mode: str) -> io.BufferedWriter:  # type: ignore[override]
        """Return the file, itself a context: the frame of one made by `contextmanager` would hold the error of a write
        in a cycle, and so the tensors (from Python 3.13 on)."""
        assert mode == "wb", "the writer only writes"
        return _Buffered(_DigestedFile(Path(path), self))

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class _Buffered(io.BufferedWriter):
    """What torch writes to. After a failed write torch flushes it once more when it is closed already, as nobody sees
    before Python 3.13, which tells of errors in finalizers."""

    def flush(self) -> None:
        if not self.closed:
            super().flush()


class _DigestedFile(io.FileIO):
    """A file that is written in order."""

    def __init__(self, path: Path, files: DigestingFileSystem) -> None:
        super().__init__(path, "wb")
        self._files = files
        self._digests = files.digests[path.name] = BlockDigests()

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")[:BLOCK_BYTES]
        if len(view) < READ_BYTES or torch.get_num_threads() == 1:  # a save beside training keeps to one core
            self._write(view)
            self._digests.update(view)
        else:  # both release Python's lock
            with ThreadPoolExecutor(1, "embershard-digest") as pool:
                digesting = pool.submit(self._digests.update, view)
                self._write(view)
            digesting.result()
        return len(view)

    def _write(self, view: memoryview) -> None:
        try:
            while len(view):
                view = view[super().write(view) :]
        except OSError as error:
            self._files.error = self._files.error or error
            raise

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        assert (offset, whence) in ((0, os.SEEK_CUR), (self._digests.num_bytes, os.SEEK_SET)), "written in order"
        return super().seek(offset, whence)
