"""How the rows train that a forward has read: in its backward, together with those of others, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from embershard.cache.row_cache import RowCache
from embershard.cache.tickets import Ticket
from embershard.errors import CacheError
from embershard.sharding.torchrec.slots import SlotTable


class RowUpdates:
    """FBGEMM's backward trains the rows of each forward in their slots.

    Attributes:
        has_gradients: the lookup runs with them.
    """

    has_gradients = True

    def __init__(self, cache: RowCache, slots: SlotTable) -> None:
        self._cache, self._slots = cache, slots

    def train_behind(self, ticket: Ticket, output: Tensor, has_zeros: bool) -> Tensor:
        """Return the output of a forward whose rows train, and end the ticket once they have.

        Args:
            has_zeros: the batch has ids whose embedding is zero: that of slot 0.
        """
        release_after_backward(self._cache, ticket, output, self._slots if has_zeros else None)
        return output

    @property
    def num_held(self) -> int:
        """Batches whose rows wait to train together."""
        return 0

    def hold(self) -> RowUpdates:
        """Return what keeps the slots of all batches from now on: their rows train together, in `training_held`."""
        return HeldUpdates(self._cache, self._slots)

    @contextmanager
    def training_held(self) -> Iterator[None]:
        """Return a context in which the rows of the batches that were held train."""
        yield

    def end_holding(self) -> list[Ticket]:
        """Return the tickets that are held, and hold none of them any more."""
        return []


class HeldUpdates(RowUpdates):
    """Rows of several batches train at once, outside of their backward passes."""

    def __init__(self, cache: RowCache, slots: SlotTable) -> None:
        super().__init__(cache, slots)
        self._tickets: list[Ticket] = []
        self._have_zeros = False

    @property
    def num_held(self) -> int:
        return len(self._tickets)

    def train_behind(self, ticket: Ticket, output: Tensor, has_zeros: bool) -> Tensor:
        self._cache.hold(ticket)
        self._tickets.append(ticket)
        self._have_zeros = self._have_zeros or has_zeros
        return output

    @contextmanager
    def training_held(self) -> Iterator[None]:
        with self._cache.training(self._tickets):
            yield
            if self._have_zeros:
                self._slots.clear_zeros()

    def end_holding(self) -> list[Ticket]:
        found, self._tickets, self._have_zeros = self._tickets, [], False
        return found


class NoUpdates(RowUpdates):
    """Nothing trains. The backward still runs: other ranks take part in its all-to-all."""

    has_gradients = False

    def __init__(self, cache: RowCache, slots: SlotTable) -> None:
        super().__init__(cache, slots)
        cache.train_nothing()

    def train_behind(self, ticket: Ticket, output: Tensor, has_zeros: bool) -> Tensor:
        self._cache.release(ticket)
        return _Frozen.apply(torch.empty(0, device=output.device, requires_grad=True), output)  # type: ignore[no-any-return]

    def hold(self) -> RowUpdates:
        return self


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, anchor: Tensor, output: Tensor) -> Tensor:  # type: ignore[override]
        return output.view_as(output)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[None, None]:  # type: ignore[override]
        return None, None


def release_after_backward(cache: RowCache, ticket: Ticket, output: Tensor, zeros: SlotTable | None) -> None:
    """Release the batch once FBGEMM's backward, which also trains the rows, has run; before, clear slot 0 of `zeros`.

    The hooks are on the autograd node: a hook on the tensor fires before the update. The node holds the ticket, so a
    node that is freed without a backward frees the pins.
    """
    node = output.grad_fn
    if node is None:
        cache.release(ticket)
        return

    def begin(_: Any) -> None:
        if ticket.released:
            raise CacheError(
                f"{cache.name}: a second backward through one forward: its rows may have left their slots. "
                "Run the forward again"
            )
        cache.begin_update(ticket)

    def end(*_: Any) -> None:
        if zeros is not None:
            zeros.clear_zeros()
        cache.release(ticket)

    node.register_prehook(begin)
    node.register_hook(end)
