"""A trace cut into the batches of one pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embershard.frequency import SampledTrace
from embershard.frequency.counts import RowCounts
from embershard.planning.simulate.pool_report import RowRange

_NONE = np.empty(0, np.int64)
_MOST_IDLE_ROWS = 10_000_000  # of a table; more need not take memory to be left out


class TraceBatches:
    """The batches of a pool: keys [N] with the tables one after another, and lookups per table [T].

    After the last batch the samples of the trace come again, in another order: mixed inside windows of
    `shuffle_window` samples, as training mixes them. 0: in the same order.

    Args:
        rank_batch_size: samples of a rank's part of a step. Of each part and table only distinct keys are given, as
            ranks receive them where distinct rows are exchanged; None: all lookups.

    Attributes:
        rows_per_table: keys of each shard: its rows, or only those that occur where many do not.
        row_counts: lookups of every key in the first `profile_samples` samples (None: in all).
    """

    def __init__(
        self,
        trace: SampledTrace,
        shards: Sequence[RowRange],
        global_batch_size: int,
        profile_samples: int | None,
        shuffle_window: int,
        rank_batch_size: int | None = None,
    ) -> None:
        self._rank_batch_size = rank_batch_size
        self._num_samples, self._shuffle_window, self._epoch = trace.num_samples, shuffle_window, 0
        self._batches_per_epoch = trace.num_samples // global_batch_size
        self._edges = np.arange(self._batches_per_epoch + 1, dtype=np.int64) * global_batch_size
        self._keys: list[NDArray[np.int64]] = []
        self._samples: list[NDArray[np.int64]] = []
        self._bounds: list[NDArray[np.int64]] = []
        self.rows_per_table: list[int] = []
        counts = []
        for shard in shards:
            table = trace.tables[shard.table]
            inside = shard.has(table.rows)
            whole = bool(inside.all())
            rows = table.rows if whole else table.rows[inside]
            samples = table.samples if whole else table.samples[inside]
            # Rows that never occur matter only in a table that stays whole; and those are small.
            is_dense = trace.rate >= 1 and shard.num_rows <= _MOST_IDLE_ROWS + len(rows)
            distinct, keys = (_NONE, rows - shard.start) if is_dense else np.unique(rows, return_inverse=True)
            num_keys = max(1, shard.num_rows if is_dense else len(distinct))
            counted = keys if profile_samples is None else keys[: np.searchsorted(samples, profile_samples)]
            counts.append(np.bincount(counted, minlength=num_keys))
            self._keys.append(keys + sum(self.rows_per_table))
            self._samples.append(samples)
            self._bounds.append(np.searchsorted(samples, self._edges))
            self.rows_per_table.append(num_keys)
        self.row_counts = RowCounts.of_dense(torch.from_numpy(np.concatenate(counts))) if counts else None

    def get(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the keys and lengths of a step. Steps must be asked for in order."""
        epoch, number = divmod(step, self._batches_per_epoch)
        if epoch != self._epoch and self._shuffle_window:
            self._shuffle(epoch)
        self._epoch = epoch
        parts = [self._part(table, slice(b[number], b[number + 1])) for table, b in enumerate(self._bounds)]
        lengths = torch.tensor([len(part) for part in parts], dtype=torch.int64)
        return torch.from_numpy(np.concatenate(parts) if parts else _NONE), lengths

    def _part(self, table: int, batch: slice) -> NDArray[np.int64]:
        """Return a table's keys in a batch."""
        keys = self._keys[table][batch]
        if self._rank_batch_size is None:
            return keys
        ranks = self._samples[table][batch] // self._rank_batch_size  # a batch begins at a multiple of it
        _, firsts = np.unique(np.stack([ranks, keys]), axis=1, return_index=True)
        return keys[np.sort(firsts)]

    def _shuffle(self, epoch: int) -> None:
        generator = np.random.default_rng(epoch)
        windows = np.arange(self._num_samples) // self._shuffle_window
        place = np.empty(self._num_samples, np.int64)
        place[np.lexsort((generator.random(self._num_samples), windows))] = np.arange(self._num_samples)
        for table, samples in enumerate(self._samples):
            moved = place[samples]
            order = np.argsort(moved, kind="stable")
            self._samples[table], self._keys[table] = moved[order], self._keys[table][order]
            self._bounds[table] = np.searchsorted(self._samples[table], self._edges)
