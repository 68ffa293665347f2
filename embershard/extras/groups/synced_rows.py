"""What groups keep equal: rows of this rank that other groups have, too. A pool of cached tables is `PoolRows`, a table
that is whole on the device `TableRows`. Both note which rows train, and give and take rows by key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn

from embershard.cache.guards import ChangeGuard
from embershard.cache.parts.changed import ChangedKeys
from embershard.cache.rows.memory import bytes_of
from embershard.errors import ConfigError
from embershard.sharding.torchrec.compat import lookups_of
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings
from embershard.sharding.torchrec.feature_keys import FeatureIds, FeatureKeys

#: Rows that are read at a time for a digest.
_BLOCK = 1 << 16


class SyncedRows(Protocol):
    """Rows of one pool or table, by key: int64, 0 to `num_rows` - 1, the same on all replicas.

    Attributes:
        name: for messages.
        num_rows: of them.
        row_bytes: weights and optimizer states of a row.
        wide_bytes: of them, weights that are float32.
        num_parts: weights, and states.
        meaning: what must be the same on all replicas, so that a key is the same row everywhere.
        start: digest of what the rows hold before anything was trained.
    """

    name: str
    num_rows: int
    row_bytes: int
    wide_bytes: int
    num_parts: int
    meaning: str

    @property
    def start(self) -> str: ...

    def take(self) -> Tensor:
        """Return the keys of rows that trained since the last call: int64 [M] ascending, in host memory."""

    def select(self, keys: Tensor) -> list[Tensor]:
        """Return rows `keys` (int64 [M]), weights and then states: [M, ...] each."""

    def replace(self, keys: Tensor, rows: Sequence[Tensor]) -> None:
        """Give rows `keys` (int64 [M] ascending) these weights and states; others hear of it, this object does not."""


class GroupsGuard(ChangeGuard):
    """Refuses rows after an average of them that did not end: replicas may differ, and nothing would ever notice.

    >>> guard = GroupsGuard("rank 0, rows of all groups")
    >>> guard.check()
    """

    doubt = "rows of the groups may differ where they must be equal"


class _SyncMarks(ChangedKeys):
    """Marks of rows that train on this rank; what the average itself writes is no change. The pool's other readers,
    such as publications, have marks of their own."""

    is_paused = False

    def __init__(self, pool: CachedTableBatchedEmbeddings, guard: ChangeGuard) -> None:
        super().__init__(pool.host, pool.cache.state.map.device)
        self.guard = guard

    def changed(self, keys: Tensor | Sequence[range] | None) -> None:
        if not self.is_paused:
            super().changed(keys)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which nothing is marked."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False


class PoolRows:
    """Rows of a pool, in its slots and its host tier; see `SyncedRows`.

    Args:
        guard: refuses forwards of the pool after an average that did not end.
    """

    def __init__(self, pool: CachedTableBatchedEmbeddings, guard: ChangeGuard) -> None:
        shape = pool.host.shape
        self.name, self.num_rows, self.row_bytes = pool.cache.name, pool.host.num_rows, shape.row_bytes
        self.num_parts, self.wide_bytes = len(shape.parts), shape.weight_bytes * (shape.dtype == torch.float32)
        self.meaning = repr((pool.shards, shape.parts, type(pool.host).__name__))
        self._pool, self._marks = pool, _SyncMarks(pool, guard)
        self._device = pool.cache.state.map.device
        pool.cache.parts.add(self._marks)

    @property
    def start(self) -> str:
        initial = self._pool.host.shape.initial  # a function of the seed: no row has to be made
        return repr(initial) if initial is not None else _digest(self)

    def take(self) -> Tensor:
        return self._marks.take()

    def select(self, keys: Tensor) -> list[Tensor]:
        return self._pool.cache.select(keys.to(self._device))

    def replace(self, keys: Tensor, rows: Sequence[Tensor]) -> None:
        with self._marks.paused():
            self._pool.cache.replace(keys.to(self._device), rows)


class TableRows:
    """Rows of a table that FBGEMM has whole on the device; see `SyncedRows`.

    Args:
        name: of the table.
        weights, states: [R, D], and [R, ...] each.
        marks: bool [R], of rows that trained.
    """

    def __init__(self, name: str, weights: Tensor, states: Sequence[Tensor], marks: Tensor) -> None:
        self.name, self.num_rows = f"table {name}", weights.shape[0]
        self._parts, self._marks = [weights.detach(), *(state.detach() for state in states)], marks
        self._parts = [part.view(self.num_rows, -1) for part in self._parts]
        self.row_bytes = sum(part.shape[1] * part.itemsize for part in self._parts)
        self.num_parts, self.wide_bytes = len(self._parts), weights.shape[1] * 4 * (weights.dtype == torch.float32)
        self.meaning = repr((name, [(part.shape, part.dtype) for part in self._parts]))

    @property
    def start(self) -> str:
        return _digest(self)

    def take(self) -> Tensor:
        keys = self._marks.nonzero().flatten()
        self._marks[keys] = False
        return keys.cpu()

    def select(self, keys: Tensor) -> list[Tensor]:
        return [part.index_select(0, keys.to(part.device)) for part in self._parts]

    def replace(self, keys: Tensor, rows: Sequence[Tensor]) -> None:
        for part, values in zip(self._parts, rows, strict=True):
            part.data.index_copy_(0, keys.to(part.device), values)


def _digest(rows: SyncedRows) -> str:
    found = hashlib.blake2b()
    for first in range(0, rows.num_rows, _BLOCK):
        for part in rows.select(torch.arange(first, min(rows.num_rows, first + _BLOCK))):
            found.update(bytes_of(part.cpu()).data)
    return found.hexdigest()


def synced_rows(model: nn.Module, guard: ChangeGuard) -> list[SyncedRows]:
    """Return the rows of a sharded model on this rank that are kept equal, in the order of its modules. Tables with a
    copy on every rank are none of them: they train with the gradients of all ranks.

    Raises:
        ConfigError: a table is of another kind.
    """
    found: list[SyncedRows] = []
    for module in model.modules():
        for lookup in lookups_of(module):
            for kernel in getattr(lookup, "_emb_modules", ()):
                names = [table.name for table in kernel.config.embedding_tables]
                found += _rows_of(kernel.emb_module, names, guard)
    return found


def _rows_of(table: Any, names: Sequence[str], guard: ChangeGuard) -> list[SyncedRows]:
    if isinstance(table, CachedTableBatchedEmbeddings):
        if table.keys.gives_rows or table.host.is_shared:
            raise ConfigError(f"{', '.join(names)}: groups average tables of row numbers, each rank with its own rows")
        return [PoolRows(table, guard)]
    if isinstance(table, SplitTableBatchedEmbeddingBagsCodegen):
        weights = table.split_embedding_weights()
        states = table.split_optimizer_states() or [[]] * len(weights)
        marks = _note_lookups(table).split([len(part) for part in weights])
        return [TableRows(*each) for each in zip(names, weights, states, marks, strict=True)]
    return []


def _note_lookups(table: SplitTableBatchedEmbeddingBagsCodegen) -> Tensor:
    """Return marks, bool [R], of the rows of all its tables that lookups with gradients name from now on."""
    rows = [num_rows for num_rows, *_ in table.embedding_specs]
    firsts = [sum(rows[:number]) for number in table.feature_table_map]
    device = table.current_device
    marks, limits = torch.zeros(sum(rows), dtype=torch.bool, device=device), torch.tensor(rows, device=device)
    limits = limits[torch.tensor(table.feature_table_map, device=device)]
    keys_of = FeatureKeys(firsts, device)

    def note(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        ids, offsets = (*given, *(named[name] for name in ("indices", "offsets") if name in named))[:2]
        ids = FeatureIds(ids, offsets, named.get("batch_size_per_feature_per_rank"))
        most = limits.repeat_interleave(ids.lengths(len(firsts)), output_size=ids.indices.numel())
        is_row = (ids.indices >= 0) & (ids.indices < most)
        ids = ids._replace(
            indices=ids.indices.where(is_row, 0)
        )  # FBGEMM takes row 0, or none, for an id that is no row
        marks.index_fill_(0, keys_of.of(ids)[0].long(), True)

    table.register_forward_pre_hook(note, with_kwargs=True)
    return marks
