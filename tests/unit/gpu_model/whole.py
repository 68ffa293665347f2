"""Whole runs of the trainer on the modelled GPU: data, model, sharding, modes, caches, publications and checkpoints.

Stood in for are FBGEMM's tables (`fbgemm.py`), collectives (`collectives.py`), DDP (a mirror image has the same
gradients) and launches of our own kernels, whose work torch's operations do. Copies by FBGEMM's other operations are
those of a CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import batched_embedding_kernel, model_parallel

from embershard.cache.gpu import launch as kernel_launch
from embershard.cache.rows import choose_transfer
from embershard.cache.rows.uva_transfer import RowKernel
from embershard.distributed import Ranks
from embershard.sharding.torchrec import accumulation, slots
from tests.unit.cache.torch_operations import torch_planning
from tests.unit.gpu_model.collectives import mirrored_ranks
from tests.unit.gpu_model.device import CUDA, Gpu
from tests.unit.gpu_model.fbgemm import ModelledTables, slice_of
from tests.unit.gpu_model.training import _copy_rows, compute_launch


class _Alike(DistributedDataParallel):
    """In place of DDP: its gradients are those of all ranks."""

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.parameters_to_ignore: set[str] = set()
        self.process_group = settings.get("process_group")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _lock_at_once(device: torch.device, tensors: Sequence[Tensor], before: Any = None) -> Any:
    """In place of the thread that locks host rows."""
    gpu = Gpu.active()
    for tensor in tensors:
        if tensor.numel():
            gpu.watch_rows(tensor)
        if before is not None:
            before(tensor.data_ptr(), tensor.nbytes)
        gpu.lock(tensor.untyped_storage().data_ptr())
    return SimpleNamespace(is_done=True)


@contextlib.contextmanager
def modelled_ranks(num_ranks: int = 1) -> Iterator[tuple[Gpu, Ranks]]:
    """A GPU, and the first of so many ranks on it."""
    properties = SimpleNamespace(total_memory=80 << 30, major=9, minor=0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mirrored_ranks(num_ranks))
        gpu = stack.enter_context(Gpu())
        for owner, name, stand_in in (
            (slots, "SplitTableBatchedEmbeddingBagsCodegen", ModelledTables),
            (batched_embedding_kernel, "SplitTableBatchedEmbeddingBagsCodegen", ModelledTables),
            (accumulation, "SplitTableBatchedEmbeddingBagsCodegen", ModelledTables),
            (batched_embedding_kernel, "TableBatchedEmbeddingSlice", slice_of),
            (model_parallel, "DistributedDataParallel", _Alike),
            (choose_transfer, "lock_for", _lock_at_once),
            (RowKernel, "_launch", _copy_rows),
            (kernel_launch, "_run", compute_launch),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "mem_get_info", lambda device=None: (80 << 30, 80 << 30)),
            (torch.cuda, "get_device_properties", lambda device=None: properties),
            (torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state()),
            (torch.cuda, "set_rng_state", lambda state, device=None: None),
            (torch.cuda, "synchronize", lambda device=None: gpu.wait_for_stream("synchronize")),
            (torch.cuda, "device", lambda device=None: contextlib.nullcontext()),
            (Ranks, "with_own_group", lambda self: self),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        stack.enter_context(torch_planning())
        yield gpu, Ranks(0, num_ranks, 0, num_ranks, CUDA)
