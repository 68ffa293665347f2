"""Execution of plans' copies, in an order that is safe on every device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embershard.cache.homes.home import Home
from embershard.cache.planner import CachePlan
from embershard.cache.rows.transfer import MakeTransfer, Transfer
from embershard.cache.tickets import Ticket

#: Rows that are made while somebody waits, in a few milliseconds.
_MOST_MADE_AT_ONCE = 1000
#: Rows that come from a GPU together.
BLOCK_BYTES = 16 << 20


def read_to_host(read: Callable[[Tensor], Tensor], keys: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return, in host memory, the rows that `read` returns on a GPU for `keys` (int64 [N], in host memory): [N, dim].
    They come in blocks, which take `BLOCK_BYTES` of page-locked memory, and twice as many of the GPU's."""
    rows, num_rows = torch.empty(keys.numel(), dim, dtype=dtype), max(1, BLOCK_BYTES // (dim * dtype.itemsize))
    for some, block in zip(keys.split(num_rows), rows.split(num_rows), strict=True):
        block.copy_(read(some))
    return rows


class RowCopies:
    """Copies rows of one pool.

    A plan takes two calls, `write_back_evicted` and `fill_missed`. On a GPU both queue copies on a stream of their own:
    the copies wait for training, but planning of the next batch must not, because the CPU waits for it.

    Args:
        device: of the slots.
        host: the rows; their initial weights are made before they are copied.
        make_transfer: makes the transfer of the rows.

    Attributes:
        transfer: moves rows between the attached tensors.
    """

    def __init__(self, device: torch.device, host: Home, make_transfer: MakeTransfer) -> None:
        self._device, self._host = device, host
        self._make_transfer = make_transfer
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._last_trained: torch.cuda.Event | None = None
        self._fill_keys: Tensor | None = None  # of the plan between its two calls

    def attach(self, payload: list[Tensor]) -> None:
        """Copy between these slots and the host rows from now on. All earlier copies must be done."""
        self._payload = payload
        self.transfer: Transfer = self._make_transfer(payload, self._host.parts)

    def write_back_evicted(self, plan: CachePlan, training: torch.cuda.Event | None = None) -> None:
        """Write the plan's dirty victims back. Their slots keep the rows until `fill_missed`.

        Args:
            training: `newest_training` when planning began; the default is that of now.
        """
        is_on_host = self.transfer.key_device.type == "cpu"  # first: on a GPU the CPU waits for the keys
        keys = (plan.on_host.write_back, plan.on_host.fill) if is_on_host else (plan.write_back_keys, plan.fill_keys)
        write_back_keys, self._fill_keys = keys
        self._host.before_write(write_back_keys)
        if self._stream is None:
            self.transfer.write_back(plan.write_back_slots, write_back_keys)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in (write_back_keys, self._fill_keys, plan.write_back_slots, plan.fill_slots):
            if tensor.is_cuda:  # if a copy fails, copies queued before it still read the tensor
                tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            self.wait_for_training(training)
            self.transfer.write_back(plan.write_back_slots, write_back_keys)

    def fill_missed(self, plan: CachePlan) -> torch.cuda.Event | None:
        """Fill the slots of the plan given to `write_back_evicted`; return the event to wait for before their use, if
        any."""
        fill_keys, self._fill_keys = self._fill_keys, None
        assert fill_keys is not None, "write_back_evicted() comes first"
        self._host.make(fill_keys)
        if self._stream is None:
            self.transfer.fill(fill_keys, plan.fill_slots)
            return None
        with torch.cuda.stream(self._stream):
            self.transfer.fill(fill_keys, plan.fill_slots)
            return self._stream.record_event()

    def wait(self, ticket: Ticket) -> None:
        """Make the current stream wait until the batch's rows are in their slots."""
        if ticket.filled is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(ticket.filled)
            for tensor in (ticket.slots, ticket.keys):  # the keys are marked as trained in the backward
                if tensor is not None:
                    tensor.record_stream(stream)

    def trained(self) -> None:
        """Note that the forward or the update of a batch was queued on the current stream (on a CPU: done)."""
        if self._device.type == "cuda":
            self._last_trained = torch.cuda.current_stream(self._device).record_event()

    @property
    def slot_bytes(self) -> int:
        """Memory of the slots with their marks, in bytes."""
        return sum(tensor.nbytes for tensor in self._payload) + self._host.mark_bytes * self._payload[0].shape[0]

    def round(self, ticket: Ticket) -> None:
        """Round the rows that a batch's update trained to what the host tier can hold. Twice is as good as once.

        Raises:
            CacheError: a weight is NaN, infinite or too large.
        """
        if self._host.rounds:
            assert ticket.keys is not None, "rows are rounded by their keys"
            self._host.round(self._payload[0], ticket.pool_slots, ticket.keys)

    @property
    def newest_training(self) -> torch.cuda.Event | None:
        """The end of the forwards and updates queued so far. A plan's victims are none of the batches in flight when it
        began, so its copies need not wait for what these do later."""
        return self._last_trained

    def wait_for_training(self, until: torch.cuda.Event | None = None) -> None:
        """Make the current stream wait for the updates of all trained batches and the newest batch's forward, `until`
        an event of `newest_training`."""
        until = self._last_trained if until is None else until
        if until is not None:
            torch.cuda.current_stream(self._device).wait_event(until)

    def finish(self) -> None:
        """Make the current stream wait for all plans' copies, and the CPU for all rows that were written back."""
        self.wait_for_training()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self.transfer.finish()

    def read(self, keys: Tensor) -> Tensor:
        """Return the weights of host rows `keys` on the device: to a GPU through page-locked memory, without a wait for
        the copy."""
        return self._host.read(keys, pinned=self._device.type == "cuda").to(self._device, non_blocking=True)

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        """Copy host rows `keys` to `slots` at once, outside of any plan."""
        self._host.make(keys)
        self.transfer.fill(keys.to(self.transfer.key_device), slots)

    def preload(self, keys: Tensor, slots: Tensor) -> None:
        """Do what `fill` does, for many rows before the first batch: those in host memory that must be made first are
        made meanwhile, in a thread, where the slots are in host memory, too."""
        if self._device.type != "cpu" or self._host.is_made or keys.numel() <= _MOST_MADE_AT_ONCE:
            self.fill(keys, slots)
            return
        self._host.read_ahead(keys, self._payload, slots)

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        """Copy `slots` to host rows `keys`; the CPU sees them afterwards."""
        keys = keys.to(self.transfer.key_device)
        self._host.before_write(keys)
        self.transfer.write_back(slots, keys)
        self.transfer.finish()
