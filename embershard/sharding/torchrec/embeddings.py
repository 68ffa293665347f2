"""One pool of cached tables on one rank: host rows, device slots and the cache between them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.modules.embedding_configs import data_type_to_dtype, data_type_to_sparse_type

from embershard.cache.homes.choose import HomeRequest, choose_home, parts_of
from embershard.cache.homes.home import Home
from embershard.cache.homes.shape import PoolShape
from embershard.cache.homes.shared import NodeShare
from embershard.cache.key_map import map_kind
from embershard.cache.next_use import pinned_tables
from embershard.cache.row_cache import RowCache
from embershard.cache.rows.choose_transfer import transfer_kind
from embershard.cache.slot_state import CacheContents
from embershard.cache.statistics import TableStats
from embershard.cache.tickets import Ticket
from embershard.errors import CacheError, ShardingError
from embershard.sharding.shards import rows_problem
from embershard.sharding.torchrec.feature_keys import FeatureIds, FeatureKeys, PoolKeys
from embershard.sharding.torchrec.host_tables import HostTables
from embershard.sharding.torchrec.row_updates import NoUpdates, RowUpdates
from embershard.sharding.torchrec.slots import SlotTable
from embershard.sharding.torchrec.spec import CacheSpec, first_column, first_row, take_spec


@dataclass(frozen=True)
class PoolShard:
    """A table's rows in a pool; a table may have several, by columns. `first_row` and `column` are in the whole table,
    `first_key` and `num_rows` in the pool."""

    table: str
    first_row: int
    column: int
    first_key: int
    num_rows: int

    def keys_of(self, rows: Tensor) -> Tensor:
        """Return the keys of those rows, numbered in the whole table, that are here."""
        is_here = (rows >= self.first_row) & (rows < self.first_row + self.num_rows)
        return rows[is_here] - self.first_row + self.first_key

    def rows_of(self, keys: Tensor) -> Tensor:
        """Return the rows, numbered in the whole table, of those keys that are here."""
        is_here = (keys >= self.first_key) & (keys < self.first_key + self.num_rows)
        return keys[is_here] - self.first_key + self.first_row


class CachedTableBatchedEmbeddings(HostTables):
    """All cached tables of one TorchRec group (same dim, dtype, optimizer, pooling) on one rank: one pool.

    A forward with gradients makes its rows resident, reads them from their slots, and releases them after its backward.
    Rows can be brought in before: by TorchRec's hook :meth:`prefetch`, or by a pipeline, which has `keys` make tickets
    and hands them over (:meth:`hand`).

    Attributes:
        keys: which rows the ids of a batch are.
        updates: how the rows train that a forward has read.
        holder: name of the sharded module's attribute that has the tables' weights; the module sets it.
    """

    holder = ""
    _announcer: object = None
    micro_batches = 1  # a pipeline makes so many known together

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pooling_mode: PoolingMode,
        device: torch.device | None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        spec, fused_params = take_spec(config)
        self._device = device or torch.device("cpu")
        share, shards = None, config.embedding_tables
        if (mode := spec.mode_of_whole_tables) is not None:
            assert group is not None, "tables that ranks share have a process group"
            share, config = mode.whole_tables(config, group, self._device, spec.config)
        tables = config.embedding_tables
        dim = tables[0].local_cols
        assert all(table.local_cols == dim for table in tables), "TorchRec groups cached tables by dim"
        _check_rows(config, spec.rank)
        self._table_of_feature = [t for t, table in enumerate(tables) for _ in table.feature_names]
        precision = data_type_to_sparse_type(config.data_type)
        self.slots = SlotTable(dim, self._table_of_feature, self._device, pooling_mode, precision, fused_params)
        initial = None if spec.counter_init is None else [spec.counter_init.of_shard(table) for table in shards]
        rows, dtype = [table.local_rows for table in tables], data_type_to_dtype(config.data_type)
        self.host = self._make_host(spec, tables, PoolShape(rows, dim, dtype, self.slots.state_specs(), initial), share)
        giver = spec.mode_that_gives_rows(tables)
        self.cache, first_slots = self._make_cache(spec, config, pins=giver is None)
        self.updates = self._updates_alone = (RowUpdates if spec.trains else NoUpdates)(self.cache, self.slots)
        if giver is None:
            first_keys = [self.host.row_offsets[t] for t in self._table_of_feature]
            self.keys = PoolKeys(self.cache, FeatureKeys(first_keys, self._device), first_slots)
        else:
            self.keys = giver.pool_keys(spec, tables, self.cache, self._table_of_feature)
        places = zip(tables, self.host.row_offsets, self.host.rows_per_table, strict=True)
        self.shards = [PoolShard(t.name, first_row(t), first_column(t), key, num_rows) for t, key, num_rows in places]
        self._prefetched: deque[tuple[Ticket, Tensor]] = deque()  # by TorchRec's hook, with the ids
        self._handed: list[Ticket | None] = []  # by a pipeline: one or none. Modules set attributes slowly

    def _make_host(
        self, spec: CacheSpec, tables: Sequence[ShardedEmbeddingTable], shape: PoolShape, share: NodeShare | None
    ) -> Home:
        request = HomeRequest(shape, spec.config.host, spec.config.host_dir, self._device.type == "cuda", share)
        return choose_home(replace(request, **spec.home_arguments(tables, shape.row_bytes)))

    def _make_cache(
        self, spec: CacheSpec, config: GroupedEmbeddingConfig, pins: bool
    ) -> tuple[RowCache, Tensor | None]:
        """Return the cache, and what `SlotTable.set_pinned_slots` returns; small tables have slots for good if
        `pins`."""
        tables, num_rows = config.embedding_tables, self.host.num_rows
        num_slots = spec.num_slots(tables, self.host.slot_row_bytes)
        pinned_of_table = pinned_tables(self.host.rows_per_table, num_slots) if pins else {}
        first_slots = self.slots.set_pinned_slots(pinned_of_table)
        pinned_keys = [torch.arange(rows) + self.host.row_offsets[t] for t, (_, rows) in pinned_of_table.items()]
        cache = RowCache(
            tables=[table.name for table in tables],
            host=self.host,
            device_payload=self.slots.resize,
            num_slots=num_slots,
            table_of_feature=self._table_of_feature,
            policy=spec.policy,
            device=self._device,
            row_counts=spec.row_counts(tables),
            overflow=spec.config.overflow,
            pinned_keys=torch.cat(pinned_keys) if pinned_keys else None,
            owner=f"rank {spec.rank}",
            transfer=transfer_kind(spec.config, self._device),
            kind=map_kind(spec.config.slot_map, num_rows, self._device.type),
        )
        cache.parts = parts_of(self.host, cache.state.scores.of_rows, self._device.type == "cuda")
        return cache, first_slots

    # -- before the step

    def prefetch(
        self,
        indices: Tensor,
        offsets: Tensor,
        forward_stream: Any = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
    ) -> None:
        """Make a batch resident before its forward; forwards then come in the same order. TorchRec's hook.

        Without gradients it does nothing: evaluation leaves the cache as it is.
        """
        if torch.is_grad_enabled():
            ids = FeatureIds(indices, offsets, batch_size_per_feature_per_rank)
            ticket = self.keys.prepare(ids, critical_path=False, known=None, if_it_fits=False)
            assert ticket is not None
            self._prefetched.append((ticket, indices))

    @property
    def num_coming(self) -> int:
        """Batches behind the one in training whose rows are brought nearer (`PoolKeys.bring_nearer`)."""
        return self.cache.parts.num_coming

    @property
    def known_bytes(self) -> int:
        """Memory of what is known of batches, beside what `PoolKeys.know` returns, in bytes."""
        index = self.cache.next_use_index
        return (0 if index is None else index.chain_bytes) + self.cache.parts.known_bytes

    @property
    def knows_most(self) -> bool:
        """True if no further batch should become known."""
        index = self.cache.next_use_index
        return (index is not None and index.knows_most) or self.cache.parts.knows_most

    def hand(self, ticket: Ticket | None) -> None:
        """Give the next forward with gradients its ticket; None: its batch has none."""
        self._handed[:] = (ticket,)

    def look_ahead_for(self, owner: object) -> bool:
        """Let `owner` announce the batches from now on; drop what another owner announced. Return True if what `owner`
        announced was dropped before, if anything."""
        if self._announcer is owner:
            return False
        self.forget_ahead()
        self._announcer = owner
        return True

    def end_ahead_of(self, owner: object) -> None:
        """Drop what `owner` announced, unless another owner has taken over."""
        if self._announcer is owner:
            self.forget_ahead()
            self._announcer = None

    def forget_ahead(self) -> None:
        """Drop all batches that are known or prefetched."""
        self._prefetched.clear()
        self.cache.cancel(forwarded=False)
        self.cache.forget()
        self.keys.forget()

    def drop_given_rows(self) -> None:
        """Before or after new rows come: drop the batches that are known or prefetched, if they gave rows, which are
        lost. Who announced the batches does so again."""
        if self.keys.gives_rows:
            self.forget_ahead()
            self._announcer = None

    def reset_cache_states(self) -> None:
        """As :class:`HostTables`, after new rows came."""
        super().reset_cache_states()
        self.drop_given_rows()

    # -- the step

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        **variable_batch: Any,
    ) -> Tensor:
        """Pool (or gather) the rows of a batch.

        With gradients enabled the rows become resident, and the backward trains them in their slots. Without, they are
        read through the cache, which stays as it is.

        Args:
            indices: [N] row numbers in each feature's table shard.
            offsets: [F * B + 1], feature after feature.
            per_sample_weights: [N] or None.
            variable_batch: FBGEMM's arguments for a batch size per feature.
        """
        self.cache.parts.check()
        ids = FeatureIds(indices, offsets, variable_batch.get("batch_size_per_feature_per_rank"))
        arguments = dict(per_sample_weights=per_sample_weights, **variable_batch)
        if not torch.is_grad_enabled():
            if self._prefetched:
                first = self._prefetched[0][1]
                is_one = indices.shape == first.shape and indices.data_ptr() == first.data_ptr()
                if indices is first or (is_one and indices.numel() > 0):  # not another batch with the same ids
                    self._prefetched.popleft()  # prefetched for training, but evaluated: release its pins
            return self._read(ids, offsets, arguments)
        self.slots.end_reading()
        ticket = self._next_ticket(ids)
        has_zeros = self.keys.begin(ticket)
        self.cache.wait(ticket)
        with torch.set_grad_enabled(self.updates.has_gradients):
            output = self.slots(ticket.slots, offsets.long(), **arguments)
        self.cache.read_by_forward(ticket)
        return self.updates.train_behind(ticket, output, has_zeros)

    def hold(self) -> None:
        """Let the rows of all forwards from now on train together, in `updates.training_held`."""
        self.updates = self._updates_alone.hold()

    def end_holding(self) -> list[Ticket]:
        """Return the tickets that were held; the rows of each forward train alone again."""
        found, self.updates = self.updates.end_holding(), self._updates_alone
        return found

    def _read(self, ids: FeatureIds, offsets: Tensor, arguments: dict[str, Any]) -> Tensor:
        unique, inverse = self.keys.find(ids).unique(return_inverse=True)
        rows = self.cache.read(unique.clamp(min=0))
        if self.keys.has_zeros:
            rows[unique < 0] = 0
        return self.slots.read(rows, inverse, offsets.long(), **arguments)

    def _next_ticket(self, ids: FeatureIds) -> Ticket:
        ticket = self._handed.pop() if self._handed else None
        if ticket is None and self._prefetched:
            found, (ticket, expected) = ids.indices, self._prefetched.popleft()
            # Pipelines forward the tensor that they prefetched, so contents are rarely compared.
            is_one = found.data_ptr() == expected.data_ptr()
            if found.shape != expected.shape or not (is_one or torch.equal(found, expected)):
                self._prefetched.clear()
                raise CacheError(
                    f"{self.cache.name}: this batch is not the one prefetched for this step (the batch has "
                    f"{found.numel()} ids, the prefetched one {expected.numel()}); forward the batches in the order in "
                    "which they were prefetched. All prefetched batches are dropped: the next forward starts afresh"
                )
        if ticket is None or ticket.released:
            ticket = self.keys.prepare(ids, critical_path=True, known=None, if_it_fits=False)
            assert ticket is not None
        return ticket

    # -- the host tier

    def put_rows(self, table: str, read: Callable[[int, int], Iterable[tuple[Tensor, Tensor]]]) -> None:
        """Write weights of a table to its rows here, in a home that rounds.

        Args:
            table: its name.
            read: yields, in blocks, which of the rows [first, stop) of the whole table are written (int64 [n],
                distinct), and their weights, as long as a whole row.

        Raises:
            CacheError: a weight is NaN, infinite or too large.
        """
        for shard in self.shards_of(table):
            for rows, weights in read(shard.first_row, shard.first_row + shard.num_rows):
                columns = weights[:, shard.column : shard.column + self.host.dim]
                self.host.put(rows - shard.first_row + shard.first_key, columns)
        self.host_rows_changed(table)

    @property
    def marked_rows(self) -> dict[str, Tensor]:
        """Rows that the home marks (`Home.marked_keys`), by table: int64, ascending, numbered in the whole table."""
        keys = self.host.marked_keys
        return {} if keys is None else {shard.table: shard.rows_of(keys) for shard in self.shards}

    def mark(self, rows: Mapping[str, Tensor]) -> None:
        """Let these rows be the marked ones, as `marked_rows` of all ranks names them; before any row is trained or
        loaded. Tables that are not named have none."""
        none = torch.empty(0, dtype=torch.int64)
        found = [shard.keys_of(rows.get(shard.table, none)).unique() for shard in self.shards]
        self.host.mark(torch.cat([none, *found]))

    def host_rows_changed(self, table: str, rows: Tensor | None = None) -> None:
        """Fetch cached rows of `table` again, whose host rows somebody wrote to.

        Args:
            table: its name.
            rows: int64 [K] row numbers in the whole table; those outside of this shard are ignored. None: all rows.
        """
        ranges = [range(each.first_key, each.first_key + each.num_rows) for each in self.shards_of(table)]
        keys = ranges if rows is None else self.keys_of(table, rows)
        self.cache.host_rows_changed(keys)

    def keys_of(self, table: str, rows: Tensor) -> Tensor:
        """Return the keys of those of the rows [K], numbered in the whole table, that are here, on the device."""
        found = [shard.keys_of(rows.flatten().long().cpu()) for shard in self.shards_of(table)]
        return torch.cat([torch.empty(0, dtype=torch.int64), *found]).to(self._device)

    def shards_of(self, table: str) -> list[PoolShard]:
        """Return the shards of a table in this pool."""
        return [shard for shard in self.shards if shard.table == table]

    def contents(self) -> Iterator[tuple[str, CacheContents]]:
        """Yield the name of every table shard, and its cached rows (this rank's own), numbered in the whole table."""
        found = self.cache.contents()
        for shard, (first, num_rows) in zip(self.shards, self.host.own_rows, strict=True):
            yield shard.table, found.between(shard.first_key + first, num_rows, shard.first_row + first)

    def restore(self, contents: Mapping[str, CacheContents]) -> None:
        """Fill the cache before the next batch with cached rows of tables, numbered in the whole table."""
        parts = [
            contents[shard.table].between(shard.first_row, shard.num_rows, shard.first_key)
            for shard in self.shards
            if shard.table in contents
        ]
        if any(len(part.rows) for part in parts):  # otherwise a profile's rows are better than none
            self.cache.restore(CacheContents.join(parts))

    def stats(self) -> list[TableStats]:
        """Return what the cache did, per table."""
        return self.cache.stats()


def _check_rows(config: GroupedEmbeddingConfig, rank: int) -> None:
    """Refuse more rows than a pool can number, before host memory is allocated. Plans made elsewhere may have them."""
    rows: Counter[str] = Counter()
    for table in config.embedding_tables:
        rows[table.name] += table.local_rows
    problem = rows_problem(rank, "device", rows)
    if problem:
        raise ShardingError(
            f"{problem}. Use more ranks, place the tables by plan_sharding, or give them fewer rows (hash their ids "
            "into fewer)"
        )
