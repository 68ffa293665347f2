"""Transfers, which move row payloads between the host tier and the slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from embershard.cache import loops
from embershard.cache.rows.memory import widest_views

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Transfer(Protocol):
    """Executes the copies of plans. Keys number host rows, slots device rows; both int64 [M] without repeats. A plan
    calls `write_back` and then `fill`, even without rows.

    On a GPU the copies are queued on the current stream, and later calls come after earlier ones. None of the keys of a
    `write_back` is filled before the next `write_back` or `finish`: a plan never fills the rows that it evicts.
    """

    @property
    def key_device(self) -> torch.device:
        """Device that keys must be on."""

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        """Copy host rows `keys` to `slots`."""

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        """Copy `slots` to host rows `keys`."""

    def finish(self) -> None:
        """Block until the CPU sees all rows that were written back."""

    def discard(self) -> int:
        """Drop written-back rows that are not in the host tier yet, and return their number."""


#: From slots (payload tensors [S + 1, ...]) and host rows ([R, ...], in the same order).
MakeTransfer = Callable[[Sequence[Tensor], Sequence[Tensor]], Transfer]


class PlainTransfer:
    """Transfer by torch's indexed copies: for slots in host memory; correct (not fast) on any device. The methods are
    those of `Transfer`.

    Args:
        device: payload tensors by slot, [S + 1, ...] each.
        host: payload tensors by key, [R, ...] each, in the same order.

    All copies go through `.data`: views made by `detach` share autograd's version counter, and filling rows between a
    forward and its backward would raise "modified by an inplace operation". Pins make it safe.
    """

    def __init__(self, device: Sequence[Tensor], host: Sequence[Tensor]) -> None:
        pairs = list(zip(device, host, strict=True))
        for d, h in pairs:
            assert d.shape[1:] == h.shape[1:], f"payload rows differ: {d.shape} and {h.shape}"
            assert d.dtype == h.dtype, f"payload types differ: {d.dtype} and {h.dtype}"
        self._pairs = [[RowTable(table) for table in widest_views(d.data, h.data)] for d, h in pairs]
        self.key_device = host[0].device

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        for device, host in self._pairs:
            device.copy(slots, host, keys)

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        for device, host in self._pairs:
            host.copy(keys, device, slots)

    def finish(self) -> None:
        pass  # every copy is done when its call returns

    def discard(self) -> int:
        return 0


class ScoresTransfer:
    """Transfer of one score per row, through the CPU. Every copy is done when its call returns.

    Args:
        device: scores by slot, [S + 1].
        host: scores by key, [R].
    """

    def __init__(self, device: Sequence[Tensor], host: Sequence[Tensor]) -> None:
        self._slots, self._rows = (RowTable(tables[0]) for tables in (device, host))
        self.key_device = host[0].device

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        self._slots.copy(slots, self._rows, keys)

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        self._rows.copy(keys, self._slots, slots)

    def finish(self) -> None:
        pass

    def discard(self) -> int:
        return 0


class RowTable:
    """Rows of one payload tensor, seen as whatever copies them fastest.

    Args:
        tensor: [R, ...].
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._words: NDArray[Any] | None = None  # [R, words per row]
        if tensor.is_cpu and tensor.is_contiguous() and tensor.numel():
            integers = tensor.view(torch.int64) if tensor.is_complex() else tensor
            self._words = integers.view(_WORDS[integers.element_size()]).numpy().reshape(tensor.shape[0], -1)

    def copy(self, rows: Tensor, source: RowTable, source_rows: Tensor) -> None:
        """Copy `source_rows` of `source` to `rows` (both int64 [M], each on its table's device)."""
        if not rows.numel():
            return
        if self._words is not None and source._words is not None:
            loops.copy_rows(self._words, rows.numpy(), source._words, source_rows.numpy())
        else:
            values = source._tensor.index_select(0, source_rows)
            put_rows(self._tensor, rows, values.to(self._tensor.device))


def put_rows(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Do `table[rows] = values`: rows int64 [M], values [M, ...]."""
    if table.dim() == 1:  # several times as fast as the assignment
        table.scatter_(0, rows, values)
    else:
        table[rows] = values
