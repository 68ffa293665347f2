"""The device tier: slots held by an FBGEMM table-batched embedding (TBE), so that FBGEMM's fused forward,
backward and optimizer work on them unchanged. It is given slot numbers where it expects row numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn

from embershard.cache.rows import memory
from embershard.sharding.torchrec.table_arguments import FBGEMM_CACHE_ARGUMENTS

# What FBGEMM may keep per row, by its names.
_PER_ROW_TENSORS = ("weights", "momentum1", "momentum2", "prev_iter", "row_counter")
# FBGEMM returns from these optimizers' forward before it counts the iteration.
_UNCOUNTED_OPTIMIZERS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD)


class SlotTable(nn.Module):
    """One physical table of S + 1 slots (slot 0 is never used) that all features of a pool look into.

    Args:
        dim: D.
        table_of_feature: for each feature, the number of its logical table; ascending.
        device: of the slots.
        pooling_mode, weights_precision: as FBGEMM takes them.
        fused_params: further FBGEMM arguments, the optimizer and its settings among them; see
            :func:`check_table_arguments` for those that work.

    :meth:`set_pinned_slots` tells it which logical tables are resident for ever, and where.
    """

    def __init__(
        self,
        dim: int,
        table_of_feature: Sequence[int],
        device: torch.device,
        pooling_mode: PoolingMode,
        weights_precision: SparseType,
        fused_params: dict[str, Any],
    ) -> None:
        super().__init__()
        self.dim = dim
        self._table_of_feature = list(table_of_feature)
        self._device = device
        self._tbe_arguments = {k: v for k, v in fused_params.items() if k not in FBGEMM_CACHE_ARGUMENTS}
        self._tbe_arguments.update(
            feature_table_map=[0] * len(self._table_of_feature),
            pooling_mode=pooling_mode,
            weights_precision=weights_precision,
            bounds_check_mode=BoundsCheckMode.NONE,  # ids are checked before they become slots
            device=device,
        )
        self._pinned_of_feature: list[tuple[int, int]] = [(0, 0)] * len(self._table_of_feature)
        self.tbe = self._build_slots(num_slots=1)
        self._reader: SplitTableBatchedEmbeddingBagsCodegen | None = None

    def set_pinned_slots(self, pinned_of_table: Mapping[int, tuple[int, int]]) -> Tensor | None:
        """Logical table -> its first slot and its rows, for tables whose rows stay in consecutive slots.

        On a CPU their ids are given to :meth:`forward` relative to the first slot. Returns that slot per feature, int64
        [F]; 0 where ids are slot numbers. None where all are: FBGEMM's backward on a GPU tells the rows of one physical
        table apart by number alone, so a relative number would be taken for another table's slot.
        """
        if self._device.type == "cuda" or not pinned_of_table:
            return None
        self._pinned_of_feature = [pinned_of_table.get(table, (0, 0)) for table in self._table_of_feature]
        return torch.tensor([first for first, _ in self._pinned_of_feature])

    def resize(self, num_slots: int) -> list[Tensor]:
        """Hold ``num_slots`` slots, keep the contents of the present ones; returns :attr:`payload`."""
        old, self.tbe = self.tbe, self._build_slots(num_slots)
        for new_rows, old_rows in zip(_payload(self.tbe), _payload(old), strict=True):
            new_rows.data[: old_rows.shape[0]] = old_rows.data
            memory.record_stream(old_rows)
        self.tbe.set_learning_rate(old.get_learning_rate())
        self.tbe.optimizer_args = old.optimizer_args
        self.tbe.iter, self.tbe.iter_cpu = old.iter, old.iter_cpu
        return self.payload

    @property
    def payload(self) -> list[Tensor]:
        """Weights [S + 1, D], then every per-row optimizer state [S + 1, ...]."""
        return _payload(self.tbe)

    def state_specs(self) -> list[tuple[str, torch.Size, torch.dtype]]:
        """Name, trailing shape and dtype of every per-row optimizer state."""
        names = [name for state in self.tbe.get_optimizer_state()[:1] for name in state if name != "iter"]
        states = _payload(self.tbe)[1:]
        return [(name, state.shape[1:], state.dtype) for name, state in zip(names, states, strict=True)]

    def forward(self, slots: Tensor, offsets: Tensor, **arguments: Any) -> Tensor:
        """FBGEMM's forward over ``slots`` int64 [N]; its backward trains the rows in them."""
        return self.tbe(indices=slots, offsets=offsets, **arguments)

    @torch.no_grad()
    def read(self, rows: Tensor, indices: Tensor, offsets: Tensor, **arguments: Any) -> Tensor:
        """The same forward over ``rows`` [U, D] that are not in slots, ``indices`` int64 [N] into them."""
        reader = self._reader
        if reader is None or reader.embedding_specs[0][0] < rows.shape[0]:
            output_dtype = self._tbe_arguments.get("output_dtype", SparseType.FP32)
            keep = {
                k: self._tbe_arguments[k] for k in ("feature_table_map", "pooling_mode", "weights_precision", "device")
            }
            reader = self._build(
                2 * rows.shape[0],
                **keep,
                output_dtype=output_dtype,
                optimizer=EmbOptimType.EXACT_SGD,
                bounds_check_mode=BoundsCheckMode.NONE,
            )
            object.__setattr__(self, "_reader", reader)  # scratch: neither a submodule nor in any state
        reader.split_embedding_weights()[0].data[: rows.shape[0]] = rows
        if self.tbe.optimizer not in _UNCOUNTED_OPTIMIZERS:  # stock counts its forward passes, trained or not
            self.tbe.iter.add_(1)
            if self.tbe.iter_cpu.item():
                self.tbe.iter_cpu.add_(1)
        return reader(indices=indices, offsets=offsets, **arguments)

    def end_reading(self) -> None:
        """Free the scratch of :meth:`read`."""
        object.__setattr__(self, "_reader", None)

    def _build(self, num_slots: int, **arguments: Any) -> SplitTableBatchedEmbeddingBagsCodegen:
        on_cuda = self._device.type == "cuda"
        location = EmbeddingLocation.DEVICE if on_cuda else EmbeddingLocation.HOST
        compute = ComputeDevice.CUDA if on_cuda else ComputeDevice.CPU
        tbe = SplitTableBatchedEmbeddingBagsCodegen([(num_slots + 1, self.dim, location, compute)], **arguments)
        return tbe

    def _build_slots(self, num_slots: int) -> SplitTableBatchedEmbeddingBagsCodegen:
        tbe = self._build(num_slots, **self._tbe_arguments)
        if self._device.type != "cuda":
            self._place_pinned_slots(tbe)
            self._name_logical_tables(tbe, num_slots)
            tbe.weights_host.data = memory.zeros(tbe.weights_host.numel(), tbe.weights_host.dtype)
        return tbe

    def _place_pinned_slots(self, tbe: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        """Let each feature's row 0 be its table's first pinned slot, in the weights and in every optimizer state."""
        first = torch.tensor([first for first, _ in self._pinned_of_feature])
        num_rows = tbe.embedding_specs[0][0]
        for kind in _PER_ROW_TENSORS:
            rows = getattr(tbe, f"{kind}_host", None)
            if rows is not None and rows.numel() >= num_rows:  # else a placeholder
                getattr(tbe, f"{kind}_offsets").copy_(first * (rows.numel() // num_rows))

    def _name_logical_tables(self, tbe: SplitTableBatchedEmbeddingBagsCodegen, num_slots: int) -> None:
        """FBGEMM's CPU backward sorts the ids table by table, with as many passes as the table's ids have bytes, and
        takes features with the same entry here for one table. A slot belongs to one logical table at a time, so
        telling it the logical tables changes no result, and the sorts are shorter (docs/decisions/0004)."""
        pinned = zip(self._table_of_feature, self._pinned_of_feature, strict=True)
        sizes = {table: rows or num_slots + 1 for table, (_, rows) in pinned}
        ends = itertools.accumulate(sizes.values())
        starts = {table: end - size for (table, size), end in zip(sizes.items(), ends, strict=True)}
        ranges = [starts[table] for table in self._table_of_feature]
        tbe.hash_size_cumsum.copy_(torch.tensor([*ranges, sum(sizes.values())]))


def _payload(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> list[Tensor]:
    states = tbe.split_optimizer_states()
    return [tbe.split_embedding_weights()[0], *(states[0] if states else [])]
