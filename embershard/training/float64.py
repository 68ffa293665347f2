"""`train.precision = "fp64"`: dense layers in float64, and gradients of embeddings that are rounded once.

Sums over samples and ranks in another order then differ by less than what is left after rounding to the tables'
float32. TorchRec divides the gradients of embeddings by the number of ranks, in float32: by three, that rounds them a
second time. So they are divided before they are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.comm_ops import get_gradient_division, set_gradient_division
from torchrec.models.dlrm import DLRMTrain
from torchrec.sparse.jagged_tensor import KeyedTensor

from embershard.sharding.plan import Plan
from embershard.training.config import RunConfig


def compute_in_float64(model: DLRMTrain, world_size: int) -> None:
    """Widen the dense layers of a model that is not sharded yet; its weights keep their values."""
    layers: Any = model.model
    for part in (layers.dense_arch, layers.inter_arch, layers.over_arch):
        part.double()
    layers.dense_arch.register_forward_pre_hook(lambda _, inputs: tuple(each.double() for each in inputs))
    layers.sparse_arch.register_forward_hook(lambda _, __, pooled: _widen(pooled, world_size))


@contextmanager
def divided_once(config: RunConfig, plan: Plan | None) -> Iterator[None]:
    """With "fp64", divide gradients of embeddings before they are rounded, in a forward and its backward.

    Without a cache, gradients of replicated tables are divided by DDP: with such tables all are divided as ever.
    """
    was = get_gradient_division()
    set_gradient_division(was and (config.train.precision != "fp64" or _ddp_divides(config, plan)))
    try:
        yield
    finally:
        set_gradient_division(was)


def _ddp_divides(config: RunConfig, plan: Plan | None) -> bool:
    return not config.cache.enabled and plan is not None and any(t.kernel == "replicated" for t in plan.tables)


@torch.fx.wrap
def _widen(pooled: Any, world_size: int) -> Any:
    """Return pooled embeddings in float64. Where TorchRec does not divide their gradients, it is done here."""
    if isinstance(pooled, KeyedTensor):
        return KeyedTensor(pooled.keys(), pooled.length_per_key(), _widen(pooled.values(), world_size))
    wide: Tensor = pooled.double()
    if wide.requires_grad:
        wide.register_hook(lambda gradient: gradient if get_gradient_division() else gradient / world_size)
    return wide
