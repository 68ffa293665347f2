"""`ComparedTable`: which rows of a table outside of caches changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from embershard.distributed.publish.write import BehindRows, TouchedRows


class ComparedTable:
    """A table on a device, or one that every rank has. No cache knows which of its rows updates train, so they are
    compared with a copy in host memory, bit by bit.

    >>> table = ComparedTable("clicks", [(0, 0, rows := torch.zeros(3, 2))])
    >>> rows[1] += 1
    >>> [found.keys.tolist() for found in table.take_touched()]
    [[1]]

    Args:
        shards: of this rank: first row, first column, and the live weights [rows, columns].
    """

    def __init__(self, name: str, shards: Sequence[tuple[int, int, Tensor]]) -> None:
        self.name, self._shards = name, shards
        self.forget_touched()

    @classmethod
    def of(cls, name: str, weights: Any, is_first: bool) -> ComparedTable:
        """Return the table with these weights of a state dict; those that all ranks have are the first rank's."""
        if isinstance(weights, ShardedTensor):
            found = [(shard.metadata.shard_offsets, shard.tensor.detach()) for shard in weights.local_shards()]
            return cls(name, [(row, column, rows) for (row, column), rows in found])
        return cls(name, [(0, 0, weights.detach())] if is_first else [])

    def forget_touched(self) -> None:
        """Compare with the rows as they are now."""
        self._before = [rows.to("cpu", copy=True) for *_, rows in self._shards]
        self._marks = [torch.zeros(len(rows), dtype=torch.bool) for rows in self._before]

    def touch(self, table: str, behind: BehindRows) -> None:
        """Count rows, numbered in the whole table, as changed, if the table is this; others are ignored."""
        rows = behind.keys
        for (first, _, _), marks in zip(self._shards, self._marks, strict=True):
            own = rows[(rows >= first) & (rows < first + len(marks))] - first
            marks[own if table == self.name else own[:0]] = True

    def take_touched(self) -> list[TouchedRows]:
        """Return the rows that changed since the last call, as they are now."""
        found = []
        for (first, column, rows), before, marks in zip(self._shards, self._before, self._marks, strict=True):
            now = rows.cpu()
            keys = ((now.view(torch.uint8) != before.view(torch.uint8)).any(1) | marks).nonzero().flatten()
            before[keys] = new = now[keys]
            marks.zero_()
            found.append(TouchedRows(self.name, column, keys + first, new))
        return found
