"""Keeps copies out of rows while a backward pass updates them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from embershard.cache.tickets import Ticket
from embershard.errors import CacheError

_MOST_SECONDS = 60.0


class UpdateGate:
    """A backward pass updates rows in their slots; a flush in another thread (an asynchronous checkpoint) copies them.
    Each waits for the other, so every row that is copied is whole: weights and optimizer states of one step.

    An update that raised never ends; it does not count once its thread does something else, or its ticket is gone.

    Args:
        pool: whose rows they are, for messages.
    """

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._changed = threading.Condition()
        self._num_paused = 0
        self._running: tuple[int, weakref.ref[Ticket]] | None = None

    def begin(self, ticket: Ticket) -> None:
        """The calling thread is about to update the rows of ``ticket``; waits for a pause to end."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_paused)
            self._running = threading.get_ident(), weakref.ref(ticket)

    def end(self) -> None:
        """The update is through."""
        with self._changed:
            self._running = None
            self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No update runs inside. Pauses may nest.

        Raises:
            CacheError: one has been running for a minute.
        """
        with self._changed:
            self._num_paused += 1  # from here on no update begins
        try:
            with self._changed:
                if not self._changed.wait_for(self._is_idle, _MOST_SECONDS):
                    raise CacheError(
                        f"{self._pool}: rows cannot be copied, because a backward pass in another thread has been "
                        f"updating them for {_MOST_SECONDS:.0f} seconds. If it failed, drop its loss and its output "
                        "first"
                    )
            yield
        finally:
            with self._changed:
                self._num_paused -= 1
                self._changed.notify_all()

    def _is_idle(self) -> bool:
        if self._running is None:
            return True
        thread, ticket = self._running
        return thread == threading.get_ident() or ticket() is None
