"""`FrequencyProfile`: the lookups of each row of each table, counted once, saved as a file, read by policies and
planner."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embershard.errors import ConfigError, DataError, IdOutOfRangeError
from embershard.frequency.compare import ProfileComparison, compare_table
from embershard.frequency.counts import RowCounter, RowCounts, SparseCounts, sum_counts
from embershard.frequency.curves import BatchMisses
from embershard.frequency.profile_file import read, write
from embershard.frequency.statistics import DataStatistics, Ints
from embershard.frequency.summary import merge_statistics

#: Share of a table's rows that counts as its most frequent ones when profiles are compared.
_TOP_SHARE = 0.015
#: Ids, of all tables together, that are counted at a time; at least so many of a table.
_COUNTED_IDS, _LEAST_COUNTED_IDS = 1 << 21, 1 << 12


@dataclass(frozen=True)
class FrequencyProfile:
    """Row counts per table, and the other statistics of a pass over the data.

    `counts[table]` is an int64 tensor [rows]: the lookups of each row. A profile that was counted, loaded or collected
    keeps only the rows that occur (`sparse`), 16 bytes each, and makes the tensor anew at each access; do not write to
    it. `num_batches` is the number of batches that were counted. `statistics` is small whatever the number of rows;
    None where only counts were made.

    >>> profile = FrequencyProfile.count([{"user": torch.tensor([3, 1, 3])}], {"user": 5})
    >>> profile.counts["user"].tolist()
    [0, 1, 0, 2, 0]
    """

    counts: Mapping[str, Tensor]
    num_batches: int
    statistics: DataStatistics | None = None

    @classmethod
    def count(cls, batches: Iterable[Mapping[str, Tensor]], num_rows: Mapping[str, int]) -> FrequencyProfile:
        """Count `batches` in one pass, each a mapping table name -> ids (int, any shape; absent tables are empty).

        Raises:
            DataError: a batch names a table that `num_rows` does not.
            IdOutOfRangeError: an id is negative or not smaller than its table's rows.
        """
        at_once = max(_LEAST_COUNTED_IDS, _COUNTED_IDS // max(1, len(num_rows)))
        tables = {table: _TableCounter(table, rows, at_once) for table, rows in num_rows.items()}
        num_batches = 0
        for num_batches, batch in enumerate(batches, start=1):
            for table, ids in batch.items():
                if table not in tables:
                    raise DataError(f"batch {num_batches} has ids of table {table!r}; known are {sorted(tables)}")
                tables[table].add(ids)
        return cls.of_sparse(num_rows, {table: counter.total() for table, counter in tables.items()}, num_batches)

    @classmethod
    def of_sparse(
        cls,
        num_rows: Mapping[str, int],
        counts: Mapping[str, RowCounts],
        num_batches: int,
        statistics: DataStatistics | None = None,
    ) -> FrequencyProfile:
        """Make a profile of the counts of the rows that occur."""
        return cls(SparseCounts(num_rows, dict(counts).__getitem__), num_batches, statistics)

    @classmethod
    def merge(cls, profiles: Sequence[FrequencyProfile], max_lookups: int = 4_000_000) -> FrequencyProfile:
        """Merge profiles of the same tables, of several days or ranks, in the order of training.

        Raises:
            ConfigError: there is no profile, or they are of different tables, or only some have statistics.
        """
        if not profiles:
            raise ConfigError("nothing to merge; needed at least one profile")
        for number, profile in enumerate(profiles[1:], start=2):
            profiles[0]._check_same(profile, number)
        num_rows = profiles[0].tables
        counts = {table: sum_counts([profile.sparse(table) for profile in profiles]) for table in num_rows}
        statistics = [profile.statistics for profile in profiles if profile.statistics is not None]
        if 0 < len(statistics) < len(profiles):
            raise ConfigError("some of the profiles have counts only; make them again with `embershard profile`")
        merged = merge_statistics(statistics, counts, max_lookups) if statistics else None
        return cls.of_sparse(num_rows, counts, sum(profile.num_batches for profile in profiles), merged)

    def compare(self, other: FrequencyProfile) -> list[ProfileComparison]:
        """Compare the most frequent rows with those of another profile, per table.

        Raises:
            ConfigError: they are of different tables.
        """
        self._check_same(other, 2)
        return [
            compare_table(table, max(1, round(_TOP_SHARE * rows)), self.sparse(table), other.sparse(table))
            for table, rows in self.tables.items()
        ]

    @property
    def tables(self) -> dict[str, int]:
        """Rows of every table, by name."""
        return {table: self.num_rows(table) for table in self.counts}

    def num_rows(self, table: str) -> int:
        """Return the rows of `table`."""
        if isinstance(self.counts, SparseCounts):
            return self.counts.num_rows[table]
        return self.counts[table].numel()

    def sparse(self, table: str) -> RowCounts:
        """Return the rows of `table` that occur, and their counts."""
        if isinstance(self.counts, SparseCounts):
            return self.counts.sparse(table)
        return RowCounts.of_dense(self.counts[table])

    def shard(self, table: str, rows: int, row_offset: int, local_rows: int) -> RowCounts:
        """Return the counts of rows [row_offset, row_offset + local_rows) of `table`, numbered from `row_offset`.

        Raises:
            ConfigError: the profile does not know the table, or was made for another number of rows.
        """
        if table not in self.counts:
            raise ConfigError(
                f"the frequency profile has no table {table!r}, only {sorted(self.counts)}; "
                "make it from the same data and model"
            )
        if self.num_rows(table) != rows:
            raise ConfigError(
                f"the frequency profile counted {self.num_rows(table)} rows of table {table!r}, the model "
                f"has {rows}; make it again with the model's row counts"
            )
        return self.sparse(table).between(row_offset, local_rows)

    def cache_statistics(self, table: str, batch_size: int) -> BatchMisses:
        """Return the misses of a cache of the most frequent rows of `table` in a batch of `batch_size` samples (over
        all ranks).

        Raises:
            ConfigError: the profile has no statistics, or not of this table.
        """
        statistics = self.need_statistics()
        if table not in statistics.tables:
            raise ConfigError(f"the profile has no table {table!r}, only {sorted(statistics.tables)}")
        return BatchMisses.of(statistics.tables[table], batch_size, statistics.num_samples)

    def need_statistics(self) -> DataStatistics:
        """Return the statistics.

        Raises:
            ConfigError: there are none.
        """
        if self.statistics is None:
            raise ConfigError("this profile has counts only, and no statistics; make one with `embershard profile`")
        return self.statistics

    def save(self, path: str | Path) -> None:
        """Write a `.npz` file without pickle; only the rows that occur are in it."""
        write(Path(path), self.tables, self.sparse, self.num_batches, self.statistics)

    @classmethod
    def load(cls, path: str | Path) -> FrequencyProfile:
        """Read a saved profile; nothing is unpickled. Counts stay in the file until they are asked for.

        Raises:
            DataError: the file is missing, damaged, or not a profile.
        """
        return cls(*read(Path(path)))

    def _check_same(self, other: FrequencyProfile, number: int) -> None:
        if self.tables == other.tables:
            return
        missing = sorted(set(self.tables) ^ set(other.tables))
        problem = f"tables {missing} are in one of them only"
        if not missing:
            table = next(table for table, rows in self.tables.items() if other.tables[table] != rows)
            problem = f"table {table!r} has {self.num_rows(table)} and {other.num_rows(table)} rows"
        raise ConfigError(
            f"profile 1 and profile {number} are not of the same model: {problem}; profile both with one config"
        )


class _TableCounter:
    """Counts a table's ids, at least `at_once` of them at a time."""

    def __init__(self, table: str, num_rows: int, at_once: int) -> None:
        self._table, self._num_rows, self._at_once = table, num_rows, at_once
        self._counter = RowCounter()
        self._ids: list[Tensor] = []
        self._num_ids = 0

    def add(self, ids: Tensor) -> None:
        if ids.numel() and ids.is_floating_point():
            raise DataError(f"table {self._table!r}: ids are {ids.dtype}; needed are whole numbers")
        self._ids.append(ids.detach().reshape(-1).to("cpu", torch.int64, copy=True))  # the caller may reuse its tensor
        self._num_ids += ids.numel()
        if self._num_ids >= self._at_once:
            self._count()

    def total(self) -> RowCounts:
        self._count()
        return self._counter.total()

    def _count(self) -> None:
        if not self._num_ids:
            return
        counts = RowCounts.of_rows(torch.cat(self._ids).numpy())
        self._ids, self._num_ids = [], 0
        low, high = int(counts.rows[0]), int(counts.rows[-1])
        if low < 0 or high >= self._num_rows:
            raise IdOutOfRangeError(
                f"table {self._table!r}: id {low if low < 0 else high} is not in [0, {self._num_rows}); "
                "check the id mapping"
            )
        self._counter.add(counts)


@dataclass(frozen=True, eq=False)
class HotRows:
    """The hot rows of all tables (FAE: Adnan et al., arXiv 2103.00686, section 4.1).

    >>> import torch
    >>> profile = FrequencyProfile.count([{"user": torch.tensor([3, 1, 3]), "ad": torch.tensor([0] * 3)}],
    ...     {"user": 5, "ad": 1})
    >>> hot = HotRows.choose(profile, {"user": 8, "ad": 8}, most_bytes=23)
    >>> hot.rows["user"].tolist(), hot.threshold, hot.is_whole("ad")
    ([3], 2, True)

    Attributes:
        rows: by table: its hot rows, int64 ascending.
        num_rows: by table: all of its rows.
        threshold: the least number of lookups of a hot row.
        num_bytes: memory of the hot rows.
    """

    rows: Mapping[str, Ints]
    num_rows: Mapping[str, int]
    threshold: int
    num_bytes: int

    @classmethod
    def choose(cls, profile: FrequencyProfile, row_bytes: Mapping[str, int], most_bytes: int) -> HotRows:
        """Take all rows with at least so many lookups that they fit into `most_bytes`.

        Equally frequent rows of all tables are hot together or not at all, so that the choice depends on no order.

        Args:
            row_bytes: by table: bytes of a row, its optimizer state included. Other tables have no hot rows.

        Raises:
            ConfigError: not even the most frequent rows fit.
        """
        counts = {table: profile.sparse(table) for table in row_bytes}
        hits = np.concatenate([found.hits for found in counts.values()])
        sizes = np.concatenate([np.full(len(found.hits), row_bytes[table]) for table, found in counts.items()])
        distinct, places = np.unique(hits, return_inverse=True)
        of_count = np.bincount(places, sizes, len(distinct))[::-1]
        num_taken = int(np.searchsorted(np.cumsum(of_count), most_bytes, side="right"))
        if not num_taken:
            least = int(of_count[0]) if len(of_count) else 0
            raise ConfigError(
                f"hot rows: got {most_bytes} bytes for them (sharding.hot_bytes), needed at least {least} for the most "
                "frequent ones, which are looked up equally often. Give more, or use a profile of more samples."
            )
        threshold = int(distinct[-num_taken])
        rows = {table: found.at_least(threshold).rows for table, found in counts.items()}
        num_rows = {table: profile.num_rows(table) for table in row_bytes}
        return cls(rows, num_rows, threshold, int(of_count[:num_taken].sum()))

    @property
    def total(self) -> int:
        """Number of hot rows of all tables."""
        return sum(map(len, self.rows.values()))

    def is_whole(self, table: str) -> bool:
        """Return whether all rows of `table` are hot."""
        return len(self.rows[table]) == self.num_rows[table]

    @property
    def digest(self) -> str:
        """SHA-256 of the choice, in hexadecimal."""
        found = hashlib.sha256()
        for table, rows in self.rows.items():
            found.update(f"{table} {self.num_rows[table]} {len(rows)} ".encode())
            found.update(rows.astype("<i8").tobytes())
        return found.hexdigest()
