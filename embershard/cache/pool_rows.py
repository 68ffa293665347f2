"""Rows of one pool in both tiers: all copies between slots and host tier, and the changes of state that follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from embershard.cache.config import Overflow
from embershard.cache.guards import ChangeGuard, UpdateGate
from embershard.cache.next_use import KnownBatch
from embershard.cache.planner import CachePlan, Planner, Shortage, grown_slots
from embershard.cache.rows.copies import RowCopies
from embershard.cache.rows.host_store import HostStore
from embershard.cache.rows.transfer import MakeTransfer
from embershard.cache.slot_state import CacheContents, SlotState
from embershard.cache.statistics import CacheCounters, Counter, TableStats, table_stats
from embershard.cache.tickets import InFlight, Ticket
from embershard.errors import CacheError
from embershard.frequency.counts import RowCounts
from embershard.stages import is_stage


class PoolRows:
    """Slots and host tier of one pool. Moves rows first and changes the state afterwards, so that the two always agree.

    The caller holds the pool's lock, except for updates, which begin and end in the training thread. The arguments are
    those of `RowCache` and parts that it made.

    Attributes:
        guard: marks changes of the state.
        copies: the copies of rows.
        payload: tensors [S + 1, ...] that hold the slots.
    """

    def __init__(
        self,
        name: str,
        host: HostStore,
        device_payload: Callable[[int], list[Tensor]],
        make_transfer: MakeTransfer,
        state: SlotState,
        counters: CacheCounters,
        in_flight: InFlight,
        pinned_keys: Tensor,
        warmup: RowCounts | None,
    ) -> None:
        self._name, self._host, self._device_payload = name, host, device_payload
        self._state, self._map, self._scores = state, state.map, state.scores
        self._counters, self._in_flight = counters, in_flight
        self.guard = ChangeGuard(name)
        self._pinned_keys = pinned_keys
        self._warmup = None if warmup is None else partial(_most_frequent, warmup, pinned_keys)
        self.copies = RowCopies(self._map.device, host, make_transfer)
        self._attach(self._map.num_slots)
        self._updates = UpdateGate(name)
        self._has_updates = False  # since the last write-back
        self._host_version, self._weights_version = host.version, host.weights_version

    @property
    def slot_bytes(self) -> int:
        """Payload of one slot, in bytes."""
        return sum(t[0].numel() * t.element_size() for t in self.payload)

    @property
    def device_bytes(self) -> int:
        """Device memory of slots, optimizer states, maps, scores and next uses, in bytes; without the known batches."""
        return sum(t.nbytes for t in self.payload) + self._state.device_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory of rows, optimizer states and scores, in bytes."""
        return self._host.host_bytes + self._scores.host_bytes

    def warm_up(self) -> None:
        """Before the first batch, fill the pinned rows, and then those with the highest counts or of a checkpoint."""
        if self._pinned_keys.numel() and not self._map.num_used:
            self._preload(self._pinned_keys.to(self._map.device))
        choose, self._warmup = self._warmup, None
        if choose is not None:
            self._preload(choose(self._map.num_free).to(self._map.device))

    def contents(self) -> CacheContents:
        """Return the cached rows that are not pinned, by key, in the order of their slots."""
        slots = self._map.used_slots()
        slots = slots[slots > self._state.num_pinned]
        ages = self._in_flight.newest - self._map.last_batch(slots)
        return CacheContents(self._map.keys(slots).cpu(), ages.int().cpu(), self._scores.counted(slots))

    def restore(self, contents: CacheContents) -> None:
        """Fill the cache with rows of a checkpoint (by key) before the next batch, as many as there are free slots."""
        keys = contents.rows.to(self._map.device)
        absent = contents.select((self._map.lookup(keys) == 0).cpu() & ~torch.isin(contents.rows, self._pinned_keys))
        self._scores.restore(absent.rows, absent.scores)
        self._warmup = partial(absent.best, by_age=self._scores.of_slots() is None)

    @is_stage("fills")
    def execute(
        self,
        plan: CachePlan,
        planner: Planner,
        known: KnownBatch | None,
        feature_lengths: Tensor,
        critical_path: bool,
    ) -> torch.cuda.Event | None:
        """Move a plan's rows; return the event to wait for before their use, if any. A copy that fails loses no row."""
        plan = self._own_write_backs(plan)
        self.copies.write_back_evicted(plan)
        if self._host.is_shared:
            self._host.meet(self._name, _digest(plan))
        with self.guard.change(f"filling the rows of batch {plan.batch}"):
            planner.evict(plan)
            try:
                filled = self.copies.fill_missed(plan)
            except BaseException:  # an interrupt, too
                planner.cancel_fill(plan)
                self._note_evicted(plan)
                self.guard.settle()
                raise
            planner.admit(plan, known)
            self._counters.add_plan(plan, feature_lengths, critical_path)
        return filled

    def _own_write_backs(self, plan: CachePlan) -> CachePlan:
        """Leave the rows of other ranks to them: all ranks evict the same rows."""
        is_own = self._host.is_own(plan.write_back_keys)
        if is_own is None:
            return plan
        own_keys, own_slots = plan.write_back_keys[is_own], plan.write_back_slots[is_own]
        return dataclasses.replace(plan, write_back_keys=own_keys, write_back_slots=own_slots)

    def remove_passing(self, planner: Planner, oldest_pinned: int) -> None:
        """Evict the rows of a static cache that batches before `oldest_pinned` brought in and no later batch uses."""
        passing = self._state.passing
        leaving = self._map.last_batch(passing) < oldest_pinned
        if not bool(leaving.any()):
            return
        plan = self._own_write_backs(planner.removal(passing[leaving]))  # the next plan's meeting orders them
        self.copies.write_back_evicted(plan)
        with self.guard.change("removing rows from a static cache"):
            planner.evict(plan)
            planner.cancel_fill(plan)
            self._note_evicted(plan)
            self._state.passing = passing[~leaving]

    def _note_evicted(self, plan: CachePlan) -> None:
        self._counters.add_rows(Counter.EVICTIONS, plan.evicted_keys)
        self._counters.add_rows(Counter.WRITE_BACKS, plan.write_back_keys)

    def grow(self, shortage: Shortage, overflow: Overflow) -> None:
        """Add the slots that the newest batch lacks.

        Raises:
            CacheOverflowError: `overflow` forbids it, or other batches are in flight.
        """
        slots, rows = self._map.num_slots, self._host.num_rows
        grown = grown_slots(self._name, slots, shortage.num_slots, rows, self.slot_bytes, self._in_flight, overflow)
        self.copies.finish()
        with self.guard.change(f"growing to {grown} slots"):
            self._attach(grown)
            self._state.grow(grown)
            self._counters.add_growth(shortage.miss_keys)

    def read(self, keys: Tensor) -> Tensor:
        """Return the current weights of `keys` (int64 [N]): [N, D] on the device. Changes nothing."""
        self.copies.finish()
        self._host.make(keys)
        host_weights, slot_weights = self._host.weights, self.payload[0]
        rows = host_weights.index_select(0, keys.to(host_weights.device)).to(self._map.device)
        slots = self._map.lookup(keys)
        cached = slots.nonzero().flatten()
        rows[cached] = slot_weights.data.index_select(0, slots[cached])
        return rows

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

    def make_all(self) -> None:
        """Make the initial weights of all rows that have none yet."""
        self._host.make_all()

    def write_back(self) -> None:
        """Write every trained row back to the host tier. Nothing moves if nothing was trained since the last time."""
        with self._updates.lock:
            self._updates.wait_until_idle()
            self.copies.finish()
            clean_through = self._in_flight.trained_through
            if self._in_flight.newest > self._state.clean_through:
                used = self._map.used_slots()
                slots = used[self._state.is_dirty(used)]
                keys = self._map.keys(slots)
                is_own = self._host.is_own(keys)
                if is_own is not None:
                    slots, keys = slots[is_own], keys[is_own]
                self.copies.write_back(slots, keys)
                self._counters.add_rows(Counter.WRITE_BACKS, keys)
                self._state.clean_through = clean_through
            self._has_updates = False

    def fetch_again(self, keys: Tensor | None = None) -> None:
        """Fill the slots of host rows that somebody wrote to: `keys` (int64 [K]), or any if None.

        Includes rows of batches that were prepared and not forwarded.

        Raises:
            CacheError: some of these rows were trained and not written back, or wait for their backward; or somebody
                wrote to weights while some rows had no initial weights yet, which would be written later.
        """
        if not self._host.is_made and (keys is not None or self._host.weights_version != self._weights_version):
            raise CacheError(
                f"{self._name}: host rows were written to before all rows had their initial weights, and nobody can "
                "tell which rows were meant. Build the model again; call embershard.flush(model) before writing to "
                "host rows (model.load_state_dict does so by itself)"
            )
        if keys is None:
            slots = self._map.used_slots()
        else:
            slots = self._map.lookup(keys.unique())
            slots = slots[slots > 0]
        num_forwarded = sum(ticket.forwarded for ticket in self._in_flight.tickets)
        if num_forwarded and slots.numel():
            raise CacheError(
                f"{self._name}: host rows were replaced while {num_forwarded} batches waited for their backward; write "
                "to host rows between steps, after the backward and before the next forward"
            )
        # Prepared batches stamp their slots, too, but without an update nothing is lost.
        lost = int(self._state.is_dirty(slots).sum()) if self._has_updates else 0
        if keys is None:
            lost += self.copies.transfer.discard()  # these rows would overwrite the new contents
        version, fetched = self._host.version, self._map.keys(slots)
        with self._updates.lock:
            self._updates.wait_until_idle()
            self.copies.finish()
            self.copies.fill(fetched, slots)
        if not lost:
            self._note_fetched(fetched, version if keys is None else None)
            return
        try:
            raise CacheError(
                f"{self._name}: host rows were written to in place while {lost} trained rows had not been written "
                "back; their latest updates are lost, and the host's rows count from now on. Call "
                "embershard.flush(model) before writing in place, or load with model.load_state_dict"
            )
        except CacheError:  # the loss is reported once, so it is noted only while the error is being raised
            self._note_fetched(fetched, version if keys is None else None)
            raise

    def _note_fetched(self, keys: Tensor, version: int | None) -> None:
        """Note that the slots of `keys` equal the host tier; `version` of the host tier if `keys` are all cached
        rows."""
        with self.guard.change("fetching rows that were written to in the host tier"):
            self._counters.add_rows(Counter.EVICTIONS, keys)
            self._counters.add_rows(Counter.PRELOADS, keys)
            if version is not None:
                self._has_updates = False
                self._state.clean_through = self._in_flight.trained_through
                self._host_version, self._weights_version = version, self._host.weights_version

    def stats(self, tables: Sequence[str]) -> list[TableStats]:
        """Return the totals of each of the pool's `tables`."""
        map_bytes = self._map.entry_bytes
        return table_stats(
            tables,
            self._host.rows_per_table,
            self._counters,
            free_slots=self._map.num_free,
            map_bytes=map_bytes,
            slot_bytes=self.device_bytes - map_bytes,
            host_bytes=self.host_bytes,
            row_bytes=self._host.row_bytes,
        )

    @is_stage("warm-up")
    def _preload(self, keys: Tensor) -> None:
        slots = self._map.next_free(keys.numel())
        self.copies.preload(keys, slots)
        with self.guard.change("filling the cache before the first batch"):
            self._state.preload(keys, slots)
            self._counters.add_rows(Counter.PRELOADS, keys)

    def _attach(self, num_slots: int) -> None:
        self.payload = self._device_payload(num_slots)
        self.copies.attach(self.payload)


def _digest(plan: CachePlan) -> int:
    """Return a number that tells plans apart. Write-backs are left out: a rank that flushed alone has fewer."""
    return int((plan.fill_keys * plan.fill_slots).sum() - plan.evicted_keys.sum())


def _most_frequent(counts: RowCounts, pinned_keys: Tensor, num_rows: int) -> Tensor:
    return torch.from_numpy(np.sort(counts.without(pinned_keys.numpy()).top(num_rows)))
