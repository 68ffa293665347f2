"""In place of FBGEMM's tables on a GPU: its tables on a CPU compute, and the model is told what their kernels touch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen as OnCpu
from torch import Tensor, nn

from tests.unit.gpu_model.device import Gpu, GpuTensor, _inner, out_of_sight

_CPU = torch.device("cpu")


class ModelledTables(nn.Module):
    """In place of `SplitTableBatchedEmbeddingBagsCodegen` with tables on a GPU. A forward is one kernel that reads
    rows, and its backward one that writes to them; all that they get must be on the device, of the types that FBGEMM's
    kernels for GPUs take."""

    def __init__(self, embedding_specs: Sequence[tuple[Any, ...]], device: Any = None, **arguments: Any) -> None:
        super().__init__()
        assert all(compute == ComputeDevice.CUDA for *_, compute in embedding_specs), "a table that is not on the GPU"
        self.embedding_specs = list(embedding_specs)
        on_cpu = [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim, *_ in embedding_specs]
        with out_of_sight():
            tables = OnCpu(on_cpu, device=_CPU, **arguments)
        self.__dict__["_tables"] = tables  # no submodule: its tensors are not what the device has
        self._anchor = Gpu.active().wrap(torch.zeros(0)).requires_grad_()
        self._kept = [
            *self.split_embedding_weights(),
            *(each for part in self.split_optimizer_states() for each in part),
        ]
        if len(self.embedding_specs) == 1:
            for rows in self._kept:
                Gpu.active().watch_rows(rows)

    def __getattr__(self, name: str) -> Any:
        if name in ("_anchor", "_kept"):
            return super().__getattr__(name)
        return _on_device(getattr(self.__dict__["_tables"], "weights_host" if name == "weights_dev" else name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("iter", "iter_cpu", "optimizer_args"):
            setattr(self._tables, name, _inner(value))
        else:
            super().__setattr__(name, value)

    @property
    def iter_cpu(self) -> Tensor:
        """The one number that is on the host."""
        return self._tables.iter_cpu  # type: ignore[no-any-return]

    def split_embedding_weights(self) -> list[Tensor]:
        """As FBGEMM's."""
        return _on_device(self._tables.split_embedding_weights())  # type: ignore[no-any-return]

    def split_optimizer_states(self) -> list[list[Tensor]]:
        """As FBGEMM's."""
        return _on_device(self._tables.split_optimizer_states())  # type: ignore[no-any-return]

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """As FBGEMM's."""
        return _on_device(self._tables.get_optimizer_state())  # type: ignore[no-any-return]

    def forward(self, indices: Tensor, offsets: Tensor, per_sample_weights: Any = None, **arguments: Any) -> Tensor:
        """As FBGEMM's."""
        assert indices.dtype == offsets.dtype == torch.int64, "FBGEMM would convert one of them"
        mask = arguments.get("feature_requires_grad")
        assert mask is None or (mask.dtype, mask.numel()) == (torch.int32, len(self._tables.feature_table_map))
        for given in (indices, offsets, per_sample_weights, mask):
            assert given is None or isinstance(given, GpuTensor), f"FBGEMM got a tensor of the host: {given.shape}"
        return _Lookup.apply(self._anchor, self, indices, offsets, per_sample_weights, arguments)  # type: ignore[no-any-return]


def slice_of(data: Tensor, start_offset: int, end_offset: int, num_embeddings: int, embedding_dim: int) -> nn.Parameter:
    """In place of TorchRec's `TableBatchedEmbeddingSlice`, of a class of its own."""
    return nn.Parameter(data[start_offset:end_offset].view(num_embeddings, embedding_dim))


def _on_device(value: Any) -> Any:
    if isinstance(value, Tensor) and not isinstance(value, GpuTensor):
        return Gpu.active().wrap(value.detach())
    if isinstance(value, dict):
        return {name: _on_device(each) for name, each in value.items()}
    return [_on_device(each) for each in value] if type(value) is list else value


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tables: Any, indices: Any, offsets: Any, weights: Any, rest: Any) -> Any:  # type: ignore[override]
        gpu, given = Gpu.active(), {name: _inner(each) for name, each in rest.items()}
        ctx.tables, ctx.indices, ctx.offsets, ctx.weights = tables, indices, offsets, weights
        is_training = anchor.requires_grad and ctx.needs_input_grad[0]
        with out_of_sight(), torch.set_grad_enabled(is_training):
            ctx.own_weights = None
            if weights is not None:
                ctx.own_weights = weights.inner.detach().requires_grad_(ctx.needs_input_grad[4])
            ctx.pooled = tables._tables(indices.inner, offsets.inner, per_sample_weights=ctx.own_weights, **given)
            pooled = gpu.wrap(ctx.pooled.detach().clone())
        others = [each for each in (offsets, weights, *rest.values()) if isinstance(each, GpuTensor)]
        gpu.launch("FBGEMM's lookup", [_rows(tables, tables._kept[0], indices), indices, *others], [pooled])
        return pooled

    @staticmethod
    def backward(ctx: Any, gradients: Any) -> tuple[Any, ...]:  # type: ignore[override]
        gpu, tables, found = Gpu.active(), ctx.tables, None
        assert isinstance(gradients, GpuTensor), "gradients of the host"
        with out_of_sight(), torch.enable_grad():
            torch.autograd.backward(ctx.pooled, gradients.inner)
            if ctx.own_weights is not None and ctx.own_weights.grad is not None:
                found = gpu.wrap(ctx.own_weights.grad)
        written = [_rows(tables, each, ctx.indices) for each in tables._kept]
        read = [each for each in (gradients, ctx.indices, ctx.offsets, ctx.weights) if each is not None]
        gpu.launch("FBGEMM's backward", read, written)
        return None, None, None, None, found, None


def _rows(tables: Any, table: Tensor, indices: Tensor) -> Any:
    return (table, indices) if len(tables.embedding_specs) == 1 else table
