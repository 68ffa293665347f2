"""Samples that are held out, or put in time order, by the values of columns: one pass over these columns, in bounded
memory.

Memory: a bit per sample, 24 bytes per distinct value of `data.split_column` (about four times as many while values are
sorted), and 64 MiB or so for times. In time order, that of `TimeWindows`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embershard.data.config import DataConfig, TableConfig, TableFeature, columns_of_files
from embershard.data.hashing import Ids, make_key, random_words, unit_floats
from embershard.data.sample_bits import Flags, SampleBits
from embershard.data.sources.held_out import HeldOut
from embershard.data.sources.source import in_threads
from embershard.data.sources.table.decode import ChunkDecoder
from embershard.data.sources.table.raw import TableFiles, check_types, is_list, need_columns
from embershard.errors import DataError

Numbers = NDArray[Any]
#: Values are told apart by 63 bits of their hash as texts; 0 is a missing one.
_NUM_HASHES = 2**63 - 1
_HASHES = 11  # a stream of random words of its own
#: Samples that wait before they are sorted in, and the most distinct times that are counted.
_WAITING, _MOST_TIMES = 1 << 20, 1 << 21


def hold_out_by_column(config: DataConfig, files: TableFiles) -> HeldOut:
    """Return which samples of `files` are held out by `data.split` "hash", "time" or "last".

    Samples without a value in the columns, and bad rows, are to train on.

    Raises:
        DataError: a file cannot be read, or has not the columns; a row is bad, or more than `data.bad_rows` are; or
            nothing would be held out, or nothing left to train on.
    """
    columns = _SplitColumns(config, files)
    find = {"hash": _by_hash, "time": _latest, "last": _last_of_each}[config.split]
    how, samples = find(columns)
    if not 0 < samples.count < samples.num_samples:
        others = {"hash": ", data.eval_fraction or data.split_seed", "time": ", or data.eval_fraction", "last": ""}
        raise DataError(
            f'data.split = "{config.split}": got {samples.count:,} of {samples.num_samples:,} samples to hold out '
            f"({how}); needed some, and others to train on. Choose another column{others[config.split]}"
        )
    if columns.num_without:
        how += f" ({columns.num_without:,} rows have no such value, and are to train on)"
    return HeldOut(how, samples)


def in_windows(config: DataConfig, files: TableFiles, chunks: Ids, newest: int | None = None) -> HeldOut:
    """Return the windows of the samples of some `chunks`, the others of which are held out.

    A bad row without a time is in the window of the row before it: the place of a bad row is that of another sample.

    Args:
        newest: the newest window of the files before.

    Raises:
        DataError: as `hold_out_by_column`; or there are too few windows, or too many.
    """
    from embershard.data.order.time_windows import NEVER, TimeWindows

    columns, time = _SplitColumns(config, files, chunks), config.time
    assert time.column is not None, "samples are in time order"
    assert time.window is not None, "it was checked"
    numbers = _filled((found, np.floor(found.seconds / time.window).astype(np.int64)) for found in columns.chunks())
    how = f"every window of {time.window:,} s by {time.column}, but the first, until it trains"
    if config.eval_path is not None:
        how = f"all of {config.eval_path}"
    newest = NEVER if config.follow and newest is None else newest
    where, in_turn = (chunks.tolist(), files.chunk_file[chunks]), config.comes_in_turn
    windows = TimeWindows.of(*where, numbers, time.window, in_turn=in_turn, newest=newest)
    return HeldOut(how, windows=windows)


def _filled(chunks: Iterator[tuple[_Values, Ids]]) -> Iterator[Ids]:
    """Yield the numbers of all rows of each chunk from those of the rows that have one: the others have that of the row
    before them, and at the start that of the first one that has it."""
    waiting, last = list[int](), None
    for found, numbers in chunks:
        if not len(numbers):
            if last is None:
                waiting.append(found.num_rows)
            else:
                yield np.full(found.num_rows, last)
            continue
        yield from (np.full(num_rows, numbers[0]) for num_rows in waiting)
        waiting, last = [], numbers[-1]
        if len(numbers) == found.num_rows:
            yield numbers
            continue
        places = np.searchsorted(found.rows, np.arange(found.num_rows), side="right") - 1
        yield numbers[np.maximum(places, 0)]


def check_split(config: DataConfig, path: Path, names: Sequence[str], schema: pa.Schema | None = None) -> None:
    """Raise `DataError` where a file has not the columns that decide what is held out.

    Args:
        names: of the file's columns.
        schema: types of its columns; None: all are texts.
    """
    need_columns(path, names, columns := _columns(config))
    if schema is None:
        return
    features = {name: TableFeature("sparse", num_rows=2) for name in columns}
    if (time := _time_column(config)) in columns:
        features[time] = TableFeature("sparse", mapping="hour")
    check_types(path, pa.schema([schema.field(name) for name in columns]), TableConfig(features))
    if config.split_column in columns and is_list(kind := schema.field(config.split_column).type):
        raise DataError(f"{path}: column {config.split_column!r} is of type {kind}; needed one value in each row")


def _time_column(config: DataConfig) -> str | None:
    return config.time.column if config.is_in_time_order else config.split_time


def _columns(config: DataConfig) -> list[str]:
    if config.time.column is not None and config.is_in_time_order:
        return [config.time.column]
    decides = config.eval_fraction not in (0, 1)  # else nothing is held out, or all is
    names = dict.fromkeys((config.split_column, config.split_time))
    return [name for name in names if name is not None and decides]


@dataclass(frozen=True)
class _Values:
    """What rows of a chunk have in the columns.

    Attributes:
        rows: int64 [n], the numbers in the chunk, ascending, of the rows that have a value.
        hashes: int64 [n], above 0, of their values of `data.split_column`; zeros without it.
        seconds: [n], their times since 1970, -inf for a missing one; zeros without times.
        num_rows: of the chunk.
        num_bad: rows of it that have no cells, or none that can be read.
    """

    rows: Ids
    hashes: Ids
    seconds: NDArray[np.float64]
    num_rows: int
    num_bad: int

    def flags(self, is_held_out: Flags) -> Flags:
        """Return whether each row of the chunk is held out, from that of the `rows`."""
        found = np.zeros(self.num_rows, np.bool_)
        found[self.rows] = is_held_out
        return found


class _SplitColumns:
    """The columns that decide.

    Args:
        chunks: those to read; None: all.

    Attributes:
        num_without: rows without a value, bad ones included, of the chunks that were yielded.
    """

    def __init__(self, config: DataConfig, files: TableFiles, chunks: Ids | None = None) -> None:
        self.config, self._files, self._columns = config, files, _columns(config)
        self._chunks = np.arange(len(files.chunk_rows)) if chunks is None else chunks
        self._time = _time_column(config)
        files.need(self._columns)
        self.sizes, self.num_samples = files.chunk_rows, int(files.chunk_rows[self._chunks].sum())
        self.num_threads = len(os.sched_getaffinity(0))  # other ranks wait
        self.num_without = 0

    def chunks(self) -> Iterator[_Values]:
        """Yield the values of all chunks, in order; threads read ahead."""
        num_bad, allowed = 0, self.config.bad_rows
        names = ("data.time", "data.time.column") if self.config.is_in_time_order else ("data.split", "data.split_time")
        for found in in_threads(self.read, self._chunks.tolist(), self.num_threads):
            self.num_without += found.num_rows - len(found.rows)
            num_bad += found.num_bad
            yield found
        if num_bad == self.num_samples > 0 and self._time in self._columns:
            raise DataError(
                f"{names[1]} = {self._time!r}: no row has a time there. Needed a column of times, or of numbers that "
                "rise with time"
            )
        if not isinstance(allowed, str) and not self.config.follow and num_bad > allowed * self.num_samples:
            raise DataError(
                f"{names[0]}: {num_bad:,} of {self.num_samples:,} rows have no {' and '.join(self._columns)} that can "
                f"be read; data.bad_rows = {allowed:g} allows {allowed:.2%}"
            )

    def read(self, chunk: int) -> _Values:
        """Return the values of a chunk."""
        config = self.config
        raw = self._files.read(chunk, self._columns)
        check_split(config, raw.path, raw.table.schema.names, raw.table.schema)
        decoder, count = ChunkDecoder(raw, columns_of_files(config)), raw.table.num_rows
        hashes, seconds, has_value = np.zeros(count, np.int64), np.zeros(count), np.ones(count, np.bool_)
        if config.split_column is not None:
            feature = TableFeature("sparse", config.split_column, num_rows=_NUM_HASHES)
            hashes, _ = decoder.bags(feature, (1, ""))
            has_value &= hashes != 0
        if self._time is not None:
            seconds = decoder.seconds(self._time)
            is_missing = np.isnan(seconds)
            if config.is_in_time_order:
                needed = "needed a time in every row, by data.time.column"
                decoder.note(is_missing & decoder.is_sample, self._time, np.full(count, "nothing"), needed)
            seconds = np.where(is_missing, -np.inf, seconds)
            has_value &= ~is_missing if config.split == "time" or config.is_in_time_order else True
        if decoder.bad:
            if config.bad_rows == "stop":
                raise decoder.bad[min(decoder.bad)].stops()
            has_value &= decoder.is_sample
        return _Values(
            raw.places[has_value],
            hashes[has_value],
            seconds[has_value],
            int(self.sizes[chunk]),
            len(decoder.bad),
        )


_Found = tuple[str, SampleBits]


def _by_hash(columns: _SplitColumns) -> _Found:
    config, values = columns.config, _LastOfEach()
    key = make_key(config.split_seed, _HASHES)

    def is_held_out(hashes: Ids) -> Flags:
        return unit_floats(random_words(key, hashes)) < config.eval_fraction

    def flags() -> Iterator[Flags]:
        for found in columns.chunks():
            values.add(found.hashes, found.seconds, found.rows)
            yield found.flags(is_held_out(found.hashes))

    samples = SampleBits.of(flags())
    distinct, *_ = values.finish()
    taken = int(is_held_out(distinct).sum())
    what = f"all samples of {taken:,} of {len(distinct):,} values of {config.split_column}"
    return f"{what}, by their hash (data.split_seed {config.split_seed})", samples


def _last_of_each(columns: _SplitColumns) -> _Found:
    config, values, start = columns.config, _LastOfEach(), 0
    for found in columns.chunks():
        values.add(found.hashes, found.seconds, found.rows + start)
        start += found.num_rows
    distinct, _, numbers = values.finish()
    by_time = "" if config.split_time is None else f", by {config.split_time}"
    what = f"the last sample of each of {len(distinct):,} values of {config.split_column}{by_time}"
    return what, SampleBits.at(numbers, columns.num_samples)


def _latest(columns: _SplitColumns) -> _Found:
    times, spans = _TimeCounts(), list[tuple[float, float]]()
    for found in columns.chunks():
        times.add(found.seconds, np.ones(len(found.rows), np.int64))
        is_whole = len(found.rows) == found.num_rows
        least = found.seconds.min(initial=np.inf) if is_whole else -np.inf
        spans.append((least, found.seconds.max(initial=-np.inf)))
    start = times.start_of_last(columns.config.eval_fraction)

    def flags(chunk: int) -> Flags:
        least, most = spans[chunk]
        if start <= least or most < start:  # all rows of the chunk are on one side
            return np.full(columns.sizes[chunk], start <= least)
        found = columns.read(chunk)
        return found.flags(found.seconds >= start)

    samples = SampleBits.of(in_threads(flags, range(len(spans)), columns.num_threads))
    return f"from {np.datetime64(start, 's')} UTC on ({columns.config.split_time})".replace("T", " ", 1), samples


class _Gathered(ABC):
    """Columns of numbers, a row per sample. Whenever as many new rows wait as were left before, all are joined."""

    def __init__(self, *columns: Numbers) -> None:
        self._columns: tuple[Numbers, ...] = columns
        self._waiting: list[tuple[Numbers, ...]] = []
        self._num_waiting = 0

    @abstractmethod
    def join(self, *columns: Numbers) -> tuple[Numbers, ...]:
        """Return fewer rows, which say the same."""

    def add(self, *columns: Numbers) -> None:
        """Add samples that come after those before."""
        self._waiting.append(columns)
        self._num_waiting += len(columns[0])
        if self._num_waiting > max(_WAITING, len(self._columns[0])):
            self.finish()

    def finish(self) -> tuple[Numbers, ...]:
        """Return the columns of what is left."""
        self._columns = self.join(*map(np.concatenate, zip(self._columns, *self._waiting, strict=True)))
        self._waiting, self._num_waiting = [], 0
        return self._columns


class _LastOfEach(_Gathered):
    """Hashes, seconds and numbers of samples: of each hash the latest one, of several at one time the last one."""

    def __init__(self) -> None:
        super().__init__(np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64))

    def join(self, *columns: Numbers) -> tuple[Numbers, ...]:
        hashes, seconds, _ = columns
        order = np.lexsort((seconds, hashes))  # equal ones stay in their order
        last = order[np.flatnonzero(np.diff(hashes[order], append=0))]
        return tuple(column[last] for column in columns)


class _TimeCounts(_Gathered):
    """Counts of samples by their time: in whole seconds or, of more than `_MOST_TIMES`, in 2, 4, 8 ... seconds."""

    def __init__(self) -> None:
        super().__init__(np.empty(0, np.int64), np.empty(0, np.int64))
        self._width = 1

    def join(self, *columns: Numbers) -> tuple[Numbers, ...]:
        times, counts = columns
        while True:
            times, places = np.unique(np.floor(times / self._width).astype(np.int64), return_inverse=True)
            counts = np.bincount(places, counts, minlength=len(times)).astype(np.int64)
            times = times * self._width
            if len(times) <= _MOST_TIMES:
                return times, counts
            self._width *= 2

    def start_of_last(self, share: float) -> int:
        """Return the time in seconds from which on about this share of the samples lie; some lie before it where there
        are two times."""
        times, counts = self.finish()
        before = np.cumsum(counts)[:-1]
        if not len(before):
            return int(times[0]) if len(times) else 0
        return int(times[1 + np.argmin(np.abs(before - (1 - share) * counts.sum()))])
