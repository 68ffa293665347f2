"""Tensors in batches of any class."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
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
        return
    cls: type = type(value)
    parts_of = _reader(cls)
    if parts_of is not None:
        for part in parts_of(value):
            if not isinstance(part, _LEAVES):  # most lists are of names or numbers
                yield from tensors_of(part)


@functools.cache
def _reader(cls: type) -> Callable[[Any], Any] | None:
    """Return the function that gives what an object of this class consists of; None if it holds no tensors."""
    if issubclass(cls, KeyedJaggedTensor):
        return _parts_of_features
    if issubclass(cls, KJTList | list | tuple):
        return iter
    if issubclass(cls, dict):
        return dict.values
    if dataclasses.is_dataclass(cls) or issubclass(cls, Multistreamable):
        return functools.partial(_attributes, _declared(cls))
    return None


def _parts_of_features(features: KeyedJaggedTensor) -> tuple[torch.Tensor | None, ...]:
    return features.values(), features.weights_or_none(), features.lengths_or_none(), features.offsets_or_none()


def _attributes(declared: tuple[str, ...], value: Any) -> list[Any]:
    """Return an object's attributes: those in its `__dict__` and in the `__slots__` of its classes."""
    found = {name: getattr(value, name) for name in declared if hasattr(value, name)}
    return list({**found, **getattr(value, "__dict__", {})}.values())


def _declared(cls: type) -> tuple[str, ...]:
    fields = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    members = [vars(each).items() for each in cls.__mro__]
    slots = [name for each in members for name, member in each if isinstance(member, types.MemberDescriptorType)]
    return (*fields, *slots)


def tensor_bytes(value: Any) -> int:
    """Return the memory of all tensors in `value`, each counted once, in bytes."""
    by_place = {tensor.data_ptr(): tensor for tensor in tensors_of(value)}
    return sum(tensor.nbytes for tensor in by_place.values())
