"""Executing plans' copies in worker threads while the training goes on.

Two rules keep them safe, whatever their timing:

* a slot is filled only after its old row was collected: plans reach the worker in their order, and the planner gives
  away no slot that a batch in flight uses;
* a host row is read only after every write-back of it has landed: each one under way is on a list, with its keys.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from embershard.cache.planner import CachePlan
from embershard.cache.transfer import PlainTransfer

# So few rows at a time that torch does not start a team of threads for a copy: the training needs the cores, and the
# team would spin on them afterwards.
_ROWS_AT_ONCE = 1024


@dataclass(eq=False)
class _WriteBack:
    """Rows on their way to the host: keys int64 [W], ascending."""

    keys: Tensor
    landed: Future[None] = field(default_factory=Future)

    def concerns(self, keys: Tensor) -> bool:
        """Whether it brings one of ``keys`` (int64 [M])."""
        places = torch.searchsorted(self.keys, keys).clamp_(max=self.keys.numel() - 1)
        return bool((self.keys.index_select(0, places) == keys).any())


class BackgroundCopies:
    """Two worker threads: one collects victims and fills slots, the other lands what was collected.

    Attributes:
        transfer: may be replaced when nothing is under way.
        failure: the first thing that a copy raised. No copy is begun after it.
    """

    def __init__(self, transfer: PlainTransfer) -> None:
        self.transfer = transfer
        self.failure: BaseException | None = None
        self._fills = ThreadPoolExecutor(1, "embershard-fill")
        self._landings = ThreadPoolExecutor(1, "embershard-write-back")
        self._pending: list[_WriteBack] = []
        self._newest: Future[None] | None = None

    def start(self, plan: CachePlan) -> Future[None]:
        """Begin with a plan's copies; the future ends when the plan's rows are in their slots."""
        self._pending = [write_back for write_back in self._pending if not write_back.landed.done()]
        readable_after = [write_back for write_back in self._pending if write_back.concerns(plan.fill_keys)]
        keys, order = plan.write_back_keys.sort()
        write_back = _WriteBack(keys)
        if keys.numel():
            self._pending.append(write_back)
        leaving = plan.write_back_slots.index_select(0, order)
        self._newest = self._fills.submit(self._exchange, plan, leaving, write_back, readable_after)
        return self._newest

    def finish(self) -> None:
        """Wait until nothing is under way; :attr:`failure` tells how it went."""
        if self._newest is not None:
            self._newest.exception()
        for write_back in self._pending:
            write_back.landed.exception()
        self._pending, self._newest = [], None

    def _exchange(
        self, plan: CachePlan, leaving: Tensor, write_back: _WriteBack, readable_after: list[_WriteBack]
    ) -> None:
        """In the first thread: what leaves is collected and passed on, then the slots are filled."""
        try:
            self._pass_on(leaving, write_back)
            for earlier in readable_after:
                earlier.landed.result()
            chunks = plan.fill_keys.split(_ROWS_AT_ONCE), plan.fill_slots.split(_ROWS_AT_ONCE)
            for keys, slots in zip(*chunks, strict=True):
                self.transfer.fill(keys, slots)
        except BaseException as error:
            self.failure = self.failure or error
            raise

    def _pass_on(self, leaving: Tensor, write_back: _WriteBack) -> None:
        """Whatever happens, the write-back ends: others wait for it, and the process for them."""
        try:
            if self.failure is not None:
                raise self.failure
            if leaving.numel():
                parts = [self.transfer.collect(slots) for slots in leaving.split(_ROWS_AT_ONCE)]
                self._landings.submit(self._land, parts, write_back)  # refused when the interpreter exits
        except BaseException as error:
            write_back.landed.set_exception(error)
            raise

    def _land(self, parts: list[list[Tensor]], write_back: _WriteBack) -> None:
        """In the second thread."""
        try:
            for rows, keys in zip(parts, write_back.keys.split(_ROWS_AT_ONCE), strict=True):
                self.transfer.land(rows, keys)
        except BaseException as error:
            self.failure = self.failure or error
            write_back.landed.set_exception(error)
        else:
            write_back.landed.set_result(None)
