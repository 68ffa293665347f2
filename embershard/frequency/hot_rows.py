"""`HotRows`: the most frequent rows of all tables that fit into a number of bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from embershard.errors import ConfigError
from embershard.frequency.profile import FrequencyProfile
from embershard.frequency.trace import Ints


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
