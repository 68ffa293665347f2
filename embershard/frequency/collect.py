"""One pass over the data, in parts that may be counted anywhere and are put together in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embershard.errors import IdOutOfRangeError
from embershard.frequency.compare import measure_drift
from embershard.frequency.counts import RowCounter, RowCounts, bound_memory, sum_counts
from embershard.frequency.downsampling import SampledRows, TraceBuilder
from embershard.frequency.statistics import DataStatistics, Ints, SampledTrace, TableStatistics, TableTrace
from embershard.frequency.summary import padded_sum, summarize_table

#: Numbers of consecutive samples in which distinct rows are counted.
WINDOWS = (256, 1024, 4096, 16384, 65536)
#: Memory that a distinct row takes while counts are merged.
BYTES_PER_ROW = 48


@dataclass(frozen=True, eq=False)
class TablePart:
    """One table's lookups in a part.

    Attributes:
        counts: of its rows.
        bag_counts: int64 [longest + 1] samples with so many lookups.
        window_rows: int64 [K] distinct rows, summed over the part's whole windows of each size in `WINDOWS`.
        trace: lookups of the rows that are sampled; samples counted from the part's first, and maybe of a narrower
            type.
    """

    counts: RowCounts
    bag_counts: Ints
    window_rows: Ints
    trace: TableTrace


@dataclass(frozen=True, eq=False)
class CountedSamples:
    """Consecutive samples; `read_seconds` of a core were spent to read and parse them."""

    num_samples: int
    tables: tuple[TablePart, ...]
    read_seconds: float = 0.0


def count_part(
    num_rows: Sequence[int],
    rows: Iterable[Ints],
    bag_sizes: Sequence[int | NDArray[np.integer]],
    num_samples: int,
    sampled: SampledRows | None = None,
    read_seconds: float = 0.0,
) -> CountedSamples:
    """Count the lookups of every table in consecutive samples.

    Args:
        num_rows: rows of every table.
        rows: int64 [M] lookups of every table, sample after sample.
        bag_sizes: for every table the lookups of every sample [num_samples], or one number for all.
        num_samples: samples of the part.
        sampled: rows to put into the trace; others may be in it.
        read_seconds: see `CountedSamples`.

    Raises:
        IdOutOfRangeError: a lookup is not of a row of its table.
    """
    sampled = sampled or SampledRows()
    tables = tuple(
        _count_table(number, *table, num_samples, sampled)
        for number, table in enumerate(zip(num_rows, rows, bag_sizes, strict=True))
    )
    return CountedSamples(num_samples, tables, read_seconds)


def _count_table(
    number: int, num_rows: int, rows: Ints, bag_sizes: int | NDArray[np.integer], num_samples: int, sampled: SampledRows
) -> TablePart:
    bag_counts, samples = _bags(bag_sizes, num_samples)
    if not len(rows):
        return TablePart(RowCounts.none(), bag_counts, np.zeros(len(WINDOWS), np.int64), TableTrace(rows, rows))
    bits = max(1, (len(rows) - 1).bit_length())
    if rows.min() < 0 or int(rows.max()) >> (62 - bits):
        places = np.argsort(rows, kind="stable")
        ordered = rows[places]
    else:  # several times as fast as a stable argsort
        keys = np.sort(rows << bits | np.arange(len(rows)))
        ordered, places = keys >> bits, keys & ((1 << bits) - 1)
    if ordered[0] < 0 or ordered[-1] >= num_rows:
        bad = ordered[0] if ordered[0] < 0 else ordered[-1]
        raise IdOutOfRangeError(f"table {number}: id {bad} is not in [0, {num_rows}); check the id mapping")
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 1))
    counts = RowCounts(ordered[starts], np.diff(starts, append=len(ordered)))
    windows = np.array([_distinct_in_windows(samples[places], starts, size, num_samples) for size in WINDOWS])
    trace = TableTrace(samples, rows)
    if not sampled.takes_all:
        kept = np.sort(places[np.repeat(sampled.mask(number, counts.rows), counts.hits)])
        trace = TableTrace(samples[kept], rows[kept])
    return TablePart(counts, bag_counts, windows, trace)


def _bags(bag_sizes: int | NDArray[np.integer], num_samples: int) -> tuple[Ints, NDArray[Any]]:
    """Return the samples by the size of their bags, and the sample of every lookup."""
    numbers = np.arange(num_samples, dtype=np.int32)
    if isinstance(bag_sizes, int):
        counts = np.zeros(bag_sizes + 1, np.int64)
        counts[bag_sizes] = num_samples
        return counts, numbers if bag_sizes == 1 else np.repeat(numbers, bag_sizes)
    return np.bincount(bag_sizes, minlength=1), np.repeat(numbers, bag_sizes)


def _distinct_in_windows(samples: NDArray[np.integer], starts: Ints, size: int, num_samples: int) -> int:
    """Return the distinct rows, summed over whole windows.

    A lookup is its row's first in a window when the one before it, of the same row, lies in another window. `samples`
    are in the order of their rows, whose first places are `starts`.
    """
    whole = num_samples // size
    if not whole:
        return 0
    window = samples // size
    is_first = np.empty(len(window), bool)
    np.not_equal(window[1:], window[:-1], out=is_first[1:])
    is_first[starts] = True
    if num_samples % size:
        is_first &= window < whole
    return int(np.count_nonzero(is_first))


@dataclass(frozen=True, eq=False)
class Collected:
    """All parts together. `halves` are the counts of every other part, where they were asked for."""

    statistics: DataStatistics
    counts: Mapping[str, RowCounts]
    halves: tuple[Mapping[str, RowCounts], Mapping[str, RowCounts]] | None


class Collector:
    """Puts parts together, in the order of training.

    The result depends on the parts alone, not on the `sampled` that they were counted with.

    Args:
        num_rows: rows of every table, by name, in the model's order.
        max_lookups: most lookups to keep in the trace.
        memory_bytes: rough limit of the counts' memory; the rarest rows are forgotten to stay below it.
        in_halves: count every other part on its own, so that the halves can be compared.
    """

    def __init__(
        self, num_rows: Mapping[str, int], *, max_lookups: int, memory_bytes: int, in_halves: bool = False
    ) -> None:
        self._num_rows = dict(num_rows)
        self._max_rows = max(1, memory_bytes // BYTES_PER_ROW)
        self._halves = [[RowCounter() for _ in num_rows] for _ in range(2 if in_halves else 1)]
        self._bags = [np.zeros(1, np.int64) for _ in num_rows]
        self._windows = np.zeros((len(num_rows), len(WINDOWS)), np.int64)
        self._num_windows = np.zeros(len(WINDOWS), np.int64)
        self._trace = TraceBuilder(list(num_rows), max_lookups)
        self.num_parts = 0
        self._read_seconds = 0.0

    @property
    def sampled(self) -> SampledRows:
        """Rows that the next part's trace needs at most."""
        return self._trace.sampled

    def add(self, part: CountedSamples) -> None:
        counters = self._halves[self.num_parts % len(self._halves)]
        for number, (counter, table) in enumerate(zip(counters, part.tables, strict=True)):
            counter.add(table.counts)
            self._bags[number] = padded_sum([self._bags[number], table.bag_counts])
            self._windows[number] += table.window_rows
        bound_memory([counter for half in self._halves for counter in half], self._max_rows)
        self._num_windows += part.num_samples // np.array(WINDOWS)
        self.num_parts += 1
        self._read_seconds += part.read_seconds
        self._trace.add([table.trace for table in part.tables], part.num_samples)
        if self._trace.is_too_long:
            self._trace.downsample(self._totals())

    def finish(self, *, share_of_samples: float = 1.0, origin: str = "") -> Collected:
        """Return the statistics and counts of all parts."""
        names, samples, counts = list(self._num_rows), self._trace.num_samples, self._totals()
        trace = self._trace.finish(counts)
        statistics = DataStatistics(
            num_samples=samples,
            share_of_samples=share_of_samples,
            tables={name: self._table(number, counts[number], trace) for number, name in enumerate(names)},
            trace=trace,
            drift=measure_drift(trace),
            read_seconds_per_sample=self._read_seconds / samples if samples and self._read_seconds else None,
            origin=origin,
        )
        halves = None
        if len(self._halves) == 2:
            first, second = ({name: c.total() for name, c in zip(names, half, strict=True)} for half in self._halves)
            halves = first, second
        return Collected(statistics, dict(zip(names, counts, strict=True)), halves)

    def _table(self, number: int, counts: RowCounts, trace: SampledTrace) -> TableStatistics:
        counters = [half[number] for half in self._halves]
        found = zip(WINDOWS, self._windows[number], self._num_windows, strict=True)
        return summarize_table(
            *list(self._num_rows.items())[number],
            counts,
            num_lookups=sum(counter.num_lookups for counter in counters),
            undercount=sum(counter.undercount for counter in counters),
            bags=self._bags[number],
            windows={size: rows / windows for size, rows, windows in found if windows},
            num_samples=self._trace.num_samples,
            trace=trace,
        )

    def _totals(self) -> list[RowCounts]:
        return [sum_counts([counter.total() for counter in same]) for same in zip(*self._halves, strict=True)]
