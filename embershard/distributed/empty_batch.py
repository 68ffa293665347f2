"""The stand-in of a rank that has no batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.errors import DataError


def empty_like(batch: Any) -> Any:
    """Return a stand-in for a batch: one sample, its numbers zero and its bags empty.

    It has a sample because not all layers run on none: TorchRec's `DLRM_DCN` does not, nor an unsharded
    `EmbeddingBagCollection` before 1.9.

    Args:
        batch: a tensor [B, ...], a KeyedJaggedTensor, or a dataclass, (named) tuple, list or dict of those. Other
            plain values in it (None, text, numbers) stay as they are.

    Raises:
        DataError: the batch holds something else, or it is None: this rank never had one.

    >>> empty_like((torch.ones(4, 2), "train"))
    (tensor([[0., 0.]]), 'train')
    """
    if batch is None:
        raise DataError(
            "got no batch to make a stand-in from: this rank had none at all. Give every rank at least one, or pass as "
            "`empty` a function that makes a batch of one sample without ids from None"
        )
    return _without_content(batch)


def _without_content(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.new_zeros((1, *batch.shape[1:])) if batch.dim() else torch.zeros_like(batch)
    if isinstance(batch, KeyedJaggedTensor):
        return _empty_bags(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(batch, **{name: _without_content(getattr(batch, name)) for name in fields})
    if isinstance(batch, dict):
        return {key: _without_content(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_without_content, batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map(_without_content, batch))
    if batch is None or isinstance(batch, str | bytes | int | float):
        return batch
    raise DataError(
        f"got a {type(batch).__name__} in a batch, needed tensors, KeyedJaggedTensors, or dataclasses, tuples, lists "
        "and dicts of them; write a function of your own that makes a batch without content, and pass it as `empty`"
    )


def _empty_bags(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    if features.variable_stride_per_key():
        raise DataError(
            "got a KeyedJaggedTensor with another number of samples per feature, needed the same for all; write a "
            "function of your own that makes a batch without content, and pass it as `empty`"
        )
    values, weights = features.values(), features.weights_or_none()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=values.new_empty((0, *values.shape[1:])),
        lengths=features.lengths().new_zeros(len(features.keys())),
        weights=None if weights is None else weights.new_empty((0, *weights.shape[1:])),
    )
