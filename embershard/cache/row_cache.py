"""Device cache of one pool of tables: plans batches, moves rows, keeps count."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from embershard.cache.config import CachePolicy, MapKind, Overflow, TransferKind
from embershard.cache.gpu.readback import Reads, planned, timed
from embershard.cache.guards import ChangeGuard, StreamOrder, UpdateGate, one_at_a_time
from embershard.cache.homes.home import Home
from embershard.cache.next_use import KnownBatch, OtherTables
from embershard.cache.own_policy import OwnScores
from embershard.cache.parts.part import PoolParts
from embershard.cache.planner import CachePlan, PinWatch, Shortage, grown_slots
from embershard.cache.planning_classes import planning_classes
from embershard.cache.policies import SlotScores, make_scores, most_frequent
from embershard.cache.rows.choose_transfer import transfer_maker
from embershard.cache.rows.copies import RowCopies
from embershard.cache.rows.moves import RowMoves
from embershard.cache.rows.transfer import MakeTransfer, Transfer
from embershard.cache.slot_state import CacheContents, SlotState
from embershard.cache.statistics import CacheCounters, TableStats, table_stats
from embershard.cache.tickets import InFlight, Ticket
from embershard.frequency.counts import RowCounts
from embershard.stages import stage


@dataclass(frozen=True, eq=False)
class _Coming:
    """A batch that is being prepared: the arguments of `RowCache.prepare`, and the following.

    Attributes:
        number: of the batch.
        pinned_from: slots that this batch or later ones used stay.
        training: the forwards and updates that were queued before.
    """

    keys: Tensor
    lengths: Tensor
    critical_path: bool
    known: KnownBatch | None
    if_it_fits: bool
    number: int
    pinned_from: int
    training: torch.cuda.Event | None


class RowCache:
    """Cache of one pool: S slots on the device in front of R rows in the host tier.

    Args:
        tables, host: name of each table of the pool, and the rows, in the same order.
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
        parts: hear of the batches; set before the first one.

    >>> from embershard.cache import MemoryRows, PoolShape
    >>> host = MemoryRows(PoolShape([6], dim=2))
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
        host: Home,
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
        self.tables, self.parts = list(tables), PoolParts()
        names = ", ".join(self.tables[:5]) + (", ..." if len(self.tables) > 5 else "")
        self.name = f"{owner + ', ' if owner else ''}tables {names}"
        self.host, self._device_payload = host, device_payload
        self._pinned_keys = torch.empty(0, dtype=torch.int64) if pinned_keys is None else pinned_keys
        map_class, index_class, planner_class = planning_classes(device)
        self._map = map_class(host.num_rows, num_slots, device, kind)
        others = OtherTables(host.row_offsets, table_of_feature, self._pinned_keys)
        self.next_use_index = index_class(self._map, others) if policy.by_next_use else None
        sizes = (host.num_rows, num_slots, device)
        own = None if policy.own is None else OwnScores(policy.own, policy.folder, *sizes)
        self._scores: SlotScores = own or make_scores(policy, *sizes, row_counts, transfer)
        num_pinned = self._pinned_keys.numel()
        self.state = SlotState(self._map, self._scores, self.next_use_index, num_pinned, policy.is_static)
        self._planner = planner_class(self.state)
        self.counters = CacheCounters(host.row_offsets, table_of_feature, device)
        self._overflow: Overflow = overflow
        self._in_flight = InFlight()
        self._pin_watch: PinWatch | None = None
        assert not policy.warmup or row_counts is not None, "warm-up without a profile"
        self._warmup: Callable[[int], Tensor] | None = None  # returns the rows to fill that many free slots with
        if policy.warmup and row_counts is not None:
            self._warmup = partial(most_frequent, row_counts, self._pinned_keys)
        self._copies = RowCopies(device, host, transfer_maker(transfer, device, host))
        self._guard, self._updates = ChangeGuard(self.name), UpdateGate(self.name)
        guards = (self._guard, self._updates)
        self._moves = RowMoves(host, self._copies, self.state, self._planner, self._in_flight, self.counters, *guards)
        self._attach(num_slots)
        self._lock, self._stream_order = threading.RLock(), StreamOrder(device)

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
        with self.counters.timed():
            self._moves.check()
            self._warm_up()
            with self._guard.change("adding a known batch"):
                known = self.next_use_index.know(keys, feature_lengths)
            self.parts.known(keys, feature_lengths, known)
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
            if_it_fits: do nothing if the batch does not fit before another one is released. Do nothing, either, for a
                known batch if two others are in flight and the three would take more than half of the slots: rows
                pinned that early cost more fills than they save time (decision 0011).

        Returns:
            The batch's ticket; None if it does not fit before another batch is released.

        Raises:
            CacheOverflowError: the batch does not fit beside those in flight, and `overflow="raise"` or the cache
                cannot grow because of them.
        """
        with self.counters.timed(critical_path):
            batch = self._begin(keys, feature_lengths, critical_path, known, if_it_fits)
            if batch is None:
                return None
            with stage("plan"):
                found = self._planner.plan(keys, batch.number, batch.pinned_from)
            return self._bring_in(batch, found)

    def preparing(self, keys: Tensor, lengths: Tensor, critical_path: bool, *rest: Any) -> Reads[Ticket | None]:
        """Do `prepare`, whose arguments these are, in parts: yield where the host needs numbers of the device. If the
        cache changes meanwhile, the plan is dropped, as if the batch did not fit."""
        work = self._preparing(keys, lengths, critical_path, *rest)
        return timed(work, partial(self.counters.add_seconds, critical_path))

    @one_at_a_time
    def _preparing(self, *arguments: Any) -> Reads[Ticket | None]:
        batch = self._begin(*arguments)
        if batch is None:
            return None
        found = yield from planned(
            self._planner.plan_with_reads(batch.keys, batch.number, batch.pinned_from),
            lambda: (self._guard.num_changes, self._in_flight.newest, self.state.clean_through),
        )
        return None if found is None else self._bring_in(batch, found)

    def _begin(
        self, keys: Tensor, lengths: Tensor, critical_path: bool, known: KnownBatch | None, if_it_fits: bool
    ) -> _Coming | None:
        """Begin to prepare a batch, up to its plan; None: it has to wait."""
        self._moves.check()
        self._warm_up()
        self.parts.coming(keys, known)
        other_slots = self.num_slots - self.state.num_pinned
        if if_it_fits and known is not None and self._in_flight.would_crowd(known.num_rows, other_slots):
            return None
        training = self._copies.newest_training
        number = self._in_flight.next_batch()  # not used again if planning fails: slots may be stamped with it
        oldest = self._in_flight.oldest
        pinned_from = number if oldest is None else oldest
        if self.state.is_static:
            self._moves.remove_passing(pinned_from)
        return _Coming(keys, lengths, critical_path, known, if_it_fits, number, pinned_from, training)

    def _bring_in(self, batch: _Coming, found: CachePlan | Shortage) -> Ticket | None:
        """Move the rows of a planned batch, after growing if it does not fit; None if it may fit after a release. On
        the critical path none comes where all batches in flight are held: they train together with this one."""
        if self._pin_watch is not None:
            self._pin_watch.note(found, batch.number, batch.pinned_from)
        if isinstance(found, Shortage):
            comes_none = batch.pinned_from == batch.number or (batch.critical_path and self._in_flight.are_held)
            if batch.if_it_fits and not comes_none:
                return None
            self._grow(found)
            found = self._planner.plan(batch.keys, batch.number, batch.pinned_from)  # what was in flight still is
            assert isinstance(found, CachePlan), "the cache grew by what was missing"
        with self.parts.moving(found, batch.known, self._copies, self._map):
            filled = self._moves.execute(found, batch.known, batch.lengths, batch.critical_path, batch.training)
        has_keys = self.parts.hears_changes or self.host.rounds
        ticket = Ticket(batch.number, found.slots, filled=filled, keys=batch.keys if has_keys else None)
        self._in_flight.add(ticket, None if batch.known is None else batch.known.num_rows)
        return ticket

    @one_at_a_time
    def reinitialise(self, keys: Tensor, numbers: Tensor) -> None:
        """Give rows `keys` (int64 [M], distinct) the initial weights of `numbers` ([M]; see `ShardWeights`), and states
        and scores of 0. What their slots hold is dropped. A call that fails is repeated.

        Raises:
            CacheError: a batch in flight uses such a row, or the host tier draws no weights.
        """
        self._moves.check()
        self.parts.changed(keys)
        self._moves.reinitialise(keys, numbers)

    def wait(self, ticket: Ticket) -> None:
        """Make the current stream wait until the batch's rows are in their slots."""
        if self._moves.is_behind:
            self._fetch_again()
        self._copies.wait(ticket)

    def read_by_forward(self, ticket: Ticket) -> None:
        """Note that a forward that reads the ticket's slots was queued on the current stream. Later fills wait for it,
        even if its pins end without a backward."""
        ticket.forwarded = True
        self._copies.trained()

    def begin_update(self, ticket: Ticket) -> None:
        """Begin the update of a batch's rows in its backward; `release` ends it."""
        self._updates.begin(ticket)
        if self.parts.hears_changes:  # now: an update that fails may have trained some
            assert ticket.keys is not None, "prepared before a part heard changes"
            self.parts.changed(ticket.keys)

    def hold(self, ticket: Ticket) -> None:
        """Keep a batch's slots beyond its backward: `training` updates its rows with those of other batches."""
        self._in_flight.hold(ticket)

    @contextmanager
    def training(self, tickets: Sequence[Ticket]) -> Iterator[None]:
        """Update, in the body, rows of batches that were held. An exception in it leaves the pool refused."""
        with self._lock, self._guard.change("training several batches at once"):
            for ticket in tickets:
                self.begin_update(ticket)
            yield
            for ticket in tickets:
                self.release(ticket)

    def release(self, ticket: Ticket) -> None:
        """Round the rows of a batch that has trained (`RowCopies.round`), and unpin. A second call does nothing."""
        if ticket.released:
            return
        try:
            self._copies.round(ticket)
        finally:
            self._copies.trained()
            self._updates.end()
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
        self.parts.skipped(keys, known)

    def train_nothing(self) -> None:
        """Let the rows stay as they are: nobody updates slots, and none is ever dirty."""
        self.state.clean_through = 2**31 - 1  # behind any batch

    def watch_pins(self) -> PinWatch:
        """Count from now on how often pins mattered. Plans take longer: for checks."""
        self._pin_watch, self._in_flight.is_watched = PinWatch(self.state), True
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
        self.parts.forgotten()

    def _warm_up(self) -> None:
        """Before the first batch, fill the pinned rows, and then those with the highest counts or of a checkpoint."""
        if self._pinned_keys.numel() and not self._map.num_used:
            self.parts.entering(self._pinned_keys, None)
            self._moves.preload(self._pinned_keys)
        choose, self._warmup = self._warmup, None
        if choose is not None:
            self.parts.entering(keys := choose(self._map.num_free), None)
            self._moves.preload(keys)

    def _attach(self, num_slots: int) -> None:
        self._payload = self._device_payload(num_slots)
        self._copies.attach(self._payload)

    def _grow(self, shortage: Shortage) -> None:
        """Add the slots that the newest batch lacks, if `overflow` and the batches in flight allow it."""
        slots, rows, row_bytes = self._map.num_slots, self.host.num_rows, self.host.slot_row_bytes
        grown = grown_slots(self.name, slots, shortage.num_slots, rows, row_bytes, self._in_flight, self._overflow)
        self._copies.finish()
        with self._guard.change(f"growing to {grown} slots"):
            self._attach(grown)
            self.state.grow(grown)
            self.counters.add_growth(shortage.miss_keys)

    # -- the host tier

    @one_at_a_time
    def read(self, keys: Tensor) -> Tensor:
        """Return the current weights of `keys` (int64 [N]): [N, D] on the device. Neither cache nor counters change."""
        self._moves.check()
        self._copies.finish()
        rows, slots, of_slots = self._copies.read(keys), self._map.lookup(keys), self._payload[0].data
        if not slots.is_cpu:  # without a wait for their number
            return torch.where((slots > 0).unsqueeze(1), of_slots.index_select(0, slots), rows, out=rows)
        cached = slots.nonzero().flatten()
        rows[cached] = of_slots.index_select(0, slots[cached])
        return rows

    @one_at_a_time
    def select(self, keys: Tensor) -> list[Tensor]:
        """Return rows `keys` (int64 [N]) as they are now, weights and then states: [N, ...] each, on the device."""
        self._moves.check()
        self._copies.finish()
        self.host.make(on_host := keys.cpu())
        rows, slots = [part.to(keys.device) for part in self.host.select(on_host)], self._map.lookup(keys)
        for part, of_slots in zip(rows, self._payload, strict=True):
            part[slots > 0] = of_slots.data.index_select(0, slots[slots > 0])
        return rows

    @one_at_a_time
    def replace(self, keys: Tensor, rows: Sequence[Tensor]) -> None:
        """Give rows `keys` (int64 [N] ascending) the weights and states `rows`, as of `select`, between steps: in the
        host tier, and in the slots of those that are cached."""
        self._moves.check()
        self.parts.changed(keys)
        self._moves.replace(keys, rows)

    @one_at_a_time
    def flush(self) -> None:
        """Bring the whole host tier up to date: `write_back`, and initial weights for all rows that have none yet."""
        self.write_back()
        self.host.make_all()

    @one_at_a_time
    def write_back(self) -> None:
        """Write every trained row back; the rows stay cached. Nothing moves if nothing was trained since the last time.

        May run in another thread than training: it waits for a running update, and a new update waits for it.
        """
        with self.counters.timed():
            self._moves.check()
            self._moves.write_back()

    @one_at_a_time
    def write_back_parts(self) -> None:
        """Let parts write what they train beside the slots to the home. Slots that have such rows get them, too."""
        if (keys := self.parts.written_back()) is not None:
            self._moves.refill(keys.to(self._map.device))

    @one_at_a_time
    def contents(self) -> CacheContents:
        """Return the cached rows, without the pinned ones, by key, in the order of their slots."""
        return self.state.contents(self._in_flight.newest)

    @one_at_a_time
    def restore(self, contents: CacheContents) -> None:
        """Fill the cache with rows of a checkpoint (by key) before the next batch, in place of a profile's. A static
        cache keeps to its profile."""
        if self.state.is_static:
            return
        keys = contents.rows.to(self._map.device)
        absent = contents.select((self._map.lookup(keys) == 0).cpu() & ~torch.isin(contents.rows, self._pinned_keys))
        self._scores.restore(absent.rows, absent.scores)
        self._warmup = partial(absent.best, by_age=self._scores.of_slots() is None)

    @one_at_a_time
    def host_rows_changed(self, keys: Tensor | Sequence[range] | None = None) -> None:
        """Fill the slots of host rows that somebody wrote to; arguments and errors as for `RowMoves.fetch_again`."""
        self.parts.changed(keys)
        self._moves.check()
        self._moves.fetch_again(keys)

    @one_at_a_time
    def _fetch_again(self) -> None:
        self._moves.check()

    # -- sizes and statistics

    @property
    def num_slots(self) -> int:
        """S, slots for rows; more after the cache grew."""
        return self._map.num_slots

    @property
    def transfer(self) -> Transfer:
        """Transfer that moves the rows now."""
        return self._copies.transfer

    @property
    def device_bytes(self) -> int:
        """Device memory of slots, optimizer states, maps, scores and next uses, in bytes; without the known batches."""
        return self._copies.slot_bytes + self.state.device_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory of rows, optimizer states and scores, in bytes."""
        return self.host.host_bytes + self._scores.host_bytes

    @one_at_a_time
    def stats(self) -> list[TableStats]:
        """Return the totals per table; the sum over tables is the pool's."""
        self._guard.check()
        sizes = {"map_bytes": (map_bytes := self._map.entry_bytes), "slot_bytes": self.device_bytes - map_bytes}
        sizes |= {"host_bytes": self.host_bytes, "free_slots": self._map.num_free, "row_bytes": self.host.row_bytes}
        return table_stats(self.tables, self.host.rows_per_table, self.counters, **sizes)
