"""Transfers, which move row payloads between the host tier and the slots: `PlainTransfer` by torch's indexed copies,
`StagedTransfer` through page-locked buffers, while the CPU gathers and scatters rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from embershard.cache import loops
from embershard.cache.rows.memory import INTEGERS, widest_views
from embershard.cache.rows.small_rows import SmallRows


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
        self.key_device = torch.device("cpu") if not host else host[0].device

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


class SmallTransfer(PlainTransfer):
    """Transfer of small rows, between host memory and slots in host memory: weights are narrowed and widened in the
    pass of the copy, states as `PlainTransfer` copies them.

    Args:
        device: payload tensors by slot, [S + 1, ...] each.
        host: payload tensors by key, [R, ...] each, in the same order; the first has no contents.
        small: the weights.
    """

    def __init__(self, device: Sequence[Tensor], host: Sequence[Tensor], small: SmallRows) -> None:
        super().__init__(device[1:], host[1:])
        self._slots, self._small, self.key_device = device[0].data, small, host[0].device

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        self._small.read(keys, self._slots, slots)
        super().fill(keys, slots)

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        self._small.write(keys, self._slots, slots)
        super().write_back(slots, keys)


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
            self._words = integers.view(INTEGERS[integers.element_size()]).numpy().reshape(tensor.shape[0], -1)

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


#: A copy of this size reaches the link's bandwidth; several buffers let gathering and copying overlap.
_BUFFER_BYTES = 8 << 20
#: Copies wait for training. A plan without a free buffer takes another one, behind the first ones, up to half a
#: gigabyte in all; only then it waits for a copy.
_FIRST_BUFFERS, _MOST_BUFFERS = 4, 64


class _Buffer:
    """Room for C rows of every payload tensor, with the event of the last copy from or to it."""

    def __init__(self, like: Sequence[Tensor], num_rows: int, pinned: bool, small: SmallRows | None) -> None:
        self.small = [] if small is None else small.new_buffer(num_rows, pinned)
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
        small: the weights, where they are small: kernels narrow them into the buffers, and widen them out of these. The
            first tensor of `host` has no contents then.
    """

    def __init__(
        self,
        device: Sequence[Tensor],
        host: Sequence[Tensor],
        buffer_bytes: int = _BUFFER_BYTES,
        small: SmallRows | None = None,
    ) -> None:
        pairs = list(zip(device, host, strict=True))[0 if small is None else 1 :]
        self._pairs = [widest_views(d.data, h.data) for d, h in pairs]
        self._device = device[0].device
        self.key_device = torch.device("cpu")
        row_bytes = sum(h.element_size() * h[:1].numel() for _, h in self._pairs)
        self._small, self._weights = small, device[0]
        if small is not None:
            row_bytes += sum(part[:1].nbytes for part in small.tensors)
        self._rows = max(1, buffer_bytes // max(1, row_bytes))
        self._buffers: deque[_Buffer] = deque()
        if self._device.type == "cuda":  # page-locking takes milliseconds: not in a step
            self._buffers.extend(self._new_buffer() for _ in range(_FIRST_BUFFERS))
        self._landing: deque[tuple[_Buffer, Tensor]] = deque()  # buffers filled by copies, and their host rows
        if small is not None:
            self._small_slots = small.slots_on(self._device)
            self._small_slots.attach(self._weights)

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        for some, to in zip(keys.split(self._rows), slots.split(self._rows), strict=True):
            if not some.numel():
                continue
            buffer = self._take()
            if self._small is not None:
                self._small.gather(some, buffer.small)
                self._small_slots.widen(self._weights, to, buffer.small)
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
            if self._small is not None:
                self._small.expect(to, buffer.small)
                self._small_slots.narrow(buffer.small, self._weights, some)
            for (device, _), part in zip(self._pairs, buffer.parts, strict=True):
                part[: some.numel()].copy_(device.index_select(0, some), non_blocking=True)
            buffer.copying(self._device)
            self._landing.append((buffer, to))

    def finish(self) -> None:
        self._land()
        if self._small is not None:
            # Whoever drops this transfer finishes it first: torch gives page-locked memory away behind copies of its
            # own, and knows nothing of kernels that read it.
            for buffer in self._buffers:
                buffer.wait()
            self._small_slots.check()

    def discard(self) -> int:
        num_rows = 0
        while self._landing:
            buffer, keys = self._landing.popleft()
            num_rows += keys.numel()
            self._buffers.append(buffer)
        return num_rows

    def _new_buffer(self) -> _Buffer:
        hosts, pinned = [host for _, host in self._pairs], self._device.type == "cuda"
        return _Buffer(hosts, self._rows, pinned, self._small)

    def _take(self) -> _Buffer:
        """Take a buffer that no copy reads or writes any more."""
        has_free = bool(self._buffers) and self._buffers[0].is_free
        if not has_free and len(self._buffers) + len(self._landing) < _MOST_BUFFERS:
            return self._new_buffer()
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
        if self._small is not None:
            self._small.scatter(keys, buffer.small)
        for (_, host), part in zip(self._pairs, buffer.parts, strict=True):
            put_rows(host, keys, part[: keys.numel()])
        self._landing.popleft()  # before the next line: a buffer in both could be refilled before it lands
        self._buffers.append(buffer)
