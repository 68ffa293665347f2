"""Keeps copies out of rows while a backward pass updates them."""

from __future__ import annotations

import threading
import weakref

from embershard.cache.tickets import Ticket
from embershard.errors import CacheError

_MOST_SECONDS = 60.0


class UpdateGate:
    """A backward pass updates rows in their slots; a flush in another thread (an asynchronous checkpoint) copies them.
    Each waits for the other, so every row that is copied is whole: weights and optimizer states of one step.

    Whoever copies holds the :attr:`lock`, in a ``with`` statement of its own: an interrupt cannot leave it locked, as
    it could a flag that says so.

    An update that raised never ends; it does not count once its thread does something else, or its ticket is gone.

    Args:
        pool: whose rows they are, for messages.

    Attributes:
        lock: no update begins while it is held. The same thread may take it several times.
    """

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._running: tuple[int, weakref.ref[Ticket]] | None = None

    def begin(self, ticket: Ticket) -> None:
        """The calling thread is about to update the rows of ``ticket``; waits for copies to end."""
        with self.lock:
            self._running = threading.get_ident(), weakref.ref(ticket)

    def end(self) -> None:
        """The update is through."""
        with self.lock:
            self._running = None
            self._changed.notify_all()

    def wait_until_idle(self) -> None:
        """Until no update runs. The caller holds the lock, and none begins as long as it does.

        Raises:
            CacheError: one has been running for a minute.
        """
        if not self._changed.wait_for(self._is_idle, _MOST_SECONDS):
            raise CacheError(
                f"{self._pool}: rows cannot be copied, because a backward pass in another thread has been updating "
                f"them for {_MOST_SECONDS:.0f} seconds. If it failed, drop its loss and its output first"
            )

    def _is_idle(self) -> bool:
        if self._running is None:
            return True
        thread, ticket = self._running
        return thread == threading.get_ident() or ticket() is None
