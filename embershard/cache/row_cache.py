"""Device cache of one pool of tables: plans batches, moves rows, keeps count."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embershard.cache.config import CachePolicy, MapKind, Overflow, TransferKind
from embershard.cache.gpu.readback import Reads, planned, read_at_once, timed
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
from embershard.cache.rows.touched import TouchedKeys
from embershard.cache.rows.transfer import MakeTransfer, Transfer
from embershard.cache.slot_map import BLOCK
from embershard.cache.slot_state import CacheContents, SlotState
from embershard.cache.statistics import CacheCounters, Counter, TableStats, table_stats
from embershard.cache.tickets import InFlight, Ticket
from embershard.errors import CacheError
from embershard.frequency.counts import RowCounts
from embershard.stages import is_stage

if TYPE_CHECKING:
    from embershard.cache.ids.births import Births


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
        touched: rows that updates trained; None: they are not tracked (`track_updates`).

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
        self._attach(num_slots)
        self._has_updates = False  # since the last write-back
        self._host_version, self._weights_version = host.version, host.weights_version
        self._guard, self._updates = ChangeGuard(self.name), UpdateGate(self.name)
        self._lock, self._stream_order = threading.RLock(), StreamOrder(device)
        self.touched: TouchedKeys | None = None

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
        self._warm_up()
        with self._guard.change("adding a known batch"):
            known = self.next_use_index.know(keys, feature_lengths)
        self.parts.known(keys, feature_lengths, known)
        self.counters.seconds += time.perf_counter() - started
        return known

    def prepare(
        self,
        keys: Tensor,
        feature_lengths: Tensor,
        critical_path: bool = True,
        known: KnownBatch | None = None,
        if_it_fits: bool = False,
        births: Births | None = None,
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
            births: rows that begin anew with this batch; see `begin_anew`.

        Returns:
            The batch's ticket; None if it does not fit before another batch is released.

        Raises:
            CacheOverflowError: the batch does not fit beside those in flight, and `overflow="raise"` or the cache
                cannot grow because of them.
        """
        with self._lock:  # between the parts, too
            return read_at_once(self.preparing(keys, feature_lengths, critical_path, known, if_it_fits, births))

    def preparing(self, keys: Tensor, lengths: Tensor, critical_path: bool, *rest: Any) -> Reads[Ticket | None]:
        """Do `prepare`, whose arguments these are, in parts: yield where the host needs numbers of the device. If the
        cache changes meanwhile, the plan is dropped, as if the batch did not fit."""
        work = self._preparing(keys, lengths, critical_path, *rest)
        return timed(work, partial(self.counters.add_seconds, critical_path))

    @one_at_a_time
    def _preparing(
        self,
        keys: Tensor,
        feature_lengths: Tensor,
        critical_path: bool,
        known: KnownBatch | None,
        if_it_fits: bool,
        births: Births | None = None,
    ) -> Reads[Ticket | None]:
        self._check()
        self._warm_up()
        self.parts.coming(keys, known)
        other_slots = self.num_slots - self.state.num_pinned
        if if_it_fits and known is not None and self._in_flight.would_crowd(known.num_rows, other_slots):
            return None
        if births is not None:
            self.begin_anew(births)
        training = self._copies.newest_training
        plan = yield from self._plan(keys, if_it_fits, critical_path)
        if plan is None:
            return None
        with self.parts.moving(plan, known, self._copies, self._map):
            filled = self._execute(plan, known, feature_lengths, critical_path, training)
        has_keys = self.touched is not None or self.host.rounds
        ticket = Ticket(plan.batch, plan.slots, filled=filled, keys=keys if has_keys else None)
        self._in_flight.add(ticket, None if known is None else known.num_rows)
        return ticket

    @one_at_a_time
    def begin_anew(self, births: Births) -> None:
        """Give rows to other ids: initial weights by id, states and scores of 0. What their slots hold is dropped.

        `prepare` does it for its batch; call it for a batch that is skipped. Nothing else changes, and a call that
        fails, or whose batch is not prepared after all, is repeated with the batch. See `births.py`.

        Raises:
            CacheError: a batch in flight uses such a row, or the host tier draws no weights.
        """
        self._check()
        slots = births.slots_to_empty(self.state, self._in_flight, self.name)
        self._copies.finish()  # no earlier content lands later
        self.host.begin_anew(births.keys, births.ids)
        if slots.numel():
            emptied = self._planner.removal(slots)
            with self._guard.change("emptying the slots of rows that begin anew"):
                self._planner.remove(emptied)
                self.counters.add_rows(Counter.EVICTIONS, emptied.evicted_keys)
        self._scores.restore(births.keys, torch.zeros(births.keys.numel()))

    def wait(self, ticket: Ticket) -> None:
        """Make the current stream wait until the batch's rows are in their slots."""
        if self._is_behind:
            self._notice_changes()
        self._copies.wait(ticket)

    def read_by_forward(self, ticket: Ticket) -> None:
        """Note that a forward that reads the ticket's slots was queued on the current stream. Later fills wait for it,
        even if its pins end without a backward."""
        ticket.forwarded = True
        self._copies.trained()

    def begin_update(self, ticket: Ticket) -> None:
        """Begin the update of a batch's rows in its backward; `release` ends it."""
        self._updates.begin(ticket)
        self._has_updates = True
        if self.touched is not None:  # now: an update that fails may have trained some
            assert ticket.keys is not None, "prepared before updates were tracked"
            self.touched.add(ticket.keys)

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
            self._has_updates = True
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

    def track_updates(self) -> None:
        """Note in `touched`, from now on, which rows are trained. Call it first before any batch is prepared."""
        self.touched = TouchedKeys(self.host.num_rows, self._map.device)

    def train_nothing(self) -> None:
        """Let the rows stay as they are: nobody updates slots, and none is ever dirty."""
        self.state.clean_through = 2**31 - 1  # behind any batch

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
        self.parts.forgotten()

    def _plan(self, keys: Tensor, if_it_fits: bool, critical_path: bool) -> Reads[CachePlan | None]:
        """Plan the next batch, and grow if it does not fit; None if it may fit after a release. On the critical path
        none comes where all batches in flight are held: they train together with this one."""
        batch = self._in_flight.next_batch()  # not used again if planning fails: slots may be stamped with it
        oldest = self._in_flight.oldest
        pinned = batch if oldest is None else oldest
        if self.state.is_static:  # rows that earlier batches brought in and no later one uses leave
            passing, num_passing = self._planner.removal_of_passing(pinned)
            if passing.evicted_slots.numel():
                self._in_flight.check_victims(passing.evicted_slots, self._map, self._pin_watch is not None)
                passing = self._own_write_backs(passing)  # the next plan's barrier orders them
                self._copies.write_back_evicted(passing)
                with self._guard.change("removing rows from a static cache"):
                    self._planner.remove(passing, num_passing)
                    self._note_evicted(passing)
        found = yield from planned(
            self._planner.plan_with_reads(keys, batch, pinned),
            lambda: (self._guard.num_changes, self._in_flight.newest, self.state.clean_through),
        )
        if found is not None and self._pin_watch is not None:
            self._pin_watch.add(found, batch, pinned)
        if isinstance(found, Shortage):
            if if_it_fits and oldest is not None and not (critical_path and self._in_flight.are_held):
                return None
            self._grow(found)
            found = self._planner.plan(keys, batch, pinned)  # what was in flight before the growth still is
            assert isinstance(found, CachePlan), "the cache grew by what was missing"
        return found

    # -- rows move first, and the state changes afterwards, so that the two always agree

    def _warm_up(self) -> None:
        """Before the first batch, fill the pinned rows, and then those with the highest counts or of a checkpoint."""
        if self._pinned_keys.numel() and not self._map.num_used:
            self._preload(self._pinned_keys)
        choose, self._warmup = self._warmup, None
        if choose is not None:
            self._preload(choose(self._map.num_free))

    @is_stage("warm-up")
    def _preload(self, every: Tensor) -> None:
        self.parts.entering(every, None)
        for keys in [every] if self._map.device.type == "cpu" else every.split(BLOCK):
            keys = keys.to(self._map.device)
            slots = self._map.next_free(keys.numel())
            self._copies.preload(keys, slots)
            with self._guard.change("filling the cache before the first batch"):
                self.state.preload(keys, slots)
                self.counters.add_rows(Counter.PRELOADS, keys)

    def _attach(self, num_slots: int) -> None:
        self._payload = self._device_payload(num_slots)
        self._copies.attach(self._payload)

    @is_stage("fills")
    def _execute(
        self,
        plan: CachePlan,
        known: KnownBatch | None,
        feature_lengths: Tensor,
        critical_path: bool,
        training: torch.cuda.Event | None,
    ) -> torch.cuda.Event | None:
        """Move a plan's rows; return the event to wait for before their use, if any. A copy that fails loses no row."""
        self._in_flight.check_victims(plan.evicted_slots, self._map, self._pin_watch is not None)
        plan = self._own_write_backs(plan)
        self._copies.write_back_evicted(plan, training)
        if self.host.is_shared:
            self.host.wait_for_ranks(self.name, plan.digest)
        with self._guard.change(f"filling the rows of batch {plan.batch}"):
            self._planner.evict(plan)
            try:
                filled = self._copies.fill_missed(plan)
            except BaseException:  # an interrupt, too
                self._planner.cancel_fill(plan)
                self._note_evicted(plan)
                self._guard.settle()
                raise
            self._planner.admit(plan, known)
            self.counters.add_plan(plan, feature_lengths, critical_path)
        return filled

    def _own_write_backs(self, plan: CachePlan) -> CachePlan:
        """Leave the rows of other ranks to them: all ranks evict the same rows."""
        is_own = self.host.is_own(plan.write_back_keys)
        if is_own is None:
            return plan
        own_keys, own_slots = plan.write_back_keys[is_own], plan.write_back_slots[is_own]
        return dataclasses.replace(plan, write_back_keys=own_keys, write_back_slots=own_slots)

    def _note_evicted(self, plan: CachePlan) -> None:
        self.counters.add_rows(Counter.EVICTIONS, plan.evicted_keys)
        self.counters.add_rows(Counter.WRITE_BACKS, plan.write_back_keys)

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
        self._check()
        self._copies.finish()
        rows, slots, of_slots = self._copies.read(keys), self._map.lookup(keys), self._payload[0].data
        if not slots.is_cpu:  # without a wait for their number
            return torch.where((slots > 0).unsqueeze(1), of_slots.index_select(0, slots), rows, out=rows)
        cached = slots.nonzero().flatten()
        rows[cached] = of_slots.index_select(0, slots[cached])
        return rows

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
        started = time.perf_counter()
        self._check()
        with self._updates.lock:
            self._updates.wait_until_idle()
            self._copies.finish()
            clean_through = self._in_flight.trained_through
            if self._in_flight.newest > self.state.clean_through:
                for used in self._map.used_in_blocks():
                    slots = used[self.state.is_dirty(used)]
                    keys = self._map.keys(slots)
                    if (is_own := self.host.is_own(keys)) is not None:
                        slots, keys = slots[is_own], keys[is_own]
                    self._copies.write_back(slots, keys)
                    self.counters.add_rows(Counter.WRITE_BACKS, keys)
                self.state.clean_through = clean_through
            self._has_updates = False
        self.counters.seconds += time.perf_counter() - started

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
        """Fill the slots of host rows that somebody wrote to; arguments and errors as for `_fetch_again`."""
        self._check()
        self._fetch_again(keys)

    @one_at_a_time
    def _notice_changes(self) -> None:
        self._check()

    def _check(self) -> None:
        """Before every operation: refuse a broken state, and fetch host rows that somebody wrote to."""
        self._guard.check()
        if self._is_behind:
            self._fetch_again()

    @property
    def _is_behind(self) -> bool:
        """True if host rows were written to in a way that torch counts, and not fetched since."""
        return self.host.version != self._host_version

    def _fetch_again(self, keys: Tensor | Sequence[range] | None = None) -> None:
        """Fill the slots of host rows that somebody wrote to: `keys` (int64 [K], or ranges), or any if None. Includes
        rows of batches that were prepared and not forwarded.

        Raises:
            CacheError: some of these rows were trained and not written back, or wait for their backward; or somebody
                wrote to weights while some rows had no initial weights yet, which would be written later.
        """
        if not self.host.is_made and (keys is not None or self.host.weights_version != self._weights_version):
            raise CacheError(
                f"{self.name}: host rows were written to before all rows had their initial weights, and nobody can "
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
                f"{self.name}: host rows were replaced while {num_forwarded} batches waited for their backward; write "
                "to host rows between steps, after the backward and before the next forward"
            )
        # Prepared batches stamp their slots, too, but without an update nothing is lost.
        lost = int(self.state.is_dirty(slots).sum()) if self._has_updates else 0
        if keys is None:
            lost += self._copies.transfer.discard()  # these rows would overwrite the new contents
        version, fetched = self.host.version, self._map.keys(slots)
        with self._updates.lock:
            self._updates.wait_until_idle()
            self._copies.finish()
            self._copies.fill(fetched, slots)
        if not lost:
            self._note_fetched(fetched, version if keys is None else None)
            return
        try:
            raise CacheError(
                f"{self.name}: host rows were written to in place while {lost} trained rows had not been written "
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
            self.counters.add_rows(Counter.EVICTIONS, keys)
            self.counters.add_rows(Counter.PRELOADS, keys)
            if version is not None:
                self._has_updates = False
                self.state.clean_through = max(self.state.clean_through, self._in_flight.trained_through)
                self._host_version, self._weights_version = version, self.host.weights_version

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
