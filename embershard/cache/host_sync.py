"""Keeping slots and host tier in step: writing back what was trained, fetching what somebody wrote."""

from __future__ import annotations

from torch import Tensor

from embershard.cache.change_guard import ChangeGuard
from embershard.cache.planner import CachePlanner
from embershard.cache.rows.copies import RowCopies
from embershard.cache.rows.host_store import HostStore
from embershard.cache.statistics import CacheCounters, Counter
from embershard.cache.tickets import InFlight, Ticket
from embershard.cache.update_gate import UpdateGate
from embershard.errors import CacheError


class HostSync:
    """Both directions between the slots and the host tier of one pool, for rows that stay cached.

    The caller holds the pool's lock, but for updates: these begin and end in the thread that trains.

    Args:
        pool: whose rows they are, for messages.
    """

    def __init__(
        self,
        pool: str,
        host: HostStore,
        planner: CachePlanner,
        copies: RowCopies,
        counters: CacheCounters,
        in_flight: InFlight,
        guard: ChangeGuard,
    ) -> None:
        self._pool, self._host, self._planner = pool, host, planner
        self._copies, self._counters = copies, counters
        self._in_flight, self._guard = in_flight, guard
        self._updates = UpdateGate(pool)
        self._has_updates = False  # that were not written back
        self._host_version = host.version

    @property
    def is_behind(self) -> bool:
        """Whether somebody wrote to host rows in a way that torch counts."""
        return self._host.version != self._host_version

    def begin_update(self, ticket: Ticket) -> None:
        """The backward of a batch is about to update its rows; waits for copies to end."""
        self._updates.begin(ticket)
        self._has_updates = True

    def end_update(self) -> None:
        """It has."""
        self._has_updates = True
        self._updates.end()

    def write_back(self) -> None:
        """Every trained row, to the host tier. Nothing moves when nothing was trained since."""
        planner = self._planner
        with self._updates.lock:
            self._updates.wait_until_idle()
            self._copies.finish()
            clean_through = self._in_flight.trained_through
            if self._in_flight.newest > planner.clean_through:
                slots = planner.dirty_slots()
                keys = planner.map.keys(slots)
                self._copies.write_back(slots, keys)
                self._counters.add_rows(Counter.WRITE_BACKS, keys)
                planner.clean_through = clean_through
            self._has_updates = False

    def fetch_again(self, keys: Tensor | None = None) -> None:
        """Somebody wrote to the host rows ``keys`` (int64 [K]; None: to any): those that are cached come in again, in
        their slots. Rows of batches that wait for their step, too; those of a forward that waits for its backward
        cannot.

        Raises:
            CacheError: trained rows among them had not been written back, or wait for their backward.
        """
        planner = self._planner
        if keys is None:
            slots = planner.map.used_slots()
        else:
            slots = planner.map.lookup(keys.unique())
            slots = slots[slots > 0]
        num_forwarded = sum(ticket.forwarded for ticket in self._in_flight.tickets)
        if num_forwarded and slots.numel():
            raise CacheError(
                f"{self._pool}: host rows were replaced while {num_forwarded} batches waited for their backward; write "
                "to host rows between steps, after the backward and before the next forward"
            )
        # Batches that are only resident stamp their slots, too, but have nothing to lose.
        lost = planner.dirty_among(slots).numel() if self._has_updates else 0
        if keys is None:
            lost += self._copies.transfer.discard()  # these would land on what was written
        version, fetched = self._host.version, planner.map.keys(slots)
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
                "back; what these had learned since is lost, and the host's rows count from now on. Call "
                "embershard.flush(model) before writing in place, or load with model.load_state_dict"
            )
        except CacheError:  # it is said once, so it must be on its way before that is noted
            self._note_fetched(fetched, version if keys is None else None)
            raise

    def _note_fetched(self, keys: Tensor, version: int | None) -> None:
        """The slots of ``keys`` hold what is in the host tier; ``version``: of the host tier, where they are all."""
        with self._guard.change("fetching rows that were written to in the host tier"):
            self._counters.add_rows(Counter.EVICTIONS, keys)
            self._counters.add_rows(Counter.PRELOADS, keys)
            if version is not None:
                self._has_updates = False
                self._planner.clean_through = self._in_flight.trained_through
                self._host_version = version
