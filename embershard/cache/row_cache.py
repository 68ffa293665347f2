"""Device cache of one pool of tables: plans batches, moves rows, keeps count."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from embershard.cache.config import CachePolicy, MapKind, Overflow, TransferKind
from embershard.cache.guards import StreamOrder, one_at_a_time
from embershard.cache.next_use import KnownBatch, OtherTables
from embershard.cache.planner import CachePlan, PinWatch, Shortage
from embershard.cache.planning_classes import planning_classes
from embershard.cache.policies import make_scores
from embershard.cache.pool_rows import PoolRows
from embershard.cache.rows.choose_transfer import transfer_maker
from embershard.cache.rows.host_store import HostStore
from embershard.cache.rows.transfer import MakeTransfer, Transfer
from embershard.cache.slot_state import CacheContents, SlotState
from embershard.cache.statistics import CacheCounters, TableStats
from embershard.cache.tickets import InFlight, Ticket
from embershard.frequency.counts import RowCounts


class RowCache:
    """Cache of one pool: S slots on the device in front of R rows in the host tier.

    Args:
        tables: name of each table of the pool, in the host store's order.
        host: the rows.
        device_payload: returns, for a number of slots, the payload tensors [S + 1, ...] that hold them (weights, then
            states). Called again with a larger number when the pool grows: it must keep the old slots' contents.
        num_slots: S.
        table_of_feature: for each feature of a batch, the number of its table.
        policy: rule by which rows are evicted, and whether to warm up.
        overflow: `"grow"` or `"raise"`.
        pinned_keys: int64 [K], rows that are never evicted, in slots 1 to K in this order.
        owner: of the pool ("rank 3"), for messages.
        row_counts: of a profile; None without one.
        transfer: a kind, or a maker of transfers.
        kind: of the map from rows to slots.

    Attributes:
        name: of the pool, for messages.
        state: rows, scores and next uses of the slots, for inspection.
        next_use_index: part of `state`; None if the policy does not look ahead.

    >>> host = HostStore([6], dim=2, dtype=torch.float32, states=[])
    >>> def slots(count):
    ...     return [torch.zeros(count + 1, 2)]
    >>> cache = RowCache(["users"], host, slots, 3, [0], CachePolicy("lru"), torch.device("cpu"))
    >>> ticket = cache.prepare(torch.tensor([5, 1, 5]), feature_lengths=torch.tensor([3]))
    >>> cache.wait(ticket)
    >>> ticket.slots.tolist()  # where forward, backward and update find the rows
    [2, 1, 2]
    >>> cache.release(ticket)
    >>> cache.stats()[0].fills
    2
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
        row_counts: RowCounts | None = None,
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
        pinned_keys = torch.empty(0, dtype=torch.int64) if pinned_keys is None else pinned_keys
        self._num_pinned = pinned_keys.numel()
        map_class, index_class, planner_class = planning_classes(device)
        self._map = map_class(host.num_rows, num_slots, device, kind)
        others = OtherTables(host.row_offsets, table_of_feature, pinned_keys)
        self.next_use_index = index_class(self._map, others) if policy.by_next_use else None
        scores = make_scores(policy, host.num_rows, num_slots, device, row_counts, transfer)
        self.state = state = SlotState(self._map, scores, self.next_use_index, self._num_pinned, policy.is_static)
        self._planner = planner_class(state)
        self.counters = counters = CacheCounters(host.row_offsets, table_of_feature, device)
        self._overflow = overflow
        self._in_flight = in_flight = InFlight()
        self._pin_watch: PinWatch | None = None
        self._lock = threading.RLock()
        make_transfer = transfer_maker(transfer, device, host)
        assert not policy.warmup or row_counts is not None, "warm-up without a profile"
        warmup = row_counts if policy.warmup else None
        self._rows = PoolRows(
            self.name, host, device_payload, make_transfer, state, counters, in_flight, pinned_keys, warmup
        )
        self._copies, self._guard = self._rows.copies, self._rows.guard
        self._stream_order = StreamOrder(device)

    # -- training

    @one_at_a_time
    def know(self, keys: Tensor, feature_lengths: Tensor) -> KnownBatch | None:
        """Announce a batch that will be prepared after all batches known so far. Steers eviction; no row moves.

        Args:
            keys: int64 [N], as for `prepare`.
            feature_lengths: int64 [F], ids per feature.

        Returns:
            The argument `known` of `prepare`; None if the policy does not look ahead.
        """
        if self.next_use_index is None:
            return None
        started = time.perf_counter()
        self._check()
        self._rows.warm_up()
        with self._guard.change("adding a known batch"):
            known = self.next_use_index.know(keys, feature_lengths)
        self.counters.seconds += time.perf_counter() - started
        return known

    @one_at_a_time
    def prepare(
        self,
        keys: Tensor,
        feature_lengths: Tensor,
        critical_path: bool = True,
        known: KnownBatch | None = None,
        if_it_fits: bool = False,
    ) -> Ticket | None:
        """Fill slots with the missing rows of a batch, and pin all of its rows.

        Args:
            keys: int64 [N], on the planning device, each in [0, R).
            feature_lengths: int64 [F], ids per feature; sums to N.
            critical_path: a training step waits for this call.
            known: result of `know` for the batch.
            if_it_fits: do nothing if the batch does not fit beside the batches in flight. Do nothing, either, for a
                known batch if two others are in flight and the three would take more than half of the slots: rows
                pinned that early cost more fills than they save time (docs/decisions/0011).

        Returns:
            The batch's ticket; None if it does not fit before another batch is released.

        Raises:
            CacheOverflowError: the batch does not fit beside those in flight, and `overflow="raise"` or the cache
                cannot grow because of them.
        """
        started = time.perf_counter()
        self._check()
        self._rows.warm_up()
        other_slots = self.num_slots - self._num_pinned
        if if_it_fits and known is not None and self._in_flight.would_crowd(known.num_rows, other_slots):
            return None
        plan = self._plan(keys, if_it_fits)
        if plan is None:
            return None
        filled = self._rows.execute(plan, self._planner, known, feature_lengths, critical_path)
        seconds = time.perf_counter() - started
        self.counters.seconds += seconds
        if critical_path:
            self.counters.stall_seconds += seconds
        ticket = Ticket(plan.batch, plan.slots, filled=filled)
        self._in_flight.add(ticket, None if known is None else known.num_rows)
        return ticket

    def wait(self, ticket: Ticket) -> None:
        """Make the current stream wait until the batch's rows are in their slots."""
        if self._rows.is_behind:
            self._notice_changes()
        self._copies.wait(ticket)

    def read_by_forward(self, ticket: Ticket) -> None:
        """Note that a forward that reads the ticket's slots was queued on the current stream. Later fills wait for it,
        even if its pins end without a backward."""
        ticket.forwarded = True
        self._copies.trained()

    def begin_update(self, ticket: Ticket) -> None:
        """Begin the update of a batch's rows in its backward; `release` ends it."""
        self._rows.begin_update(ticket)

    def release(self, ticket: Ticket) -> None:
        """Unpin the slots of a batch that has trained. A second call does nothing."""
        if not ticket.released:
            self._copies.trained()
            self._rows.end_update()
            ticket.cancel()

    def cancel(self, forwarded: bool) -> None:
        """Cancel all batches that were prepared and not forwarded; or those forwarded, whose backward will not run."""
        for ticket in self._in_flight.tickets:
            if ticket.forwarded == forwarded:
                ticket.cancel()

    @one_at_a_time
    def skip(self, keys: Tensor, known: KnownBatch) -> None:
        """Take back the oldest known batch, with these keys (int64 [N]), which will not be prepared."""
        if self.next_use_index is not None and not self._guard.is_broken:
            with self._guard.change("skipping a known batch"):
                self.next_use_index.skip(known, keys)

    def watch_pins(self) -> PinWatch:
        """Count from now on how often pins mattered. Plans take longer: for checks."""
        self._pin_watch = PinWatch(self.state)
        return self._pin_watch

    def freeze_pins(self) -> None:
        """Keep the batches in flight pinned until `unfreeze_pins`, released or not."""
        self._in_flight.freeze()

    def unfreeze_pins(self) -> None:
        """End `freeze_pins`."""
        self._in_flight.unfreeze()

    @one_at_a_time
    def forget(self) -> None:
        """Take back all known batches that were not prepared."""
        if self.next_use_index is not None and not self._guard.is_broken:
            with self._guard.change("forgetting the known batches"):
                self._planner.forget_known()

    def _plan(self, keys: Tensor, if_it_fits: bool) -> CachePlan | None:
        """Plan the next batch, and grow if it does not fit; None if it may fit after a release."""
        batch = self._in_flight.next_batch()  # not used again if planning fails: slots may be stamped with it
        oldest = self._in_flight.oldest
        if self.state.is_static:
            self._rows.remove_passing(self._planner, batch if oldest is None else oldest)
        found = self._planner.plan(keys, batch, batch if oldest is None else oldest)
        if self._pin_watch is not None:
            self._pin_watch.add(found, batch, batch if oldest is None else oldest)
        if isinstance(found, Shortage):
            if if_it_fits and oldest is not None:
                return None
            self._rows.grow(found, self._overflow)
            found = self._planner.plan(keys, batch, batch)
            assert isinstance(found, CachePlan), "the cache grew by what was missing"
        return found

    # -- the host tier

    @one_at_a_time
    def read(self, keys: Tensor) -> Tensor:
        """Return the current weights of `keys` (int64 [N]): [N, D] on the device. Neither cache nor counters change."""
        self._check()
        return self._rows.read(keys)

    @one_at_a_time
    def flush(self) -> None:
        """Bring the whole host tier up to date: `write_back`, and initial weights for all rows that have none yet."""
        self.write_back()
        self._rows.make_all()

    @one_at_a_time
    def write_back(self) -> None:
        """Write every trained row back; the rows stay cached. Nothing moves if nothing was trained since the last time.

        May run in another thread than training: it waits for a running update, and a new update waits for it.
        """
        started = time.perf_counter()
        self._check()
        self._rows.write_back()
        self.counters.seconds += time.perf_counter() - started

    @one_at_a_time
    def contents(self) -> CacheContents:
        """Return the cached rows, by key, without the pinned ones."""
        return self._rows.contents()

    @one_at_a_time
    def restore(self, contents: CacheContents) -> None:
        """Fill the cache with rows of a checkpoint (by key) before the next batch, in place of a profile's. A static
        cache keeps to its profile."""
        if not self.state.is_static:
            self._rows.restore(contents)

    @one_at_a_time
    def host_rows_changed(self, keys: Tensor | None = None) -> None:
        """Fill the slots of host rows that somebody wrote to with the new contents.

        Args:
            keys: int64 [K]; None for all rows.

        Raises:
            CacheError: some of these rows were trained and not written back, or wait for their backward.
        """
        self._check()
        self._rows.fetch_again(keys)

    @one_at_a_time
    def _notice_changes(self) -> None:
        self._check()

    def _check(self) -> None:
        """Before every operation: refuse a broken state, and fetch host rows that somebody wrote to."""
        self._guard.check()
        if self._rows.is_behind:
            self._rows.fetch_again()

    # -- sizes and statistics

    @property
    def num_rows(self) -> int:
        """R, rows of the pool."""
        return self.host.num_rows

    @property
    def num_slots(self) -> int:
        """S, slots for rows; more after the cache grew."""
        return self._map.num_slots

    @property
    def looks_ahead(self) -> bool:
        """True if the policy uses known batches."""
        return self.next_use_index is not None

    @property
    def chain_bytes(self) -> int:
        """Memory of the links between known batches, in bytes."""
        return 0 if self.next_use_index is None else self.next_use_index.chain_bytes

    @property
    def transfer(self) -> Transfer:
        """Transfer that moves the rows now."""
        return self._copies.transfer

    @property
    def device_bytes(self) -> int:
        """Device memory of slots, optimizer states, maps, scores and next uses, in bytes; without the known batches."""
        return self._rows.device_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory of rows, optimizer states and scores, in bytes."""
        return self._rows.host_bytes

    @property
    def stall_seconds(self) -> float:
        """Time that training steps waited for rows, in seconds."""
        return self.counters.stall_seconds

    @one_at_a_time
    def stats(self) -> list[TableStats]:
        """Return the totals per table; the sum over tables is the pool's."""
        self._guard.check()
        return self._rows.stats(self.tables)
