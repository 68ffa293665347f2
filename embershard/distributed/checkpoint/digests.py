"""Checksums of files: SHA-256 of each block, so that one large file can be checked by many threads."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
