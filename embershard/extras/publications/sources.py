"""Where a publication's rows come from on this rank: the pools, and tables that no cache trains."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from embershard.cache.parts.changed import ComparedRows
from embershard.cache.rows.copies import read_to_host
from embershard.distributed.changed_rows import BehindRows, TouchedRows
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings


class RowSource(Protocol):
    """Rows of tables on this rank, which knows of each whether it changed."""

    def forget(self) -> None:
        """Count no row as changed."""

    def touch(self, table: str, behind: BehindRows) -> None:
        """Count rows of a table, numbered in the whole of it, as changed, and as had by these ids until now; those of
        other ranks are ignored."""

    def take(self) -> list[TouchedRows]:
        """Return the rows that changed since the last call, as they are now, in host memory. Call it between steps."""


class PublishedPool:
    """The rows of a pool. Of rows that ranks share, each returns those that it writes back."""

    def __init__(self, pool: CachedTableBatchedEmbeddings) -> None:
        self._pool, self._marks = pool, pool.track_changes()
        self.forget()

    def forget(self) -> None:
        self._marks.take()
        self._pool.keys.note_changes()

    def touch(self, table: str, behind: BehindRows) -> None:
        for shard in self._pool.shards_of(table):
            self._pool.keys.touch(table, shard.first_row, behind.id_rows, behind.ids)
        self._marks.changed(self._pool.keys_of(table, behind.keys))

    def take(self) -> list[TouchedRows]:
        pool = self._pool
        keys, changes = pool.keys.take_changes(pool.take_changed(self._marks))
        bounds = torch.searchsorted(keys, torch.tensor([*pool.host.row_offsets, pool.host.num_rows])).tolist()
        rows = self._read(keys)
        found = [
            TouchedRows(shard.table, shard.column, shard.rows_of(keys[start:stop]), rows[start:stop])
            for shard, (start, stop) in zip(pool.shards, itertools.pairwise(bounds), strict=True)
        ]
        if changes is None:
            return found
        return [
            replace(part, changed=replace(ids, rows=ids.rows + shard.first_row))
            for part, ids, shard in zip(found, changes, pool.shards, strict=True)
        ]

    def _read(self, keys: Tensor) -> Tensor:
        cache, device = self._pool.cache, self._pool.cache.state.map.device
        if device.type == "cpu":
            return cache.read(keys)
        shape = cache.host.shape
        return read_to_host(lambda some: cache.read(some.to(device)), keys, shape.dim, shape.dtype)


class ComparedTable:
    """A table on a device, or one that every rank has. No cache knows which of its rows updates train, so they are
    compared with a copy.

    >>> table = ComparedTable("clicks", [(0, 0, rows := torch.zeros(3, 2))])
    >>> rows[1] += 1
    >>> [found.keys.tolist() for found in table.take()]
    [[1]]

    Args:
        shards: of this rank: first row, first column, and the live weights [rows, columns].
    """

    def __init__(self, name: str, shards: Sequence[tuple[int, int, Tensor]]) -> None:
        self.name, self._shards = name, shards
        self.forget()

    @classmethod
    def of(cls, name: str, weights: Any, is_first: bool) -> ComparedTable:
        """Return the table with these weights of a state dict; those that all ranks have are the first rank's."""
        if isinstance(weights, ShardedTensor):
            found = [(shard.metadata.shard_offsets, shard.tensor.detach()) for shard in weights.local_shards()]
            return cls(name, [(row, column, rows) for (row, column), rows in found])
        return cls(name, [(0, 0, weights.detach())] if is_first else [])

    def forget(self) -> None:
        self._compared = [ComparedRows([rows]) for *_, rows in self._shards]

    def touch(self, table: str, behind: BehindRows) -> None:
        for (first, _, weights), compared in zip(self._shards, self._compared, strict=True):
            own = (behind.keys >= first) & (behind.keys < first + len(weights)) & (table == self.name)
            compared.add(behind.keys[own] - first)

    def take(self) -> list[TouchedRows]:
        found = []
        for (first, column, weights), compared in zip(self._shards, self._compared, strict=True):
            keys = compared.take([weights])
            found.append(TouchedRows(self.name, column, keys + first, compared.copies[0][keys]))
        return found
