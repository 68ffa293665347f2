"""Transfer through page-locked buffers: the CPU gathers and scatters rows, and the GPU copies buffers meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from embershard.cache.rows.memory import widest_views
from embershard.cache.rows.transfer import put_rows

#: A copy of this size reaches the link's bandwidth; several buffers let gathering and copying overlap.
_BUFFER_BYTES = 8 << 20
#: Copies wait for training. A plan without a free buffer takes another one, up to half a gigabyte in all; only then it
#: waits for a copy.
_MOST_BUFFERS = 64


class _Buffer:
    """Room for C rows of every payload tensor, with the event of the last copy from or to it."""

    def __init__(self, like: Sequence[Tensor], num_rows: int, pinned: bool) -> None:
        self.parts = [torch.empty((num_rows, *t.shape[1:]), dtype=t.dtype, pin_memory=pinned) for t in like]
        self._copied: torch.cuda.Event | None = None

    def copying(self, device: torch.device) -> None:
        """Note that a copy from or to the buffer was queued on the current stream (on a CPU: done)."""
        if device.type == "cuda":
            self._copied = torch.cuda.current_stream(device).record_event()

    @property
    def is_free(self) -> bool:
        """True if the last copy is done."""
        return self._copied is None or self._copied.query()

    def wait(self) -> None:
        """Block until the last copy is done."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None


class StagedTransfer:
    """Transfer for host rows that a GPU cannot address: mapped files, or memory that is not page-locked yet. The
    methods are those of `Transfer`.

    Rows that are written back land in the host tier with the next `write_back` or `finish`, when their copies are done,
    so that the CPU does not wait for training. Until then their keys must not be filled.

    Args:
        device: payload tensors by slot, [S + 1, ...] each.
        host: payload tensors by key, [R, ...] each, in the same order.
        buffer_bytes: size of each buffer of the ring.
    """

    def __init__(self, device: Sequence[Tensor], host: Sequence[Tensor], buffer_bytes: int = _BUFFER_BYTES) -> None:
        self._pairs = [widest_views(d.data, h.data) for d, h in zip(device, host, strict=True)]
        self._device = device[0].device
        self.key_device = torch.device("cpu")
        row_bytes = sum(h.element_size() * h[:1].numel() for _, h in self._pairs)
        self._rows = max(1, buffer_bytes // max(1, row_bytes))
        self._buffers: deque[_Buffer] = deque()
        self._landing: deque[tuple[_Buffer, Tensor]] = deque()  # buffers filled by copies, and their host rows

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        for some, to in zip(keys.split(self._rows), slots.split(self._rows), strict=True):
            if not some.numel():
                continue
            buffer = self._take()
            for (device, host), part in zip(self._pairs, buffer.parts, strict=True):
                rows = torch.index_select(host, 0, some, out=part[: some.numel()])
                put_rows(device, to, rows.to(self._device, non_blocking=True))
            buffer.copying(self._device)
            self._buffers.append(buffer)

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        self._land()
        for some, to in zip(slots.split(self._rows), keys.split(self._rows), strict=True):
            if not some.numel():
                continue
            buffer = self._take()
            for (device, _), part in zip(self._pairs, buffer.parts, strict=True):
                part[: some.numel()].copy_(device.index_select(0, some), non_blocking=True)
            buffer.copying(self._device)
            self._landing.append((buffer, to))

    def finish(self) -> None:
        self._land()

    def discard(self) -> int:
        num_rows = 0
        while self._landing:
            buffer, keys = self._landing.popleft()
            num_rows += keys.numel()
            self._buffers.append(buffer)
        return num_rows

    def _take(self) -> _Buffer:
        """Take a buffer that no copy reads or writes any more."""
        has_free = bool(self._buffers) and self._buffers[0].is_free
        if not has_free and len(self._buffers) + len(self._landing) < _MOST_BUFFERS:
            pinned = self._device.type == "cuda"
            return _Buffer([host for _, host in self._pairs], self._rows, pinned)
        if not self._buffers:
            self._land_one()
        buffer = self._buffers.popleft()
        buffer.wait()
        return buffer

    def _land(self) -> None:
        while self._landing:
            self._land_one()

    def _land_one(self) -> None:
        buffer, keys = self._landing[0]  # removed once it has landed: after an interrupt it lands again
        buffer.wait()
        for (_, host), part in zip(self._pairs, buffer.parts, strict=True):
            put_rows(host, keys, part[: keys.numel()])
        self._landing.popleft()  # before the next line: a buffer in both could be refilled before it lands
        self._buffers.append(buffer)
