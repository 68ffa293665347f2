"""The tensors in batches of any class."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_types import KJTList
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

_LEAVES = frozenset({int, str, float, bool, type(None)})


def tensors_of(value: Any) -> list[Tensor]:
    """Return all tensors in a batch, a module's input or its context: in containers, dataclasses, and attributes of
    objects that can be moved to a device.

    >>> [tensor.numel() for tensor in tensors_of({"dense": torch.zeros(3), "labels": [torch.zeros(2)]})]
    [3, 2]
    """
    found: list[Tensor] = []
    _collect(value, found, set())
    return found


def _collect(value: Any, found: list[Tensor], seen: set[int]) -> None:
    cls: type = type(value)
    if cls in _LEAVES:  # most lists are of names or numbers
        return
    parts_of = _reader(cls)
    if parts_of is None:
        if issubclass(cls, Tensor):
            found.append(value)
    elif id(value) not in seen:  # parts may refer back to the whole
        seen.add(id(value))
        for part in parts_of(value):
            _collect(part, found, seen)


@functools.cache
def _reader(cls: type) -> Callable[[Any], Any] | None:
    """Return the function that gives what an object of this class consists of; None for tensors and other values."""
    if issubclass(cls, KeyedJaggedTensor):
        return lambda it: (it.values(), it.weights_or_none(), it.lengths_or_none(), it.offsets_or_none())
    if issubclass(cls, KJTList | list | tuple):
        return iter
    if issubclass(cls, dict):
        return dict.values
    if issubclass(cls, Tensor | nn.Module):  # a module that a batch refers to is no part of it
        return None
    if dataclasses.is_dataclass(cls) or issubclass(cls, Multistreamable) or hasattr(cls, "to"):
        return lambda it: _attributes(it).values()
    return None


@functools.cache
def _slots(cls: type) -> list[str]:
    members = [member for each in cls.__mro__ for member in vars(each).items()]
    return [name for name, member in members if isinstance(member, types.MemberDescriptorType)]


def _attributes(value: Any) -> dict[str, Any]:
    cls: type = type(value)
    found = {name: getattr(value, name) for name in _slots(cls) if hasattr(value, name)}
    return {**found, **getattr(value, "__dict__", {})}


def tensor_bytes(value: Any) -> int:
    """Return the memory of all tensors in `value`, in bytes. What several views share is counted once.

    >>> ids = torch.arange(4)
    >>> tensor_bytes([ids, ids[:2], ids[2:], torch.arange(8)[:2]])
    48
    """
    views: dict[torch.UntypedStorage, dict[int, int]] = {}
    for tensor in tensors_of(value):
        of_storage = views.setdefault(tensor.untyped_storage(), {})
        of_storage[tensor.data_ptr()] = max(tensor.nbytes, of_storage.get(tensor.data_ptr(), 0))
    return sum(min(storage.nbytes(), sum(sizes.values())) for storage, sizes in views.items())
