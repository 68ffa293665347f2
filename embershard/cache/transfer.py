"""Moving row payloads between the host tier and the slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from embershard.cache.memory import widest_views


class Transfer(Protocol):
    """Executes the copies of a plan. Keys number host rows, slots device rows; both int64 [M] without
    repeats. A write-back has two halves, because only the first one must come before the slots are filled again."""

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        """Host rows ``keys`` -> ``slots``."""

    def collect(self, slots: Tensor) -> list[Tensor]:
        """Copies of the payloads in ``slots``."""

    def land(self, rows: list[Tensor], keys: Tensor) -> None:
        """Collected payloads -> host rows ``keys``."""


class PlainTransfer:
    """Indexed copies with torch's own kernels: for slots in host memory, and correct (not fast) on any
    device.

    Args:
        device: payload tensors by slot, [S + 1, ...] each.
        host: payload tensors by key, [R, ...] each, in the same order.

    All copies go through ``.data``: views made by ``detach`` share autograd's version counter, and filling
    rows between a forward and its backward would raise "modified by an inplace operation". Pins make it safe.
    """

    def __init__(self, device: Sequence[Tensor], host: Sequence[Tensor]) -> None:
        pairs = list(zip(device, host, strict=True))
        for d, h in pairs:
            assert d.shape[1:] == h.shape[1:], f"payload rows differ: {d.shape} and {h.shape}"
            assert d.dtype == h.dtype, f"payload types differ: {d.dtype} and {h.dtype}"
        self._pairs = [widest_views(d.data, h.data) for d, h in pairs]

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        if keys.numel():
            for device, host in self._pairs:
                rows = host.index_select(0, keys.to(host.device))
                _put(device, slots, rows.to(device.device))

    def collect(self, slots: Tensor) -> list[Tensor]:
        return [device.index_select(0, slots) for device, _ in self._pairs] if slots.numel() else []

    def land(self, rows: list[Tensor], keys: Tensor) -> None:
        if keys.numel():
            for (_, host), part in zip(self._pairs, rows, strict=True):
                _put(host, keys.to(host.device), part.to(host.device))


def _put(table: Tensor, rows: Tensor, values: Tensor) -> None:
    if table.dim() == 1:  # several times as fast as the general assignment
        table.scatter_(0, rows, values)
    else:
        table[rows] = values
