"""Rows that change their ranks between two placements: exactly, by the row and column ranges of all shards; and which
ranks of the new one should have which numbers, so that few do.

A resume cannot rename the ranks of a run, and need not: ranks are alike, so the new plan is written with the numbers
with which most rows stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from embershard.sharding.sharding_types import SHARDING_TYPES
from embershard.sharding.shards import TablePlacement, shards_of
from embershard.sharding.sizes import ModelSize, RankLayout, TableSize

Ints = NDArray[np.int64]
#: Of a row of a table that takes any id: the id itself, which is saved beside it.
_ID_BYTES = 8


@dataclass(frozen=True, eq=False)
class TableCut:
    """The shards of a table as ranges; N shards. A replicated table has one on every rank.

    Attributes:
        ranks: [N].
        rows, columns: first and one behind the last, [2, N].
        is_copied: every rank has all of it.
    """

    ranks: Ints
    rows: Ints
    columns: Ints
    is_copied: bool

    @staticmethod
    def of(table: TablePlacement, layout: RankLayout) -> TableCut:
        """Return the ranges of a placed table."""
        if table.kernel == "replicated":
            ranks = np.arange(layout.world_size)
            whole = np.array([[0], [1]]) * np.ones(layout.world_size, np.int64)
            return TableCut(ranks, table.rows * whole, table.dim * whole, is_copied=True)
        shards = shards_of(table, layout.ranks_per_node)
        numbers = np.array([[s.rank, s.first_row, s.rows, s.first_column, s.columns] for s in shards], np.int64).T
        rows, columns = (np.array([numbers[n], numbers[n] + numbers[n + 1]]) for n in (1, 3))
        return TableCut(numbers[0], rows, columns, is_copied=False)

    @cached_property
    def num_blocks(self) -> int:
        """Blocks that the columns are cut into."""
        return len(np.unique(self.columns[0]))


def bytes_from(size: TableSize, before: TableCut, after: TableCut) -> Ints:
    """Return the bytes of weights and states that each new shard takes of each old one, [old, new].

    A state per row (row-wise Adagrad's) belongs to a shard of columns. With another number of these, a new shard's
    state is the mean of all old ones, so it takes that of each.
    """
    rows, columns = (_common(getattr(before, name), getattr(after, name)) for name in ("rows", "columns"))
    is_same_block = before.columns[0][:, None] == after.columns[0][None]
    takes_state = is_same_block | (before.num_blocks != after.num_blocks)
    of_cell = size.weight_bytes(1) + size.state_bytes_per_column
    of_row = size.state_bytes + (_ID_BYTES if size.buckets else 0)
    return rows * columns * of_cell + rows * takes_state * of_row


def _common(before: Ints, after: Ints) -> Ints:
    """Return how long the common part of each two ranges is, [old, new]."""
    first, stop = (pick.outer(old, new) for pick, old, new in zip((np.maximum, np.minimum), before, after, strict=True))
    return np.asarray(np.maximum(0, stop - first))


@dataclass(frozen=True, eq=False)
class Moves:
    """Bytes of weights and optimizer states that are on another rank than before.

    Attributes:
        tables: by table, those that have some.
        between: from each rank to each, [ranks, ranks].
    """

    tables: Mapping[str, int]
    between: Ints

    @property
    def total(self) -> int:
        """Of all tables."""
        return sum(self.tables.values())


def moves(
    model: ModelSize, before: Sequence[TablePlacement], after: Sequence[TablePlacement], layout: RankLayout
) -> Moves:
    """Return what moves from one placement to another on the same ranks: what a shard has that its rank had not.

    Args:
        before, after: of all tables of the model.
    """
    old, new = ({table.table: table for table in tables} for tables in (before, after))
    tables, between = {}, np.zeros((layout.world_size, layout.world_size), np.int64)
    for size in model.tables:
        was, now = old[size.table], new[size.table]
        if was.kernel == "replicated" or (was.sharding, was.ranks) == (now.sharding, now.ranks):
            continue
        cuts = [TableCut.of(table, layout) for table in (was, now)]
        taken = bytes_from(size, *cuts) * (cuts[0].ranks[:, None] != cuts[1].ranks[None])
        np.add.at(between, (cuts[0].ranks[:, None], cuts[1].ranks[None]), taken)
        if taken.any():
            tables[size.table] = int(taken.sum())
    return Moves(tables, between)


def with_kept_ranks(
    model: ModelSize, before: Sequence[TablePlacement], after: Sequence[TablePlacement], layout: RankLayout
) -> tuple[TablePlacement, ...]:
    """Return a placement with its ranks renamed, whole nodes and ranks within them, and with blocks of columns in
    another order on a table's ranks, so that as many bytes as possible stay where they were.

    Tables over all ranks have their first block on rank 0 in every plan. Beside one of these another numbering may be
    another placement: whoever asks compares what both take.
    """
    world_size, per_node = layout.world_size, min(layout.ranks_per_node, layout.world_size)
    sizes, old = {size.table: size for size in model.tables}, {table.table: table for table in before}
    kept = {over: np.zeros((world_size, world_size), np.int64) for over in ("one", "node")}  # [new, old]
    for table in after:
        over = SHARDING_TYPES[table.sharding].rows_over
        if over in kept and old[table.table].kernel != "replicated":
            was, now = (TableCut.of(each, layout) for each in (old[table.table], table))
            taken = bytes_from(sizes[table.table], was, now)
            np.add.at(kept[over], (now.ranks[None], was.ranks[:, None]), taken)
    nodes = world_size // per_node
    values, inside = np.zeros((nodes, nodes), np.int64), np.zeros((nodes, nodes, per_node), np.int64)
    by_node = {over: each.reshape(nodes, per_node, nodes, per_node) for over, each in kept.items()}
    for new_node in range(nodes):
        for old_node in range(nodes):
            block = by_node["one"][new_node, :, old_node]
            inside[new_node, old_node] = linear_sum_assignment(block, maximize=True)[1]
            values[new_node, old_node] = block[np.arange(per_node), inside[new_node, old_node]].sum()
            values[new_node, old_node] += np.trace(by_node["node"][new_node, :, old_node])
    node_of = linear_sum_assignment(values, maximize=True)[1]
    rank_of = np.concatenate([per_node * node + inside[number, node] for number, node in enumerate(node_of)])

    def renamed(table: TablePlacement) -> TablePlacement:
        over = SHARDING_TYPES[table.sharding].rows_over
        if over not in kept:
            return table
        ranks = np.array(table.ranks)
        if over == "node":
            ranks = per_node * node_of[ranks // per_node] + ranks % per_node
            return replace(table, ranks=tuple(ranks.tolist()))
        table = replace(table, ranks=tuple(rank_of[ranks].tolist()))
        return _in_kept_order(sizes[table.table], old[table.table], table, layout)

    return tuple(map(renamed, after))


def _in_kept_order(
    size: TableSize, before: TablePlacement, after: TablePlacement, layout: RankLayout
) -> TablePlacement:
    """Return the placement of a table by columns with its blocks, which are all alike, on those of its ranks that have
    most of them."""
    if len(after.ranks) < 2 or len(set(after.ranks)) < len(after.ranks) or before.kernel == "replicated":
        return after
    was, now = TableCut.of(before, layout), TableCut.of(after, layout)
    taken, ranks = bytes_from(size, was, now), np.array(after.ranks)
    kept = (taken[:, :, None] * (was.ranks[:, None, None] == ranks[None, None])).sum(axis=0)  # [block, rank]
    return replace(after, ranks=tuple(ranks[linear_sum_assignment(kept, maximize=True)[1]].tolist()))
