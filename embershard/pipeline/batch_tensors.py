"""Tensors in batches of any class."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_types import KJTList
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

_LEAVES = frozenset({int, str, float, bool, type(None)})


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return all tensors in a batch, a module's input or its context: in containers, dataclasses, and attributes of
    objects that can be moved to a device.

    >>> [tensor.numel() for tensor in tensors_of({"dense": torch.zeros(3), "labels": [torch.zeros(2)]})]
    [3, 2]
    """
    found: list[torch.Tensor] = []
    _collect(value, found, set())
    return found


def _collect(value: Any, found: list[torch.Tensor], seen: set[int]) -> None:
    cls: type = type(value)
    if cls in _LEAVES:  # most lists are of names or numbers
        return
    parts_of = _reader(cls)
    if parts_of is None:
        if issubclass(cls, torch.Tensor):
            found.append(value)
    elif id(value) not in seen:  # parts may refer back to the whole
        seen.add(id(value))
        for part in parts_of(value):
            _collect(part, found, seen)


@functools.cache
def _reader(cls: type) -> Callable[[Any], Any] | None:
    """Return the function that gives what an object of this class consists of; None for tensors and other values."""
    if issubclass(cls, KeyedJaggedTensor):
        return _parts_of_features
    if issubclass(cls, KJTList | list | tuple):
        return iter
    if issubclass(cls, dict):
        return dict.values
    if issubclass(cls, torch.Tensor | nn.Module):  # a module that a batch refers to is no part of it
        return None
    if dataclasses.is_dataclass(cls) or issubclass(cls, Multistreamable) or hasattr(cls, "to"):
        return functools.partial(_attributes, _slots(cls))
    return None


def _parts_of_features(features: KeyedJaggedTensor) -> tuple[torch.Tensor | None, ...]:
    return features.values(), features.weights_or_none(), features.lengths_or_none(), features.offsets_or_none()


def _attributes(slots: list[str], value: Any) -> list[Any]:
    """Return an object's attributes: those in the `__slots__` of its classes and in its `__dict__`."""
    found = [getattr(value, name) for name in slots if hasattr(value, name)]
    return [*found, *getattr(value, "__dict__", {}).values()]


def _slots(cls: type) -> list[str]:
    members = [vars(each).items() for each in cls.__mro__]
    return [name for each in members for name, member in each if isinstance(member, types.MemberDescriptorType)]


def tensor_bytes(value: Any) -> int:
    """Return the memory of all tensors in `value`, each counted once, in bytes."""
    by_place = {tensor.data_ptr(): tensor for tensor in tensors_of(value)}
    return sum(tensor.nbytes for tensor in by_place.values())
