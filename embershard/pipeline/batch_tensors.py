"""Tensors in batches of any class."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torchrec.distributed.embedding_types import KJTList
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

_LEAVES = (int, str, float, type(None))


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in a batch, a module's input or its context.

    >>> [tensor.numel() for tensor in tensors_of({"dense": torch.zeros(3), "labels": [torch.zeros(2)]})]
    [3, 2]
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, _LEAVES):
        return
    elif isinstance(value, KeyedJaggedTensor):
        parts = (value.values(), value.weights_or_none(), value.lengths_or_none(), value.offsets_or_none())
        yield from (part for part in parts if part is not None)
    elif isinstance(value, KJTList | list | tuple):
        for part in value:
            if not isinstance(part, _LEAVES):  # most lists are of names or numbers
                yield from tensors_of(part)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif not isinstance(value, type) and (dataclasses.is_dataclass(value) or isinstance(value, Multistreamable)):
        yield from tensors_of(_attributes(value))


def _attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes: those in its `__dict__` and in the `__slots__` of its classes."""
    cls: type = type(value)
    found = {name: getattr(value, name) for name in _declared(cls) if hasattr(value, name)}
    return {**found, **getattr(value, "__dict__", {})}


@functools.cache
def _declared(cls: type) -> tuple[str, ...]:
    fields = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    members = [vars(each).items() for each in cls.__mro__]
    slots = [name for each in members for name, member in each if isinstance(member, types.MemberDescriptorType)]
    return (*fields, *slots)


def tensor_bytes(value: Any) -> int:
    """Return the memory of all tensors in `value`, each counted once, in bytes."""
    by_place = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors_of(value)}
    return sum(tensor.numel() * tensor.element_size() for tensor in by_place.values())
