"""A trace that stays below a number of lookups however long the data are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from embershard.frequency.counts import RowCounts, sum_counts
from embershard.frequency.statistics import Ints, SampledTrace, TableTrace, is_sampled, row_hashes

#: A row with so many lookups per sample is in about every batch.
CONSTANT_HITS_PER_SAMPLE = 1 / 512
#: A rate below 1 marks a trace without its constant rows, though nearly all of the others may be sampled.
_NEARLY_ALL = 1.0 - 2.0**-20


@dataclass(frozen=True, eq=False)
class SampledRows:
    """The rows that a trace takes: a share `rate` of those that are not `constant` (table number -> rows)."""

    rate: float = 1.0
    constant: Mapping[int, Ints] = field(default_factory=dict)

    @property
    def takes_all(self) -> bool:
        """No row is left out."""
        return self.rate >= 1.0 and not self.constant

    def mask(self, table_number: int, rows: Ints) -> NDArray[np.bool_]:
        """Return True for each of these rows [M] that is sampled: bool [M]."""
        kept = is_sampled(row_hashes(table_number, rows), self.rate)
        constant = self.constant.get(table_number)
        return kept if constant is None or not len(constant) else kept & ~np.isin(rows, constant)


class TraceBuilder:
    """Joins traces of consecutive samples, and follows fewer rows when there is no room for all.

    Args:
        tables: their names; a table's place is its number.
        max_lookups: most lookups to keep.
        sampled: rows to take at first.
    """

    def __init__(self, tables: Sequence[str], max_lookups: int, sampled: SampledRows | None = None) -> None:
        self.sampled = sampled or SampledRows()
        self.num_samples = 0
        self._names = list(tables)
        self._max_lookups = max_lookups
        self._parts: list[list[TableTrace]] = [[] for _ in tables]

    @property
    def is_too_long(self) -> bool:
        """The trace must be downsampled."""
        return sum(len(part.rows) for parts in self._parts for part in parts) > self._max_lookups

    def add(self, tables: Sequence[TableTrace], num_samples: int) -> None:
        """Add the next samples' lookups, their samples counted from 0; of rows that are sampled, and maybe others."""
        for number, (parts, table) in enumerate(zip(self._parts, tables, strict=True)):
            moved = TableTrace(table.samples.astype(np.int64) + self.num_samples, table.rows)
            parts.append(self._filtered(number, moved))
        self.num_samples += num_samples

    def downsample(self, counts: Sequence[RowCounts]) -> None:
        """Leave out constant rows, by the counts [tables] so far; then follow ever fewer of the others, if needed."""
        self._leave_out_constant(counts)
        while self.is_too_long:
            halved = self.sampled.rate / 2 if self.sampled.rate <= 0.5 else 0.5
            self._sample(SampledRows(halved, self.sampled.constant))

    def finish(self, counts: Sequence[RowCounts]) -> SampledTrace:
        """Return the trace; `counts` [tables] are those of all samples."""
        if self.sampled.constant:
            self._leave_out_constant(counts)
        rows = {self._names[number]: rows for number, rows in self.sampled.constant.items()}
        hits = {self._names[number]: counts[number].hits_of(rows) for number, rows in self.sampled.constant.items()}
        tables = {name: _joined(parts) for name, parts in zip(self._names, self._parts, strict=True)}
        return SampledTrace(self.sampled.rate, self.num_samples, tables, rows, hits)

    def _leave_out_constant(self, counts: Sequence[RowCounts]) -> None:
        least = max(2.0, CONSTANT_HITS_PER_SAMPLE * self.num_samples)
        constant = {
            number: np.union1d(self.sampled.constant.get(number, []), table.at_least(least).rows).astype(np.int64)
            for number, table in enumerate(counts)
        }
        self._sample(SampledRows(min(self.sampled.rate, _NEARLY_ALL), constant))

    def _sample(self, sampled: SampledRows) -> None:
        self.sampled = sampled
        self._parts = [[self._filtered(number, _joined(parts))] for number, parts in enumerate(self._parts)]

    def _filtered(self, number: int, table: TableTrace) -> TableTrace:
        if self.sampled.takes_all:
            return table
        kept = self.sampled.mask(number, table.rows)
        return TableTrace(table.samples[kept], table.rows[kept])


def _joined(parts: Sequence[TableTrace]) -> TableTrace:
    if len(parts) == 1:
        return parts[0]
    none = np.empty(0, np.int64)
    samples = np.concatenate([none, *(part.samples for part in parts)])
    return TableTrace(samples, np.concatenate([none, *(part.rows for part in parts)]))


def downsampled(trace: SampledTrace, max_lookups: int) -> SampledTrace:
    """Return the same trace with fewer rows sampled, where it is longer than this."""
    if trace.num_lookups <= max_lookups:
        return trace
    names = list(trace.tables)
    constant = {number: trace.constant_rows[name] for number, name in enumerate(names) if name in trace.constant_rows}
    builder = TraceBuilder(names, max_lookups, SampledRows(trace.rate, constant))
    builder.add([trace.tables[name] for name in names], trace.num_samples)
    counts = []  # of the rows that were sampled or are constant; other rows are missing
    for name in names:
        parts = [RowCounts.of_rows(trace.tables[name].rows)]
        if name in trace.constant_rows:
            parts.append(RowCounts(trace.constant_rows[name], trace.constant_lookups[name]))
        counts.append(sum_counts(parts))
    builder.downsample(counts)
    return builder.finish(counts)
