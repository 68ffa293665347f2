"""Files for torch's checkpoint writer, whose checksums are taken while they are written."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from embershard.distributed.checkpoint.digests import BLOCK_BYTES, READ_BYTES, BlockDigests


class DigestingFileSystem(FileSystem):
    """Files for torch's checkpoint writer, whose checksums are taken while they are written.

    Attributes:
        digests: by file name.
        error: the first write that failed. torch reports a failed write as an error of its own format.
    """

    def __init__(self) -> None:
        self.digests: dict[str, BlockDigests] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:  # type: ignore[override]
        assert mode == "wb", "the writer only writes"
        with io.BufferedWriter(_DigestedFile(Path(path), self)) as stream:
            yield cast(io.IOBase, stream)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


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
