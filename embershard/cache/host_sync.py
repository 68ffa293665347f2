"""Synchronisation of slots and host tier: writing trained rows back, fetching rows that others wrote."""

from __future__ import annotations

from torch import Tensor

from embershard.cache.change_guard import ChangeGuard
from embershard.cache.rows.copies import RowCopies
from embershard.cache.rows.host_store import HostStore
from embershard.cache.slot_state import SlotState
from embershard.cache.statistics import CacheCounters, Counter
from embershard.cache.tickets import InFlight, Ticket
from embershard.cache.update_gate import UpdateGate
from embershard.errors import CacheError


class HostSync:
    """Copies rows between slots and host tier, both ways, for rows that stay cached.

    The caller holds the pool's lock, except for updates, which begin and end in the training thread.

    Args:
        pool: name of the pool, for messages.
    """

    def __init__(
        self,
        pool: str,
        host: HostStore,
        state: SlotState,
        copies: RowCopies,
        counters: CacheCounters,
        in_flight: InFlight,
        guard: ChangeGuard,
    ) -> None:
        self._pool, self._host, self._state, self._map = pool, host, state, state.map
        self._copies, self._counters = copies, counters
        self._in_flight, self._guard = in_flight, guard
        self._updates = UpdateGate(pool)
        self._has_updates = False  # since the last write-back
        self._host_version = host.version

    @property
    def is_behind(self) -> bool:
        """True if host rows were written to in a way that torch counts, and not fetched since."""
        return self._host.version != self._host_version

    def begin_update(self, ticket: Ticket) -> None:
        """Begin the update of the ticket's rows; wait for copies to end."""
        self._updates.begin(ticket)
        self._has_updates = True

    def end_update(self) -> None:
        """End the update."""
        self._has_updates = True
        self._updates.end()

    def write_back(self) -> None:
        """Write every trained row back to the host tier. Nothing moves if nothing was trained since the last time."""
        state = self._state
        with self._updates.lock:
            self._updates.wait_until_idle()
            self._copies.finish()
            clean_through = self._in_flight.trained_through
            if self._in_flight.newest > state.clean_through:
                used = self._map.used_slots()
                slots = used[state.is_dirty(used)]
                keys = self._map.keys(slots)
                self._copies.write_back(slots, keys)
                self._counters.add_rows(Counter.WRITE_BACKS, keys)
                state.clean_through = clean_through
            self._has_updates = False

    def fetch_again(self, keys: Tensor | None = None) -> None:
        """Fill the slots of host rows that somebody wrote to: `keys` (int64 [K]), or any if None.

        Includes rows of batches that were prepared and not forwarded, but a forward that waits for its backward is an
        error.

        Raises:
            CacheError: some of these rows were trained and not written back, or wait for their backward.
        """
        if keys is None:
            slots = self._map.used_slots()
        else:
            slots = self._map.lookup(keys.unique())
            slots = slots[slots > 0]
        num_forwarded = sum(ticket.forwarded for ticket in self._in_flight.tickets)
        if num_forwarded and slots.numel():
            raise CacheError(
                f"{self._pool}: host rows were replaced while {num_forwarded} batches waited for their backward; write "
                "to host rows between steps, after the backward and before the next forward"
            )
        # Prepared batches stamp their slots, too, but without an update nothing is lost.
        lost = int(self._state.is_dirty(slots).sum()) if self._has_updates else 0
        if keys is None:
            lost += self._copies.discard()  # these copies would overwrite the new contents
        version, fetched = self._host.version, self._map.keys(slots)
        with self._updates.lock:
            self._updates.wait_until_idle()
            self._copies.finish()
            self._copies.fill(fetched, slots)
        if not lost:
            self._note_fetched(fetched, version if keys is None else None)
            return
        try:
            raise CacheError(
                f"{self._pool}: host rows were written to in place while {lost} trained rows had not been written "
                "back; their latest updates are lost, and the host's rows count from now on. Call "
                "embershard.flush(model) before writing in place, or load with model.load_state_dict"
            )
        except CacheError:  # noted only while the error is being raised, so that an interrupt cannot hide the loss
            self._note_fetched(fetched, version if keys is None else None)
            raise

    def _note_fetched(self, keys: Tensor, version: int | None) -> None:
        """Note that the slots of `keys` equal the host tier; `version` of the host tier if `keys` are all cached
        rows."""
        with self._guard.change("fetching rows that were written to in the host tier"):
            self._counters.add_rows(Counter.EVICTIONS, keys)
            self._counters.add_rows(Counter.PRELOADS, keys)
            if version is not None:
                self._has_updates = False
                self._state.clean_through = self._in_flight.trained_through
                self._host_version = version
