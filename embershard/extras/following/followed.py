"""`FollowedSource`: a folder that grows, whose files train one after another, each in time order."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from embershard.data.block import BadRow, Block
from embershard.data.config import DataConfig
from embershard.data.hashing import Ids
from embershard.data.order.order import ChunkTable, EpochOrder, spans
from embershard.data.order.time_windows import NEVER
from embershard.data.schema import Schema
from embershard.data.sources.held_out import HeldOut
from embershard.data.sources.input_file import FileIdentity, InputFile, Stamp, left_out_of, need_path, next_file
from embershard.data.sources.source import GrowingSource, RecentlyUsed, Split, WindowAhead, windows_between
from embershard.data.sources.table.source import TableSource, check_table
from embershard.data.time_config import TimeConfig
from embershard.errors import CheckpointError, ConfigError, DataError, NoRowsError, naming_file, os_problem
from embershard.settings.decoding import decode
from embershard.whole_file import sync_folder, whole_file


@dataclass(frozen=True)
class JournalFile:
    """A file as it was when it was taken: a line of the journal.

    Attributes:
        name: in the folder.
        num_bytes: its size.
        modified_ns: its time of modification.
        sha256: of blocks of it, as `FileIdentity` has it.
        rows: its samples.
        windows: of time that it has rows of.
        first_window, last_window: the numbers of the first and the last of them; of a file without rows, of the last
            one before it. A late row counts in the newest window so far.
        bad: its rows that are no samples, where such are replaced.
    """

    name: str
    num_bytes: int
    modified_ns: int
    sha256: str
    rows: int
    windows: int
    first_window: int
    last_window: int
    bad: int = 0

    def digest_behind(self, digest: str) -> str:
        """Return a checksum of this file behind others, of which `digest` is that."""
        text = json.dumps([digest, self.name, self.num_bytes, self.sha256, self.rows])
        return hashlib.sha256(text.encode()).hexdigest()


class Journal:
    """A file with a line per followed file. One process appends to it, and cuts it where nothing has trained.

    A line that a crash cut short is dropped: nothing of its file has trained.

    Attributes:
        files: so far.

    Raises:
        DataError: a line is damaged.

    >>> journal = Journal(Path("files.jsonl"))
    >>> journal.append(JournalFile("part_0.csv", 120, 0, "5f", rows=9, windows=1, first_window=7, last_window=7))
    >>> [file.name for file in Journal(Path("files.jsonl")).files]
    ['part_0.csv']
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.files: list[JournalFile] = []
        with naming_file(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            whole, _, rest = (path.read_bytes() if path.exists() else b"").rpartition(b"\n")
            if rest:
                os.truncate(path, path.stat().st_size - len(rest))
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                self.files.append(decode(JournalFile, json.loads(line), DataError))
            except ValueError as error:
                raise DataError(
                    f"{path}:{number}: got {str(error)[:200]}, needed a file that was followed. Restore the journal, "
                    "or start a new run with another --run-dir"
                ) from error

    def append(self, file: JournalFile) -> None:
        """Note a file. When this returns, the note is on the disk."""
        is_new = not self._path.exists()
        with naming_file(self._path):
            with self._path.open("ab") as journal:
                journal.write(_line(file))
                journal.flush()
                os.fsync(journal.fileno())
            if is_new:
                sync_folder(self._path.parent)
        self.files.append(file)

    def cut(self, num_files: int) -> None:
        """Forget all files but the first ones: nothing of the others has trained."""
        self.files = self.files[:num_files]
        with whole_file(self._path) as partial:
            partial.write_bytes(b"".join(map(_line, self.files)))
        sync_folder(self._path.parent)


def _line(file: JournalFile) -> bytes:
    return json.dumps(asdict(file)).encode() + b"\n"


#: Files that are open at a time. Each keeps its newest chunks.
_MOST_OPEN = 3
#: Numbers of chunks: file times this, and the chunk in it.
_CHUNKS_PER_FILE = 1 << 32
#: A new file may take as long to be seen on another machine of a network file system.
_SEEN_SECONDS = 5.0


@dataclass(frozen=True, eq=False)
class Examined:
    """What the next file of a folder was found to be.

    Attributes:
        path: of the file.
        file, held_out: of one that can train: what the journal gets, and its windows.
        problem: why it cannot.
    """

    path: Path
    file: JournalFile | None = None
    held_out: HeldOut | None = None
    problem: DataError | None = None


class FollowedSource(GrowingSource):
    """The files of a folder that are in the journal, in its order; a `Source`.

    Positions count samples through all files. A file is **offered** when its samples may be read; until then, it is
    only known to be in the journal. Each is read by a `TableSource` of its own, which is opened when it is needed.

    Args:
        config: of a folder that is followed.
        files: in the journal.
        of_metrics: columns that evaluations need, too.

    Attributes:
        files: in the journal, by their numbers.

    Raises:
        ConfigError: `data.path` is no folder.
    """

    notes: tuple[str, ...]

    def __init__(self, config: DataConfig, files: Sequence[JournalFile], of_metrics: Sequence[str] = ()) -> None:
        need_path(config)
        self.folder = Path(str(config.path)).expanduser()
        self.schema: Schema = TableSource.schema_of(config)
        self._config, self._of_metrics = replace(config, eval_path=None), of_metrics
        self._forget_all()
        self._held_out_part = None
        how = f"every window of {config.time.window:,} s by {config.time.column}, but the first, until it trains"
        if config.eval_path is not None:
            alone = replace(config, path=config.eval_path, eval_path=None, eval_fraction=1.0, time=TimeConfig(),
                            follow=False, idle_seconds=None, bad_files="stop")  # fmt: skip
            self._held_out_part = TableSource(alone)
            how = f"all of {config.eval_path}"
        self.held_out = HeldOut(how)
        if not config.is_in_time_order:
            raise ConfigError("data.eval_fraction = 1 with data.follow; needed 0, or the default: nothing would train")
        behind = f", behind {len(files):,} files that the run's journal has" if files else ""
        self.notes = (f"Follows {self.folder}{behind}.", *left_out_of(config))
        for file in files:
            self._add(file)
        self.start_at(0)

    # -- which files there are

    def start_at(self, position: int) -> None:
        """Let files be offered anew: the next one is that with the sample at `position`."""
        self.num_files = self._first_kept = int(np.searchsorted(self._ends[1:], position, side="right"))
        self._kept: dict[int, HeldOut] = {}  # the windows of the files that were offered and are needed
        self._open = RecentlyUsed(self._open_file, _MOST_OPEN)
        self._orders = RecentlyUsed(self._make_order, _MOST_OPEN)

    @property
    def num_samples(self) -> int:
        """Samples of the files that were offered."""
        return int(self._ends[self.num_files])

    def find_next(self, left_out: Mapping[str, Stamp]) -> tuple[Path | None, dict[str, str]]:
        """Return the next file: of the journal or, when it has been offered, of the folder; None if there is none. And
        what was passed over, see `next_file`."""
        if self.num_files < len(self.files):
            return self.folder / self.files[self.num_files].name, {}
        return next_file(self.folder, self._config.file_patterns, self._names, left_out)

    def num_begun(self, position: int) -> int:
        """Return how many files have a sample before `position`."""
        return int(np.searchsorted(self._ends[:-1], position))

    def examine(self, path: Path, *, has_begun: bool) -> Examined:
        """Look into the next file, all of it, unless it `has_begun` to train: it is to be known before it is offered,
        or noted, that its samples can be read."""
        known = self.files[self.num_files] if self.num_files < len(self.files) else None
        try:
            return self._examine(path, known, is_checked=not has_begun)
        except OSError as error:
            problem = DataError(os_problem(error, path))
        except (DataError, ConfigError) as error:
            problem = error if isinstance(error, DataError) else DataError(str(error))
        return Examined(path, problem=problem)

    def _examine(self, path: Path, known: JournalFile | None, *, is_checked: bool) -> Examined:
        input_file = InputFile.at(path)
        identity = FileIdentity.of(path)
        if known is not None and identity != (known.name, known.num_bytes, known.sha256):
            is_same_size = identity.num_bytes == known.num_bytes
            now = "other ones" if is_same_size else f"{identity.num_bytes:,}"
            raise DataError(f"{path}: changed since it was taken: it had {known.num_bytes:,} bytes, and has {now} now")
        first = last = self.files[self.num_files - 1].last_window if self.num_files else NEVER
        rows, windows, bad, held_out = 0, 0, list[BadRow](), self.held_out
        try:
            if is_checked:
                check_table(self._config_of(path), [input_file], self._of_metrics)
            source = TableSource(self._config_of(path), newest=last)
            bad, held_out = source.check() if is_checked else [], source.held_out
            assert held_out.windows is not None, "in time order"
            rows, numbers = int(held_out.windows.part_rows.sum()), held_out.windows.numbers
            windows, first, last = len(numbers), int(numbers[0]), int(numbers[-1])
        except NoRowsError:
            pass
        input_file.check(0)
        if bad:
            self._check_share(bad, rows)
        num_bad = len(bad) if is_checked or known is None else known.bad
        place = (identity.name, identity.num_bytes, input_file.modified_ns, identity.sha256)
        found = JournalFile(*place, rows, windows, first, last, num_bad)
        if known is not None and replace(found, modified_ns=known.modified_ns, bad=known.bad) != known:
            raise DataError(f"{path}: the journal has {known}, and it is read as {found}. Set the settings back")
        return Examined(path, found, held_out)

    def _check_share(self, bad: list[BadRow], rows: int) -> None:
        """Raise `DataError` where with a file more than the share of all rows that `data.bad_rows` allows would be
        bad."""
        allowed, before = self._config.bad_rows, sum(file.bad for file in self.files[: self.num_files])
        of = int(self._ends[self.num_files]) + rows
        if isinstance(allowed, str) or before + len(bad) <= allowed * of:
            return
        enough = ceil(1e4 * (before + len(bad)) / of) / 1e4
        with_others = f", with those before {before + len(bad):,} of {of:,}," if before else ""
        raise DataError(
            f"{bad[0].path}: {len(bad):,} of {rows:,} rows are bad{with_others} and data.bad_rows = {allowed:g} allows "
            f"{allowed:.2%}. The first is {bad[0]}. To allow them: --set data.bad_rows={enough:g}"
        )

    def offer(self, file: JournalFile, held_out: HeldOut) -> None:
        """Let the samples of the next file be read."""
        if self.num_files == len(self.files):
            self._add(file)
        self.files[self.num_files] = file  # with its time of modification now
        self._kept[self.num_files] = held_out
        self.num_files += 1

    def drop_coming(self) -> None:
        """Forget the files that were not offered yet."""
        files = self.files[: self.num_files]
        self._forget_all()
        for file in files:
            self._add(file)

    def taken_again(self, file: JournalFile) -> str | None:
        """Return the name of an earlier file with samples and the same bytes as `file`; None if there is none."""
        first = self._first_of.get((file.num_bytes, file.sha256), file.name)
        return None if first == file.name or not file.rows else first

    def changed(self, numbers: Iterable[int]) -> list[str]:
        """Return the names of those of these files, all of whose samples have trained, that have other bytes now. Sizes
        and times tell; what was only touched is noted."""
        found = list[str]()
        for number in numbers:
            noted, path = self.files[number], self.folder / self.files[number].name
            try:
                status = path.stat()
                if (status.st_size, status.st_mtime_ns) == (noted.num_bytes, noted.modified_ns):
                    continue
                if FileIdentity.of(path) != (noted.name, noted.num_bytes, noted.sha256):
                    found.append(noted.name)
                    continue
            except OSError:  # it may go
                continue
            self.files[number] = replace(noted, modified_ns=status.st_mtime_ns)
        return found

    @property
    def num_trained(self) -> int:
        """Files that `forget` dropped, or `start_at` passed."""
        return self._first_kept

    def forget(self, position: int) -> None:
        """Drop what is kept of files whose samples are all before `position`."""
        while self._first_kept < self.num_files and self._ends[self._first_kept + 1] <= position:
            self._kept.pop(self._first_kept, None)
            self._first_kept += 1

    # -- a source

    def chunks(self, split: Split) -> ChunkTable:
        if split == "eval":
            nothing = np.empty(0, np.int64)
            return ChunkTable(nothing, nothing) if self._held_out_part is None else self._held_out_part.chunks(split)
        return ChunkTable(np.arange(len(self.files)), np.diff(self._ends))

    def read(self, split: Split, chunk: int, rows: Ids) -> Block:
        if split == "eval":
            assert self._held_out_part is not None, "nothing is held out"
            return self._held_out_part.read(split, chunk, rows)
        file, of_file = divmod(chunk, _CHUNKS_PER_FILE)
        return self._open.get(file).read(split, of_file, rows)

    def held_out_columns(self, names: list[str]) -> Iterator[pa.Table]:
        """Return columns of the samples of `data.eval_path`; nothing without it."""
        return iter(()) if self._held_out_part is None else self._held_out_part.held_out_columns(names)

    def locate(self, start: int, stop: int) -> list[tuple[int, Ids]]:
        ends = self._ends
        return [
            (file * _CHUNKS_PER_FILE + chunk, rows)
            for file, first, last in spans(ends[1:], np.diff(ends), start, stop)
            for chunk, rows in self._orders.get(file).locate(first, last)
        ]

    def has_window(self, start: int, stop: int) -> bool:
        """Return whether a window has its first sample at one of the positions [start, stop)."""
        return any(
            np.ptp(np.searchsorted(windows.firsts, [start - begin, stop - begin])) > 0
            for file, begin in self._files_between(start, stop)
            if (windows := self._kept[file].windows) is not None
        )

    def windows_between(self, start: int, stop: int) -> Iterator[WindowAhead]:
        """Yield the windows of each file whose first sample is at one of the positions [start, stop)."""
        for file, begin in self._files_between(start, stop):
            number = int(self._windows[file])
            yield from windows_between(self._open.get(file), start - begin, stop - begin, number)

    def _files_between(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the files that have samples at positions [start, stop), and the position of the first sample of each:
        of those that were offered and not forgotten."""
        first, last = int(np.searchsorted(self._ends[1:], start, "right")), int(np.searchsorted(self._ends[:-1], stop))
        for file in range(max(first, self._first_kept), min(last, self.num_files)):
            begin, end = self._ends[file : file + 2].tolist()
            if begin < end:
                yield file, begin

    # -- what a checkpoint needs

    def state_at(self, position: int) -> dict[str, Any]:
        """Return how many files have a sample before `position`, and their checksum."""
        num_files = self.num_begun(position)
        return {"files": num_files, "sha256": self._digests[num_files]}

    def check_state(self, checkpoint: Path, saved: dict[str, Any] | None) -> None:
        """Raise `CheckpointError` unless the journal begins with the files that trained before a checkpoint."""
        num_files = 0 if saved is None else int(saved["files"])
        if saved is None or num_files > len(self.files) or self._digests[num_files] != saved["sha256"]:
            raise CheckpointError(
                f"{checkpoint} was saved after {num_files:,} files of a folder, and the journal of this run has "
                f"{len(self.files):,}, or others. Resume with the run's own files.jsonl."
            )

    # -- files

    def _forget_all(self) -> None:
        self.files: list[JournalFile] = []
        self._ends, self._windows = np.zeros((2, 1), np.int64)  # of all files up to each, from none on
        self._digests = [""]
        self._names = set[str]()
        self._first_of: dict[tuple[int, str], str] = {}  # names by size and checksum

    def _add(self, file: JournalFile) -> None:
        self.files.append(file)
        self._names.add(file.name)
        if file.rows:
            self._first_of.setdefault((file.num_bytes, file.sha256), file.name)
        self._ends = np.append(self._ends, self._ends[-1] + file.rows)
        self._windows = np.append(self._windows, self._windows[-1] + file.windows)
        self._digests.append(file.digest_behind(self._digests[-1]))

    def _config_of(self, path: Path) -> DataConfig:
        return replace(self._config, path=str(path))

    def _open_file(self, file: int) -> TableSource:
        noted = self.files[file]
        as_noted = InputFile(self.folder / noted.name, noted.num_bytes, noted.modified_ns, noted.sha256)
        ends_at = time.monotonic() + _SEEN_SECONDS
        while not as_noted.path.exists() and time.monotonic() < ends_at:
            time.sleep(0.1)
        as_noted.check(0)
        opened = TableSource(self._config_of(as_noted.path), share=lambda _: self._kept[file])
        as_noted.check(0)
        return opened

    def _make_order(self, file: int) -> EpochOrder:
        chunks, config = self._open.get(file).chunks("train"), self._config
        return EpochOrder(chunks, seed=config.seed, epoch=file, shuffle=config.shuffle, window=config.shuffle_window)
