"""Rows of one pool in both tiers: moves rows first and changes the state afterwards, so that the two always agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from embershard.cache.change_guard import ChangeGuard
from embershard.cache.next_use import KnownBatch
from embershard.cache.planner import CachePlan, CachePlanner
from embershard.cache.policies import best_rows
from embershard.cache.rows.copies import RowCopies
from embershard.cache.rows.host_store import HostStore
from embershard.cache.rows.transfer import MakeTransfer
from embershard.cache.slot_state import SlotState
from embershard.cache.statistics import CacheCounters, Counter, TableStats, table_stats


class PoolRows:
    """Slots and host tier of one pool. The caller holds the pool's lock.

    Args:
        host: the rows.
        device_payload: returns the payload tensors for a number of slots, as for `RowCache`.
        make_transfer: makes the transfer of rows between payload and host tier.
        state: of the slots.
        counters: count the moved rows.
        guard: marks changes of the state.
        pinned_keys: int64 [K], rows that are never evicted, in slots 1 to K in this order.
        is_cold: `warm_up` fills all slots with the rows of the highest scores.

    Attributes:
        copies: the copies of rows.
        payload: tensors [S + 1, ...] that hold the slots.
    """

    def __init__(
        self,
        host: HostStore,
        device_payload: Callable[[int], list[Tensor]],
        make_transfer: MakeTransfer,
        state: SlotState,
        counters: CacheCounters,
        guard: ChangeGuard,
        pinned_keys: Tensor,
        is_cold: bool,
    ) -> None:
        self._host, self._state, self._map, self._scores = host, state, state.map, state.scores
        self._counters, self._guard = counters, guard
        self._pinned_keys, self._is_cold = pinned_keys, is_cold
        self._device_payload = device_payload
        self.copies = RowCopies(self._map.device, make_transfer)
        self._attach(self._map.num_slots)

    @property
    def slot_bytes(self) -> int:
        """Payload of one slot, in bytes."""
        return sum(t[0].numel() * t.element_size() for t in self.payload)

    @property
    def device_bytes(self) -> int:
        """Device memory of slots, optimizer states, maps, scores and next uses, in bytes; without the known batches."""
        return sum(t.numel() * t.element_size() for t in self.payload) + self._state.device_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory of rows, optimizer states and scores, in bytes."""
        return self._host.host_bytes + self._scores.host_bytes

    def warm_up(self) -> None:
        """Before the first batch, fill the pinned rows and then the rows with the highest scores."""
        if self._pinned_keys.numel() and not self._map.num_used:
            self._preload(self._pinned_keys.to(self._map.device))
        if not self._is_cold:
            return
        self._is_cold = False
        row_scores = self._scores.of_rows()
        assert row_scores is not None, "warm-up without a profile"
        wanted = row_scores.index_fill(0, self._pinned_keys, 0.0)  # already cached
        self._preload(best_rows(wanted, min(self._map.num_free, wanted.numel())).to(self._map.device))

    def execute(
        self,
        plan: CachePlan,
        planner: CachePlanner,
        known: KnownBatch | None,
        feature_lengths: Tensor,
        critical_path: bool,
    ) -> torch.cuda.Event | None:
        """Move a plan's rows; return the event to wait for before their use, if any. A copy that fails loses no row."""
        self.copies.write_back_evicted(plan)
        with self._guard.change(f"filling the rows of batch {plan.batch}"):
            planner.evict(plan)
            try:
                filled = self.copies.fill_missed(plan)
            except BaseException:  # an interrupt, too
                planner.cancel_fill(plan)
                self._counters.add_rows(Counter.EVICTIONS, plan.evicted_keys)
                self._counters.add_rows(Counter.WRITE_BACKS, plan.write_back_keys)
                self._guard.settle()
                raise
            planner.admit(plan, known)
            self._counters.add_plan(plan, feature_lengths, critical_path)
        return filled

    def grow(self, num_slots: int, miss_keys: Tensor) -> None:
        """Add slots, up to `num_slots` in all, for a batch that missed `miss_keys` (int64 [M])."""
        self.copies.finish()
        with self._guard.change(f"growing to {num_slots} slots"):
            self._attach(num_slots)
            self._state.grow(num_slots)
            self._counters.add_growth(miss_keys)

    def read(self, keys: Tensor) -> Tensor:
        """Return the current weights of `keys` (int64 [N]): [N, D] on the device. Changes nothing."""
        self.copies.finish()
        host_weights, slot_weights = self._host.weights, self.payload[0]
        rows = host_weights.index_select(0, keys.to(host_weights.device)).to(self._map.device)
        slots = self._map.lookup(keys)
        cached = slots.nonzero().flatten()
        rows[cached] = slot_weights.data.index_select(0, slots[cached])
        return rows

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

    def _preload(self, keys: Tensor) -> None:
        slots = self._map.next_free(keys.numel())
        self.copies.fill(keys, slots)
        with self._guard.change("filling the cache before the first batch"):
            self._state.preload(keys, slots)
            self._counters.add_rows(Counter.PRELOADS, keys)

    def _attach(self, num_slots: int) -> None:
        self.payload = self._device_payload(num_slots)
        self.copies.attach(self.payload, self._host.payload)
