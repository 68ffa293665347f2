"""Batches in flight, whose slots are pinned until they have trained."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from embershard.cache.slot_map import SlotMap


@dataclass(eq=False)
class Ticket:
    """A prepared batch, whose slots are pinned until it is released.

    The pins end with `RowCache.release` (after the fused backward), with `cancel`, or when nobody holds the ticket any
    more (a forward whose backward never ran).

    Attributes:
        batch: number of the batch.
        slots: int64 [N], in place of the batch's ids; readable once `RowCache.wait` has returned.
        released: the batch was released or cancelled.
        forwarded: a forward has read the slots, and its backward will update them.
        held: its rows are updated with those of other batches, at the end of them all (gradient accumulation).
        filled: on a GPU, the end of the batch's fills.
        keys: int64 [N], the batch's ids in the pool; None where updates are neither tracked nor rounded.
        pool_slots: int64 [N], `slots` as the pool numbers them; a table may number its pinned ones on its own.

    >>> in_flight = InFlight()
    >>> ticket = Ticket(in_flight.next_batch(), slots=torch.tensor([2, 1, 2]))
    >>> in_flight.add(ticket, known_rows=None)
    >>> in_flight.oldest
    1
    >>> ticket.cancel()
    >>> in_flight.oldest is None
    True
    """

    batch: int
    slots: Tensor
    released: bool = False
    forwarded: bool = False
    held: bool = False
    filled: torch.cuda.Event | None = field(default=None, repr=False)
    keys: Tensor | None = field(default=None, repr=False)
    _unpin: weakref.finalize | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.pool_slots = self.slots

    def cancel(self) -> None:
        """Unpin the slots of a batch that has trained or will not train. A second call does nothing."""
        self.released = True
        if self._unpin is not None:
            self._unpin()


class InFlight:
    """Batches in flight. A slot is pinned if and only if the last batch that used it is not older than the oldest batch
    in flight, so pins need no state but these batches and the slots' stamps.

    Training threads release batches while a worker plans, so every change is a single dictionary operation.
    """

    def __init__(self) -> None:
        self._batches: dict[int, weakref.ref[Ticket]] = {}
        self._frozen: int | None = None
        self._rows: dict[int, int] = {}  # distinct rows of the batches that were known
        self._held_through = self._frozen_held = 0  # batches up to this one wait for an update together
        self.newest = 0  # number of the last batch that was begun, counted from 1
        self.is_watched = False  # somebody counts pins, and may wait for a device

    def next_batch(self) -> int:
        """Begin a batch and return its number."""
        self.newest += 1
        return self.newest

    @property
    def trained_through(self) -> int:
        """Number of the last batch before the oldest one in flight."""
        return min(self._batches, default=self.newest + 1) - 1

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def oldest(self) -> int | None:
        """Number of the oldest batch whose slots are pinned; None if there is none."""
        return min(self._batches, default=None) if self._frozen is None else self._frozen

    @property
    def tickets(self) -> list[Ticket]:
        """Tickets of the batches in flight."""
        return [ticket for ref in list(self._batches.values()) if (ticket := ref()) is not None]

    @property
    def are_held(self) -> bool:
        """True if no slot is unpinned before further batches have run: all batches in flight are held."""
        return self._frozen is None and all(ticket.held for ticket in self.tickets)

    def check_victims(self, slots: Tensor, of: SlotMap) -> None:
        """Check that no batch in flight uses `slots` (int64 [M]) of a map, which other rows are about to get. On a GPU,
        whose host would wait for the answer, only where `is_watched`."""
        oldest = self.oldest
        if oldest is not None and slots.numel() and (slots.is_cpu or self.is_watched):
            newest = int(of.last_batch(slots).max())
            assert newest < oldest, f"a slot of batch {newest} was to be evicted; batches from {oldest} on are pinned"

    def add(self, ticket: Ticket, known_rows: int | None) -> None:
        """Pin the slots of the ticket's batch, which has `known_rows` distinct rows; None if it was not known."""
        if known_rows is not None:
            self._rows = {**self._known_and_pinned(), ticket.batch: known_rows}
        ticket._unpin = weakref.finalize(
            ticket, self._batches.pop, ticket.batch, None
        )  # first, so that it runs whatever happens next
        ticket._unpin.atexit = False
        self._batches[ticket.batch] = weakref.ref(ticket)

    def hold(self, ticket: Ticket) -> None:
        """Note that a batch keeps its slots until others have run, too: it does not keep further ones out."""
        ticket.held = True
        self._held_through = max(self._held_through, ticket.batch)

    def use_of(self, slots: Tensor) -> tuple[int, int] | None:
        """Return one of `slots` (int64 [M]) that a batch in flight uses, and the batch; None if none uses any."""
        for ticket in self.tickets:
            used = slots[torch.isin(slots, ticket.slots)]
            if used.numel():
                return int(used[0]), ticket.batch
        return None

    def freeze(self) -> None:
        """Keep the present batches pinned until `unfreeze`, released or not: plans made in another thread must not
        depend on how far training is."""
        self._frozen, self._frozen_held = min(self._batches, default=None), self._held_through

    def unfreeze(self) -> None:
        """End `freeze`."""
        self._frozen = None

    def would_crowd(self, rows: int, slots: int) -> bool:
        """True if, with a further batch of `rows` distinct rows, three or more known batches would pin more than half
        of `slots`."""
        held = self._known_and_pinned().values()
        return len(held) >= 2 and sum(held) + rows > slots // 2

    def _known_and_pinned(self) -> dict[int, int]:
        oldest, held = self.oldest, self._held_through if self._frozen is None else self._frozen_held
        if oldest is None:
            return {}
        return {batch: rows for batch, rows in self._rows.items() if batch >= max(oldest, held + 1)}
