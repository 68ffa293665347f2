"""Which files a run reads: names, sizes, and checksums of samples of their bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from embershard.data.config import DataConfig
from embershard.data.sources.input_file import files_at

_NUM_BLOCKS = 16
_BLOCK_BYTES = 1 << 14


class FileIdentity(NamedTuple):
    """A file's name in its folder, its size, and a checksum of blocks of it."""

    name: str
    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """Read 16 blocks of 16 KiB, evenly spaced, the first and the last ones of the file among them; a file of up to
        256 KiB whole.

        >>> path = Path("day_0")
        >>> size = path.write_bytes(b"0\\t1\\n" * 3)
        >>> FileIdentity.of(path)[:2]
        ('day_0', 12)
        """
        size, digest = path.stat().st_size, hashlib.sha256()
        with path.open("rb") as file:
            for number in range(_NUM_BLOCKS):
                file.seek(max(number * _BLOCK_BYTES, (size - _BLOCK_BYTES) * number // (_NUM_BLOCKS - 1)))
                digest.update(file.read(_BLOCK_BYTES))
        return cls(path.name, size, digest.hexdigest())


def identify_files(config: DataConfig) -> dict[str, list[FileIdentity]]:
    """Return the files of `data.path` and of `data.eval_path` as `files` and `eval_files`, in the order of reading.

    >>> identify_files(DataConfig())
    {'files': [], 'eval_files': []}

    Raises:
        DataError: there is nothing at a path, no file of a folder matches, or a file is empty.
    """
    found: dict[str, list[FileIdentity]] = {"files": [], "eval_files": []}
    for name, path in (("files", config.path), ("eval_files", config.eval_path)):
        if config.kind != "synthetic" and path is not None:
            patterns = getattr(config, config.kind).files
            found[name] = [FileIdentity.of(file.path) for file in files_at(path, patterns, config.kind)]
    return found
