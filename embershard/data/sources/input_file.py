"""The files of samples: `InputFile`, which must not change while a run reads it; the files of a config."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import unquote

from embershard.data.config import DataConfig
from embershard.data.sources.folder import UNFINISHED, Listing, fits
from embershard.data.time_config import WITH_NAMES
from embershard.errors import ConfigError, DataError, near_file, os_problem

_GZIP_MAGIC = b"\x1f\x8b"
#: In the name of a folder, as Hive and Spark write it, for a missing value.
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_NUM_SAMPLED = 16
_SAMPLED_BYTES = 1 << 14
#: What tells whether a file was written to, or its permissions changed: size and times.
Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class InputFile:
    """A file as it was when it was opened. Nothing is memory-mapped: a page of a truncated file kills the process.

    Attributes:
        path: of the file.
        num_bytes: its size.
        modified_ns: its time of modification.
        sha256: of blocks of it, as `FileIdentity` has it: with another time of modification, a file of the same size
            and bytes is still the same. "": it is not known, and the time counts.
        folders: between the folder of the data and the file, as "day=2026-01-01".
        above: folders of that kind that are, or hold, the folder of the data; they tell no file from another one.
    """

    path: Path
    num_bytes: int
    modified_ns: int
    sha256: str = ""
    folders: tuple[str, ...] = ()
    above: tuple[str, ...] = ()

    @staticmethod
    def at(path: Path, *, sums: bool = False) -> InputFile:
        """Return the file at `path` as it is now; with its checksum, if it `sums`.

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
        sha256 = FileIdentity.of(path).sha256 if sums else ""
        return InputFile(path, status.st_size, status.st_mtime_ns, sha256)

    @property
    def partitions(self) -> dict[str, str | None]:
        """Columns that the names of the folders give, with their one value.

        >>> InputFile(Path("a.csv"), 1, 0, folders=("day=2026-01-01", "place=__HIVE_DEFAULT_PARTITION__")).partitions
        {'day': '2026-01-01', 'place': None}
        """
        pairs = ((unquote(each) for each in folder.split("=", 1)) for folder in (*self.above, *self.folders))
        return {name: None if value == _NO_PARTITION else value for name, value in pairs}

    def identity(self) -> FileIdentity:
        """Return what tells it from other files; its name has the folders."""
        found = FileIdentity.of(self.path)
        return found._replace(name="/".join((*self.folders, found.name)))

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
            if (status.st_size, status.st_mtime_ns) == (self.num_bytes, self.modified_ns):
                return
            is_same_size = status.st_size == self.num_bytes
            if self.sha256 and is_same_size and FileIdentity.of(self.path).sha256 == self.sha256:
                return  # it was only touched
        except OSError as error:
            raise DataError(os_problem(error, self.path)) from error
        now = f"has {status.st_size:,} now" if status.st_size != self.num_bytes else "was written to since"
        raise DataError(
            f"{self.path}: changed while it was read, at byte {place:,}: it had {self.num_bytes:,} bytes, and {now}. "
            f"Bring it back as it was{'' if self.sha256 else ', time of modification included'}, or start a new run"
        )


def natural_order(name: str) -> tuple[list[str | int], str]:
    """Return by what names of files are sorted as people do.

    >>> sorted(["part_10", "part_2"], key=natural_order)
    ['part_2', 'part_10']
    """
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)], name


def next_file(
    folder: Path, patterns: tuple[str, ...], known: Container[str], left_out: Mapping[str, Stamp] = MappingProxyType({})
) -> tuple[Path | None, dict[str, str]]:
    """Return that file of a folder whose name, in natural order, is the first one that is not known; None if there is
    none. And what matches a pattern and is no file, by name: why it is passed over.

    Names that begin with "." or "_" or end in ".tmp" or ".partial", and empty files, do not count: somebody writes
    them.

    Args:
        left_out: files that do not count, either, while they are as they were.

    >>> next_file(Path("."), ("*.csv",), known=())
    (None, {})

    Raises:
        DataError: the folder cannot be read.
    """
    names, others = list[str](), dict[str, str]()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name
                if name in known or name.startswith((".", "_")) or name.endswith(UNFINISHED):
                    continue
                if not fits(name, patterns):
                    continue
                status, problem = _status_of(entry)
                if problem:
                    others[name] = problem
                elif status is not None and status.st_size > 0 and left_out.get(name) != stamp_of(status):
                    names.append(name)
    except OSError as error:
        raise DataError(os_problem(error, folder)) from error
    return folder / min(names, key=natural_order) if names else None, others


def stamp_of(status: os.stat_result) -> Stamp:
    """Return the stamp of a file with this status."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _status_of(entry: os.DirEntry[str]) -> tuple[os.stat_result | None, str]:
    """Return the status of a file, else None; and what is wrong with an entry that is none."""
    try:
        status = entry.stat()
    except FileNotFoundError:  # without a link: its writer moved it
        return None, "a link to nothing" if entry.is_symlink() else ""
    except OSError as error:
        return None, error.strerror or type(error).__name__
    if stat.S_ISREG(status.st_mode):
        return status, ""
    return None, "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"


def files_at(
    path: str, patterns: tuple[str, ...], kind: str, *, in_turn: bool = False, sums: bool = False
) -> list[InputFile]:
    """Return the file at `path`, or the folder's files that are data (see `Listing`), by name; files that come
    `in_turn`, in natural order. `sums`: with checksums. Of kinds with named columns, folders that are called NAME=VALUE
    belong to the folder, and a `path` in one of them is a part, with its columns."""
    root = Path(path).expanduser()
    if not root.exists():
        raise DataError(f"{root}: no such file or folder; check data.path and data.eval_path{near_file(root)}")
    files = [root]
    if root.is_dir():
        listing = Listing.of(root, patterns, kind)
        files = listing.files
        if in_turn:
            files.sort(key=lambda p: natural_order(str(p.relative_to(root))))
        if not files:
            raise DataError(listing.problem)
    found = [InputFile.at(file, sums=sums) for file in files]
    above = _above(root) if kind in WITH_NAMES else ()
    return [replace(file, folders=_folders(file.path, root), above=above) for file in found]


def _folders(path: Path, root: Path) -> tuple[str, ...]:
    return path.relative_to(root).parts[:-1] if path != root else ()


def _above(root: Path) -> tuple[str, ...]:
    """Return the folders NAME=VALUE that a path is in, or is one of, from the outermost one on."""
    found = list[str]()
    for folder in [root.absolute(), *root.absolute().parents][0 if root.is_dir() else 1 :]:
        if "=" not in folder.name[1:]:
            break
        found.insert(0, folder.name)
    return tuple(found)


def left_out_of(config: DataConfig) -> tuple[str, ...]:
    """Return sentences that name what is in the folders of a config and is not read."""
    said = list[str]()
    for path, grows in ((config.path, config.follow), (config.eval_path, False)):
        if path is not None and (root := Path(path).expanduser()).is_dir():
            said += Listing.of(root, config.file_patterns, config.kind).sentences(grows=grows)
    return tuple(said)


def need_path(config: DataConfig) -> None:
    """Raise `ConfigError` where a source that reads files has no path, or one that follows a folder has none."""
    if config.kind != "synthetic" and config.path is None:
        raise ConfigError(f'data.kind = "{config.kind}" needs data.path: a file, or a folder of files')
    if config.follow and not Path(str(config.path)).expanduser().is_dir():
        raise ConfigError(f"data.path = {config.path!r}: no such folder; data.follow needs one, which may be empty")


def files_of(config: DataConfig) -> tuple[list[InputFile], list[InputFile]]:
    """Return the files of `data.path` and those of `data.eval_path`, each in the order of reading.

    Raises:
        DataError: there is nothing at a path, no file of a folder matches, or a file is empty or cannot be read.
    """
    pairs, patterns = ((config.path, config.comes_in_turn), (config.eval_path, False)), config.file_patterns
    kind, sums = config.kind, config.follow
    found = [[] if path is None else files_at(path, patterns, kind, in_turn=turn, sums=sums) for path, turn in pairs]
    return found[0], found[1]


def list_files(config: DataConfig) -> tuple[list[InputFile], list[float]]:
    """Return all data files of a config, and the share of each that is held out, at its end; see `files_of`."""
    files, held_out = files_of(config)
    return files + held_out, [config.held_out_share] * len(files) + [1.0] * len(held_out)


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
            for number in range(_NUM_SAMPLED):
                file.seek(max(number * _SAMPLED_BYTES, (size - _SAMPLED_BYTES) * number // (_NUM_SAMPLED - 1)))
                digest.update(file.read(_SAMPLED_BYTES))
        return cls(path.name, size, digest.hexdigest())


def identify_files(config: DataConfig) -> dict[str, list[FileIdentity]]:
    """Return the files of `data.path` and of `data.eval_path` as `files` and `eval_files`, in the order of reading. Of
    a folder that is followed, the journal has the files.

    >>> identify_files(DataConfig())
    {'files': [], 'eval_files': []}

    Raises:
        DataError: there is nothing at a path, no file of a folder matches, or a file is empty.
    """
    if config.follow:
        config = replace(config, path=None)
    files, held_out = ([file.identity() for file in files] for files in files_of(config))
    return {"files": files, "eval_files": held_out}
