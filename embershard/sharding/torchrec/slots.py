"""The device tier: slots in an FBGEMM table-batched embedding (TBE).

FBGEMM's fused forward, backward and optimizer work on slots unchanged. They get slot numbers for row numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
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
from torch.overrides import TorchFunctionMode

from embershard.cache.rows import memory
from embershard.sharding.torchrec.feature_keys import add_per_feature, feature_lengths
from embershard.sharding.torchrec.table_arguments import FBGEMM_CACHE_ARGUMENTS
from embershard.stages import is_stage

# FBGEMM's names for tensors that it may keep per row.
_PER_ROW_TENSORS = ("weights", "momentum1", "momentum2", "prev_iter", "row_counter")
# FBGEMM returns from these optimizers' forward before it counts the iteration.
_UNCOUNTED_OPTIMIZERS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD)
# Of these, a lookup's arguments are those of the one before, but for ids and bags; of others, the step is among them.
_WITHOUT_STEP = (*_UNCOUNTED_OPTIMIZERS, EmbOptimType.EXACT_ROWWISE_ADAGRAD)


class SlotTable(nn.Module):
    """One physical table of S + 1 slots that all features of a pool look into. Slot 0 has the zeros of unadmitted ids.

    Args:
        dim: D.
        table_of_feature: number of each feature's logical table; ascending.
        device: of the slots.
        pooling_mode, weights_precision: as FBGEMM takes them.
        fused_params: further FBGEMM arguments, such as the optimizer and its settings; `check_table_arguments` has
            those that work.
    """

    held: Any = None  # `HeldLookups`, inside of `accumulating`

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
            bounds_check_mode=BoundsCheckMode.NONE,  # ids were checked before they became slots
            device=device,
        )
        self._pinned_of_feature: list[tuple[int, int]] = [(0, 0)] * len(self._table_of_feature)
        self._no_weight_gradients = torch.zeros(len(self._table_of_feature), dtype=torch.int32, device=device)
        self.tbe = self._build_slots(num_slots=1)
        self._kept_call: _KeptCall | None = None
        self._reader: SplitTableBatchedEmbeddingBagsCodegen | None = None

    def set_pinned_slots(self, pinned_of_table: Mapping[int, tuple[int, int]]) -> Tensor | None:
        """Set the logical tables whose rows stay in consecutive slots: number -> first slot and rows.

        Returns:
            On a CPU, the first slot per feature, int64 [F], 0 for other tables: :meth:`forward` takes ids relative to
            it. None where all ids are slot numbers, as on a GPU: FBGEMM's backward there tells the rows of one
            physical table apart by number alone, and would take a relative number for another table's slot.
        """
        if self._device.type == "cuda" or not pinned_of_table:
            return None
        self._pinned_of_feature = [pinned_of_table.get(table, (0, 0)) for table in self._table_of_feature]
        return torch.tensor([first for first, _ in self._pinned_of_feature])

    def resize(self, num_slots: int) -> list[Tensor]:
        """Resize to `num_slots` slots, keep the contents of the present ones, and return :attr:`payload`."""
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

    def clear_zeros(self) -> None:
        """Make slot 0 zeros again, after a backward that trained it."""
        for rows in self.payload:
            rows.data[0] = 0

    def state_specs(self) -> list[tuple[str, torch.Size, torch.dtype]]:
        """Return name, trailing shape and dtype of every per-row optimizer state."""
        names = [name for state in self.tbe.get_optimizer_state()[:1] for name in state if name != "iter"]
        states = _payload(self.tbe)[1:]
        return [(name, state.shape[1:], state.dtype) for name, state in zip(names, states, strict=True)]

    @is_stage("lookup")
    def forward(self, slots: Tensor, offsets: Tensor, **arguments: Any) -> Tensor:
        """Run FBGEMM's forward over `slots` int64 [N]; its backward trains the rows in them, at once or with those of
        other lookups (`held`)."""
        if self.held is not None and torch.is_grad_enabled():
            return self.held.forward(slots, offsets, **arguments)
        return self.look_up(slots, offsets, **arguments)

    def look_up(self, slots: Tensor, offsets: Tensor, **arguments: Any) -> Tensor:
        """Run FBGEMM's forward over `slots` int64 [N]; its backward trains the rows in them."""
        if all(value is None for value in arguments.values()):
            if self._kept_call is None or not self._kept_call.is_of(self.tbe):
                self._kept_call = _KeptCall(self.tbe)
            return self._kept_call(slots, offsets)
        weights = arguments.get("per_sample_weights")
        if weights is not None and not weights.requires_grad:  # FBGEMM would compute their gradients nevertheless
            arguments["feature_requires_grad"] = self._no_weight_gradients
        return self.tbe(indices=slots, offsets=offsets, **arguments)

    def train_rows(self, slots: Tensor, gradients: Tensor) -> None:
        """Apply the optimizer to the rows in distinct `slots` (int64 [T]), once each, with gradients [T, D].

        For a table that pools by SUM: each row is a bag of the first feature, so that FBGEMM's own backward trains it.
        """
        num_bags = slots.numel() * len(self._table_of_feature)  # those of other features are empty
        offsets = torch.arange(num_bags + 1, device=slots.device).clamp_(max=slots.numel())
        with torch.enable_grad():
            rows = self(slots, offsets)[:, : self.dim]
        rows.backward(gradients.to(rows.dtype))

    def rows_of(self, slots: Tensor, offsets: Tensor) -> Tensor:
        """Return the weights [N, D] in slots as `forward` takes them."""
        firsts = torch.tensor([first for first, _ in self._pinned_of_feature], device=slots.device)
        places = add_per_feature(slots, firsts, feature_lengths(offsets, len(self._table_of_feature)))
        return self.payload[0].detach()[places]

    @property
    def output_dtype(self) -> torch.dtype:
        """Type of pooled embeddings."""
        return self._tbe_arguments.get("output_dtype", SparseType.FP32).as_dtype()  # type: ignore[no-any-return]

    def count_reading(self) -> None:
        """Count a forward that trains nothing: stock counts its forward passes, trained or not."""
        if self.held is not None and torch.is_grad_enabled():
            self.held.is_read = True  # of several batches that train together one counts
            return
        if self.tbe.optimizer not in _UNCOUNTED_OPTIMIZERS:
            self.tbe.iter.add_(1)
            if self.tbe.iter_cpu.item():
                self.tbe.iter_cpu.add_(1)

    @torch.no_grad()
    def read(self, rows: Tensor, indices: Tensor, offsets: Tensor, **arguments: Any) -> Tensor:
        """Run the same forward over `rows` [U, D] that are not in slots; `indices` int64 [N] point into them."""
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
            object.__setattr__(self, "_reader", reader)  # scratch: no submodule, and in no state dict
        reader.split_embedding_weights()[0].data[: rows.shape[0]] = rows
        self.count_reading()
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
        if self._device.type == "cuda":
            return tbe
        # Each feature's row 0 is its table's first pinned slot, in the weights and in every optimizer state.
        first, num_rows = torch.tensor([first for first, _ in self._pinned_of_feature]), tbe.embedding_specs[0][0]
        for kind in _PER_ROW_TENSORS:
            rows = getattr(tbe, f"{kind}_host", None)
            if rows is not None and rows.numel() >= num_rows:  # else a placeholder
                getattr(tbe, f"{kind}_offsets").copy_(first * (rows.numel() // num_rows))
        # FBGEMM's backward sorts ids table by table, with as many passes as a table's ids have bytes, and takes
        # features with equal entries here for one table. A slot belongs to one logical table at a time, so no result
        # changes, and the sorts are shorter (decision 0004).
        pinned = zip(self._table_of_feature, self._pinned_of_feature, strict=True)
        sizes = {table: own_rows or num_slots + 1 for table, (_, own_rows) in pinned}
        ends = itertools.accumulate(sizes.values())
        starts = {table: end - size for (table, size), end in zip(sizes.items(), ends, strict=True)}
        ranges = [starts[table] for table in self._table_of_feature]
        tbe.hash_size_cumsum.copy_(torch.tensor([*ranges, sum(sizes.values())]))
        tbe.weights_host.data = memory.zeros(tbe.weights_host.numel(), tbe.weights_host.dtype, small_pages=False)
        return tbe


def _payload(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> list[Tensor]:
    states = tbe.split_optimizer_states()
    return [tbe.split_embedding_weights()[0], *(states[0] if states else [])]


class _KeptCall:
    """Lookups of one table whose rows train, of ids without weights. The first one is FBGEMM's forward, which puts the
    arguments of its operation together in 0.2 ms; the others run the operation with those arguments, and their own ids
    and bags. Where the step is among the arguments, all are FBGEMM's forward.
    """

    def __init__(self, tbe: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        self._tbe, self._optimizer_args = tbe, tbe.optimizer_args
        counts = ("_used_rowwise_adagrad_with_counter", "_used_rowwise_adagrad_with_global_weight_decay")
        self._keeps = tbe.optimizer in _WITHOUT_STEP and not any(getattr(tbe, name, False) for name in counts)
        self._is_counted = tbe.optimizer not in _UNCOUNTED_OPTIMIZERS
        self._operation: Any = None
        self._arguments: dict[str, Any] = {}

    def is_of(self, tbe: SplitTableBatchedEmbeddingBagsCodegen) -> bool:
        """Return True if the arguments are those of this table as it is now: a cache that grows makes a new one."""
        return tbe is self._tbe and tbe.optimizer_args is self._optimizer_args

    def __call__(self, slots: Tensor, offsets: Tensor) -> Tensor:
        tbe = self._tbe
        if self._operation is None:
            notes = _NotesLookup(slots, offsets)
            with notes if self._keeps else nullcontext():
                output: Tensor = tbe(indices=slots, offsets=offsets)
            self._operation, self._arguments = notes.operation, notes.arguments
            return output
        if self._is_counted:  # as FBGEMM's forward does
            tbe.iter.add_(1)
            tbe.iter_cpu.add_(1)
        return self._operation(**self._arguments, indices=slots, offsets=offsets)  # type: ignore[no-any-return]


class _NotesLookup(TorchFunctionMode):
    """Notes the operation that gets the ids and bags of a table's forward, and its other arguments."""

    def __init__(self, indices: Tensor, offsets: Tensor) -> None:
        super().__init__()
        self._indices, self._offsets = indices, offsets
        self.operation: Any = None
        self.arguments: dict[str, Any] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        others = dict(kwargs or {})
        output = function(*args, **others)
        if others.pop("indices", None) is self._indices and others.pop("offsets", None) is self._offsets and not args:
            self.operation, self.arguments = getattr(function, "default", function), others
        return output
