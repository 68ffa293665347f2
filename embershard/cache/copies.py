"""Executing plans' copies, at once or in the background, in an order that is safe on every device."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import NoReturn

import torch
from torch import Tensor

from embershard.cache.background import BackgroundCopies
from embershard.cache.planner import CachePlan
from embershard.cache.tickets import Ticket
from embershard.cache.transfer import MakeTransfer, PlainTransfer, Transfer
from embershard.errors import CacheError


class RowCopies:
    """The copies of one pool.

    Args:
        pool: whose copies they are, for messages.
        undo: takes a plan back whose copies failed, for the maps are ahead of them. It is told whether the victims are
            still in their slots.
        device: of the slots. On a GPU, plans are executed on a stream of their own: copies wait for the training, and
            the planning of the next batch, which the CPU waits for, must not.
        background: copy in worker threads, by plain transfers.
        make_transfer: what moves the rows otherwise; None for plain transfers, too.

    Attributes:
        transfer: what moves them between the tensors that are attached.
        stall_seconds: how long training steps waited for copies in the background.
    """

    def __init__(
        self,
        pool: str,
        undo: Callable[[CachePlan, bool], None],
        device: torch.device,
        background: bool = False,
        make_transfer: MakeTransfer | None = None,
    ) -> None:
        self._pool = pool
        self._undo = undo
        self._device = device
        self._wants_background = background
        self._make_transfer = make_transfer
        self._background: BackgroundCopies | None = None
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._last_trained: torch.cuda.Event | None = None
        self._failure: BaseException | None = None
        self.stall_seconds = 0.0

    def attach(self, payload: list[Tensor], host_payload: list[Tensor]) -> None:
        """Copy between these tensors from now on; nothing is under way."""
        if self._make_transfer is not None and not self._wants_background:
            self.transfer: Transfer = self._make_transfer(payload, host_payload)
            return
        self.transfer = plain = PlainTransfer(payload, host_payload)
        if self._background is not None:
            self._background.transfer = plain
        elif self._wants_background:
            self._background = BackgroundCopies(plain)

    def start(self, plan: CachePlan) -> Future[None] | torch.cuda.Event | None:
        """Execute the plan's copies, or begin with them; what to wait for before the batch is used, if anything."""
        if self._background is not None:
            try:
                return self._background.start(plan)
            except BaseException as error:
                self._fail(error)
        if self._stream is None:
            self._execute(plan, *self._keys(plan))
            return None
        return self._execute_on(self._stream, plan)

    def wait(self, ticket: Ticket) -> None:
        """Until the batch's rows are in their slots, for whatever runs on the current stream afterwards."""
        filled = ticket._filled
        if isinstance(filled, Future):
            started = time.perf_counter()
            error = filled.exception()  # when the waiting is interrupted, no copy failed
            if error is not None:
                self._fail(error)
            self.stall_seconds += time.perf_counter() - started
        elif filled is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(filled)
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

    def _follow_copies(self) -> None:
        """And after the copies of all plans."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def finish(self) -> None:
        """Nothing is under way between slots and host any more."""
        self.check()
        if self._background is not None:
            self._background.finish()
            self.check()
        self.follow_training()
        self._follow_copies()
        self.transfer.finish()

    def preload(self, keys: Tensor, slots: Tensor) -> None:
        """Host rows ``keys`` -> ``slots`` that no batch uses yet."""
        self.transfer.fill(keys.to(self.transfer.key_device), slots)

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        """``slots`` -> host rows ``keys``, where the CPU sees them afterwards."""
        self.transfer.write_back(slots, keys.to(self.transfer.key_device))
        self.transfer.finish()

    def spoil(self, error: BaseException) -> None:
        """What this pool knows of its rows is no longer true: from now on :meth:`check` raises."""
        self._failure = error

    def check(self) -> None:
        """Raise if a copy in the background ever failed, or :meth:`spoil` was called.

        Raises:
            CacheError: with what happened.
        """
        if self._background is not None and self._failure is None:
            self._failure = self._background.failure
        if self._failure is not None:
            raise CacheError(
                f"{self._pool}: planning or copying rows failed ({type(self._failure).__name__}: {self._failure}); the "
                "rows that were under way are lost, so nothing is read, trained or saved from now on. Mend the cause "
                "and resume from the last checkpoint"
            ) from self._failure

    def _keys(self, plan: CachePlan) -> tuple[Tensor, Tensor]:
        """Keys of the rows that leave and of those that come, where the transfer wants them."""
        try:
            return plan.write_back_keys.to(self.transfer.key_device), plan.fill_keys.to(self.transfer.key_device)
        except BaseException:
            self._undo(plan, True)
            raise

    def _execute_on(self, stream: torch.cuda.Stream, plan: CachePlan) -> torch.cuda.Event:
        """The copies wait for the training, and on the current stream nothing waits for them."""
        leaving, coming = self._keys(plan)  # the CPU may have to wait for these, so it asks first
        planning = torch.cuda.current_stream(self._device)
        stream.wait_stream(planning)
        for tensor in (leaving, coming, plan.write_back_slots, plan.fill_slots):
            if tensor.is_cuda:  # if a copy fails, those queued before it still read them
                tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            self.follow_training()
            self._execute(plan, leaving, coming, planning)
            return stream.record_event()

    def _execute(
        self, plan: CachePlan, leaving: Tensor, coming: Tensor, planning: torch.cuda.Stream | None = None
    ) -> None:
        """If a copy fails, the map must not promise its rows. On a GPU it is put right on the stream that plans, whose
        turn this is."""
        victims_are_intact = True
        try:
            self.transfer.write_back(plan.write_back_slots, leaving)
            victims_are_intact = False
            self.transfer.fill(coming, plan.fill_slots)
        except BaseException:  # an interrupt, too
            with nullcontext() if planning is None else torch.cuda.stream(planning):
                self._undo(plan, victims_are_intact)
            raise

    def _fail(self, error: BaseException) -> NoReturn:
        """A copy in the background did not happen, and plans made since rely on it: this pool is no good any more."""
        self.spoil(error)
        self.check()
        raise AssertionError("unreachable")
