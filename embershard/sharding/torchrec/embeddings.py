"""Host rows, device slots and the cache between them, behind the members that TorchRec reads of an FBGEMM
module."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
from torch import Tensor, nn
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.modules.embedding_configs import data_type_to_dtype, data_type_to_sparse_type

from embershard.cache.key_map import map_kind
from embershard.cache.next_use import KnownBatch
from embershard.cache.pinned_tables import pinned_tables
from embershard.cache.row_cache import RowCache
from embershard.cache.rows.choose_transfer import transfer_kind
from embershard.cache.rows.host_store import HostStore
from embershard.cache.statistics import TableStats
from embershard.cache.tickets import Ticket
from embershard.errors import CacheError, ShardingError
from embershard.sharding.shards import rows_problem
from embershard.sharding.torchrec.slots import SlotTable
from embershard.sharding.torchrec.spec import CacheSpec, take_spec


class CachedTableBatchedEmbeddings(nn.Module):
    """All cached tables of one TorchRec group (same dim, dtype, optimizer, pooling) on one rank: one pool.

    Looks like FBGEMM's ``SplitTableBatchedEmbeddingBagsCodegen`` to TorchRec, but for the location of its
    rows: the weights and optimizer states that it shows are the host tier's, for the whole shard. Whoever
    reads them calls :meth:`flush` first.
    """

    def __init__(self, config: GroupedEmbeddingConfig, pooling_mode: PoolingMode, device: torch.device | None) -> None:
        super().__init__()
        spec, fused_params = take_spec(config)
        tables = config.embedding_tables
        self._device = device or torch.device("cpu")
        self._dim = tables[0].local_cols
        assert all(table.local_cols == self._dim for table in tables), "TorchRec groups cached tables by dim"
        self._rows = [table.local_rows for table in tables]
        _check_rows(config, spec.rank)
        self._table_of_feature = [t for t, table in enumerate(tables) for _ in table.feature_names]
        self.slots = SlotTable(
            self._dim,
            self._table_of_feature,
            self._device,
            pooling_mode,
            data_type_to_sparse_type(config.data_type),
            fused_params,
        )
        self.host = HostStore(
            self._rows,
            self._dim,
            data_type_to_dtype(config.data_type),
            self.slots.state_specs(),
            spec.config.host,
            spec.config.host_dir,
            whole_pages=self._device.type == "cuda",
        )
        self.cache = self._make_cache(spec, config)
        first_keys = [self.host.row_offsets[table] for table in self._table_of_feature]
        self._first_key_of_feature = torch.tensor(first_keys, dtype=torch.int64, device=self._device)
        self._prefetched: deque[tuple[Ticket, Tensor]] = deque()  # with the ids that they are for
        self._handed: Ticket | None = None
        self._announcer: object = None
        self._shards = [(table.name, _first_row(table)) for table in tables]  # several may be of one table, by columns

    def _make_cache(self, spec: CacheSpec, config: GroupedEmbeddingConfig) -> RowCache:
        tables, num_rows = config.embedding_tables, self.host.num_rows
        num_slots = spec.num_slots(tables, self.host.row_bytes)
        pinned_of_table = pinned_tables(self._rows, num_slots)
        self._pinned_of_feature = self.slots.set_pinned_slots(pinned_of_table)
        pinned_keys = [torch.arange(rows) + self.host.row_offsets[t] for t, (_, rows) in pinned_of_table.items()]
        counts = None
        if spec.profile is not None:
            counts = torch.cat(
                [
                    spec.profile.shard(table.name, table.num_embeddings, _first_row(table), table.local_rows)
                    for table in tables
                ]
            )
        return RowCache(
            tables=[table.name for table in tables],
            host=self.host,
            device_payload=self.slots.resize,
            num_slots=num_slots,
            table_of_feature=self._table_of_feature,
            policy=spec.policy,
            device=self._device,
            row_counts=counts,
            overflow=spec.config.overflow,
            pinned_keys=torch.cat(pinned_keys) if pinned_keys else None,
            owner=f"rank {spec.rank}",
            transfer=transfer_kind(spec.config, self._device),
            kind=map_kind(spec.config.slot_map, num_rows, self._device.type),
        )

    # -- the step

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
        if not torch.is_grad_enabled():
            return
        ticket = self._prepare(indices, offsets, batch_size_per_feature_per_rank, critical_path=False)
        assert ticket is not None
        self._prefetched.append((ticket, indices))

    def know(self, indices: Tensor, offsets: Tensor, batch_sizes: list[list[int]] | None) -> KnownBatch | None:
        """A batch that will be prefetched, after all that are known already; see :meth:`RowCache.know`."""
        if self.cache.next_use_index is None:
            return None
        keys, lengths = self._keys(indices, offsets, batch_sizes)
        return self.cache.know(keys, lengths)

    def prefetch_if_it_fits(
        self,
        indices: Tensor,
        offsets: Tensor,
        batch_sizes: list[list[int]] | None,
        known: KnownBatch | None,
        critical_path: bool,
    ) -> Ticket | None:
        """Make a batch resident, unless it does not fit beside those in flight: None then.

        ``critical_path``: the batch trains next. Whoever holds the ticket gives it to
        :meth:`hand` before the batch's forward.
        """
        return self._prepare(indices, offsets, batch_sizes, critical_path, known, if_it_fits=True)

    def hand(self, ticket: Ticket | None) -> None:
        """The next forward with gradients is of this ticket's batch; None: of a batch without one."""
        self._handed = ticket

    def skip(
        self, indices: Tensor, offsets: Tensor, batch_sizes: list[list[int]] | None, known: KnownBatch | None
    ) -> None:
        """A known batch, the next one in order, will not be prefetched."""
        if known is not None:
            self.cache.skip(self._keys(indices, offsets, batch_sizes)[0], known)

    def look_ahead_for(self, owner: object) -> None:
        """From now on ``owner`` announces the batches; what another one announced will not come."""
        if self._announcer is not owner:
            self.forget_ahead()
            self._announcer = owner

    def end_ahead_of(self, owner: object) -> None:
        """``owner`` announces no more; nothing happens when another one does by now."""
        if self._announcer is owner:
            self.forget_ahead()
            self._announcer = None

    def forget_ahead(self) -> None:
        """No batch that is known or prefetched will come."""
        self._prefetched.clear()
        self.cache.cancel_prepared()
        self.cache.forget()

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        **variable_batch: Any,
    ) -> Tensor:
        """Pool (or gather) the rows of a batch.

        Args:
            indices: [N] row numbers in each feature's table shard.
            offsets: [F * B + 1], feature after feature.
            per_sample_weights: [N] or None.
            variable_batch: FBGEMM's arguments for a batch size per feature.

        With gradients enabled the rows become resident, and the backward trains them in their slots. Without,
        they are read through the cache, which stays as it is.
        """
        arguments = dict(per_sample_weights=per_sample_weights, **variable_batch)
        batch_sizes = variable_batch.get("batch_size_per_feature_per_rank")
        if not torch.is_grad_enabled():
            if self._prefetched and _is(indices, self._prefetched[0][1]):
                self._prefetched.popleft()  # prefetched to be trained, but evaluated: its pins go
            keys, _ = self._keys(indices, offsets, batch_sizes)
            unique, inverse = keys.unique(return_inverse=True)
            return self.slots.read(self.cache.read(unique), inverse, offsets.long(), **arguments)
        self.slots.end_reading()
        ticket = self._next_ticket(indices, offsets, batch_sizes)
        self.cache.wait(ticket)
        output = self.slots(ticket.slots, offsets.long(), **arguments)
        self.cache.read_by_forward(ticket)
        _release_after_backward(self.cache, ticket, output)
        return output

    def _next_ticket(self, indices: Tensor, offsets: Tensor, batch_sizes: list[list[int]] | None) -> Ticket:
        ticket, self._handed = self._handed, None
        if ticket is None and self._prefetched:
            ticket = self._next_prefetched(indices)
        if ticket is None or ticket.released:
            ticket = self._prepare(indices, offsets, batch_sizes, critical_path=True)
            assert ticket is not None
        return ticket

    def _next_prefetched(self, indices: Tensor) -> Ticket:
        ticket, expected = self._prefetched.popleft()
        if not _same(indices, expected):
            self._prefetched.clear()
            raise CacheError(
                f"{self.cache.name}: this batch is not the one prefetched for this step (the batch has "
                f"{indices.numel()} ids, the prefetched one {expected.numel()}); forward the batches in the order in "
                "which they were prefetched. What was prefetched is given up: a next forward starts afresh"
            )
        return ticket

    def _prepare(
        self,
        indices: Tensor,
        offsets: Tensor,
        batch_sizes: list[list[int]] | None,
        critical_path: bool,
        known: KnownBatch | None = None,
        if_it_fits: bool = False,
    ) -> Ticket | None:
        keys, lengths = self._keys(indices, offsets, batch_sizes)
        ticket = self.cache.prepare(keys, lengths, critical_path, known, if_it_fits)
        if ticket is not None and self._pinned_of_feature is not None:
            ticket.slots = _add_per_feature(ticket.slots, -self._pinned_of_feature, lengths)
        return ticket

    def _keys(self, indices: Tensor, offsets: Tensor, batch_sizes: list[list[int]] | None) -> tuple[Tensor, Tensor]:
        """Keys int64 [N] of the batch's ids, and ids per feature int64 [F]."""
        num_features = len(self._table_of_feature)
        if batch_sizes is None:
            bounds = offsets[:: max(1, (offsets.numel() - 1) // num_features)]
        else:
            sizes = torch.tensor([0] + [sum(per_rank) for per_rank in batch_sizes], device=offsets.device)
            bounds = offsets[sizes.cumsum(0)]
        lengths = (bounds.diff() if bounds.numel() > 1 else offsets.new_zeros(num_features)).long()
        return _add_per_feature(indices, self._first_key_of_feature, lengths), lengths

    # -- what TorchRec reads

    prefetch_pipeline = True

    @property
    def embedding_specs(self) -> list[tuple[int, int, EmbeddingLocation, ComputeDevice]]:
        """Rows, dim and place of each table: the host tier's."""
        return [(rows, self._dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in self._rows]

    @property
    def weights_host(self) -> Tensor:
        """All tables' weights, flat."""
        return self.host.flat_weights

    @property
    def weights_physical_offsets(self) -> list[int]:
        """Where each table starts in :attr:`weights_host`."""
        return [offset * self._dim for offset in self.host.row_offsets]

    @property
    def weights_precision(self) -> SparseType:
        """Type of the weights."""
        return self.slots.tbe.weights_precision

    @property
    def optimizer(self) -> Any:
        """FBGEMM's optimizer type."""
        return self.slots.tbe.optimizer

    def split_embedding_weights(self) -> list[Tensor]:
        """Host weights per table: views [rows, D]."""
        return self.host.table_weights()

    def split_optimizer_states(self) -> list[list[Tensor]]:
        """Host optimizer states per table; empty for an optimizer without state, as FBGEMM has it."""
        return self.host.table_states() if self.host.states else []

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """Per table the named states: per-row ones from the host tier, ``iter`` from the slots' TBE."""
        named = self.slots.tbe.get_optimizer_state()
        if not named:
            return []
        per_row = [dict(zip(self.host.states, states, strict=True)) for states in self.host.table_states()]
        return [{name: rows.get(name, scalar) for name, scalar in named[0].items()} for rows in per_row]

    def get_learning_rate(self) -> float:
        """Of the fused optimizer."""
        return self.slots.tbe.get_learning_rate()

    def set_learning_rate(self, lr: float) -> None:
        """Of the fused optimizer."""
        self.slots.tbe.set_learning_rate(lr)

    def set_optimizer_step(self, step: int) -> None:
        """Of the fused optimizer."""
        self.slots.tbe.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Of the fused optimizer."""
        self.slots.tbe.update_hyper_parameters(params_dict)

    def flush(self) -> None:
        """Write trained rows back to the host tier."""
        self.cache.flush()

    def reset_cache_states(self) -> None:
        """Write trained rows back, and fetch what is cached again."""
        self.cache.flush()
        self.cache.host_rows_changed()

    def host_rows_changed(self, table: str, rows: Tensor | None = None) -> None:
        """Somebody wrote to rows of ``table`` (int64 [K], numbers of the whole table; None: all of them) in the host
        tier; those outside of this shard are not looked at."""
        keys = [torch.empty(0, dtype=torch.int64)]
        for number, (name, first_row) in enumerate(self._shards):
            if name == table:
                shard = torch.arange(self._rows[number]) if rows is None else rows.flatten().long().cpu() - first_row
                inside = shard[(shard >= 0) & (shard < self._rows[number])]
                keys.append(inside + self.host.row_offsets[number])
        self.cache.host_rows_changed(torch.cat(keys).to(self._device))

    def stats(self) -> list[TableStats]:
        """What the cache did, per table."""
        return self.cache.stats()


def _add_per_feature(ids: Tensor, addends: Tensor, lengths: Tensor) -> Tensor:
    """``ids`` [N] plus the addend int64 [F] of each one's feature, whose ids ``lengths`` int64 [F] tell: int64 [N]."""
    if not ids.is_cpu:
        return torch.repeat_interleave(addends, lengths, output_size=ids.numel()).add_(ids)
    if int(lengths.max()) * lengths.numel() == ids.numel():  # as many ids of every feature
        return (ids.view(lengths.numel(), -1) + addends[:, None]).view(-1)
    sums = torch.empty(ids.shape, dtype=torch.int64)  # a pass per feature, without an addend per id
    ends = lengths.cumsum(0).tolist()
    for addend, start, end in zip(addends.tolist(), [0, *ends], ends, strict=False):
        torch.add(ids[start:end], addend, out=sums[start:end])
    return sums


def _same(ids: Tensor, others: Tensor) -> bool:
    """Whether both hold the same ids. Pipelines forward the very tensor that they prefetched, so the contents are
    looked at only when it is another one."""
    return ids.shape == others.shape and (ids.data_ptr() == others.data_ptr() or torch.equal(ids, others))


def _is(ids: Tensor, others: Tensor) -> bool:
    """Whether both are one tensor; another batch may have the same ids."""
    return ids is others or (ids.numel() > 0 and ids.shape == others.shape and ids.data_ptr() == others.data_ptr())


def _release_after_backward(cache: RowCache, ticket: Ticket, output: Tensor) -> None:
    """Unpin the batch once FBGEMM's backward, which also trains the rows, has run.

    Hooks on the autograd node, because a hook on the tensor fires before the update. The node holds the
    ticket: if it is freed without a backward, so are the pins.
    """
    node = output.grad_fn
    if node is None:
        cache.release(ticket)
        return

    def begin(_: Any) -> None:
        if ticket.released:
            raise CacheError(
                f"{cache.name}: a second backward through one forward: its rows may have left their slots. "
                "Run the forward again"
            )
        cache.begin_update(ticket)

    node.register_prehook(begin)
    node.register_hook(lambda *_: cache.release(ticket))


def _first_row(table: ShardedEmbeddingTable) -> int:
    """Of this rank's shard, in the whole table."""
    return table.local_metadata.shard_offsets[0] if table.local_metadata else 0


def _check_rows(config: GroupedEmbeddingConfig, rank: int) -> None:
    """Plans of ours are within the limit; others may not be, and the host rows would be allocated before the map."""
    rows: Counter[str] = Counter()
    for table in config.embedding_tables:
        rows[table.name] += table.local_rows
    problem = rows_problem(rank, "device", rows)
    if problem:
        raise ShardingError(
            f"{problem}. Use more ranks, place the tables by plan_sharding, or give them fewer rows (hash their ids "
            "into fewer)"
        )
