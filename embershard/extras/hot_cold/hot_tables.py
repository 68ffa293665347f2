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

from embershard.cache.homes.home import Home
from embershard.cache.parts.changed import rows_that_differ
from embershard.cache.parts.part import PoolPart
from embershard.distributed.traffic import counted_as_other
from embershard.errors import CacheError
from embershard.sharding.torchrec.feature_keys import FeaturePlaces, add_per_feature, feature_lengths
from embershard.sharding.torchrec.modes.replicated_rows import CopiesOptimizer, ReplicatedBags, ReplicatedRows


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
        table: its name.
        column: its first column.
        numbers: int64 [K], the rows in the whole table.
        rows: the group that has their copies.
        start: the copies are start to start + K.
    """

    host: Home
    keys: Tensor
    table: str
    column: int
    numbers: Tensor
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
        part_of_feature, self.places, names, addends = zip(*features, strict=True)
        self._feature_places = FeaturePlaces(names, device)
        self._addends = torch.tensor(addends, device=device)
        table = members[0][0]
        precision = data_type_to_sparse_type(table.data_type)
        name = f"hot rows of tables {', '.join(dict.fromkeys(table.name for table, _ in members))}"
        arguments = (device, PoolingMode.SUM, precision, dict(table.fused_params), group, name)
        self.rows = ReplicatedRows(num_rows, columns, part_of_feature, *arguments)

    def prepare(self, hot: KeyedJaggedTensor) -> ReplicatedBags:
        order, on_device = self._feature_places.of(hot.keys())
        if order != list(range(len(hot.keys()))):
            hot = hot.permute(order, on_device)
        lengths = feature_lengths(hot.offsets(), len(order))
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
        self._up_to_date: set[int] = set()  # host tiers that have what the copies learned
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
        for shard in self._shards:
            if shard.host.version != self._versions[id(shard.host)]:
                raise CacheError(
                    "the host tier of tables with hot rows was written to. Their hot rows are on all ranks, and new "
                    "contents get there by load_state_dict of model and fused optimizer, or by "
                    "embershard.host_rows_changed(model), on all ranks. Call one of them before the next forward"
                )
        pieces: list[tuple[int, Tensor]] = []
        for group, bags in zip(self._groups, batch, strict=True):
            pooled = group.rows(bags)
            if pooled.requires_grad:
                pooled.register_hook(lambda _: self.note_trained())
            if len(self._groups) == 1 and list(group.places) == sorted(group.places):
                return pooled
            pieces += zip(group.places, pooled.split(group.columns, dim=1), strict=True)
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda piece: piece[0])], dim=1)

    @property
    def copies(self) -> list[ReplicatedRows]:
        """The rows, a group for each number of columns."""
        return [group.rows for group in self._groups]

    def note_trained(self) -> None:
        """Note that rows train: the host tier's places of them are behind."""
        self._up_to_date.clear()

    # -- the host tier

    def add_shard(self, host: Home, table: str, rows: tuple[int, int], column: int, first_key: int) -> None:
        """Note a shard of this rank: its rows from `rows[0]`, `rows[1]` of them, its first column, its first key."""
        hot = self.tables[table].hot
        low, high = torch.searchsorted(hot, torch.tensor([rows[0], sum(rows)])).tolist()
        group = next(group for group in self._groups if (table, column) in group.first)
        start = group.first[table, column] + low
        numbers = hot[low:high]
        self._shards.append(HotShard(host, numbers - rows[0] + first_key, table, column, numbers, group.rows, start))

    @torch.no_grad()
    def write_to(self, host: Home) -> Tensor:
        """Write the rows of this rank's shards in a host tier; return the keys of those that changed by it.

        Nothing is written over contents that were loaded into it since :meth:`load`.

        Raises:
            CacheError: a backward did not end on this rank.
        """
        for group in self._groups:
            group.rows.guard.check()
        if self._is_behind or host.version != self._versions[id(host)]:
            return torch.empty(0, dtype=torch.int64)
        self._up_to_date.add(id(host))  # first: a backward in another thread takes it back
        found = [torch.empty(0, dtype=torch.int64)]
        for shard in self._shards:
            if shard.host is host:
                own = [copies[shard.start : shard.start + len(shard.keys)].cpu() for copies in shard.rows.payload]
                pairs = zip(own, host.parts, strict=True)
                changed = torch.cat([rows_that_differ(new, rows.detach()[shard.keys].cpu()) for new, rows in pairs])
                changed = changed.unique()
                found.append(shard.keys[changed])
                host.before_write(found[-1])
                for new, rows in zip(own, host.parts, strict=True):
                    rows.data[found[-1]] = new[changed].to(rows.device)
        return torch.cat(found)

    def host_was_loaded(self) -> None:
        """Let the next batch take its rows from the host tiers. All ranks call it."""
        self._is_behind = True

    def load(self) -> None:
        """Copy the rows from the host tiers of all ranks. Collective."""
        self._take(None)
        self._note_taken(everything=True)

    @counted_as_other()
    def host_rows_changed(self, table: str | None, rows: Tensor | None) -> None:
        """Copy rows that somebody wrote to from the host tiers of all ranks. Collective.

        Args:
            table: a table's name; None for all tables.
            rows: int64 [K] row numbers in the whole table, of which those count that are hot and on this rank. None for
                all rows.

        Raises:
            CacheError: on all ranks: some of these rows may have been trained since the last flush.
        """
        if self._is_behind:
            self.load()
            return
        flags = []
        for group in self._groups:
            copies = group.rows.payload[0]
            flag = torch.zeros(copies.shape[0] + 1, dtype=torch.uint8, device=copies.device)  # the last: not flushed
            for shard in self._shards_of(group):
                is_changed = self._is_changed(shard, table, rows)
                flag[shard.start : shard.start + len(shard.keys)] = is_changed.to(flag.device)
                if id(shard.host) not in self._up_to_date and bool(is_changed.any()):
                    flag[-1] = 1
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._process_group)
            flags.append(flag)
        self._take([flag[:-1].nonzero().flatten() for flag in flags])
        self._note_taken(everything=table is None)
        if any(int(flag[-1]) for flag in flags):
            raise CacheError(
                f"host rows were written to in place while hot rows of tables {', '.join(sorted(self.tables))} were "
                "trained after the last flush; what they learned since then is lost, and the host's rows count from "
                "now on. Call embershard.flush(model) on all ranks before writing, or load with load_state_dict"
            )

    def _shards_of(self, group: _Group) -> list[HotShard]:
        return [shard for shard in self._shards if shard.rows is group.rows]

    def _is_changed(self, shard: HotShard, table: str | None, rows: Tensor | None) -> Tensor:
        """Return which of a shard's hot rows may have been written to: bool [K]."""
        if table is None or shard.host.version != self._versions[id(shard.host)]:  # through torch, to any rows
            return torch.ones_like(shard.keys, dtype=torch.bool)
        if shard.table != table:
            return torch.zeros_like(shard.keys, dtype=torch.bool)
        wanted = shard.numbers if rows is None else rows.flatten().long().cpu()
        return torch.isin(shard.numbers, wanted)

    @torch.no_grad()
    @counted_as_other()
    def _take(self, changed: Sequence[Tensor] | None) -> None:
        """Copy rows from the host tiers of all ranks: per group these copies (int64, ascending), or all. Collective."""
        for number, group in enumerate(self._groups):
            shards = [(shard, shard.start, shard.keys) for shard in self._shards_of(group)]
            places = None if changed is None else changed[number]
            if places is not None:
                shards = [_part(shard, places.cpu()) for shard in self._shards_of(group)]
            for shard, _, keys in shards:
                shard.host.make(keys)
            for part, copies in enumerate(group.rows.payload):
                taken = copies.zero_() if places is None else copies.new_zeros(len(places), *copies.shape[1:])
                for shard, start, keys in shards:
                    taken[start : start + len(keys)] = shard.host.parts[part].data[keys].to(copies.device)
                # One rank has a row, the others zeros. Sums of bytes keep every bit; of numbers, not a zero's sign.
                dist.all_reduce(taken.view(torch.uint8), group=self._process_group)
                if places is not None:
                    copies[places] = taken

    def _note_taken(self, everything: bool) -> None:
        self._versions = {id(shard.host): shard.host.version for shard in self._shards}
        if everything:
            self._up_to_date = set(self._versions)
        self._is_behind = False


def _part(shard: HotShard, places: Tensor) -> tuple[HotShard, int, Tensor]:
    """Return a shard, the first of its copies among `places` (int64, ascending), and the keys of those."""
    first, end = torch.searchsorted(places, torch.tensor([shard.start, shard.start + len(shard.keys)])).tolist()
    return shard, first, shard.keys[places[first:end] - shard.start]


class _HotOptimizer(CopiesOptimizer):
    """The fused optimizer of the copies. Their states are in no state dict: the host tier's are."""

    def __init__(self, tables: HotTables) -> None:
        self._tables = tables
        slots = [group.rows.slots for group in tables._groups]
        super().__init__(slots, [[] for _ in slots], {}, {})

    def post_load_state_dict(self) -> None:
        """Take the rows from the host tier again: it has new states."""
        self._tables.host_was_loaded()


class HotPart(PoolPart):
    """Hot rows as a part of a pool: what the copies of its rows learned is written before somebody reads."""

    def __init__(self, tables: HotTables, host: Home) -> None:
        self._tables, self._host = tables, host

    def written_back(self) -> Tensor:
        return self._tables.write_to(self._host)
