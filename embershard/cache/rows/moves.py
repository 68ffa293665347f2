"""`RowMoves`: the moves of a pool's rows between host tier and slots, each with the change of state that it makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from embershard.cache.guards import ChangeGuard, UpdateGate
from embershard.cache.homes.home import Home
from embershard.cache.next_use import KnownBatch
from embershard.cache.planner import CachePlan, Planner
from embershard.cache.rows.copies import RowCopies
from embershard.cache.slot_map import BLOCK
from embershard.cache.slot_state import SlotState
from embershard.cache.statistics import CacheCounters, Counter
from embershard.cache.tickets import InFlight
from embershard.errors import CacheError
from embershard.stages import is_stage


class RowMoves:
    """Moves rows of one pool. Rows move first, and the state changes afterwards, so that the two always agree.

    Args:
        host: the rows.
        copies: between them and the slots.
        state: which row each slot has.
        planner: that changes the state.
        in_flight: batches whose slots are in use.
        counters: of the moves.
        guard: of the state.
        updates: of the slots' rows, which no copy meets.
    """

    def __init__(
        self,
        host: Home,
        copies: RowCopies,
        state: SlotState,
        planner: Planner,
        in_flight: InFlight,
        counters: CacheCounters,
        guard: ChangeGuard,
        updates: UpdateGate,
    ) -> None:
        self._host, self._copies, self._state, self._map = host, copies, state, state.map
        self._planner, self._in_flight, self._counters = planner, in_flight, counters
        self._guard, self._updates, self._pool = guard, updates, guard.pool
        self._host_version, self._weights_version = host.version, host.weights_version

    # -- for batches

    @is_stage("warm-up")
    def preload(self, every: Tensor) -> None:
        """Fill the next free slots with rows (int64 [M], distinct) before the first batch."""
        for keys in [every] if self._map.device.type == "cpu" else every.split(BLOCK):
            keys = keys.to(self._map.device)
            slots = self._map.next_free(keys.numel())
            self._copies.preload(keys, slots)
            with self._guard.change("filling the cache before the first batch"):
                self._state.preload(keys, slots)
                self._counters.add_rows(Counter.PRELOADS, keys)

    def remove_passing(self, pinned_from: int) -> None:
        """Empty the slots of a static cache that earlier batches brought rows to, and none from `pinned_from` on
        used."""
        passing, num_passing = self._planner.removal_of_passing(pinned_from)
        if passing.evicted_slots.numel():
            self._in_flight.check_victims(passing.evicted_slots, self._map)
            passing = self._own_write_backs(passing)  # the next plan's barrier orders them
            self._copies.write_back_evicted(passing)
            with self._guard.change("removing rows from a static cache"):
                self._planner.remove(passing, num_passing)
                self._note_evicted(passing)

    @is_stage("fills")
    def execute(
        self,
        plan: CachePlan,
        known: KnownBatch | None,
        feature_lengths: Tensor,
        critical_path: bool,
        training: torch.cuda.Event | None,
    ) -> torch.cuda.Event | None:
        """Move a plan's rows; return the event to wait for before their use, if any. A copy that fails loses no row.

        Args:
            plan: of a batch.
            known, feature_lengths, critical_path: of the batch, as for `RowCache.prepare`.
            training: as for `RowCopies.write_back_evicted`.
        """
        self._in_flight.check_victims(plan.evicted_slots, self._map)
        plan = self._own_write_backs(plan)
        self._copies.write_back_evicted(plan, training)
        if self._host.is_shared:
            self._host.wait_for_ranks(self._pool, plan.digest)
        with self._guard.change(f"filling the rows of batch {plan.batch}"):
            self._planner.evict(plan)
            try:
                filled = self._copies.fill_missed(plan)
            except BaseException:  # an interrupt, too
                self._planner.cancel_fill(plan)
                self._note_evicted(plan)
                self._guard.settle()
                raise
            self._planner.note_filled(plan, known)
            self._counters.add_plan(plan, feature_lengths, critical_path)
        return filled

    def _own_write_backs(self, plan: CachePlan) -> CachePlan:
        """Leave the rows of other ranks to them: all ranks evict the same rows."""
        is_own = self._host.is_own(plan.write_back_keys)
        if is_own is None:
            return plan
        own_keys, own_slots = plan.write_back_keys[is_own], plan.write_back_slots[is_own]
        return dataclasses.replace(plan, write_back_keys=own_keys, write_back_slots=own_slots)

    def _note_evicted(self, plan: CachePlan) -> None:
        self._counters.add_rows(Counter.EVICTIONS, plan.evicted_keys)
        self._counters.add_rows(Counter.WRITE_BACKS, plan.write_back_keys)

    # -- of the host tier

    def write_back(self) -> None:
        """Write every trained row back; see `RowCache.write_back`."""
        with self._updates.lock:
            self._updates.wait_until_idle()
            self._copies.finish()
            clean_through = self._in_flight.trained_through
            if self._in_flight.newest > self._state.clean_through:
                for used in self._map.used_in_blocks():
                    slots = used[self._state.is_dirty(used)]
                    keys = self._map.keys(slots)
                    if (is_own := self._host.is_own(keys)) is not None:
                        slots, keys = slots[is_own], keys[is_own]
                    self._copies.write_back(slots, keys)
                    self._counters.add_rows(Counter.WRITE_BACKS, keys)
                self._state.clean_through = clean_through
            self._updates.have_run = False

    def reinitialise(self, keys: Tensor, numbers: Tensor) -> None:
        """Give rows other initial weights, and drop what their slots hold; see `RowCache.reinitialise`."""
        slots = self._map.lookup(keys)
        slots = slots[slots > 0]
        assert not bool((slots <= self._state.num_pinned).any()), "a pinned row has its slot for good"
        oldest = self._in_flight.oldest
        if oldest is not None and bool((self._map.last_batch(slots) >= oldest).any()):
            used = self._in_flight.use_of(slots)  # none, if it was a batch that failed or was cancelled
            if used is not None:
                slot, batch = used
                raise CacheError(
                    f"{self._pool}: row {int(self._map.keys(slots.new_tensor([slot])))} is to be reinitialised while "
                    f"batch {batch}, which uses it, is in flight. Give a row to another id only after all batches "
                    "prepared with the old one have trained"
                )
        self._copies.finish()  # no earlier content lands later
        self._host.reinitialise(keys, numbers)
        if slots.numel():
            emptied = self._planner.removal(slots)
            with self._guard.change("emptying the slots of reinitialised rows"):
                self._planner.remove(emptied)
                self._counters.add_rows(Counter.EVICTIONS, emptied.evicted_keys)
        self._state.scores.restore(keys, torch.zeros(keys.numel()))

    # -- after writes of others to the host tier

    def check(self) -> None:
        """Before every operation: refuse a broken state, and fetch host rows that somebody wrote to."""
        self._guard.check()
        if self.is_behind:
            self.fetch_again()

    @property
    def is_behind(self) -> bool:
        """True if host rows were written to in a way that torch counts, and not fetched since."""
        return self._host.version != self._host_version

    def refill(self, keys: Tensor) -> None:
        """Copy rows (int64 [K], distinct) from the host tier to the slots that have them, whatever these hold."""
        slots = self._map.lookup(keys)
        keys, slots = keys[slots > 0], slots[slots > 0]
        with self._updates.lock:
            self._updates.wait_until_idle()
            self._copies.finish()
            self._copies.fill(keys, slots)

    def replace(self, keys: Tensor, rows: Sequence[Tensor]) -> None:
        """Write rows to the host tier and to the slots that have them; see `RowCache.replace`."""
        with self._updates.lock:
            self._updates.wait_until_idle()
            self._copies.finish()  # no earlier content lands later
            self._host.make(on_host := keys.cpu())
            self._host.before_write(on_host)
            self._host.replace(on_host, [part.cpu() for part in rows])
            self.refill(keys)

    def fetch_again(self, keys: Tensor | Sequence[range] | None = None) -> None:
        """Fill the slots of host rows that somebody wrote to: `keys` (int64 [K], or ranges), or any if None. Includes
        rows of batches that were prepared and not forwarded.

        Raises:
            CacheError: some of these rows were trained and not written back, or wait for their backward; or somebody
                wrote to weights while some rows had no initial weights yet, which would be written later.
        """
        if not self._host.is_made and (keys is not None or self._host.weights_version != self._weights_version):
            raise CacheError(
                f"{self._pool}: host rows were written to before all rows had their initial weights, and nobody can "
                "tell which rows were meant. Build the model again; call embershard.flush(model) before writing to "
                "host rows (model.load_state_dict does so by itself)"
            )
        if isinstance(keys, Tensor):
            slots = self._map.lookup(keys.unique())
            slots = slots[slots > 0]
        else:
            slots = self._map.used_slots(keys)
        num_forwarded = sum(ticket.forwarded for ticket in self._in_flight.tickets)
        if num_forwarded and slots.numel():
            raise CacheError(
                f"{self._pool}: host rows were replaced while {num_forwarded} batches waited for their backward; write "
                "to host rows between steps, after the backward and before the next forward"
            )
        # Prepared batches stamp their slots, too, but without an update nothing is lost.
        lost = int(self._state.is_dirty(slots).sum()) if self._updates.have_run else 0
        if keys is None:
            lost += self._copies.transfer.discard()  # these rows would overwrite the new contents
        version, fetched = self._host.version, self._map.keys(slots)
        self.refill(fetched)
        if not lost:
            self._note_fetched(fetched, version if keys is None else None)
            return
        try:
            raise CacheError(
                f"{self._pool}: host rows were written to in place while {lost} trained rows had not been written "
                "back; their latest updates are lost, and the host's rows count from now on. Call "
                "embershard.flush(model) before writing in place, or load with model.load_state_dict"
            )
        except CacheError:  # the loss is reported once, so it is noted only while the error is being raised
            self._note_fetched(fetched, version if keys is None else None)
            raise

    def _note_fetched(self, keys: Tensor, version: int | None) -> None:
        """Note that the slots of `keys` equal the host tier; `version` of the host tier if `keys` are all cached
        rows."""
        with self._guard.change("fetching rows that were written to in the host tier"):
            self._counters.add_rows(Counter.EVICTIONS, keys)
            self._counters.add_rows(Counter.PRELOADS, keys)
            if version is not None:
                self._updates.have_run = False
                self._state.clean_through = max(self._state.clean_through, self._in_flight.trained_through)
                self._host_version, self._weights_version = version, self._host.weights_version
