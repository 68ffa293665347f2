"""Rows with equal copies on every rank, in FBGEMM slots.

Each rank looks its own samples up. A backward adds up the gradients of each row over the ranks, before the optimizer:
all ranks then apply the same update to the same rows, and the copies stay equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor, nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.optim.fused import FusedOptimizer

from embershard.cache.guards import CopiesGuard
from embershard.distributed.row_gradients import sum_rows
from embershard.sharding.torchrec.modes.bags import Bags, DistinctIds
from embershard.sharding.torchrec.slots import SlotTable


def trained_alike(
    rows: Tensor,
    numbers: Tensor,
    group: dist.ProcessGroup | None,
    guard: CopiesGuard,
    train: Callable[[Tensor, Tensor], None],
) -> Tensor:
    """Return `rows` [M, D], copies of which are equal on all ranks.

    The backward is collective: it trains every row that any rank looked up, once, on all ranks alike. Ranks must look
    up in several tables in one order. Gradients are divided by the number of ranks, as TorchRec's are.

    Args:
        numbers: int64 [M], of the rows, the same on all ranks; none is in twice.
        group: of the ranks; None: the default group.
        guard: of the copies. A backward that does not end leaves its mark.
        train: is given the numbers [T] of the rows of all ranks, ascending, and the sums of their gradients [T, D].
    """
    anchor = torch.empty(0, device=rows.device, requires_grad=torch.is_grad_enabled())
    return _TrainedAlike.apply(anchor, rows.detach(), numbers, group, guard, train)  # type: ignore[no-any-return]


def trained_features(table_of_feature: Sequence[int], fused_params: Mapping[str, Any]) -> list[int]:
    """Return the features that FBGEMM gets where it trains rows whose gradients were summed: one suffices.

    On a CPU, FBGEMM's row-wise Adagrad applies weight decay to tables of several features only. With weight decay, an
    empty second feature makes it do so here, too, if a table has several.
    """
    has_decay = bool(fused_params.get("weight_decay"))
    return [0, 0] if has_decay and len(set(table_of_feature)) < len(table_of_feature) else [0]


class _TrainedAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, numbers: Tensor, group: Any, guard: Any, train: Any) -> Tensor:  # type: ignore[override]
        ctx.numbers, ctx.group, ctx.guard, ctx.train = numbers, group, guard, train
        return rows

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        if get_gradient_division():
            gradients = gradients / dist.get_world_size(ctx.group)
        with ctx.guard.change("training a batch"):
            ctx.train(*sum_rows(ctx.numbers, gradients, ctx.group))
        return (None,) * 6


class ReplicatedBags(NamedTuple):
    """A batch's bags over its distinct rows.

    Attributes:
        slots: int64 [M] of the distinct rows; on one rank of every id, [N].
        bags: over these.
    """

    slots: Tensor
    bags: Bags


class ReplicatedRows(nn.Module):
    """R rows of several tables, with equal copies on every rank, in slots 1 to R.

    On one rank FBGEMM pools and trains them as it does in TorchRec, and results are equal bit for bit. On several, rows
    are pooled here, and gradients of a row are added up per rank and then in rank order: sums have another order than
    TorchRec's, and are equal to its where they have no rounding.

    Args:
        num_rows: R.
        dim: D.
        table_of_feature: number of each feature's table; ascending.
        device: of the rows.
        pooling_mode: SUM or MEAN.
        weights_precision, fused_params: as `SlotTable` takes them.
        group: of the ranks; None: the default group.
        name: of the rows, for messages.

    Attributes:
        slots: the rows, from slot 1 on.
        guard: of the copies. Check it before the rows are read or saved.
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        table_of_feature: Sequence[int],
        device: torch.device,
        pooling_mode: PoolingMode,
        weights_precision: SparseType,
        fused_params: dict[str, Any],
        group: dist.ProcessGroup | None = None,
        name: str = "rows",
    ) -> None:
        super().__init__()
        self.guard = CopiesGuard(f"rank {dist.get_rank(group)}, {name}")
        self._group, self._num_features = group, len(table_of_feature)
        self._is_mean = pooling_mode == PoolingMode.MEAN
        self._is_alone = dist.get_world_size(group) == 1
        if not self._is_alone:
            table_of_feature, pooling_mode = trained_features(table_of_feature, fused_params), PoolingMode.SUM
        self.slots = SlotTable(dim, table_of_feature, device, pooling_mode, weights_precision, fused_params)
        self.slots.resize(max(1, num_rows))
        self._num_rows = num_rows

    @property
    def payload(self) -> list[Tensor]:
        """Weights [R, D], then every per-row optimizer state [R, ...]: views."""
        return [rows.detach()[1 : self._num_rows + 1] for rows in self.slots.payload]

    def prepare(self, rows: Tensor, offsets: Tensor, scales: Tensor | None = None) -> ReplicatedBags:
        """Return what :meth:`forward` takes for a batch. It may be made ahead.

        Args:
            rows: int64 [N], each in [0, R), feature after feature.
            offsets: int64 [F * B + 1], bounds of the bags.
            scales: fp32 [N], weights of the rows; None: all are 1.
        """
        slots, offsets = rows + 1, offsets.long()
        if self._is_alone:
            return ReplicatedBags(slots, Bags(slots, offsets, scales, self._num_features))
        found = DistinctIds.of(slots, [slots.numel()])
        if self._is_mean:
            lengths = offsets.diff()
            of_bag = lengths.float().reciprocal().repeat_interleave(lengths, output_size=slots.numel())
            scales = of_bag if scales is None else scales * of_bag
        return ReplicatedBags(found.ids, Bags(found.inverse, offsets, scales, self._num_features))

    def forward(self, batch: ReplicatedBags) -> Tensor:
        """Pool the rows of a batch by bag: [B, F * D]. The backward is collective.

        Raises:
            CacheError: an earlier backward did not end on this rank.
        """
        self.guard.check()
        slots, bags = batch
        if self._is_alone:
            alone: Tensor = self.slots(slots, bags.offsets, per_sample_weights=bags.scales)
            return alone
        if not torch.is_grad_enabled():
            self.slots.count_reading()
        rows = self.slots.payload[0].detach().index_select(0, slots).float()
        rows = trained_alike(rows, slots, self._group, self.guard, self.slots.train_rows)
        return bags.pool(rows).to(self.slots.output_dtype)


class CopiesOptimizer(FusedOptimizer):
    """The fused optimizer of FBGEMM tables whose rows have equal copies: a backward trains the rows, and this hands
    settings on.

    Args:
        tables: each a parameter group.
        params_of_table: the parameters of each.
        params, state: by name and by parameter, as TorchRec's keyed optimizers have them.
    """

    def __init__(
        self,
        tables: Sequence[SlotTable],
        params_of_table: Sequence[list[Tensor]],
        params: Mapping[str, Tensor],
        state: Mapping[Any, Any],
    ) -> None:
        self._tbes = [table.tbe for table in tables]
        groups = [
            {"params": own, "lr": tbe.get_learning_rate()} for tbe, own in zip(self._tbes, params_of_table, strict=True)
        ]
        super().__init__(params, state, groups)  # type: ignore[arg-type]

    def step(self, closure: Any = None) -> None:
        """Hand the learning rates on."""
        for tbe, group in zip(self._tbes, self.param_groups, strict=True):
            tbe.set_learning_rate(group["lr"])

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Hand the learning rates on."""
        self.step()

    def set_optimizer_step(self, step: int) -> None:
        """Set the optimizer's step number."""
        for tbe in self._tbes:
            tbe.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Set the optimizer's parameters."""
        for tbe in self._tbes:
            tbe.update_hyper_parameters(params_dict)
