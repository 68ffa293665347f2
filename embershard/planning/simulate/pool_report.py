"""Counts of one pool of slots, shard by shard: the answer of the replay and of the steady state."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from embershard.cache.statistics import CacheReport
from embershard.planning.simulate.file_tier import FileTraffic
from embershard.sharding.sizes import PlacedShard


@dataclass(frozen=True)
class RowRange:
    """The rows [start, stop) of a table.

    >>> RowRange("t_user", 100, 200).num_rows
    100
    """

    table: str
    start: int
    stop: int

    @classmethod
    def of(cls, shard: PlacedShard) -> RowRange:
        """The rows of a shard."""
        return cls(shard.table.table, shard.row_start, shard.row_stop)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    def has(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the `rows` [N] of the table that lie in the range."""
        return (rows >= self.start) & (rows < self.stop)


@dataclass(frozen=True)
class ShardReport(CacheReport):
    """Counts of one shard's rows: means over the steps. Fills include those of a warm-up.

    Attributes:
        held_rows: slots that hold the shard's rows.
        shard: whose rows.
        first_touches: those of a batch's distinct ids that miss because the cache never had their rows before. No size
            of a cache that starts so avoids them; all other misses are of rows that had to leave.
        step_rows: distinct ids of a step, which need slots at the same time: `unique_ids` counts one in each piece of
            the step that has it. From counts alone.
    """

    LABELS = frozenset({"shard"})

    held_rows: float
    shard: RowRange
    first_touches: float = 0.0
    step_rows: float = 0.0

    def part(self, lookups: float, rows: float) -> ShardReport:
        """Return the report of such shares of the lookups and of the rows; distinct ones in proportion to these."""
        shares = {name: lookups * getattr(self, name) for name in ("lookups", "hits_lookups")}
        return replace(self.scaled(rows), **shares)


@dataclass(frozen=True)
class PoolReport:
    """One pool.

    Attributes:
        shards: one report per shard, over all steps.
        late: the same over the second half of the steps, when the cache is no longer new.
        num_steps: steps that `shards` are means over; 0: the long run.
        num_slots: slots at the end: more than planned where one batch did not fit.
        grew: one batch did not fit.
        files, late_files: with rows in a file, what was read from it and written to it per step; None: no file.
    """

    shards: tuple[ShardReport, ...]
    late: tuple[ShardReport, ...]
    num_steps: int
    num_slots: int
    grew: bool
    files: FileTraffic | None = None
    late_files: FileTraffic | None = None

    def over(self, num_steps: int | None) -> tuple[ShardReport, ...]:
        """Return means over `num_steps` steps: the replayed ones, then as many like the late ones as are needed.
        None: only the replayed ones."""
        if num_steps is None or num_steps <= self.num_steps:
            return self.shards
        weight = self.num_steps / num_steps
        return tuple(
            early.scaled(weight) + late.scaled(1 - weight) for early, late in zip(self.shards, self.late, strict=True)
        )

    def files_over(self, num_steps: int | None) -> FileTraffic | None:
        """Return what was read from the file and written to it, as `over`."""
        if num_steps is None or num_steps <= self.num_steps or self.files is None or self.late_files is None:
            return self.files
        weight = self.num_steps / num_steps
        return self.files.scaled(weight) + self.late_files.scaled(1 - weight)
