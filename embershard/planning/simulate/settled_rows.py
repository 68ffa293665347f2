"""Rows that stay in any cache: counted beside the replay, not replayed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embershard.frequency import SampledTrace, TableTrace
from embershard.planning.simulate.pool_report import RowRange, ShardReport

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class SettledRows:
    """A shard's rows that stay in any cache: its constant rows, and all rows of a pinned table where rows are sampled.

    Attributes:
        shard: whose rows.
        is_whole: all of the shard's rows, of a pinned table.
        constant: lookups of each constant row, int64 [C].
        others: the followed lookups of a whole shard.
    """

    shard: RowRange
    is_whole: bool
    constant: NDArray[np.int64]
    others: TableTrace

    @classmethod
    def of(cls, trace: SampledTrace, shard: RowRange, is_pinned: bool) -> SettledRows:
        """The settled rows of a shard; `is_pinned` says that its table is resident for ever."""
        constant = trace.constant_lookups.get(shard.table, _NONE)
        constant = constant[shard.has(trace.constant_rows.get(shard.table, _NONE))]
        if not is_pinned or trace.rate >= 1:
            return cls(shard, False, constant, TableTrace(_NONE, _NONE))
        table = trace.tables[shard.table]
        inside = shard.has(table.rows)
        return cls(shard, True, constant, TableTrace(table.samples[inside], table.rows[inside]))

    @property
    def num_rows(self) -> int:
        """Rows, and so slots that they keep."""
        return self.shard.num_rows if self.is_whole else len(self.constant)

    def report(
        self,
        trace: SampledTrace,
        global_batch_size: int,
        rank_batch_size: int | None,
        num_steps: int,
        is_late: bool,
        warmup: bool,
    ) -> ShardReport:
        """Return what happens to the rows, per step. They are filled once: in the first of `num_steps` steps, or
        before it by a warm-up; `is_late`: before these steps."""
        unique_ids = self._distinct(trace, global_batch_size)
        if rank_batch_size is None:
            every = float(self.constant.sum()) + len(self.others.rows) / trace.rate
            lookups = every * global_batch_size / trace.num_samples
        else:
            lookups = self._distinct(trace, rank_batch_size) * global_batch_size / rank_batch_size
        fills = 0.0 if is_late else self.num_rows / num_steps
        missed = 0.0 if is_late or warmup or self.is_whole else min(fills, unique_ids)
        return ShardReport(
            lookups=lookups,
            unique_ids=unique_ids,
            hits_unique=unique_ids - missed,
            hits_lookups=lookups * (1.0 - missed / max(unique_ids, 1e-300)),
            fills=fills,
            write_backs=0.0,
            held_rows=float(self.num_rows),
            shard=self.shard,
        )

    def _distinct(self, trace: SampledTrace, batch_size: int) -> float:
        """Return the mean distinct rows of a batch."""
        # A row that occurs in a share p of the samples is missing from a batch of B with (1 - p)^B.
        absent = (1.0 - np.minimum(self.constant / trace.num_samples, 1.0)) ** batch_size
        found = float((1.0 - absent).sum())
        if len(self.others.rows):
            pairs = np.unique(self.others.samples // batch_size * self.shard.stop + self.others.rows)
            batches = max(1.0, trace.num_samples / batch_size)
            found += min(len(pairs) / trace.rate / batches, self.shard.num_rows - found)
        return found
