"""Batches in flight: resident, and pinned until they have trained."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class Ticket:
    """A batch whose rows are resident and pinned until it is released.

    ``slots`` int64 [N] takes the place of the batch's ids, once :meth:`RowCache.wait` has returned. The pins go when
    :meth:`RowCache.release` is called (after the fused backward), or when nobody holds the ticket any more (a forward
    whose backward never ran).
    """

    batch: int
    slots: Tensor
    released: bool = False
    _filled: Future[None] | torch.cuda.Event | None = field(default=None, repr=False)
    _unpin: weakref.finalize | None = field(default=None, repr=False)


class InFlight:
    """Which batches are in flight. A slot is pinned if and only if the last batch that used it is not older than the
    oldest of them: that and the slots' stamps are all the state there is.

    Training threads release while a worker plans, so everything here is one dictionary operation at a time.
    """

    def __init__(self) -> None:
        self._batches: dict[int, None] = {}
        self._held: int | None = None
        self._rows: dict[int, int] = {}  # distinct rows of those that were known

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._batches))

    @property
    def oldest(self) -> int | None:
        """The oldest batch whose slots are pinned; None when nothing is in flight."""
        return min(self._batches, default=None) if self._held is None else self._held

    def add(self, ticket: Ticket, known_rows: int | None) -> None:
        """The ticket's batch is in flight from now on; ``known_rows`` distinct rows, if it was known."""
        if known_rows is not None:
            self._rows = {**self._known_and_pinned(), ticket.batch: known_rows}
        self._batches[ticket.batch] = None
        ticket._unpin = weakref.finalize(ticket, self._batches.pop, ticket.batch, None)
        ticket._unpin.atexit = False

    def remove(self, ticket: Ticket) -> None:
        """The batch has trained, or never will."""
        if ticket._unpin is not None:
            ticket._unpin()

    def hold(self) -> None:
        """From now on what is in flight stays pinned even when it is released: plans made in another thread do not
        depend on how far the training is."""
        self._held = min(self._batches, default=None)

    def let_go(self) -> None:
        """Ends :meth:`hold`."""
        self._held = None

    def would_crowd(self, rows: int, slots: int) -> bool:
        """Whether with a batch of ``rows`` distinct rows, three batches or more would be held in more than half of
        ``slots``."""
        held = self._known_and_pinned().values()
        return len(held) >= 2 and sum(held) + rows > slots // 2

    def _known_and_pinned(self) -> dict[int, int]:
        oldest = self.oldest
        return {batch: rows for batch, rows in self._rows.items() if oldest is not None and batch >= oldest}
