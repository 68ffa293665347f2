"""Gradient accumulation that is exact for rows: several forwards and backwards, and one update of each row.

Inside of `accumulating`, a lookup is FBGEMM's forward without autograd, and its backward keeps the gradient of the
output. At the end each table runs one FBGEMM forward and backward over all of these lookups and gradients: the call of
one large batch, so that pooling, weights and optimizer are FBGEMM's own.

Letters: K lookups that a table holds, F features, B bags of a feature, N ids, D columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from embershard.cache.guards import ChangeGuard
from embershard.distributed.traffic import counted_as
from embershard.errors import CacheError, ConfigError
from embershard.sharding.torchrec.compat import lookups_of
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings
from embershard.sharding.torchrec.inspection import cached_embeddings, tables_of
from embershard.sharding.torchrec.modes.replicated_rows import ReplicatedRows
from embershard.sharding.torchrec.modules import CachedModule
from embershard.sharding.torchrec.slots import SlotTable

VARIABLE = "batch_size_per_feature_per_rank"
_IS_DELAYED = "_static_graph_delay_allreduce_enqueued"  # DDP's: the average of the first backward was asked for


@contextmanager
def accumulating(model: nn.Module) -> Iterator[None]:
    """Train once for all forwards and backwards in the context: one update of each row that they looked up, and dense
    gradients that are summed over them and averaged over the ranks. Each batch's loss is to be its share of the whole::

        with accumulating(model):
            for _ in range(4):
                with pipeline.step(batches) as batch:
                    (model(batch)[0] / 4).backward()
        optimizer.step()
        optimizer.zero_grad()

    The slots of all batches in it must fit into the cache together; else it grows, or raises, as `overflow` says. The
    end is collective, as the backwards are. After an exception nothing has trained, and dense gradients are None.

    >>> with accumulating(model):  # a sharded model
    ...     pass

    Raises:
        ConfigError: a table whose lookups cannot be held: of an unknown kernel, or of ids whose batches do not become
            known together.
        CacheError: lookups ran that nobody held, so that their rows were trained batch by batch; or an update has
            another number of batches than get rows together.
    """
    group = _HeldTables(model)
    with group.held():
        yield


@dataclass(eq=False)
class _Lookup:
    """A lookup that waits for the end.

    Attributes:
        ids: [N], numbers of rows or slots.
        offsets: int64 [F * B + 1].
        weights: [N], of the ids; None: 1 each.
        sizes: batch sizes by feature and rank, where features differ in them; else None.
        gradient: of its output, once its backward has run.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    sizes: list[list[int]] | None
    gradient: Tensor | None = None

    def bags(self, num_features: int) -> Tensor:
        """Return the number of bags of each feature, int64 [F]."""
        if self.sizes is not None:
            return torch.tensor([sum(of_ranks) for of_ranks in self.sizes], device=self.offsets.device)
        return self.offsets.new_full((num_features,), (self.offsets.numel() - 1) // num_features)


class HeldLookups:
    """The lookups of one FBGEMM table that train together.

    Args:
        table: slots, or one of TorchRec's own.

    Attributes:
        num_held: lookups so far.
        is_read: a batch without lookups came by, which stock counts as a forward, too.
    """

    def __init__(self, table: SlotTable | SplitTableBatchedEmbeddingBagsCodegen) -> None:
        self._table, self._slots = table, table if isinstance(table, SlotTable) else None
        self._num_features = len(self._tbe.feature_table_map)
        self._lookups: list[_Lookup] = []
        self.num_held, self.is_read = 0, False

    @property
    def _tbe(self) -> SplitTableBatchedEmbeddingBagsCodegen:
        return self._table if self._slots is None else self._slots.tbe  # a cache that grows makes a new one

    def _look_up(self, ids: Tensor, offsets: Tensor, **arguments: Any) -> Tensor:
        if self._slots is not None:
            return self._slots.look_up(ids, offsets, **arguments)
        return type(self._tbe).forward(self._tbe, ids, offsets, **arguments)  # type: ignore[no-any-return]

    def forward(self, ids: Tensor, offsets: Tensor, **arguments: Any) -> Tensor:
        """Do what the table's forward does for FBGEMM's arguments; the backward keeps the gradient."""
        weights = arguments.get("per_sample_weights")
        held = _Lookup(ids, offsets, None if weights is None else weights.detach(), arguments.get(VARIABLE))
        self._lookups.append(held)
        self.num_held += 1
        anchor = torch.empty(0, device=ids.device, requires_grad=True)
        return _HeldLookUp.apply(anchor, weights, self, held, arguments)  # type: ignore[no-any-return]

    def read(self, held: _Lookup, arguments: dict[str, Any]) -> Tensor:
        """Return the output of a lookup. FBGEMM counts no iteration: that is done once, at the end."""
        tbe = self._tbe
        counts = tbe.iter.clone(), tbe.iter_cpu.clone()
        try:
            return self._look_up(held.ids, held.offsets, **arguments).detach()
        finally:  # after an interrupt, too
            for count, before in zip((tbe.iter, tbe.iter_cpu), counts, strict=True):
                count.copy_(before)

    def weight_gradients(self, held: _Lookup) -> Tensor:
        """Return the gradients [N] of the ids' weights: each row times the gradient of its bag."""
        is_sum = self._tbe.pooling_mode == PoolingMode.SUM
        if self._slots is None or held.sizes is not None or not is_sum:
            raise ConfigError(
                "gradient accumulation with trained weights of ids (a feature processor): only tables with a cache "
                "that pool by SUM, of features with equal batch sizes, give them gradients. Use kernel 'cached' and "
                "SUM for these tables"
            )
        assert held.gradient is not None
        lengths, columns = held.offsets.diff(), self._slots.dim
        of_bag = held.gradient.view(-1, self._num_features, columns).transpose(0, 1).reshape(-1, columns)
        of_id = of_bag.repeat_interleave(lengths, dim=0, output_size=held.ids.numel())
        return (of_id * self._slots.rows_of(held.ids, held.offsets)).sum(dim=1)

    def train(self) -> None:
        """Run one forward and backward over the lookups whose backward has run; count a forward if there was any."""
        trained, self._lookups = [each for each in self._lookups if each.gradient is not None], []
        if trained:
            ids, offsets, weights, sizes, gradients = self._joined(trained)
            arguments: dict[str, Any] = {} if weights is None else {"per_sample_weights": weights}
            with torch.enable_grad():
                output = self._look_up(ids, offsets, **arguments, **({} if sizes is None else {VARIABLE: sizes}))
            output.backward(gradients.to(output.dtype))
        elif self.is_read and self._slots is not None:
            self._slots.count_reading()

    def _joined(
        self, lookups: Sequence[_Lookup]
    ) -> tuple[Tensor, Tensor, Tensor | None, list[list[int]] | None, Tensor]:
        """Return ids, offsets, weights, batch sizes and gradients of one lookup that is all of these.

        Ids go feature after feature, and in a feature lookup after lookup, as if these were the ranks' batches.
        """
        gradients = torch.cat([each.gradient for each in lookups])  # type: ignore[misc]
        if len(lookups) == 1:
            (only,) = lookups
            return only.ids, only.offsets, only.weights, only.sizes, gradients
        device, count = lookups[0].ids.device, len(lookups)
        bags = torch.stack([each.bags(self._num_features) for each in lookups])  # [K, F]
        bounds = nn.functional.pad(bags.cumsum(dim=1), (1, 0))
        num_ids = torch.stack([each.offsets[own].diff() for each, own in zip(lookups, bounds, strict=True)])  # [K, F]
        order = torch.arange(count * self._num_features, dtype=torch.int32, device=device)
        order = order.view(count, -1).t().flatten()
        permuted = partial(torch.ops.fbgemm.permute_1D_sparse_data, order)
        all_lengths = torch.cat([each.offsets.diff() for each in lookups])
        _, lengths, _ = permuted(bags.flatten(), all_lengths, None, all_lengths.numel())
        weights = None if lookups[0].weights is None else torch.cat([each.weights for each in lookups])  # type: ignore[misc]
        all_ids = torch.cat([each.ids for each in lookups])
        _, ids, weights = permuted(num_ids.flatten(), all_ids, weights, all_ids.numel())
        if self._tbe.pooling_mode == PoolingMode.NONE:  # a gradient for each id
            places = torch.arange(all_ids.numel(), device=device)
            gradients = gradients[permuted(num_ids.flatten(), places, None, places.numel())[1]]
        sizes = None
        if lookups[0].sizes is not None:
            by_lookup = [each.sizes or [] for each in lookups]
            sizes = [[size for part in of_feature for size in part] for of_feature in zip(*by_lookup, strict=True)]
        return ids, nn.functional.pad(lengths.cumsum(dim=0), (1, 0)), weights, sizes, gradients


class _HeldLookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weights: Tensor | None,
        table: HeldLookups,
        held: _Lookup,
        arguments: dict[str, Any],
    ) -> Tensor:  # type: ignore[override]
        ctx.table, ctx.held = table, held
        return table.read(held, arguments)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.held.gradient is not None:
            raise CacheError("a second backward through one forward of gradient accumulation. Run the forward again")
        ctx.held.gradient = gradient.contiguous()
        return None, ctx.table.weight_gradients(ctx.held) if ctx.needs_input_grad[1] else None, None, None, None


class _DenseGradients:
    """The gradients of DDP's parameters: summed on their rank, then averaged over the ranks once, by `average`.

    DDP sees none of these forwards and backwards, the first ones of a process included: gradients that it has averaged
    already would be summed in another order, so that a resume would change bits; and it would count a forward whose
    backward never came.
    """

    def __init__(self, model: nn.Module) -> None:
        self._wrapped = list(_ddps(model))
        self._have_run: set[nn.Module] = set()

    @contextmanager
    def unsynchronized(self) -> Iterator[None]:
        """Return a context in which gradients stay on their rank."""
        with ExitStack() as stack:
            for each in self._wrapped:
                stack.callback(each.register_forward_pre_hook(self._note_forward).remove)
                stack.enter_context(each.no_sync())
                if each.static_graph and not each._static_graph_delay_allreduce_enqueued:
                    # Else the first backward of a process, whoever asks for no communication, averages at its end.
                    stack.callback(setattr, each, _IS_DELAYED, False)
                    setattr(each, _IS_DELAYED, True)
            yield

    def _note_forward(self, wrapped: nn.Module, _: Any) -> None:
        if torch.is_grad_enabled():
            self._have_run.add(wrapped)

    def average(self) -> None:
        """Average over the ranks what was summed, if there was a forward."""
        for wrapped in self._wrapped:
            gradients = [p.grad for p in _parameters(wrapped) if p.grad is not None]
            if wrapped not in self._have_run or dist.get_world_size(wrapped.process_group) == 1:
                continue
            for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
                own = [gradient for gradient in gradients if gradient.dtype == dtype]
                flat = torch.cat([gradient.flatten() for gradient in own])
                flat /= dist.get_world_size(wrapped.process_group)
                with counted_as("dense_all_reduce"):  # as DDP's, in a backward
                    dist.all_reduce(flat, group=wrapped.process_group)
                for gradient, average in zip(own, flat.split([each.numel() for each in own]), strict=True):
                    gradient.copy_(average.view_as(gradient))

    def drop(self) -> None:
        """Drop all gradients."""
        for wrapped in self._wrapped:
            for parameter in _parameters(wrapped):
                parameter.grad = None


def _ddps(model: nn.Module) -> Iterator[DistributedDataParallel]:
    """Yield DDP's wrappers, those of TorchRec's lookups among them, which no module refers to."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            yield module
        for lookup in getattr(module, "_lookups", None) or ():
            if isinstance(lookup, DistributedDataParallel):
                yield lookup


def _parameters(wrapped: DistributedDataParallel) -> list[nn.Parameter]:
    ignored = wrapped.parameters_to_ignore
    return [each for name, each in wrapped.module.named_parameters() if each.requires_grad and name not in ignored]


class _HeldTables:
    """All tables of a model on this rank, in the order of its modules."""

    def __init__(self, model: nn.Module) -> None:
        self._pools = list(cached_embeddings(model))
        for pool in self._pools:
            pool.keys.check_updates(pool.micro_batches)
        self._slots: list[SlotTable] = []
        self._stock: list[SplitTableBatchedEmbeddingBagsCodegen] = []
        self._hot: list[Any] = []
        self._lookups: list[nn.Module] = []
        self._guards: list[ChangeGuard] = []
        self._dense = _DenseGradients(model)
        for module in model.modules():
            for lookup in lookups_of(module):
                self._find_tables(lookup)
            if isinstance(module, CachedModule) and (hot := getattr(module, "_hot", None)) is not None:
                self._hot.append(hot)
                self._add_copies(hot.copies)
        for pool in self._pools:
            self._guards += pool.cache.parts.guards
        self._guards = list(dict.fromkeys(self._guards))  # pools may share one
        self._num_run = 0

    def _find_tables(self, lookup: nn.Module) -> None:
        before = len(self._slots) + len(self._stock)
        for table in tables_of(lookup):
            if isinstance(table, CachedTableBatchedEmbeddings):
                self._slots.append(table.slots)
            elif isinstance(table, SplitTableBatchedEmbeddingBagsCodegen):
                self._stock.append(table)
            elif copies := [each for each in table.modules() if isinstance(each, ReplicatedRows)]:
                self._add_copies(copies)
            elif not isinstance(table, DenseTableBatchedEmbeddingBagsCodegen):  # trained by the dense optimizer
                raise ConfigError(
                    f"gradient accumulation with a table of {type(table).__name__}, whose lookups cannot be held: use "
                    "the compute kernels 'cached', 'fused' or 'dense'"
                )
        if len(self._slots) + len(self._stock) > before:
            self._lookups.append(lookup)

    def _add_copies(self, copies: Sequence[ReplicatedRows]) -> None:
        self._slots += [rows.slots for rows in copies]
        self._guards += [rows.guard for rows in copies]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Return a context in which the tables hold their lookups; they train at its end."""
        tables = [HeldLookups(table) for table in (*self._slots, *self._stock)]
        is_whole = False
        try:
            with self._dense.unsynchronized(), self._holding(tables):
                yield
            self._check(tables)
            self._train(tables)
            is_whole = True
        finally:
            for pool in self._pools:
                for ticket in pool.end_holding():
                    ticket.cancel()
            if not is_whole:
                self._dense.drop()

    @contextmanager
    def _holding(self, tables: Sequence[HeldLookups]) -> Iterator[None]:
        hooks = [lookup.register_forward_pre_hook(self._count) for lookup in self._lookups]
        try:
            for pool in self._pools:
                pool.hold()
            for slots, table in zip(self._slots, tables, strict=False):
                slots.held = table
            for tbe, table in zip(self._stock, tables[len(self._slots) :], strict=True):
                tbe.forward = partial(_hold_or_read, table, tbe)  # type: ignore[method-assign]
            yield
        finally:
            for slots in self._slots:
                slots.held = None
            for tbe in self._stock:
                vars(tbe).pop("forward", None)
            for hook in hooks:
                hook.remove()

    def _count(self, *_: Any) -> None:
        self._num_run += torch.is_grad_enabled()

    def _check(self, tables: Sequence[HeldLookups]) -> None:
        if self._num_run and not any(table.num_held or table.is_read for table in tables):
            raise CacheError(
                f"gradient accumulation held none of {self._num_run} lookups: their rows were trained batch by batch. "
                "Something has replaced the tables' forward; call accumulating(model) after that"
            )
        for pool in self._pools:
            pool.keys.check_updates(pool.micro_batches, pool.updates.num_held)

    def _train(self, tables: Sequence[HeldLookups]) -> None:
        with ExitStack() as stack:
            for guard in self._guards:
                stack.enter_context(guard.change("training several batches at once"))
            for pool in self._pools:
                stack.enter_context(pool.updates.training_held())
            for table in tables:
                table.train()
            for hot in self._hot:
                hot.note_trained()
        self._dense.average()


def _hold_or_read(table: HeldLookups, tbe: Any, indices: Tensor, offsets: Tensor, **arguments: Any) -> Any:
    if torch.is_grad_enabled():
        return table.forward(indices, offsets, **arguments)
    return type(tbe).forward(tbe, indices, offsets, **arguments)
