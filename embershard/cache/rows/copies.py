"""Executing plans' copies in an order that is safe on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from embershard.cache.planner import CachePlan
from embershard.cache.rows.transfer import MakeTransfer, PlainTransfer, Transfer
from embershard.cache.tickets import Ticket


class RowCopies:
    """The copies of one pool.

    A plan's copies are two calls, :meth:`put_out` and :meth:`bring_in`. On a GPU both are queued on a stream of their
    own: they wait for the training, and the planning of the next batch, which the CPU waits for, must not.

    Args:
        device: of the slots.
        make_transfer: what moves the rows; None for plain copies.

    Attributes:
        transfer: what moves them between the tensors that are attached.
    """

    def __init__(self, device: torch.device, make_transfer: MakeTransfer | None = None) -> None:
        self._device = device
        self._make_transfer: MakeTransfer = make_transfer or PlainTransfer
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._last_trained: torch.cuda.Event | None = None
        self._coming: Tensor | None = None  # keys of the rows that the plan under way brings in

    def attach(self, payload: list[Tensor], host_payload: list[Tensor]) -> None:
        """Copy between these tensors from now on; nothing is under way."""
        self.transfer: Transfer = self._make_transfer(payload, host_payload)

    def put_out(self, plan: CachePlan) -> None:
        """Write back the rows that leave. They are in their slots as well, until :meth:`bring_in`."""
        key_device = self.transfer.key_device  # on a GPU the CPU may have to wait for the keys, so it asks first
        leaving, self._coming = plan.write_back_keys.to(key_device), plan.fill_keys.to(key_device)
        if self._stream is None:
            self.transfer.write_back(plan.write_back_slots, leaving)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in (leaving, self._coming, plan.write_back_slots, plan.fill_slots):
            if tensor.is_cuda:  # if a copy fails, those queued before it still read them
                tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            self.follow_training()
            self.transfer.write_back(plan.write_back_slots, leaving)

    def bring_in(self, plan: CachePlan) -> torch.cuda.Event | None:
        """Fill the slots of the rows that :meth:`put_out` was told of; what to wait for before they are used, if
        anything."""
        coming, self._coming = self._coming, None
        assert coming is not None, "put_out() comes first"
        if self._stream is None:
            self.transfer.fill(coming, plan.fill_slots)
            return None
        with torch.cuda.stream(self._stream):
            self.transfer.fill(coming, plan.fill_slots)
            return self._stream.record_event()

    def wait(self, ticket: Ticket) -> None:
        """Until the batch's rows are in their slots, for whatever runs on the current stream afterwards."""
        if ticket._filled is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(ticket._filled)
            ticket.slots.record_stream(stream)

    def trained(self) -> None:
        """The forward or the update of a batch is queued on the current stream (on a CPU it is done)."""
        if self._device.type == "cuda":
            self._last_trained = torch.cuda.current_stream(self._device).record_event()

    def follow_training(self) -> None:
        """What runs on the current stream from now on comes after the updates of all batches that have trained, and
        after the forward of the newest one."""
        if self._last_trained is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last_trained)

    def finish(self) -> None:
        """Nothing is under way between slots and host any more."""
        self.follow_training()
        if self._stream is not None:  # and after the copies of all plans
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self.transfer.finish()

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        """Host rows ``keys`` -> ``slots``, at once: of no batch's plan."""
        self.transfer.fill(keys.to(self.transfer.key_device), slots)

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        """``slots`` -> host rows ``keys``, where the CPU sees them afterwards."""
        self.transfer.write_back(slots, keys.to(self.transfer.key_device))
        self.transfer.finish()
