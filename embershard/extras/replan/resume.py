"""What a change of plan costs: a stop with a save, and a resume that reads it on the new plan.

A resume moves no rows between ranks. The run stops and saves all rows; its ranks start again, check the files, each a
share of them, and read their new shards. So all rows go through the storage, whichever change their ranks: a change of
few tables takes about as long as one of all. What differs is what ranks read: a block of rows is read whole, also
where a rank wants some of its columns (`embershard/distributed/checkpoint/load.py`). Caches begin with the rows that
were cached, as a checkpoint has their numbers; each of these, and each that is missing, is a fill.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from embershard.extras.replan.moves import Ints, TableCut
from embershard.planning.cost.rates import RankRates, of_each
from embershard.planning.workload import Layout
from embershard.sharding.shards import PoolKey, TablePlacement
from embershard.sharding.sizes import ModelSize, RankLayout


@dataclass(frozen=True)
class StorageBytes:
    """Bytes of rows that the node with most of them writes and reads.

    Attributes:
        written: by the save.
        checked: read to compare all files with their checksums.
        read: of the new shards.
    """

    written: int
    checked: int
    read: int

    @property
    def total(self) -> int:
        """All three."""
        return self.written + self.checked + self.read


def storage_bytes(
    model: ModelSize, before: Sequence[TablePlacement], after: Sequence[TablePlacement], layout: RankLayout
) -> StorageBytes:
    """Return what goes through the storage when a run stops, and goes on in another placement. Dense layers, and the
    borders of blocks of 16 MiB, are not counted."""
    old, new = ({table.table: table for table in tables} for tables in (before, after))
    written, read = (np.zeros(layout.world_size, np.int64) for _ in range(2))
    for size in model.tables:
        was, now = (TableCut.of(tables[size.table], layout) for tables in (old, new))
        cell = size.weight_bytes(1) + size.state_bytes_per_column
        if was.is_copied:  # saved once
            was = TableCut(was.ranks[:1], was.rows[:, :1], was.columns[:, :1], is_copied=False)
        rows, columns = was.rows[1] - was.rows[0], was.columns[1] - was.columns[0]
        np.add.at(written, was.ranks, rows * (columns * cell + size.state_bytes))
        np.add.at(read, now.ranks, _rows_read(was, now, cell, size.state_bytes))
        if was.num_blocks != now.num_blocks:  # each rank reads the states of all shards, to take their mean
            read[np.unique(now.ranks)] += size.rows * was.num_blocks * size.state_bytes
    per_node = min(layout.ranks_per_node, layout.world_size)
    of_nodes = [int(each.reshape(-1, per_node).sum(axis=1).max()) for each in (written, read)]
    checked = math.ceil(int(written.sum()) * per_node / layout.world_size)
    return StorageBytes(of_nodes[0], checked, of_nodes[1])


def _rows_read(before: TableCut, after: TableCut, cell_bytes: int, state_bytes: int) -> Ints:
    """Return the bytes that each new shard reads, [new]: of old shards with some of its rows and columns these rows,
    with all columns that were saved together."""
    rows = np.minimum.outer(before.rows[1], after.rows[1]) - np.maximum.outer(before.rows[0], after.rows[0])
    firsts, stops = (pick.outer(*pair) for pick, pair in (
        (np.maximum, (before.columns[0], after.columns[0])), (np.minimum, (before.columns[1], after.columns[1]))
    ))  # fmt: skip
    rows = np.maximum(0, rows) * (stops > firsts)
    of_row = cell_bytes * (before.columns[1] - before.columns[0])
    if before.num_blocks == after.num_blocks:
        of_row = of_row + state_bytes
    return np.asarray((rows * of_row[:, None]).sum(axis=0))


def warm_up(layout: Layout, slots: Mapping[PoolKey, int], rates: RankRates) -> tuple[float, float]:
    """Return the fills until the caches hold what they hold in the long run, of all ranks, and the seconds that the
    rank with most takes for its own, beside nothing else."""
    num_ranks = layout.workload.shape.world_size
    rows, seconds = 0.0, np.zeros(num_ranks)
    for key, members in layout.pools.items():
        for shard, report in zip(members, layout.workload.counted_reports(members, slots[key]), strict=True):
            rows += report.held_rows
            own = of_each(rates, num_ranks)[key.rank]
            per_row = own.seconds_per_fill + shard.host_row_bytes * own.seconds_per_byte_to_device
            seconds[key.rank] += report.held_rows * per_row
    return rows, float(seconds.max())
