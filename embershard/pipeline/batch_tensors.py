"""The tensors in batches of any class; and a batch whose tensors are in host memory for a while."""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchrec.distributed.embedding_types import KJTList
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from embershard.cache.rows import memory

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


@dataclasses.dataclass(eq=False)
class _Away:
    """In place of a tensor, which is a view of a buffer: element `first` of that is its first one."""

    shape: torch.Size
    stride: tuple[int, ...]
    first: int
    buffer: Tensor | None = None


class Moves(TorchFunctionMode):
    """Context that notes which tensors `Tensor.to` copies as they are."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[tuple[Tensor, int, Tensor]] = []  # a copy, its version, and what it is of

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_copy = func is Tensor.to and made is not args[0] and made.dtype == args[0].dtype
        if is_copy and made.is_contiguous() and args[0].is_contiguous():
            self._found.append((made, made._version, args[0]))
        return made

    def end(self, value: Any) -> None:
        """Keep only what is part of a value: memory that is freed may become another tensor's."""
        kept = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(value)}
        self._found = [each for each in self._found if each[0].untyped_storage().data_ptr() in kept]

    def take(self) -> dict[int, Tensor]:
        """Return the originals of copies that nobody wrote to, by the address of the copy's memory, and forget them.

        >>> ids = torch.arange(3)
        >>> with Moves() as moves:
        ...     copy = ids.to("cpu", copy=True)
        >>> moves.take()[copy.data_ptr()] is ids
        True
        """
        found, self._found = self._found, []
        return {made.untyped_storage().data_ptr(): of for made, version, of in found if made._version == version}


class HostCopy:
    """A value with its tensors on a device in host memory, until `restore`: views of one memory are such again.

    Objects on the way to these tensors are copied, so that others may keep theirs; what has no such tensors is shared.

    Args:
        value: what `tensors_of` reads.
        device: whose tensors go; its current stream copies them, and they are freed behind that.
        originals: what some of those tensors were copied from, by the address of the copy's memory (`Moves`): they are
            not copied back. Nobody may write to an original until `restore`.

    >>> ids = torch.arange(6)
    >>> away = HostCopy({"ids": ids[2:], "first": ids[:2], "name": "clicks"}, torch.device("cpu"))
    >>> away.num_bytes, away.restore()
    (48, {'ids': tensor([2, 3, 4, 5]), 'first': tensor([0, 1]), 'name': 'clicks'})
    """

    def __init__(self, value: Any, device: torch.device, originals: Mapping[int, Tensor] = {}) -> None:
        self._device, self._kind = device, type(torch.empty(0, device=device))
        self._buffers: list[Tensor] = []
        self._num_bytes = 0
        taken: dict[tuple[int, torch.dtype], list[tuple[Tensor, _Away]]] = {}

        def take(tensor: Any) -> Any:
            if type(tensor) is not self._kind or tensor.device.type != device.type or tensor.requires_grad:
                return tensor
            if tensor.layout != torch.strided or not tensor.numel():
                return tensor
            away = _Away(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
            taken.setdefault((tensor.untyped_storage().data_ptr(), tensor.dtype), []).append((tensor, away))
            return away

        self._value = _rebuilt(value, take, {})
        for (address, dtype), views in taken.items():
            original = originals.get(address)
            if original is None or original.dtype != dtype:
                self._buffers.append(self._copied(views))
                num_bytes = self._buffers[-1].nbytes
                self._num_bytes += memory.pinned_bytes(num_bytes) if self._device.type == "cuda" else num_bytes
                continue
            self._buffers.append(original.view(-1))
            for _, away in views:
                away.buffer = self._buffers[-1]

    def _copied(self, views: list[tuple[Tensor, _Away]]) -> Tensor:
        """Copy the memory that these views have to a buffer, from the first element to the last."""
        tensor = views[0][0]
        start = min(away.first for _, away in views)
        stop = max(
            away.first + 1 + sum((size - 1) * step for size, step in zip(away.shape, away.stride, strict=True))
            for _, away in views
        )
        source = tensor.as_strided((stop - start,), (1,), start)
        buffer = torch.empty(stop - start, dtype=tensor.dtype, pin_memory=self._device.type == "cuda")
        buffer.copy_(source, non_blocking=True)
        memory.record_stream(source)
        for _, away in views:
            away.first, away.buffer = away.first - start, buffer
        return buffer

    @property
    def num_bytes(self) -> int:
        """Host memory of the copies, in bytes."""
        return self._num_bytes

    def restore(self) -> Any:
        """Return the value with its tensors on the device again; its current stream copies them."""
        here = [
            torch.empty(each.shape, dtype=each.dtype, device=self._device).copy_(each, non_blocking=True)
            for each in self._buffers
        ]
        of_buffer = {id(buffer): copied for buffer, copied in zip(self._buffers, here, strict=True)}

        def bring(away: Any) -> Any:
            if not isinstance(away, _Away):
                return away
            return of_buffer[id(away.buffer)].as_strided(away.shape, away.stride, away.first)

        return _rebuilt(self._value, bring, {})


def _rebuilt(value: Any, replaced: Callable[[Any], Any], done: dict[int, tuple[Any, Any]]) -> Any:
    """Return a copy of `value` with other tensors; `done` has what was copied, by address, beside its copy."""
    cls: type = type(value)
    if cls in _LEAVES:
        return value
    if id(value) in done:  # parts may refer back to the whole
        return done[id(value)][1]
    has_parts = _reader(cls) is not None
    if issubclass(cls, Tensor | _Away):
        made = replaced(value)
        done[id(value)] = value, made
        return made
    if not has_parts:
        return value
    if issubclass(cls, list | dict):
        parts = value.values() if issubclass(cls, dict) else value
        if _LEAVES.issuperset(map(type, parts)):  # most lists are of names or numbers
            return value
    if issubclass(cls, tuple):  # whose parts cannot be set
        made = tuple.__new__(cls, [_rebuilt(part, replaced, done) for part in value])
    else:
        made = copy.copy(value)
    done[id(value)] = value, made
    if issubclass(cls, list | dict):
        for key, part in list(value.items() if issubclass(cls, dict) else enumerate(value)):
            made[key] = _rebuilt(part, replaced, done)
    for name, part in _attributes(value).items():
        if (new := _rebuilt(part, replaced, done)) is not part:
            object.__setattr__(made, name, new)
    return made
