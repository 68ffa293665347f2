"""`Source`, the protocol of all sources, and the work that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from threading import Lock
from typing import Generic, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from embershard.data.block import Block, ParsedChunk
from embershard.data.hashing import Ids
from embershard.data.order.order import ChunkTable
from embershard.data.schema import Schema

Split = Literal["train", "eval"]
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


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


class FileSource(ABC):
    """Base of sources that parse physical chunks of files as a whole, and keep the last few of them.

    Attributes:
        num_physical: number of the physical chunks.
        train_rows: int64 [num_physical], the first rows of each, which are to train on; the others are held out.
    """

    def __init__(self, schema: Schema, split: SplitChunks, num_kept: int, *, tolerates_bad_rows: bool) -> None:
        self.schema, self.num_physical, self.train_rows = schema, len(split.train_rows), split.train_rows
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
        return ()

    def read(self, split: Split, chunk: int, rows: Ids) -> Block:
        physical, first = self._split.place(split, chunk)
        stop = first + int(self._split.table(split).rows[chunk])
        return self._parsed.get(physical).take(first + rows, first, stop, replaces=split == "train")

    def _parse_checked(self, number: int) -> ParsedChunk:
        parsed = self.parse(number, self._most_bad)
        if parsed.bad and self._most_bad is not None:
            bad = parsed.bad[min(parsed.bad)]
            raise bad.error(str(bad))
        return parsed


class SplitChunks:
    """Assigns the rows of physical chunks, which are parsed as a whole, to the train or the eval split.

    The last `eval_fraction` of every file is held out. Where the border cuts a physical chunk, both splits have a
    chunk that refers to a part of it.

    Args:
        file: the file of every physical chunk.
        rows: its number of rows.
        eval_fraction: share of the rows, rounded to whole rows; one number per file.
    """

    def __init__(self, file: ArrayLike, rows: ArrayLike, eval_fraction: ArrayLike) -> None:
        owner, size = np.asarray(file, np.int64), np.asarray(rows, np.int64)
        share = np.asarray(eval_fraction, np.float64)
        total = np.bincount(owner, weights=size, minlength=len(share)).astype(np.int64)
        num_train = total - np.rint(total * share).astype(np.int64)
        before_file = np.cumsum(total) - total
        first = np.cumsum(size) - size - before_file[owner]
        cut = np.clip(num_train[owner] - first, 0, size)
        self.train_rows = cut
        self._parts = {"train": _part(owner, np.zeros_like(cut), cut), "eval": _part(owner, cut, size)}

    def table(self, split: Split) -> ChunkTable:
        return self._parts[split][0]

    def place(self, split: Split, chunk: int) -> tuple[int, int]:
        """Return the physical chunk of a split's chunk, and the row of it that is the chunk's row 0."""
        _, physical, first = self._parts[split]
        return int(physical[chunk]), int(first[chunk])


def _part(owner: Ids, first: Ids, end: Ids) -> tuple[ChunkTable, Ids, Ids]:
    keep = np.flatnonzero(end > first)
    return ChunkTable(owner[keep], (end - first)[keep]), keep, first[keep]


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
