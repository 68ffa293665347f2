"""The device cache over one pool of tables: plans batches, moves rows, keeps count."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from embershard.cache.host_store import HostStore
from embershard.cache.planner import CachePlan, CachePlanner, Misses
from embershard.cache.scores import SlotScores
from embershard.cache.slot_map import SlotMap
from embershard.cache.statistics import CacheCounters, Counter, TableStats, apportion
from embershard.cache.transfer import PlainTransfer
from embershard.errors import CacheError, CacheOverflowError

GROWTH = 0.25  # an overflow adds what is missing, and at least this share of the slots


class CacheGrowthWarning(UserWarning):
    """One batch needed more rows than the cache had slots, so the cache took more device memory."""


@dataclass(eq=False)
class Ticket:
    """A batch whose rows are resident and pinned until it is released.

    ``slots`` int64 [N] takes the place of the batch's ids. The pins go when :meth:`RowCache.release` is
    called (after the fused backward), or when nobody holds the ticket any more (a forward whose backward
    never ran).
    """

    batch: int
    slots: Tensor
    released: bool = False
    _release: weakref.finalize | None = field(default=None, repr=False)


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
        scores: the policy.
        overflow: ``"grow"`` or ``"raise"``.
        warmup: fill the pool with the rows of highest score before the first batch.
        home_keys: int64 [K], rows that are resident for ever, in slots 1 to K in this order.
        owner: whose pool it is ("rank 3"), for messages.
    """

    def __init__(
        self,
        tables: Sequence[str],
        host: HostStore,
        device_payload: Callable[[int], list[Tensor]],
        num_slots: int,
        table_of_feature: Sequence[int],
        scores: SlotScores,
        device: torch.device,
        overflow: str = "grow",
        warmup: bool = False,
        home_keys: Tensor | None = None,
        owner: str = "",
    ) -> None:
        self.tables = list(tables)
        names = ", ".join(self.tables[:5]) + (", ..." if len(self.tables) > 5 else "")
        self.name = f"{owner + ', ' if owner else ''}tables {names}"
        self.host = host
        self.device = device
        self._home_keys = torch.empty(0, dtype=torch.int64) if home_keys is None else home_keys
        slot_map = SlotMap(host.num_rows, num_slots, device)
        self.planner = CachePlanner(slot_map, scores, num_home_slots=self._home_keys.numel())
        self.counters = CacheCounters(host.row_offsets, table_of_feature, device)
        self._device_payload = device_payload
        self._overflow = overflow
        self._warmup = warmup
        self._batch = 0
        self._in_flight: dict[int, Ticket | None] = {}
        self._attach(num_slots)
        self._host_version = host.version

    # -- training

    @torch.no_grad()
    def prepare(self, keys: Tensor, feature_lengths: Tensor, critical_path: bool = True) -> Ticket:
        """Make every row of a batch resident and pin it.

        Args:
            keys: int64 [N], on the planning device, each in [0, R).
            feature_lengths: int64 [F], ids per feature; sums to N.
            critical_path: a training step waits for this.

        Raises:
            CacheOverflowError: the batch and those in flight do not fit, and ``overflow="raise"``.
        """
        started = time.perf_counter()
        self._check_host()
        self._warm_up()
        plan = self._plan(keys)
        self._move(plan)
        self.counters.add_plan(plan, feature_lengths, critical_path)
        self.counters.seconds += time.perf_counter() - started
        return self._issue(plan)

    def _move(self, plan: CachePlan) -> None:
        """Execute the plan's copies. The map is ahead of them: if one fails, it must not promise their rows."""
        victims_are_intact = True
        try:
            self.transfer.write_back(plan.write_back_slots, plan.write_back_keys)
            victims_are_intact = False
            self.transfer.fill(plan.fill_keys, plan.fill_slots)
        except BaseException:  # an interrupt, too
            self.planner.undo(plan, victims_are_intact)
            raise

    def release(self, ticket: Ticket) -> None:
        """The batch has trained (or never will): its slots may be evicted. Releasing twice does nothing."""
        if not ticket.released:
            ticket.released = True
            if ticket._release is not None:
                ticket._release()

    def _plan(self, keys: Tensor) -> CachePlan:
        batch = self._batch + 1
        looked = self.planner.look(keys, batch)
        self._batch = batch  # a batch that fails below has stamped slots, so its number is used up
        positions = looked[2]
        if not positions.numel():
            return self.planner.hits_only(looked, batch)
        miss_keys, inverse = keys.index_select(0, positions).unique(return_inverse=True)
        victims = self.planner.choose_victims(miss_keys.numel(), min(self._in_flight, default=batch))
        shortage = miss_keys.numel() - self.planner.map.num_free - victims.numel()
        if shortage > 0:
            self._grow(shortage, miss_keys, batch)
        return self.planner.admit(looked, Misses(miss_keys, inverse, victims), batch)

    def _issue(self, plan: CachePlan) -> Ticket:
        ticket = Ticket(plan.batch, plan.slots)
        self._in_flight[plan.batch] = None
        ticket._release = weakref.finalize(ticket, self._in_flight.pop, plan.batch, None)
        ticket._release.atexit = False
        return ticket

    def _grow(self, shortage: int, miss_keys: Tensor, batch: int) -> None:
        slots = self.planner.map.num_slots
        pinned = len(self._in_flight)
        needed = f"batch {batch} and {pinned} in flight need {slots + shortage} slots at once, there are {slots}"
        advice = "set a larger cache.ratio or cache.device_bytes, or a smaller batch"
        if self._overflow == "raise":
            raise CacheOverflowError(f"{self.name}: {needed}; {advice}")
        if pinned:
            raise CacheOverflowError(
                f"{self.name}: {needed}, and the cache cannot grow while {pinned} earlier batches wait for "
                f"their backward; run each backward before the next forward, or {advice}"
            )
        grown = min(slots + max(shortage, int(slots * GROWTH)), self.host.num_rows)
        warnings.warn(
            f"{self.name}: {needed}; the cache grows to {grown} slots "
            f"({(grown - slots) * self.slot_bytes / 1e6:.1f} MB more device memory). To avoid it {advice}",
            CacheGrowthWarning,
            stacklevel=2,
        )
        self._attach(grown)
        self.planner.map.grow(grown)
        self.planner.scores.grow(grown)
        self.counters.add_growth(miss_keys)

    def _attach(self, num_slots: int) -> None:
        self._payload = self._device_payload(num_slots)
        self.transfer = PlainTransfer(self._payload, self.host.payload)

    def _warm_up(self) -> None:
        """Before the first batch, and again when all rows were dropped: first the rows that stay, then the best."""
        if self._home_keys.numel() and not self.planner.map.num_used:
            self._preload(self._home_keys.to(self.device))
        if not self._warmup:
            return
        self._warmup = False
        row_scores = self.planner.scores.of_rows()
        assert row_scores is not None, "warm-up without a profile"
        wanted = row_scores.index_fill(0, self._home_keys, 0.0)  # those are there already
        best = torch.topk(wanted, min(self.planner.map.num_free, wanted.numel()))
        self._preload(best.indices[best.values > 0].sort().values.to(self.device))

    def _preload(self, keys: Tensor) -> None:
        slots = self.planner.occupy(keys)
        try:
            self.transfer.fill(keys, slots)
        except BaseException:  # nothing was trained yet, so the host has every row
            self.planner.clear()
            raise
        self.counters.add_rows(Counter.PRELOADS, keys)

    # -- the host tier

    @torch.no_grad()
    def read(self, keys: Tensor) -> Tensor:
        """Current weights of ``keys`` (int64 [N]): [N, D] on the device. Changes neither cache nor
        counters."""
        self._check_host()
        host_weights, slot_weights = self.host.weights, self._payload[0]
        rows = host_weights.index_select(0, keys.to(host_weights.device)).to(self.device)
        slots = self.planner.map.lookup(keys)
        cached = slots.nonzero().flatten()
        rows[cached] = slot_weights.data.index_select(0, slots[cached])
        return rows

    @torch.no_grad()
    def flush(self) -> None:
        """Write every trained row back; the rows stay cached. Nothing moves when nothing was trained
        since."""
        started = time.perf_counter()
        self._check_host()
        planner = self.planner
        if self._batch <= planner.clean_through:
            return
        slots = planner.dirty_slots()
        keys = planner.map.keys(slots)
        self.transfer.write_back(slots, keys)
        self.counters.add_rows(Counter.WRITE_BACKS, keys)
        planner.clean_through = min(self._in_flight, default=self._batch + 1) - 1
        self.counters.seconds += time.perf_counter() - started

    def drop(self) -> None:
        """Forget all cached rows without writing them back: the host tier has new contents.

        Raises:
            CacheError: a batch is in flight, whose rows would vanish under it.
        """
        if self._in_flight:
            raise CacheError(
                f"{self.name}: rows were replaced while {len(self._in_flight)} batches were in flight; "
                "load between steps, after the backward and before the next forward"
            )
        self.counters.add_rows(Counter.EVICTIONS, self.planner.map.keys(self.planner.map.used_slots()))
        self.planner.clear()
        self._host_version = self.host.version

    def _check_host(self) -> None:
        if self.host.version == self._host_version:
            return
        # Somebody wrote to the host rows: a checkpoint was loaded, or they were initialized.
        lost = self.planner.dirty_slots().numel() if self._batch > self.planner.clean_through else 0
        self.drop()
        if lost:
            raise CacheError(
                f"{self.name}: host rows were written to in place while {lost} trained rows had not been written "
                "back; what these had learned since is lost, and the host's rows count from now on. Call "
                "embershard.flush(model) before writing in place, or load with model.load_state_dict"
            )

    # -- what it did

    @property
    def slot_bytes(self) -> int:
        """Payload of one slot, in bytes."""
        return sum(t[0].numel() * t.element_size() for t in self._payload)

    @property
    def device_bytes(self) -> int:
        """Slots, optimizer states, maps and scores, in bytes, as allocated."""
        slots = sum(t.numel() * t.element_size() for t in self._payload)
        return slots + self.planner.map.device_bytes + self.planner.scores.device_bytes

    def stats(self) -> list[TableStats]:
        """Totals per table; the sum over tables is the pool's."""
        values = self.counters.values.tolist()
        rows = self.host.rows_per_table
        slot_map = self.planner.map
        held = [row[Counter.FILLS] + row[Counter.PRELOADS] - row[Counter.EVICTIONS] for row in values]
        absent = [all_rows - own for all_rows, own in zip(rows, held, strict=True)]
        slots = [own + free for own, free in zip(held, apportion(slot_map.num_free, absent), strict=True)]
        map_bytes = apportion(slot_map.slot_of_key.numel() * 4, rows)
        slot_bytes = apportion(self.device_bytes - slot_map.slot_of_key.numel() * 4, slots)
        host_bytes = apportion(self.host.host_bytes + self.planner.scores.host_bytes, rows)
        lookups = [row[Counter.LOOKUPS] for row in values]
        shares = lookups if any(lookups) else [1] * len(lookups)
        return [
            TableStats(
                table=table,
                rows=rows[t],
                slots=slots[t],
                lookups=(row := values[t])[Counter.LOOKUPS],
                unique_ids=row[Counter.HITS_UNIQUE] + row[Counter.FILLS],
                hits_unique=row[Counter.HITS_UNIQUE],
                hits_lookups=row[Counter.LOOKUPS] - row[Counter.MISSED_LOOKUPS],
                fills=row[Counter.FILLS] + row[Counter.PRELOADS],
                critical_path_fills=row[Counter.CRITICAL_PATH_FILLS],
                write_backs=row[Counter.WRITE_BACKS],
                evictions=row[Counter.EVICTIONS],
                overflow_growths=row[Counter.OVERFLOW_GROWTHS],
                bytes_to_device=(row[Counter.FILLS] + row[Counter.PRELOADS]) * self.host.row_bytes,
                bytes_to_host=row[Counter.WRITE_BACKS] * self.host.row_bytes,
                device_bytes=map_bytes[t] + slot_bytes[t],
                host_bytes=host_bytes[t],
                seconds=self.counters.seconds * shares[t] / sum(shares),
            )
            for t, table in enumerate(self.tables)
        ]
