"""The hot rows of a sharded module's tables: equal copies on every rank, for the whole run.

A hot row is trained in its copies alone. Its place in the host tier of its shard is written before somebody reads the
host tier, and read after somebody has loaded it: checkpoints and state dicts are those of whole tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor
from torchrec.modules.embedding_configs import DataType, data_type_to_sparse_type
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.cache.rows.host_store import HostStore
from embershard.distributed.traffic import counted_as_other
from embershard.errors import CacheError
from embershard.sharding.torchrec.feature_keys import add_per_feature
from embershard.sharding.torchrec.replicated_rows import CopiesOptimizer, ReplicatedBags, ReplicatedRows


@dataclass(frozen=True)
class HotTable:
    """A table of a sharded module.

    Attributes:
        hot: int64 [H], its hot rows, ascending; H may be 0.
        parts: first column and columns of its column shards, which have optimizer states of their own.
        fused_params: FBGEMM's arguments.
    """

    name: str
    num_rows: int
    hot: Tensor
    parts: tuple[tuple[int, int], ...]
    data_type: DataType
    fused_params: Mapping[str, Any]


class OutputFeature(NamedTuple):
    """A feature in the module's output, its table and that table's columns."""

    name: str
    table: HotTable


class HotShard(NamedTuple):
    """The hot rows of a table shard on this rank.

    Attributes:
        host: the host tier that has the shard.
        keys: int64 [K], the rows in it.
        rows: the group that has their copies.
        start: the copies are start to start + K.
    """

    host: HostStore
    keys: Tensor
    rows: ReplicatedRows
    start: int


class _Group:
    """Copies of rows with one number of columns, in one FBGEMM table.

    Attributes:
        rows: the copies.
        first: the first copy of each part of a table, by the table's name and the part's first column.
        columns: of a row.
        places: of the pooled features: first column in the module's output.
    """

    def __init__(
        self,
        columns: int,
        members: list[tuple[HotTable, int]],
        output: Sequence[OutputFeature],
        hot_starts: Mapping[str, int],
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.columns = columns
        self.first: dict[tuple[str, int], int] = {}
        num_rows = 0
        for table, column in members:
            self.first[table.name, column] = num_rows
            num_rows += len(table.hot)
        numbers = {part: number for number, part in enumerate(self.first)}
        features: list[tuple[int, int, str, int]] = []
        start = 0
        for name, table in output:
            for column, _ in table.parts:
                if (table.name, column) in self.first:
                    addend = self.first[table.name, column] - hot_starts[table.name]
                    features.append((numbers[table.name, column], start + column, name, addend))
            start += sum(size for _, size in table.parts)
        features.sort()  # FBGEMM wants the features of a table together: here, of a part
        part_of_feature, self.places, self.names, addends = zip(*features, strict=True)
        self._addends = torch.tensor(addends, device=device)
        table = members[0][0]
        precision = data_type_to_sparse_type(table.data_type)
        name = f"hot rows of tables {', '.join(dict.fromkeys(table.name for table, _ in members))}"
        arguments = (device, PoolingMode.SUM, precision, dict(table.fused_params), group, name)
        self.rows = ReplicatedRows(num_rows, columns, part_of_feature, *arguments)

    def prepare(self, hot: KeyedJaggedTensor) -> ReplicatedBags:
        keys = list(hot.keys())
        order = [keys.index(name) for name in self.names]
        if order != list(range(len(keys))):
            hot = hot.permute(order)
        lengths = torch.tensor(hot.length_per_key(), device=hot.values().device)
        weights = hot.weights_or_none()
        return self.rows.prepare(add_per_feature(hot.values(), self._addends, lengths), hot.offsets(), weights)


class HotTables:
    """Copies of the hot rows of a module's tables, and their way to and from the host tier.

    Args:
        output: the features of the module's output, in its order.
        device: of the copies.
        group: of the ranks.
    """

    def __init__(self, output: Sequence[OutputFeature], device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.tables = {table.name: table for _, table in output}
        self.starts: dict[str, int] = {}  # number of each table's first hot row
        for table in self.tables.values():
            self.starts[table.name] = sum(len(self.tables[name].hot) for name in self.starts)
        members: dict[Any, list[tuple[HotTable, int]]] = {}
        for table in self.tables.values():
            for column, columns in table.parts:
                alike = (columns, table.data_type, repr(sorted(table.fused_params.items())))
                members.setdefault(alike, []).append((table, column))
        self._groups = [_Group(alike[0], found, output, self.starts, device, group) for alike, found in members.items()]
        self._process_group = group
        self._shards: list[HotShard] = []
        self._versions: dict[int, int] = {}  # of the host tiers, when the copies were equal to them
        self._is_behind = True
        self.optimizer = _HotOptimizer(self)

    @property
    def num_bytes(self) -> int:
        """Device memory of the copies and their optimizer states."""
        return sum(rows.nbytes for group in self._groups for rows in group.rows.payload)

    # -- a batch

    def prepare(self, hot: KeyedJaggedTensor) -> list[ReplicatedBags]:
        """Return what :meth:`pool` takes, for a batch of hot ids: numbers of hot rows, over all tables."""
        return [group.prepare(hot) for group in self._groups]

    def pool(self, batch: Sequence[ReplicatedBags]) -> Tensor:
        """Pool the hot rows of a batch: [B, columns of the module's output]. Collective, as is its backward."""
        if self._is_behind:
            self.load()
        self._check_host()
        pieces: list[tuple[int, Tensor]] = []
        for group, bags in zip(self._groups, batch, strict=True):
            pooled = group.rows(bags)
            if len(self._groups) == 1 and list(group.places) == sorted(group.places):
                return pooled
            pieces += zip(group.places, pooled.split(group.columns, dim=1), strict=True)
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda piece: piece[0])], dim=1)

    # -- the host tier

    def add_shard(self, host: HostStore, table: str, rows: tuple[int, int], column: int, first_key: int) -> None:
        """Note a shard of this rank: its rows from `rows[0]`, `rows[1]` of them, its first column, its first key."""
        hot = self.tables[table].hot
        low, high = torch.searchsorted(hot, torch.tensor([rows[0], sum(rows)])).tolist()
        group = next(group for group in self._groups if (table, column) in group.first)
        start = group.first[table, column] + low
        self._shards.append(HotShard(host, hot[low:high] - rows[0] + first_key, group.rows, start))

    @torch.no_grad()
    def write_to(self, host: HostStore) -> None:
        """Write the rows of this rank's shards in a host tier.

        Nothing is written over contents that were loaded into it since :meth:`load`.

        Raises:
            CacheError: a backward did not end on this rank.
        """
        for group in self._groups:
            group.rows.guard.check()
        if self._is_behind or host.version != self._versions[id(host)]:
            return
        for shard in self._shards:
            if shard.host is host:
                host.before_write(shard.keys)
                for copies, rows in zip(shard.rows.payload, host.payload, strict=True):
                    rows.data[shard.keys] = copies[shard.start : shard.start + len(shard.keys)].to(rows.device)

    def host_was_loaded(self) -> None:
        """Let the next batch take its rows from the host tiers. All ranks call it."""
        self._is_behind = True

    @torch.no_grad()
    @counted_as_other()
    def load(self) -> None:
        """Copy the rows from the host tiers of all ranks. Collective."""
        for group in self._groups:
            for copies in group.rows.payload:
                copies.zero_()
        for shard in self._shards:
            shard.host.make(shard.keys)
            for copies, rows in zip(shard.rows.payload, shard.host.payload, strict=True):
                copies[shard.start : shard.start + len(shard.keys)] = rows.data[shard.keys].to(copies.device)
        for group in self._groups:
            for copies in group.rows.payload:
                # One rank has a row, the others zeros. Sums of bytes keep every bit; of numbers, not a zero's sign.
                dist.all_reduce(copies.view(torch.uint8), group=self._process_group)
        self._versions = {id(shard.host): shard.host.version for shard in self._shards}
        self._is_behind = False

    def _check_host(self) -> None:
        for shard in self._shards:
            if shard.host.version != self._versions[id(shard.host)]:
                raise CacheError(
                    "the host tier of tables with hot rows was written to. Their hot rows are on all ranks, and only "
                    "load_state_dict of model and fused optimizer, on all ranks, brings new contents there. Load so"
                )


class _HotOptimizer(CopiesOptimizer):
    """The fused optimizer of the copies. Their states are in no state dict: the host tier's are."""

    def __init__(self, tables: HotTables) -> None:
        self._tables = tables
        slots = [group.rows.slots for group in tables._groups]
        super().__init__(slots, [[] for _ in slots], {}, {})

    def post_load_state_dict(self) -> None:
        """Take the rows from the host tier again: it has new states."""
        self._tables.host_was_loaded()
