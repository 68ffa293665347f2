"""Numbers of lookups of the rows that occur, in memory that does not grow without bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from embershard.frequency.statistics import CountHistogram, Ints


@dataclass(frozen=True, eq=False)
class RowCounts:
    """The rows of a table that occur.

    Attributes:
        rows: int64 [R] ascending.
        hits: int64 [R] lookups of each, above 0.
    """

    rows: Ints
    hits: Ints

    @classmethod
    def none(cls) -> RowCounts:
        return cls(np.empty(0, np.int64), np.empty(0, np.int64))

    @classmethod
    def of_rows(cls, rows: Ints) -> RowCounts:
        """Count lookups [M] in any order."""
        return cls(*np.unique(rows, return_counts=True))

    @classmethod
    def of_dense(cls, counts: Tensor) -> RowCounts:
        """Take the counts of all rows [R], in order."""
        rows = counts.nonzero().view(-1)
        return cls(rows.numpy(), counts[rows].long().numpy())

    @classmethod
    def of_shards(cls, shards: Iterable[tuple[RowCounts, int]]) -> RowCounts:
        """Join shards, each with its number of rows: the rows of a shard follow those of the shards before it."""
        rows, hits, first = [], [], 0
        for shard, num_rows in shards:
            rows.append(shard.rows + first)
            hits.append(shard.hits)
            first += num_rows
        return cls(np.concatenate(rows), np.concatenate(hits)) if rows else cls.none()

    @property
    def num_lookups(self) -> int:
        return int(self.hits.sum())

    def hits_of(self, rows: Ints) -> Ints:
        """Return the lookups [M] of these rows [M]: 0 where a row does not occur."""
        if not len(self.rows):
            return np.zeros(len(rows), np.int64)
        places = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        return np.where(self.rows[places] == rows, self.hits[places], 0)

    def at_least(self, hits: float) -> RowCounts:
        """Return only the rows with so many lookups."""
        kept = self.hits >= hits
        return RowCounts(self.rows[kept], self.hits[kept])

    def between(self, start: int, num_rows: int) -> RowCounts:
        """Return the counts of the rows [start, start + num_rows), numbered from `start`."""
        low, high = np.searchsorted(self.rows, (start, start + num_rows))
        return RowCounts(self.rows[low:high] - start, self.hits[low:high])

    def without(self, rows: Ints) -> RowCounts:
        """Return the counts of all other rows than these [M], in any order."""
        kept = np.ones(len(self.rows), bool)
        if len(self.rows):
            places = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
            kept[places[self.rows[places] == rows]] = False
        return RowCounts(self.rows[kept], self.hits[kept])

    def top(self, num_rows: int) -> Ints:
        """Return the most frequent rows, the most frequent first; of equally frequent rows the first."""
        if not 0 < num_rows < len(self.hits):
            return self.rows[np.argsort(-self.hits, kind="stable")[:num_rows]]
        least = np.partition(self.hits, -num_rows)[-num_rows]
        above = np.flatnonzero(self.hits > least)
        ties = np.flatnonzero(self.hits == least)[: num_rows - len(above)]
        return self.rows[np.concatenate([above[np.argsort(-self.hits[above], kind="stable")], ties])]

    def dense(self, num_rows: int) -> Tensor:
        """Return the counts of the rows [0, num_rows): int64 [num_rows]."""
        counts = torch.zeros(num_rows, dtype=torch.int64)
        counts[torch.from_numpy(self.rows)] = torch.from_numpy(self.hits)
        return counts


def sum_counts(parts: Sequence[RowCounts]) -> RowCounts:
    """Return the exact lookups of all parts together."""
    parts = [part for part in parts if len(part.rows)]
    if not parts:
        return RowCounts.none()
    if len(parts) == 1:
        return parts[0]
    rows = np.concatenate([part.rows for part in parts])
    order = np.argsort(rows, kind="stable")  # sorted runs are merged, not sorted anew
    rows = rows[order]
    starts = np.flatnonzero(np.diff(rows, prepend=rows[0] - 1))
    hits = np.concatenate([part.hits for part in parts])[order]
    return RowCounts(rows[starts], np.add.reduceat(hits, starts))


def histogram_of(counts: RowCounts, num_rows: int, num_lookups: int) -> CountHistogram:
    """Return the histogram of a table.

    Lookups whose rows were forgotten to save memory stand in it as rows that were seen as seldom as the table's number
    of rows allows: their share of all lookups is right, and they come last in every ranking.
    """
    histogram = CountHistogram.of_counts(counts.hits)
    lost, room = num_lookups - counts.num_lookups, num_rows - len(counts.rows)
    if lost <= 0 or room <= 0:
        return histogram
    seldom = float(-(-lost // room))
    return CountHistogram.joined(np.append(histogram.counts, seldom), np.append(histogram.rows, lost / seldom))


class SparseCounts(Mapping[str, Tensor]):
    """Counts by table as int64 tensors [rows], made of the rows that occur when a table is asked for.

    Args:
        num_rows: rows of every table.
        sparse: returns the counts of a table's rows that occur.
    """

    def __init__(self, num_rows: Mapping[str, int], sparse: Callable[[str], RowCounts]) -> None:
        self.num_rows = dict(num_rows)
        self.sparse = sparse

    def __getitem__(self, table: str) -> Tensor:
        return self.sparse(table).dense(self.num_rows[table])

    def __contains__(self, table: object) -> bool:
        return table in self.num_rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.num_rows)

    def __len__(self) -> int:
        return len(self.num_rows)


class RowCounter:
    """Adds up the counts of one table.

    Parts are merged when they have about the same size (as a log-structured merge tree does), so that every row is
    moved a logarithmic number of times.
    """

    def __init__(self) -> None:
        self._runs: list[RowCounts] = []
        self.num_lookups = 0
        self.undercount = 0

    @property
    def num_entries(self) -> int:
        """Entries held; at least the number of distinct rows."""
        return sum(len(run.rows) for run in self._runs)

    def add(self, part: RowCounts) -> None:
        self.num_lookups += part.num_lookups
        self._runs.append(part)
        while len(self._runs) > 1 and len(self._runs[-2].rows) <= 2 * len(self._runs[-1].rows):
            last = self._runs.pop()
            self._runs[-1] = sum_counts([self._runs[-1], last])

    def total(self) -> RowCounts:
        self._runs = [sum_counts(self._runs)]
        return self._runs[0]

    def forget(self, hits: int) -> None:
        """Drop the rows that have at most so many lookups; `undercount`, the most that a row may have lost, adds up."""
        total = self.total()
        kept = total.at_least(hits + 1)
        if len(kept.rows) < len(total.rows):
            self._runs = [kept]
            self.undercount += hits


def bound_memory(counters: Sequence[RowCounter], max_rows: int) -> None:
    """Forget the rarest rows of all tables while there are more than `max_rows` (lossy counting: Manku and Motwani,
    VLDB 2002). At least half of the room is free afterwards, so that this is seldom done."""
    if sum(counter.num_entries for counter in counters) <= max_rows:
        return
    totals = [counter.total() for counter in counters]
    if sum(len(total.rows) for total in totals) <= max_rows:
        return
    values, rows = np.unique(np.concatenate([total.hits for total in totals]), return_counts=True)
    kept_above = rows.sum() - np.cumsum(rows)
    hits = int(values[np.searchsorted(-kept_above, -(max_rows // 2))])
    for counter in counters:
        counter.forget(hits)
