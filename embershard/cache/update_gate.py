"""Mutual exclusion of backward passes, which update rows in their slots, and copies of these rows."""

from __future__ import annotations

import threading
import weakref

from embershard.cache.tickets import Ticket
from embershard.errors import CacheError

_MOST_SECONDS = 60.0


class UpdateGate:
    """Keeps copies and updates of rows apart.

    A backward pass updates rows in their slots; a flush in another thread (an asynchronous checkpoint) copies them.
    Each waits for the other, so every copied row is whole: weights and optimizer states of one step.

    The copying thread holds `lock` in a `with` statement of its own: an interrupt could leave a flag set, but cannot
    leave the lock taken.

    An update that raised never ends. It does not count any more when its own thread copies, or once its ticket is gone.

    Args:
        pool: name of the pool, for messages.

    Attributes:
        lock: no update begins while it is held. The same thread may take it several times.
    """

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._running: tuple[int, weakref.ref[Ticket]] | None = None

    def begin(self, ticket: Ticket) -> None:
        """Begin an update of the ticket's rows by the calling thread; wait for copies to end."""
        with self.lock:
            self._running = threading.get_ident(), weakref.ref(ticket)

    def end(self) -> None:
        """End the update."""
        with self.lock:
            self._running = None
            self._changed.notify_all()

    def wait_until_idle(self) -> None:
        """Block until no update runs. The caller holds `lock`, so no other update begins.

        Raises:
            CacheError: an update has been running for a minute.
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
