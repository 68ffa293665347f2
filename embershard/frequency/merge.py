"""Several profiles as one, and one beside another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from embershard.errors import ConfigError
from embershard.frequency.counts import RowCounts, sum_counts
from embershard.frequency.downsampling import Following, TraceBuilder
from embershard.frequency.statistics import DataStatistics
from embershard.frequency.summary import Windows, summarize
from embershard.frequency.trace import SampledTrace


class Counted(Protocol):
    """What is read of a :class:`~embershard.FrequencyProfile`."""

    @property
    def tables(self) -> dict[str, int]:
        """Rows of every table, by name."""

    @property
    def num_batches(self) -> int:
        """That were counted."""

    @property
    def statistics(self) -> DataStatistics | None:
        """None where only counts were made."""

    def num_rows(self, table: str) -> int:
        """Rows of ``table``."""

    def sparse(self, table: str) -> RowCounts:
        """The rows of ``table`` that occur, and their counts."""


@dataclass(frozen=True)
class Merged:
    """Several profiles as one: rows of every table, counts of those that occur, batches, statistics if all had some."""

    num_rows: dict[str, int]
    counts: dict[str, RowCounts]
    num_batches: int
    statistics: DataStatistics | None


def merge(profiles: Sequence[Counted], max_lookups: int) -> Merged:
    """What the profile of all samples is made of, the profiles' order being the order of training.

    Counts add up, and what follows from them is computed anew. Distinct rows of windows are means over all samples. The
    trace follows what the sparsest of the traces does, and less where it would have more than ``max_lookups``.

    Raises:
        ConfigError: there is no profile, or they are of different tables, or only some have statistics.
    """
    if not profiles:
        raise ConfigError("nothing to merge; needed at least one profile")
    for number, profile in enumerate(profiles[1:], start=2):
        _check_same(profiles[0], profile, number)
    num_rows = profiles[0].tables
    counts = {table: sum_counts([profile.sparse(table) for profile in profiles]) for table in num_rows}
    statistics = [profile.statistics for profile in profiles if profile.statistics is not None]
    if 0 < len(statistics) < len(profiles):
        raise ConfigError("some of the profiles have counts only; make them again with `embershard profile`")
    merged = _merge_statistics(statistics, counts, max_lookups) if statistics else None
    return Merged(num_rows, counts, sum(profile.num_batches for profile in profiles), merged)


def _check_same(first: Counted, other: Counted, number: int) -> None:
    if first.tables == other.tables:
        return
    missing = sorted(set(first.tables) ^ set(other.tables))
    what = f"tables {missing} are in one of them only"
    if not missing:
        table = next(table for table, rows in first.tables.items() if other.tables[table] != rows)
        what = f"table {table!r} has {first.num_rows(table)} and {other.num_rows(table)} rows"
    raise ConfigError(f"profile 1 and profile {number} are not of the same model: {what}; profile both with one config")


def _merge_statistics(
    parts: Sequence[DataStatistics], counts: dict[str, RowCounts], max_lookups: int
) -> DataStatistics:
    tables = list(parts[0].tables)
    samples = np.array([part.num_samples for part in parts], dtype=np.float64)
    traces = [part.trace for part in parts if part.trace is not None]
    whole_data = sum(part.num_samples / part.share_of_samples for part in parts)
    timed = [part for part in parts if part.read_seconds_per_sample is not None]
    seconds = sum(part.num_samples * (part.read_seconds_per_sample or 0.0) for part in timed)
    return summarize(
        num_samples=int(samples.sum()),
        num_rows={table: parts[0].tables[table].num_rows for table in tables},
        counts=counts,
        num_lookups={table: sum(part.tables[table].num_lookups for part in parts) for table in tables},
        undercounts={table: sum(part.tables[table].undercount for part in parts) for table in tables},
        bags={table: _weighted([part.tables[table].bag_sizes for part in parts], samples) for table in tables},
        windows={table: _merge_windows(parts, table, samples) for table in tables},
        trace=_merge_traces(traces, tables, counts, max_lookups) if len(traces) == len(parts) else None,
        share_of_samples=float(samples.sum() / whole_data) if whole_data else 1.0,
        read_seconds_per_sample=seconds / sum(part.num_samples for part in timed) if seconds else None,
        origin=" + ".join(part.origin for part in parts),
    )


def _weighted(shares: Sequence[NDArray[np.float64]], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    total = np.zeros(max(len(each) for each in shares))
    for each, weight in zip(shares, weights, strict=True):
        total[: len(each)] += each * weight
    return total


def _merge_windows(parts: Sequence[DataStatistics], table: str, samples: NDArray[np.float64]) -> Windows:
    """Means over all samples, of the windows that all of them have."""
    curves = [
        dict(zip(part.tables[table].window_samples.tolist(), part.tables[table].window_rows, strict=True))
        for part in parts
    ]
    sizes = [size for size in curves[0] if all(size in curve for curve in curves)]
    rows = [np.average([curve[size] for curve in curves], weights=samples) for size in sizes]
    return Windows(np.array(sizes, dtype=np.int64), np.array(rows, dtype=np.float64))


def _merge_traces(
    traces: Sequence[SampledTrace], tables: Sequence[str], counts: dict[str, RowCounts], max_lookups: int
) -> SampledTrace:
    none = np.empty(0, np.int64)
    constant = {
        number: np.unique(np.concatenate([trace.constant_rows.get(table, none) for trace in traces]))
        for number, table in enumerate(tables)
    }
    constant = constant if any(len(rows) for rows in constant.values()) else {}
    builder = TraceBuilder(tables, max_lookups, Following(min(trace.rate for trace in traces), constant))
    for trace in traces:
        builder.add([trace.tables[table] for table in tables], trace.num_samples)
    by_number = [counts[table] for table in tables]
    if builder.is_too_long:
        builder.downsample(by_number)
    return builder.finish(by_number)


@dataclass(frozen=True)
class TableComparison:
    """One table in two profiles, A and B. Shares are 0..1, of lookups unless said.

    Attributes:
        table: its name.
        num_top: how many rows count as its most frequent ones.
        overlap: share of A's most frequent rows that are B's, too.
        own_hit_rate: B's lookups that go to B's most frequent rows.
        hit_rate: B's lookups that go to A's most frequent rows.
        unseen: B's lookups that go to rows that do not occur in A.
        lookups: of B.
    """

    table: str
    num_top: int
    overlap: float
    own_hit_rate: float
    hit_rate: float
    unseen: float
    lookups: int


def compare(a: Counted, b: Counted, share_of_rows: float = 0.015) -> list[TableComparison]:
    """What counts of A say about B, per table; as many rows are the most frequent ones as ``share_of_rows`` of all.

    Raises:
        ConfigError: they are of different tables.
    """
    _check_same(a, b, 2)
    found = []
    for table, num_rows in a.tables.items():
        counts_a, counts_b = a.sparse(table), b.sparse(table)
        num_top = max(1, round(share_of_rows * num_rows))
        top_a, top_b = _top(counts_a, num_top), _top(counts_b, num_top)
        lookups = max(counts_b.num_lookups, 1)
        kept = len(np.intersect1d(top_a, top_b, assume_unique=True)) / max(len(top_a), 1)
        seen = int(counts_b.hits_of(counts_a.rows).sum())
        found.append(
            TableComparison(
                table=table,
                num_top=num_top,
                overlap=kept,
                own_hit_rate=int(counts_b.hits_of(top_b).sum()) / lookups,
                hit_rate=int(counts_b.hits_of(top_a).sum()) / lookups,
                unseen=(counts_b.num_lookups - seen) / lookups,
                lookups=counts_b.num_lookups,
            )
        )
    return found


def _top(counts: RowCounts, num_rows: int) -> NDArray[np.int64]:
    return counts.rows[np.argsort(-counts.hits, kind="stable")[:num_rows]]
