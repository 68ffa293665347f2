"""`Source`, the protocol of all sources, and the work that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from embershard.data.block import BadRow, Block, ParsedChunk, no_good_row
from embershard.data.hashing import Ids
from embershard.data.order.order import ChunkTable
from embershard.data.sample_bits import Flags
from embershard.data.schema import Schema
from embershard.data.sources.held_out import HeldOut
from embershard.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

#: Samples to train on, and held-out ones. "ahead": those to train on, evaluated before their training, in time order.
Split = Literal["train", "eval", "ahead"]
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
#: Chunks of which the rows of a split are remembered: neighbouring batches of a rank often share a chunk.
_KEPT_MEMBERS = 8


class Source(Protocol):
    """Samples that can be read chunk by chunk, by several threads at a time.

    Sources know nothing of ranks, batches or order; `BatchStream` does.

    >>> from embershard.data import DataConfig, open_source
    >>> source = open_source(DataConfig())
    >>> source.read("train", chunk=0, rows=np.arange(5)).dense.shape
    (5, 13)
    """

    @property
    def schema(self) -> Schema:
        """The columns of a sample."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of these data, as sentences."""

    @property
    def held_out(self) -> HeldOut:
        """Which samples are held out."""

    def chunks(self, split: Split) -> ChunkTable:
        """Return the chunks of the split; none when nothing is held out and `split` is "eval"."""

    def read(self, split: Split, chunk: int, rows: Ids) -> Block:
        """Return the samples number `rows` of a chunk, in that order.

        Where bad rows are tolerated, another sample of the same split takes a bad row's place in training; in
        evaluation bad rows are left out. `Block.bad` names them.

        Raises:
            DataError: a file is damaged, or has changed; or a row is no sample, and none is tolerated. File, row and
                column are named.
        """


@runtime_checkable
class ColumnSource(Protocol):
    """A source whose samples have columns with names."""

    def held_out_columns(self, names: list[str]) -> Iterator[pa.Table]:
        """Return columns of the held-out samples, as `TableSource.columns`, in the order of the chunks."""


class GrowingSource(ABC):
    """Base of sources that get more samples to train on. Positions count the samples of all time, in one order."""

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Samples so far."""

    @abstractmethod
    def locate(self, start: int, stop: int) -> list[tuple[int, Ids]]:
        """Return the places of the samples at positions [start, stop), as `EpochOrder.locate` does."""

    @abstractmethod
    def state_at(self, position: int) -> dict[str, Any]:
        """Return what a checkpoint notes of the samples before a position, as JSON values by name."""

    @abstractmethod
    def check_state(self, checkpoint: Path, saved: dict[str, Any] | None) -> None:
        """Raise `CheckpointError` unless this source has what a checkpoint noted; None: it noted nothing."""

    @abstractmethod
    def has_window(self, start: int, stop: int) -> bool:
        """Return whether a window has its first sample at one of the positions [start, stop). Reads nothing."""

    @abstractmethod
    def windows_between(self, start: int, stop: int) -> Iterator[WindowAhead]:
        """Yield these windows."""


class FileSource(ABC):
    """Base of sources that parse physical chunks of files as a whole, and keep the last few of them.

    Attributes:
        num_physical: number of the physical chunks.
        held_out: which samples are held out.
    """

    def __init__(self, schema: Schema, split: SplitChunks, num_kept: int, *, tolerates_bad_rows: bool) -> None:
        self.schema, self.num_physical, self.held_out = schema, split.num_physical, split.held_out
        self._split, self._most_bad = split, None if tolerates_bad_rows else 1
        self._parsed = RecentlyUsed(self._parse_checked, num_kept)

    @abstractmethod
    def parse(self, number: int, most_bad: int | None = None) -> ParsedChunk:
        """Return samples and bad rows of a physical chunk; it may stop once it has found the first `most_bad`.

        Raises:
            DataError: the chunk cannot be read at all.
        """

    def chunks(self, split: Split) -> ChunkTable:
        return self._split.table(split)

    @property
    def notes(self) -> tuple[str, ...]:
        return self._split.notes

    def is_held_out(self, number: int) -> Flags:
        """Return for each row of a physical chunk whether it is held out."""
        return self._split.is_held_out(number)

    def read(self, split: Split, chunk: int, rows: Ids) -> Block:
        parsed, members, among = self.parsed(split, chunk)
        return parsed.take(members[rows], among, replaces=split == "train")

    def parsed(self, split: Split, chunk: int) -> tuple[ParsedChunk, Ids, Ids]:
        """Return the physical chunk of a split's chunk, and of it the chunk's rows and those that replace bad ones."""
        physical, members = self._split.place(split, chunk)
        parsed = self._parsed.get(physical)
        return parsed, members, self._split.replacements(chunk) if split == "train" and parsed.bad else members

    def _parse_checked(self, number: int) -> ParsedChunk:
        parsed = self.parse(number, self._most_bad)
        if parsed.bad and self._most_bad is not None:
            raise parsed.bad[min(parsed.bad)].stops()
        return parsed


class SplitChunks:
    """Assigns the rows of physical chunks, which are parsed as a whole, to the train or the eval split.

    A physical chunk with rows of both is a chunk of both; in time order, one with rows of several windows is a chunk of
    each of them.

    Args:
        file: the file of every physical chunk.
        rows: its number of rows.
        eval_fraction: share of the rows that is held out at the end of a file, rounded to whole rows; one number per
            file. It does not count where samples are chosen.
        held_out: which samples are held out.
    """

    def __init__(self, file: ArrayLike, rows: ArrayLike, eval_fraction: ArrayLike, held_out: HeldOut) -> None:
        owner, size = np.asarray(file, np.int64), np.asarray(rows, np.int64)
        self.held_out, self.num_physical, self._size = held_out, len(size), size
        self._starts = np.cumsum(size) - size
        if held_out.samples is None:
            share = np.asarray(eval_fraction, np.float64)
            total = np.bincount(owner, weights=size, minlength=len(share)).astype(np.int64)
            num_train = total - np.rint(total * share).astype(np.int64)
            first = self._starts - (np.cumsum(total) - total)[owner]
            self._train_rows = np.clip(num_train[owner] - first, 0, size)
            num_eval = size - self._train_rows
        else:
            if held_out.samples.num_samples != size.sum():
                raise DataError(f"the split is of {held_out.samples.num_samples} samples, and there are {size.sum()}")
            num_eval = np.array([self.is_held_out(number).sum() for number in range(len(size))], np.int64)
        windows = held_out.windows
        train = _part(owner, size - num_eval) if windows is None else (windows.table(owner), windows.part_chunk)
        self._parts = {"train": train, "eval": _part(owner, num_eval), "ahead": train}
        self._members = RecentlyUsed(self._find_members, _KEPT_MEMBERS)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know: which samples are held out, unless that is none or all."""
        num_eval, num_samples = self.table("eval").num_samples, int(self._size.sum())
        windows = () if self.held_out.windows is None else (self.held_out.windows.sentence(),)
        if self.held_out.samples is None and num_eval in (0, num_samples):
            return windows
        return (self.held_out.sentence(num_eval, num_samples), *windows)

    def is_held_out(self, number: int) -> Flags:
        """Return for each row of a physical chunk whether it is held out."""
        start, size = int(self._starts[number]), int(self._size[number])
        if self.held_out.samples is None:
            return np.arange(size) >= self._train_rows[number]
        return self.held_out.samples.between(start, start + size)

    def table(self, split: Split) -> ChunkTable:
        return self._parts[split][0]

    def place(self, split: Split, chunk: int) -> tuple[int, Ids]:
        """Return the physical chunk of a split's chunk, and the rows of it that are the chunk's rows, in order."""
        table, physicals = self._parts[split]
        physical, window = int(physicals[chunk]), None if table.window is None else int(table.window[chunk])
        return physical, self._members.get((physical, split == "eval", window))

    def replacements(self, chunk: int) -> Ids:
        """Return the rows, in order, that may take a bad one's place in a chunk to train on: in time order, those of
        earlier windows, too, since of its own there may be none."""
        physical, members = self.place("train", chunk)
        windows, table = self.held_out.windows, self.table("train")
        if windows is None or table.window is None:
            return members
        is_earlier = windows.of_rows[physical] <= table.window[chunk]
        return np.flatnonzero(np.broadcast_to(is_earlier, self._size[physical]))

    def need_replacements(self, number: int, bad: Mapping[int, BadRow]) -> None:
        """Raise `DataError` where nothing can take the place of a `bad` row to train on of a physical chunk."""
        is_bad = np.zeros(self._size[number], np.bool_)
        is_bad[np.fromiter(bad, np.int64, len(bad))] = True
        for chunk in np.flatnonzero(self._parts["train"][1] == number).tolist():
            found = (members := self.place("train", chunk)[1])[is_bad[members]]
            if len(found) and is_bad[among := self.replacements(chunk)].all():
                raise no_good_row(bad[int(found[0])], len(among))

    def _find_members(self, place: tuple[int, bool, int | None]) -> Ids:
        number, held_out, window = place
        is_member = self.is_held_out(number) == held_out
        if self.held_out.windows is not None and window is not None:
            is_member &= self.held_out.windows.of_rows[number] == window
        return np.flatnonzero(is_member)


@dataclass(frozen=True)
class WindowAhead:
    """A window of time that has not begun to train.

    Attributes:
        number: of the window, from 0.
        start: the time in UTC at which it begins.
        late: samples of it that are late.
        source: of its samples, as held-out ones.
    """

    number: int
    start: str
    late: int
    source: WindowSource


def windows_between(source: Source, start: int, stop: int, first_number: int = 0) -> Iterator[WindowAhead]:
    """Yield the windows whose first sample is at one of the positions [start, stop) of the order; none without time
    order.

    Args:
        first_number: of the first window of the source.
    """
    if (windows := source.held_out.windows) is None:
        return
    first, last = np.searchsorted(windows.firsts, [start, stop]).tolist()
    for window in range(first, last):
        late, of_window = int(windows.late[window]), WindowSource(source, window)
        yield WindowAhead(first_number + window, windows.name(window), late, of_window)


class WindowSource:
    """The samples of a window of time, before they train: all of them are "held out".

    Args:
        source: in time order.
    """

    def __init__(self, source: Source, window: int) -> None:
        self._source, chunks = source, source.chunks("train")
        assert chunks.window is not None, "the samples are in time order"
        first, last = np.searchsorted(chunks.window, [window, window + 1]).tolist()
        self._first, self._chunks = first, ChunkTable(chunks.file[first:last], chunks.rows[first:last])
        self.schema, self.notes, self.held_out = source.schema, source.notes, source.held_out

    def chunks(self, split: Split) -> ChunkTable:
        assert split == "eval"
        return self._chunks

    def read(self, split: Split, chunk: int, rows: Ids) -> Block:
        assert split == "eval"
        return self._source.read("ahead", self._first + chunk, rows)

    def held_out_columns(self, names: list[str]) -> Iterator[pa.Table]:
        chunks = range(self._first, self._first + len(self._chunks.rows))
        return self._source.columns("ahead", chunks, names)  # type: ignore[attr-defined,no-any-return]  # a table


def _part(owner: Ids, rows: Ids) -> tuple[ChunkTable, Ids]:
    keep = np.flatnonzero(rows)
    return ChunkTable(owner[keep], rows[keep]), keep


def in_threads(make: Callable[[K], T], items: Iterable[K], num_threads: int) -> Iterator[T]:
    """Yield what a function returns for each item, in order; threads are ahead by an item each.

    >>> list(in_threads(str, range(3), num_threads=2))
    ['0', '1', '2']
    """
    with ThreadPoolExecutor(num_threads, "embershard-data") as pool:
        ahead: deque[Future[T]] = deque()
        for item in items:
            ahead.append(pool.submit(make, item))
            if len(ahead) > num_threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


class RecentlyUsed(Generic[K, T]):
    """The last few results of a slow function, shared by threads.

    A thread that asks for a result that another thread is making waits for it, and does not make it again. An exception
    is raised, and not kept.
    """

    def __init__(self, make: Callable[[K], T], capacity: int) -> None:
        self._results = lru_cache(capacity)(lambda key: _Lazy(partial(make, key)))
        self._lock = Lock()

    def get(self, key: K) -> T:
        with self._lock:
            result = self._results(key)
        return result.get()


class _Lazy(Generic[T]):
    """The result of a function that is called when it is first asked for."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: list[T] = []
        self._lock = Lock()

    def get(self) -> T:
        with self._lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]
