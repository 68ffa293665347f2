"""`SaveChain`: which rows of a run's tables changed since its last save, and whether the next one is a delta."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from embershard.cache.homes.home import Home
from embershard.cache.parts.changed import ComparedRows
from embershard.distributed import Ranks
from embershard.distributed.checkpoint.load import without_known_warnings
from embershard.distributed.checkpoint.manifest import Parent
from embershard.distributed.checkpoint.rows_file import ChangedShard
from embershard.distributed.checkpoint.save import NewLink
from embershard.sharding.torchrec import FrozenRows, cached_embeddings
from embershard.training.checkpoint.table_shards import (
    TableShard,
    shards_of,
    tables_in,
    total_bytes,
    weights_and_ids,
    without,
)

#: Tables without a cache up to this size are in every save whole.
_SMALL_BYTES = 16 << 20
#: A save of at least this share of the bytes of all rows is whole: a chain of such deltas takes more than it saves.
MOST_CHANGED = 0.6
_NOT_WRITTEN = "the save before it was not written"
_Key = tuple[str, int]


@dataclass(frozen=True)
class _Place:
    """Where the rows of a shard are.

    Attributes:
        pool: its number; None: none has them.
        first: the key of the first row.
        numbers: of each tensor, its number in the payload; None: it is compared with a copy.
    """

    pool: int | None
    first: int
    numbers: tuple[int | None, ...]


class _PoolRows:
    """The frozen rows of a pool, up to the last one that a save reads: then nothing is put aside any more."""

    def __init__(self, frozen: FrozenRows, last_key: int) -> None:
        self._frozen, self._last_key = frozen, last_key
        if last_key < 0:
            frozen.close()

    def select(self, keys: Tensor) -> list[Tensor]:
        """See `FrozenRows.select`."""
        found = self._frozen.select(keys)
        if int(keys[-1]) == self._last_key:
            self._frozen.close()
        return found


class SaveChain:
    """The saves of a run: whole ones, each followed by deltas. All ranks call its methods in the same steps.

    Pools tell which of their rows changed (`PoolPart.changed`). Other tables, and the ids of rows, are compared with a
    copy of what the last save has, bit by bit.

    Args:
        full_every: of so many saves, one is whole.
        is_replica: another rank has the same rows, and saves them.
    """

    def __init__(self, model: DistributedModelParallel, ranks: Ranks, full_every: int, is_replica: bool) -> None:
        self._ranks, self._full_every, self._is_replica = ranks, full_every, is_replica
        self._pools, self._tables = list(cached_embeddings(model)), sorted(model.fused_optimizer.params)
        self._marks = [pool.track_changes() for pool in self._pools]
        self._compared = dict[_Key, ComparedRows]()  # what no pool has; and rows of saves that failed
        self._row_tables: set[str] | None = None  # whose changed rows deltas have
        self._parent: Parent | str = "the first one"  # or why the next save follows none
        self._num_deltas = 0  # since the last whole save
        self._open: NewLink | None = None  # of a save that was prepared

    def go_on_from(
        self, parent: Parent | str, num_deltas: int, tensors: Mapping[str, Any], saved: Mapping[str, torch.Size]
    ) -> None:
        """Begin with a state that was loaded. Collective.

        Args:
            parent: the save that has it; or why the next one is whole.
            num_deltas: in the chain of that save.
            tensors: of the run, by group.
            saved: sizes of the tensors in that save. The next one is whole if one has another size now.
        """
        for pool in self._pools:
            pool.write_back()  # which notices what was loaded
        shards = self._shards(tensors)
        self._changed(shards)
        with without_known_warnings():
            names = {name: t.size() for parts in tables_in(tensors, self._tables).values() for name, t in parts.items()}
        other = next((name for name, size in names.items() if saved.get(name) != size), None)
        if isinstance(parent, Parent) and other is not None:
            parent = f"{other} has another size than in step_{parent.step}"
        self._parent, self._num_deltas, self._open = parent, num_deltas, None

    def cut(self, tensors: Mapping[str, Any], frozen: Sequence[FrozenRows]) -> tuple[dict[str, Any], NewLink]:
        """Return the tensors that the next save has whole, and its link. `written` or `failed` says what became of it.
        Collective.

        Args:
            tensors: of the run, by group.
            frozen: the rows of each pool, in which all trained ones were written back.
        """
        token, shards = self._ranks.from_first(lambda: uuid.uuid4().hex), self._shards(tensors)
        changed = self._changed(shards)
        if self._is_replica:
            shards, changed = [], []
        parent, why = self._parent, self._why_whole(shards, changed)
        if why or isinstance(parent, str):
            self._open = NewLink(token, why_whole=why)
            return dict(tensors), self._open
        pools = [_PoolRows(rows, own) for rows, own in zip(frozen, self._last_keys(shards, changed), strict=True)]
        parts = [
            ChangedShard(shard.names, shard.offsets, shard.tensors, rows, partial(self._read, shard, place, pools))
            for (shard, place), rows in zip(shards, changed, strict=True)
        ]
        self._open = NewLink(token, parent, tuple(parts))
        tables = tables_in(tensors, self._tables)
        names = {name for table in self._row_tables or () for name in (*weights_and_ids(table), *tables.get(table, ()))}
        return without(tensors, names), self._open

    def _why_whole(self, shards: Sequence[tuple[TableShard, _Place]], changed: Sequence[Tensor]) -> str:
        """Return the reason for a whole save, or nothing, the same on all ranks. Collective."""
        why = self._parent if isinstance(self._parent, str) else _NOT_WRITTEN if self._open is not None else ""
        some = sum(shard.row_bytes * len(rows) for (shard, _), rows in zip(shards, changed, strict=True))
        everything = sum(shard.row_bytes * shard.num_rows for shard, _ in shards)
        told = self._ranks.all_gather_objects((why, some, everything))
        if reasons := [reason for reason, *_ in told if reason]:
            return reasons[0]
        if self._num_deltas + 1 >= self._full_every:
            return f"one of {self._full_every} is"
        some, everything = (sum(numbers) for numbers in zip(*(rest for _, *rest in told), strict=True))
        if not everything:
            return "all tables are small"
        return "" if some < MOST_CHANGED * everything else f"{some / everything:.0%} of the rows' bytes changed"

    def written(self, step: int) -> None:
        """The save is complete: the next one may follow it."""
        assert self._open is not None, "a save was cut"
        self._num_deltas = 0 if self._open.parent is None else self._num_deltas + 1
        self._parent, self._open = Parent(step, self._open.token), None

    def failed(self) -> None:
        """The save was not written: its rows are in the next one."""
        assert self._open is not None, "a save was cut"
        if self._open.parent is None:
            self._parent = _NOT_WRITTEN
        else:
            for compared in self._compared.values():
                compared.add(compared.taken)
        self._open = None

    def _shards(self, tensors: Mapping[str, Any]) -> list[tuple[TableShard, _Place]]:
        """Return this rank's shards of the tables whose rows deltas have, in the order of their rows in the pools."""
        tables = tables_in(tensors, self._tables)
        with without_known_warnings():
            found = [
                (shard, _place_of(shard, [pool.host for pool in self._pools]))
                for table, parts in tables.items()
                for shard in shards_of(table, parts, self._ranks.is_first)
            ]
            large = {table for table, parts in tables.items() if total_bytes(parts) > _SMALL_BYTES}
        if self._row_tables is None:  # other ranks may have the table
            own = large | {shard.table for shard, place in found if place.pool is not None}
            self._row_tables = set[str]().union(*self._ranks.all_gather_objects(own))
        kept = [(shard, place) for shard, place in found if shard.table in self._row_tables]
        return sorted(kept, key=lambda each: (each[1].pool is None, each[1].pool or 0, each[1].first))

    def _changed(self, shards: Sequence[tuple[TableShard, _Place]]) -> list[Tensor]:
        """Return the rows of each shard that are not as the last save has them, int64 [n] ascending; what is compared
        is copied."""
        of_pools = [pool.take_changed(marks) for pool, marks in zip(self._pools, self._marks, strict=True)]
        for pool, keys in zip(self._pools, of_pools, strict=True):
            pool.host.make(keys)  # where somebody said that all were written to
        found = []
        for shard, place in shards:
            others = [tensor for tensor, number in zip(shard.tensors, place.numbers, strict=True) if number is None]
            if shard.key not in self._compared:
                self._compared[shard.key] = ComparedRows(others)
            compared = self._compared[shard.key]
            if place.pool is not None:
                of_pool = of_pools[place.pool]
                start, stop = torch.searchsorted(of_pool, torch.tensor([place.first, place.first + shard.num_rows]))
                compared.add(of_pool[start:stop] - place.first)
            found.append(compared.take(others))
        return found

    def _last_keys(self, shards: Sequence[tuple[TableShard, _Place]], changed: Sequence[Tensor]) -> list[int]:
        """Return the last key of each pool that a save reads; -1: it reads none."""
        last = [-1] * len(self._pools)
        for (_, place), rows in zip(shards, changed, strict=True):
            if place.pool is not None and len(rows):
                last[place.pool] = place.first + int(rows[-1])
        return last

    def _read(self, shard: TableShard, place: _Place, pools: Sequence[_PoolRows], rows: Tensor) -> list[Tensor]:
        of_pool = [] if place.pool is None else pools[place.pool].select(rows + place.first)
        copies = iter(self._compared[shard.key].copies)
        return [next(copies)[rows] if number is None else of_pool[number] for number in place.numbers]


def _place_of(shard: TableShard, hosts: Sequence[Home]) -> _Place:
    pool, first, numbers = None, 0, list[int | None]()
    for tensor in shard.tensors:
        found = None
        for number, host in enumerate(hosts):
            if (place := host.views.place_of(tensor)) is not None:
                pool, (found, first) = number, place
        numbers.append(found)
    return _Place(pool, first, tuple(numbers))
