"""Moving row payloads between the host tier and the slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from embershard.cache.rows.memory import widest_views


class Transfer(Protocol):
    """Executes the copies of plans. Keys number host rows, slots device rows; both int64 [M] without repeats. A plan's
    write-back is called before its fill, with no rows, too.

    On a GPU the copies are queued on the current stream, and later calls come after earlier ones. Between a
    :meth:`write_back` and the next one, or :meth:`finish`, none of its keys is filled: a plan's fills are never rows
    that it puts out.
    """

    @property
    def key_device(self) -> torch.device:
        """Where keys are wanted; slots are wanted on the device."""

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        """Host rows ``keys`` -> ``slots``."""

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        """``slots`` -> host rows ``keys``."""

    def finish(self) -> None:
        """Wait until the CPU sees all that was written back."""

    def discard(self) -> int:
        """Forget what was written back and is not in the host tier yet: how many rows."""


#: From slots (payload tensors [S + 1, ...]) and host rows ([R, ...], in the same order).
MakeTransfer = Callable[[Sequence[Tensor], Sequence[Tensor]], Transfer]


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
        self.key_device = host[0].device

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        """Host rows ``keys`` -> ``slots``."""
        if keys.numel():
            for device, host in self._pairs:
                rows = host.index_select(0, keys)
                put_rows(device, slots, rows.to(device.device))

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        """Both halves, one right after the other."""
        self.land(self.collect(slots), keys)

    def finish(self) -> None:
        """Nothing: every copy is done when its call returns."""

    def discard(self) -> int:
        """Nothing is under way."""
        return 0

    def collect(self, slots: Tensor) -> list[Tensor]:
        """The first half of a write-back, which must come before the slots are filled again: copies of the payloads in
        ``slots``."""
        return [device.index_select(0, slots) for device, _ in self._pairs] if slots.numel() else []

    def land(self, rows: list[Tensor], keys: Tensor) -> None:
        """The second half: collected payloads -> host rows ``keys``."""
        if keys.numel():
            for (_, host), part in zip(self._pairs, rows, strict=True):
                put_rows(host, keys, part.to(host.device))


class ScoresTransfer:
    """For a score per row: through the CPU, and done when a call returns.

    Args:
        device: scores by slot, [S + 1].
        host: scores by key, [R].
    """

    def __init__(self, device: Sequence[Tensor], host: Sequence[Tensor]) -> None:
        (self._slots,), (self._rows,) = device, host
        self.key_device = self._rows.device

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        """Scores of host rows ``keys`` -> ``slots``."""
        self._slots.scatter_(0, slots, self._rows.index_select(0, keys).to(self._slots.device))

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        """Scores of ``slots`` -> host rows ``keys``."""
        self._rows.scatter_(0, keys, self._slots.index_select(0, slots).to(self.key_device))

    def finish(self) -> None:
        """Nothing."""

    def discard(self) -> int:
        """Nothing is under way."""
        return 0


def put_rows(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """``table[rows] = values``: rows int64 [M], values [M, ...]."""
    if table.dim() == 1:  # several times as fast as the general assignment
        table.scatter_(0, rows, values)
    else:
        table[rows] = values
