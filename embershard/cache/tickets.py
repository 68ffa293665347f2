"""Batches in flight: resident, and pinned until they have trained."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class Ticket:
    """A batch whose rows are resident and pinned until it is released.

    ``slots`` int64 [N] takes the place of the batch's ids, once :meth:`RowCache.wait` has returned. The pins go when
    :meth:`RowCache.release` is called (after the fused backward), or when nobody holds the ticket any more (a forward
    whose backward never ran). ``forwarded``: a forward has read the slots, and its backward will update them.
    """

    batch: int
    slots: Tensor
    released: bool = False
    forwarded: bool = False
    _filled: torch.cuda.Event | None = field(default=None, repr=False)
    _unpin: weakref.finalize | None = field(default=None, repr=False)

    def cancel(self) -> None:
        """The batch will not train, or has trained: its slots may be evicted. Twice does nothing."""
        self.released = True
        if self._unpin is not None:
            self._unpin()


class InFlight:
    """Which batches are in flight. A slot is pinned if and only if the last batch that used it is not older than the
    oldest of them: that and the slots' stamps are all the state there is.

    Training threads release while a worker plans, so everything here is one dictionary operation at a time.
    """

    def __init__(self) -> None:
        self._batches: dict[int, weakref.ref[Ticket]] = {}
        self._frozen: int | None = None
        self._rows: dict[int, int] = {}  # distinct rows of those that were known
        self.newest = 0  # number of the last batch that was begun; they are counted from 1

    def next_batch(self) -> int:
        """Number of a batch that begins now."""
        self.newest += 1
        return self.newest

    @property
    def trained_through(self) -> int:
        """The last batch before the oldest one in flight."""
        return min(self._batches, default=self.newest + 1) - 1

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._batches))

    @property
    def oldest(self) -> int | None:
        """The oldest batch whose slots are pinned; None when nothing is in flight."""
        return min(self._batches, default=None) if self._frozen is None else self._frozen

    @property
    def tickets(self) -> list[Ticket]:
        """Of the batches in flight."""
        return [ticket for ref in list(self._batches.values()) if (ticket := ref()) is not None]

    def add(self, ticket: Ticket, known_rows: int | None) -> None:
        """The ticket's batch is in flight from now on; ``known_rows`` distinct rows, if it was known."""
        if known_rows is not None:
            self._rows = {**self._known_and_pinned(), ticket.batch: known_rows}
        ticket._unpin = weakref.finalize(ticket, self._batches.pop, ticket.batch, None)  # first: whatever happens next
        ticket._unpin.atexit = False
        self._batches[ticket.batch] = weakref.ref(ticket)

    def freeze(self) -> None:
        """From now on what is in flight stays pinned even when it is released: plans made in another thread do not
        depend on how far the training is."""
        self._frozen = min(self._batches, default=None)

    def unfreeze(self) -> None:
        """Ends :meth:`freeze`."""
        self._frozen = None

    def would_crowd(self, rows: int, slots: int) -> bool:
        """Whether with a batch of ``rows`` distinct rows, three batches or more would be held in more than half of
        ``slots``."""
        held = self._known_and_pinned().values()
        return len(held) >= 2 and sum(held) + rows > slots // 2

    def _known_and_pinned(self) -> dict[int, int]:
        oldest = self.oldest
        return {batch: rows for batch, rows in self._rows.items() if oldest is not None and batch >= oldest}
