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


def row_copier(rows: Sequence[Tensor], out: Sequence[Tensor]) -> Callable[[Tensor, Tensor], None]:
    """Return what copies rows of tensors to rows of others, called with the rows' numbers there and here, int64
    [M] each: `Home.copier` says more."""
    tables = [
        (RowTable(to), RowTable(of))
        for pair in zip(out, rows, strict=True)
        for to, of in [widest_views(*(each.data for each in pair))]
    ]

    def copy(keys: Tensor, places: Tensor) -> None:
        for to, of in tables:
            to.copy(places, of, keys)

    return copy


def put_rows(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Do `table[rows] = values`: rows int64 [M], values [M, ...]."""
    if table.dim() == 1:  # several times as fast as the assignment
        table.scatter_(0, rows, values)
    else:
        table[rows] = values


#: A copy of this size reaches the link's bandwidth; several buffers let gathering and copying overlap.
BUFFER_BYTES = 8 << 20
#: Copies wait for training. A plan without a free buffer takes another one, behind the first ones, up to half a
#: gigabyte in all; only then it waits for a copy.
_FIRST_BUFFERS, _MOST_BUFFERS = 4, 64


class Buffer:
    """Room for C rows, with the event of the last copy from or to it.

    Args:
        like: a tensor [?, ...] for each part of a row.
    """

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
        host: payload tensors by key, [R, ...] each, in the same order; a subclass gives only the last ones.
        buffer_bytes: size of each buffer of the ring.
        coded: what a buffer has of the rows before these, which the subclass moves in its own way.
    """

    def __init__(
        self,
        device: Sequence[Tensor],
        host: Sequence[Tensor],
        buffer_bytes: int = BUFFER_BYTES,
        coded: Sequence[Tensor] = (),
    ) -> None:
        self._pairs = [
            widest_views(d.data, h.data) for d, h in zip(device[len(device) - len(host) :], host, strict=True)
        ]
        self._device = device[0].device
        self.key_device = torch.device("cpu")
        self._in_buffers = [*coded, *(host for _, host in self._pairs)]
        self._rows = max(1, buffer_bytes // max(1, sum(part[:1].nbytes for part in self._in_buffers)))
        self._buffers: deque[Buffer] = deque()
        if self._device.type == "cuda":  # page-locking takes milliseconds: not in a step
            self._buffers.extend(self._new_buffer() for _ in range(_FIRST_BUFFERS))
        self._landing: deque[tuple[Buffer, Tensor]] = deque()  # buffers filled by copies, and their host rows

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        for some, to in zip(keys.split(self._rows), slots.split(self._rows), strict=True):
            if not some.numel():
                continue
            buffer = self._take()
            self._send(buffer.parts, some, to)
            buffer.copying(self._device)
            self._buffers.append(buffer)

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        self._land()
        for some, to in zip(slots.split(self._rows), keys.split(self._rows), strict=True):
            if not some.numel():
                continue
            buffer = self._take()
            self._receive(buffer.parts, some, to)
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

    def _send(self, parts: Sequence[Tensor], keys: Tensor, slots: Tensor) -> None:
        """Copy host rows to a buffer, and queue their copy from there."""
        for (device, host), part in zip(self._pairs, parts, strict=True):
            rows = torch.index_select(host, 0, keys, out=part[: keys.numel()])
            put_rows(device, slots, rows.to(self._device, non_blocking=True))

    def _receive(self, parts: Sequence[Tensor], slots: Tensor, keys: Tensor) -> None:
        """Queue the copy of slots to a buffer, from where they land in host rows."""
        for (device, _), part in zip(self._pairs, parts, strict=True):
            part[: slots.numel()].copy_(device.index_select(0, slots), non_blocking=True)

    def _put(self, parts: Sequence[Tensor], keys: Tensor) -> None:
        """Copy a buffer to host rows."""
        for (_, host), part in zip(self._pairs, parts, strict=True):
            put_rows(host, keys, part[: keys.numel()])

    def _new_buffer(self) -> Buffer:
        return Buffer(self._in_buffers, self._rows, pinned=self._device.type == "cuda")

    def _take(self) -> Buffer:
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
        self._put(buffer.parts, keys)
        self._landing.popleft()  # before the next line: a buffer in both could be refilled before it lands
        self._buffers.append(buffer)
