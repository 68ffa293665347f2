"""Transfers, which move row payloads between the host tier and the slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from embershard.cache.rows.memory import widest_views


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
        self._pairs = [widest_views(d.data, h.data) for d, h in pairs]
        self.key_device = host[0].device

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        if keys.numel():
            for device, host in self._pairs:
                rows = host.index_select(0, keys)
                put_rows(device, slots, rows.to(device.device))

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        self.land(self.collect(slots), keys)

    def finish(self) -> None:
        pass  # every copy is done when its call returns

    def discard(self) -> int:
        return 0

    def collect(self, slots: Tensor) -> list[Tensor]:
        """Do the first half of a write-back, before the slots are filled again: copy the payloads of `slots`."""
        return [device.index_select(0, slots) for device, _ in self._pairs] if slots.numel() else []

    def land(self, rows: list[Tensor], keys: Tensor) -> None:
        """Do the second half: copy collected payloads to host rows `keys`."""
        if keys.numel():
            for (_, host), part in zip(self._pairs, rows, strict=True):
                put_rows(host, keys, part.to(host.device))


class ScoresTransfer:
    """Transfer of one score per row, through the CPU. Every copy is done when its call returns.

    Args:
        device: scores by slot, [S + 1].
        host: scores by key, [R].
    """

    def __init__(self, device: Sequence[Tensor], host: Sequence[Tensor]) -> None:
        (self._slots,), (self._rows,) = device, host
        self.key_device = self._rows.device

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        self._slots.scatter_(0, slots, self._rows.index_select(0, keys).to(self._slots.device))

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        self._rows.scatter_(0, keys, self._slots.index_select(0, slots).to(self.key_device))

    def finish(self) -> None:
        pass

    def discard(self) -> int:
        return 0


def put_rows(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Do `table[rows] = values`: rows int64 [M], values [M, ...]."""
    if table.dim() == 1:  # several times as fast as the assignment
        table.scatter_(0, rows, values)
    else:
        table[rows] = values
