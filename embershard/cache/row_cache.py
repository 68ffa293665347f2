"""The device cache over one pool of tables: plans batches, moves rows, keeps count."""

from __future__ import annotations

import functools
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from embershard.cache.change_guard import ChangeGuard
from embershard.cache.config import CachePolicy, Overflow, TransferKind
from embershard.cache.host_sync import HostSync
from embershard.cache.key_map import MapKind
from embershard.cache.next_use import KnownBatch, NextUseIndex
from embershard.cache.pinned_tables import OtherTables
from embershard.cache.planner import CachePlan, CachePlanner, Shortage
from embershard.cache.policies import best_rows, make_scores
from embershard.cache.rows.choose_transfer import transfer_maker
from embershard.cache.rows.copies import RowCopies
from embershard.cache.rows.host_store import HostStore
from embershard.cache.rows.stream_order import StreamOrder
from embershard.cache.rows.transfer import MakeTransfer, Transfer
from embershard.cache.slot_map import SlotMap
from embershard.cache.statistics import CacheCounters, Counter, PoolSizes, TableStats, table_stats
from embershard.cache.tickets import InFlight, Ticket
from embershard.errors import CacheOverflowError

GROWTH = 0.25  # an overflow adds what is missing, and at least this share of the slots

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _alone(method: _Method) -> _Method:
    """One thread at a time: while a worker plans ahead, an evaluation or a flush in the training thread waits. And one
    stream at a time."""

    @functools.wraps(method)
    def locked(self: RowCache, *args: Any, **kwargs: Any) -> Any:
        with self._lock, torch.no_grad(), self._stream_order.next():
            return method(self, *args, **kwargs)

    return cast(_Method, locked)


class CacheGrowthWarning(UserWarning):
    """One batch needed more rows than the cache had slots, so the cache took more device memory."""


class RowCache:
    """One pool: S slots on the device in front of R rows in the host tier.

    Args:
        tables: name of each table of the pool, in the host store's order.
        host: the rows.
        device_payload: gives, for a number of slots, the payload tensors [S + 1, ...] that hold them
            (weights, then states, in the host store's order). Called again with a larger number when the pool
            grows: it must keep the contents of the old slots.
        num_slots: S.
        table_of_feature: for each feature of a batch, the number of its table.
        policy: rule by which rows are evicted, and whether to warm up.
        overflow: ``"grow"`` or ``"raise"``.
        pinned_keys: int64 [K], rows that are resident for ever, in slots 1 to K in this order.
        owner: whose pool it is ("rank 3"), for messages.
        row_counts: of a profile, [R]; None without one.
        transfer: what copies rows between slots and host rows: a kind, or a maker of transfers.
        kind: of the map from rows to slots.
    """

    def __init__(
        self,
        tables: Sequence[str],
        host: HostStore,
        device_payload: Callable[[int], list[Tensor]],
        num_slots: int,
        table_of_feature: Sequence[int],
        policy: CachePolicy,
        device: torch.device,
        row_counts: Tensor | None = None,
        overflow: Overflow = "grow",
        pinned_keys: Tensor | None = None,
        owner: str = "",
        transfer: TransferKind | MakeTransfer = "plain",
        kind: MapKind = "array",
    ) -> None:
        self.tables = list(tables)
        names = ", ".join(self.tables[:5]) + (", ..." if len(self.tables) > 5 else "")
        self.name = f"{owner + ', ' if owner else ''}tables {names}"
        self.host = host
        self.device = device
        self._pinned_keys = torch.empty(0, dtype=torch.int64) if pinned_keys is None else pinned_keys
        slot_map = SlotMap(host.num_rows, num_slots, device, kind)
        self.next_use_index = NextUseIndex(slot_map) if policy.by_next_use else None
        scores = make_scores(policy, host.num_rows, num_slots, device, row_counts, transfer)
        self.planner = CachePlanner(slot_map, scores, self._pinned_keys.numel(), self.next_use_index)
        self._other_tables = OtherTables(host.row_offsets, table_of_feature, self._pinned_keys)
        self.counters = CacheCounters(host.row_offsets, table_of_feature, device)
        self._device_payload = device_payload
        self._overflow = overflow
        self._is_cold = policy.warmup  # the warm-up is still to come
        self._in_flight = InFlight()
        self._lock = threading.RLock()
        self._guard = ChangeGuard(self.name)
        self._copies = RowCopies(device, transfer_maker(transfer, device, host.payload))
        self._attach(num_slots)
        self._stream_order = StreamOrder(device)
        self._host_sync = HostSync(
            self.name, host, self.planner, self._copies, self.counters, self._in_flight, self._guard
        )

    # -- training

    @_alone
    def know(self, keys: Tensor, feature_lengths: Tensor) -> KnownBatch | None:
        """This batch will be prepared, after all that are known already. Nothing moves; only eviction is steered.

        Args:
            keys: int64 [N], as for :meth:`prepare`.
            feature_lengths: int64 [F], ids per feature.

        Returns:
            What :meth:`prepare` wants to be given with the batch; None when the policy does not look ahead.
        """
        if self.next_use_index is None:
            return None
        started = time.perf_counter()
        self._check()
        self._warm_up()
        keys, positions = self._other_tables.select(keys, feature_lengths, self.planner.map)
        with self._guard.change("adding a batch to those that are known"):
            known = self.next_use_index.know(keys, positions)
        self.counters.seconds += time.perf_counter() - started
        return known

    @_alone
    def prepare(
        self,
        keys: Tensor,
        feature_lengths: Tensor,
        critical_path: bool = True,
        known: KnownBatch | None = None,
        if_it_fits: bool = False,
    ) -> Ticket | None:
        """Make every row of a batch resident and pin it.

        Args:
            keys: int64 [N], on the planning device, each in [0, R).
            feature_lengths: int64 [F], ids per feature; sums to N.
            critical_path: a training step waits for this.
            known: what :meth:`know` returned for the batch.
            if_it_fits: do nothing when the batch does not fit beside those in flight. A known batch also stays out when
                two others are in flight and all of them would take more than half of the slots: rows held that early
                cost more fills than they save time (docs/decisions/0011).

        Returns:
            The batch's ticket; None when it does not fit now but may when one of those in flight is released.

        Raises:
            CacheOverflowError: the batch and those in flight do not fit, and ``overflow="raise"``.
        """
        started = time.perf_counter()
        self._check()
        self._warm_up()
        other_slots = self.planner.map.num_slots - self._pinned_keys.numel()
        if if_it_fits and known is not None and self._in_flight.would_crowd(known.num_rows, other_slots):
            return None
        plan = self._plan(keys, if_it_fits)
        if plan is None:
            return None
        filled = self._carry_out(plan, known, feature_lengths, critical_path)
        seconds = time.perf_counter() - started
        self.counters.seconds += seconds
        if critical_path:
            self.counters.stall_seconds += seconds
        ticket = Ticket(plan.batch, plan.slots, _filled=filled)
        self._in_flight.add(ticket, None if known is None else known.num_rows)
        return ticket

    def wait(self, ticket: Ticket) -> None:
        """Until the rows of a batch are in their slots. What runs on the current stream afterwards sees them."""
        if self._host_sync.is_behind:
            self._notice_changes()
        self._copies.wait(ticket)

    def read_by_forward(self, ticket: Ticket) -> None:
        """A forward that reads the slots of ``ticket`` is queued on the current stream: should its pins go without a
        backward, later rows still come into its slots after it."""
        ticket.forwarded = True
        self._copies.trained()

    def begin_update(self, ticket: Ticket) -> None:
        """The backward of a batch is about to update its rows; :meth:`release` says when it has."""
        self._host_sync.begin_update(ticket)

    def release(self, ticket: Ticket) -> None:
        """The batch has trained: its slots may be evicted. Releasing twice does nothing."""
        if not ticket.released:
            self._copies.trained()
            self._host_sync.end_update()
            ticket.cancel()

    def cancel_prepared(self) -> None:
        """No batch that was prepared and not forwarded will come."""
        for ticket in self._in_flight.tickets:
            if not ticket.forwarded:
                ticket.cancel()

    @_alone
    def skip(self, keys: Tensor, known: KnownBatch) -> None:
        """A known batch, the next one in order, with these keys (int64 [N]), will not be prepared."""
        if self.next_use_index is not None and not self._guard.is_broken:
            with self._guard.change("skipping a batch that was known"):
                self.next_use_index.skip(known, keys)

    def freeze_pins(self) -> None:
        """See :meth:`InFlight.freeze`."""
        self._in_flight.freeze()

    def unfreeze_pins(self) -> None:
        """See :meth:`InFlight.unfreeze`."""
        self._in_flight.unfreeze()

    @_alone
    def forget(self) -> None:
        """The known batches that were not prepared will not come."""
        if self.next_use_index is not None and not self._guard.is_broken:
            with self._guard.change("forgetting the batches that were known"):
                self.next_use_index.forget()
                self.planner.queue.clear()

    @property
    def looks_ahead(self) -> bool:
        """True if known uses choose what is evicted."""
        return self.next_use_index is not None

    @property
    def chain_bytes(self) -> int:
        """Memory of what links the known batches, in bytes."""
        return 0 if self.next_use_index is None else self.next_use_index.chain_bytes

    @property
    def known_bytes(self) -> int:
        """Memory of what is known of batches that were not prepared yet, in bytes."""
        return 0 if self.next_use_index is None else self.next_use_index.known_bytes

    def _plan(self, keys: Tensor, if_it_fits: bool) -> CachePlan | None:
        """The plan of the next batch; the cache grows if it must. None if it must not."""
        batch = self._in_flight.next_batch()  # used up even if planning fails: slots may be stamped with it
        oldest = self._in_flight.oldest
        found = self.planner.plan(keys, batch, batch if oldest is None else oldest)
        if isinstance(found, Shortage):
            if if_it_fits and oldest is not None:
                return None
            self._grow(found)
            found = self.planner.plan(keys, batch, batch)
            assert isinstance(found, CachePlan), "the cache grew by what was missing"
        return found

    def _carry_out(
        self, plan: CachePlan, known: KnownBatch | None, feature_lengths: Tensor, critical_path: bool
    ) -> torch.cuda.Event | None:
        """Move the rows; the map follows. A copy that fails leaves a cache that is as good as before."""
        self._copies.put_out(plan)
        with self._guard.change(f"bringing in the rows of batch {plan.batch}"):
            self.planner.put_out(plan)
            try:
                filled = self._copies.bring_in(plan)
            except BaseException:  # an interrupt, too
                self.planner.leave_empty(plan)
                self.counters.add_rows(Counter.EVICTIONS, plan.evicted_keys)
                self.counters.add_rows(Counter.WRITE_BACKS, plan.write_back_keys)
                self._guard.settle()
                raise
            self.planner.put_in(plan, known)
            self.counters.add_plan(plan, feature_lengths, critical_path)
        return filled

    def _grow(self, shortage: Shortage) -> None:
        slots, needed_slots = self.planner.map.num_slots, self.planner.map.num_slots + shortage.num_slots
        batch, pinned = self._in_flight.newest, len(self._in_flight)
        needed = f"batch {batch} and {pinned} in flight need {needed_slots} slots at once, there are {slots}"
        advice = "set a larger cache.ratio or cache.device_bytes, or a smaller batch"
        if self._overflow == "raise":
            raise CacheOverflowError(f"{self.name}: {needed}; {advice}")
        if pinned:
            raise CacheOverflowError(
                f"{self.name}: {needed}, and the cache cannot grow while {pinned} earlier batches wait for "
                f"their backward; run each backward before the next forward, or {advice}"
            )
        grown = min(max(needed_slots, slots + int(slots * GROWTH)), self.host.num_rows)
        warnings.warn(
            f"{self.name}: {needed}; the cache grows to {grown} slots "
            f"({(grown - slots) * self.slot_bytes / 1e6:.1f} MB more device memory). To avoid it {advice}",
            CacheGrowthWarning,
            stacklevel=2,
        )
        self._copies.finish()
        with self._guard.change(f"growing to {grown} slots"):
            self._attach(grown)
            self.planner.grow(grown)
            self.counters.add_growth(shortage.miss_keys)

    def _attach(self, num_slots: int) -> None:
        self._payload = self._device_payload(num_slots)
        self._copies.attach(self._payload, self.host.payload)

    def _warm_up(self) -> None:
        """Before the first batch, and again when all rows were dropped: first the rows that stay, then the best."""
        if self._pinned_keys.numel() and not self.planner.map.num_used:
            self._preload(self._pinned_keys.to(self.device))
        if not self._is_cold:
            return
        self._is_cold = False
        row_scores = self.planner.scores.of_rows()
        assert row_scores is not None, "warm-up without a profile"
        wanted = row_scores.index_fill(0, self._pinned_keys, 0.0)  # those are there already
        self._preload(best_rows(wanted, min(self.planner.map.num_free, wanted.numel())).to(self.device))

    def _preload(self, keys: Tensor) -> None:
        slots = self.planner.map.next_free(keys.numel())
        self._copies.fill(keys, slots)
        with self._guard.change("filling the cache before the first batch"):
            self.planner.occupy(keys, slots)
            self.counters.add_rows(Counter.PRELOADS, keys)

    # -- the host tier

    @_alone
    def read(self, keys: Tensor) -> Tensor:
        """Current weights of ``keys`` (int64 [N]): [N, D] on the device. Changes neither cache nor
        counters."""
        self._check()
        self._copies.finish()
        host_weights, slot_weights = self.host.weights, self._payload[0]
        rows = host_weights.index_select(0, keys.to(host_weights.device)).to(self.device)
        slots = self.planner.map.lookup(keys)
        cached = slots.nonzero().flatten()
        rows[cached] = slot_weights.data.index_select(0, slots[cached])
        return rows

    @_alone
    def flush(self) -> None:
        """Write every trained row back; the rows stay cached. Nothing moves when nothing was trained since.

        Safe in another thread than the training's: an update that runs is waited for, and one that begins waits.
        """
        started = time.perf_counter()
        self._check()
        self._host_sync.write_back()
        self.counters.seconds += time.perf_counter() - started

    @_alone
    def host_rows_changed(self, keys: Tensor | None = None) -> None:
        """Somebody wrote to these host rows: fetch those that are cached again.

        Args:
            keys: int64 [K]; None for all rows.

        Raises:
            CacheError: trained rows among them had not been written back, or wait for their backward.
        """
        self._check()
        self._host_sync.fetch_again(keys)

    @_alone
    def _notice_changes(self) -> None:
        self._check()

    def _check(self) -> None:
        """Before every operation: is the state whole, and did somebody write to host rows?"""
        self._guard.check()
        if self._host_sync.is_behind:
            self._host_sync.fetch_again()

    # -- what it did

    @property
    def transfer(self) -> Transfer:
        """What moves its rows now."""
        return self._copies.transfer

    @property
    def slot_bytes(self) -> int:
        """Payload of one slot, in bytes."""
        return sum(t[0].numel() * t.element_size() for t in self._payload)

    @property
    def device_bytes(self) -> int:
        """Slots, optimizer states, maps, scores and next uses, in bytes, as allocated; without the known batches."""
        slots = sum(t.numel() * t.element_size() for t in self._payload)
        next_uses = 0 if self.next_use_index is None else self.next_use_index.device_bytes
        return slots + self.planner.map.device_bytes + self.planner.scores.device_bytes + next_uses

    @property
    def stall_seconds(self) -> float:
        """How long training steps waited for rows, in seconds."""
        return self.counters.stall_seconds

    @_alone
    def stats(self) -> list[TableStats]:
        """Totals per table; the sum over tables is the pool's."""
        self._guard.check()
        slot_map = self.planner.map
        sizes = PoolSizes(
            rows_per_table=self.host.rows_per_table,
            free_slots=slot_map.num_free,
            map_bytes=slot_map.entry_bytes,
            device_bytes=self.device_bytes,
            host_bytes=self.host.host_bytes + self.planner.scores.host_bytes,
            row_bytes=self.host.row_bytes,
        )
        return table_stats(self.tables, self.counters, sizes)
