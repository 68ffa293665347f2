"""Plans of single batches: the slot of every id, the rows to fill and the rows to evict.

The cost of a plan follows the batch, not the table and not the cache: one gather finds the slots of all ids; only the
misses are sorted; victims come from a queue that is refilled in bulk. Planning is deterministic: equal states and equal
keys give equal plans.

A plan changes no map. It is executed in two halves, so that the map never promises a row that is not in its slot:
`CachePlanner.evict` once the evicted rows are in the host tier, `CachePlanner.note_filled` once the filled rows are in
their slots.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from embershard.cache import loops
from embershard.cache.config import Overflow
from embershard.cache.eviction import VictimQueue
from embershard.cache.gpu.readback import Reads
from embershard.cache.next_use import KnownBatch
from embershard.cache.slot_state import SlotState
from embershard.cache.tickets import InFlight
from embershard.errors import CacheOverflowError
from embershard.units import size


class HostKeys(NamedTuple):
    """Keys of a plan's fills, evictions and write-backs: int64 [M], [E] and [W] on the CPU."""

    fill: Tensor
    evicted: Tensor
    write_back: Tensor


@dataclass(frozen=True, eq=False)
class CachePlan:
    """Slots, fills, evictions and write-backs of one batch.

    N ids, M fills, E evictions, W <= E write-backs; all int64 on the planning device.

    Attributes:
        batch: number of the batch, counted from 1.
        slots: [N] slot of every id.
        fill_keys, fill_slots: [M] rows to fill, ascending by key, and their slots.
        evicted_keys, evicted_slots: [E] rows to evict; their slots are among `fill_slots`.
        write_back_keys, write_back_slots: [W] the evicted rows that were trained since their last fill or write-back.
        first_hits: bool [N], True at one position of every distinct row that was found in the cache.
        missed: [?] positions of all ids that were not found, ascending; in any order on a GPU.

    >>> from embershard.cache.policies import RecencyScores
    >>> from embershard.cache.slot_map import SlotMap
    >>> planner = CachePlanner(SlotState(SlotMap(num_keys=9, num_slots=3), RecencyScores()))
    >>> plan = planner.plan(torch.tensor([7, 5, 7]), batch=1, oldest_pinned=1)
    >>> plan.slots.tolist(), plan.fill_keys.tolist(), plan.evicted_keys.tolist()
    ([2, 1, 2], [5, 7], [])
    """

    batch: int
    slots: Tensor
    fill_keys: Tensor
    fill_slots: Tensor
    evicted_keys: Tensor
    evicted_slots: Tensor
    write_back_keys: Tensor
    write_back_slots: Tensor
    first_hits: Tensor
    missed: Tensor

    @cached_property
    def on_host(self) -> HostKeys:
        """Its keys on the CPU; of a plan on a GPU in one copy, for which the host waits."""
        keys = (self.fill_keys, self.evicted_keys, self.write_back_keys)
        if not self.fill_keys.is_cuda:
            return HostKeys(*keys)
        return HostKeys(*torch.cat(keys).cpu().split([each.numel() for each in keys]))

    @property
    def digest(self) -> int:
        """Number that tells plans apart. Write-backs are left out: a rank that flushed alone has fewer."""
        return int((self.fill_keys * self.fill_slots).sum() - self.evicted_keys.sum())


@dataclass(frozen=True, eq=False)
class Shortage:
    """Reason why a batch has no plan.

    Attributes:
        num_slots: slots that are missing, because batches in flight pin the others.
        miss_keys: int64 [M], rows that the batch did not find, ascending.
    """

    num_slots: int
    miss_keys: Tensor


class VictimOrder(Protocol):
    """Order in which slots are evicted."""

    def clear(self) -> None:
        """Forget the order, which follows from the state."""

    def offer(self, slots: Tensor, next_uses: Tensor, batch: int) -> None:
        """Consider `slots` (int64 [M]) that `batch` used, with their rows' next uses (int32 [M], 0: none)."""


class Planner(ABC):
    """Plans batches against the slots of one pool, and changes its state as plans are executed."""

    def __init__(self, state: SlotState, order: VictimOrder) -> None:
        self.state = state
        self._map, self._scores, self._next_use_index = state.map, state.scores, state.next_use_index
        self._order = order
        self._is_open = False  # a plan was begun and not executed

    @abstractmethod
    def plan(self, keys: Tensor, batch: int, oldest_pinned: int) -> CachePlan | Shortage:
        """Plan a batch. Only the use stamps of the rows it finds change, so that none of them becomes a victim.

        Args:
            keys: int64 [N].
            batch: its number, which no other plan has.
            oldest_pinned: slots last used by this batch or a later one are not evicted.
        """

    def plan_with_reads(self, keys: Tensor, batch: int, oldest_pinned: int) -> Reads[CachePlan | Shortage]:
        """Do what `plan` does; yield where the host needs numbers of the device."""
        yield from ()
        return self.plan(keys, batch, oldest_pinned)

    def _begin(self) -> None:
        if self._is_open:
            self._order.clear()  # the earlier plan's victims are still cached, but no longer in the order
        self._is_open = True

    def evict(self, plan: CachePlan) -> None:
        """Unbind the plan's victims, whose rows are in the host tier."""
        if plan.evicted_slots.numel():
            self.state.evict(plan.evicted_keys, plan.evicted_slots)

    def removal(self, slots: Tensor, num_dirty: int | None = None) -> CachePlan:
        """Return a plan of no batch, which evicts `slots` (int64 [M], distinct) and fills none, for `remove`.

        Args:
            num_dirty: how many of them are dirty; None: a GPU's host waits for the number.
        """
        none, keys, dirty = slots[:0], self._map.keys(slots), self.state.is_dirty(slots)
        places = _places(dirty, num_dirty)
        return CachePlan(0, none, none, none, keys, slots, keys[places], slots[places], dirty[:0], none)

    def removal_of_passing(self, oldest_pinned: int) -> tuple[CachePlan, int]:
        """Return a `removal` of the slots in `SlotState.passing` that no batch from `oldest_pinned` on used, and how
        many stay. A GPU's host waits once."""
        passing = self.state.passing
        is_leaving = self._map.last_batch(passing) < oldest_pinned
        counts = torch.stack([is_leaving.sum(), (is_leaving & self.state.is_dirty(passing)).sum()])
        num_leaving, num_dirty = counts.tolist() if passing.numel() else (0, 0)
        removal = self.removal(passing[_places(is_leaving, num_leaving)], num_dirty)
        return removal, passing.numel() - num_leaving

    def remove(self, plan: CachePlan, num_passing: int | None = None) -> None:
        """Empty the slots of a `removal`, whose rows are in the host tier or not needed any more.

        Args:
            num_passing: of the slots in `SlotState.passing`, how many are not emptied; None: as for `removal`.
        """
        self.evict(plan)
        self.cancel_fill(plan)
        passing = self.state.passing
        self.state.passing = passing[_places(self._map.keys(passing) >= 0, num_passing)]

    def cancel_fill(self, plan: CachePlan) -> None:
        """Free the victims' slots, after `evict` and in place of `note_filled`: the rows could not be filled."""
        self._map.free(plan.evicted_slots)

    def note_filled(self, plan: CachePlan, known: KnownBatch | None = None) -> None:
        """Bind the plan's filled rows, which are in their slots, and count the batch's uses.

        Args:
            known: the batch as `NextUseIndex.know` returned it.
        """
        self._map.claim(plan.fill_slots.numel() - plan.evicted_slots.numel())
        self.state.bind(plan.fill_keys, plan.fill_slots, plan.batch)
        self._scores.used(plan.slots, plan.first_hits, plan.fill_slots)
        if known is not None:
            assert self._next_use_index is not None, "only an index of next uses knows batches"
            arrived = self._next_use_index.arrive(known, plan.slots)
            if arrived is not None:
                self._order.offer(*arrived, plan.batch)
        self._is_open = False

    def forget_known(self) -> None:
        """Forget all known batches, and the ranking of victims that follows from them."""
        assert self._next_use_index is not None, "only an index of next uses knows batches"
        self._next_use_index.forget()
        self._order.clear()


def _places(mask: Tensor, count: int | None) -> Tensor:
    """Return the `count` places at which bool [N] is True; None: they are counted."""
    return mask.nonzero_static(size=int(mask.sum()) if count is None else count).flatten()


class CachePlanner(Planner):
    """Plans batches on a CPU, by compiled loops.

    >>> from embershard.cache.policies import RecencyScores
    >>> from embershard.cache.slot_map import SlotMap
    >>> planner = CachePlanner(SlotState(SlotMap(num_keys=9, num_slots=1), RecencyScores()))
    >>> planner.note_filled(planner.plan(torch.tensor([7]), batch=1, oldest_pinned=1))
    >>> planner.plan(torch.tensor([5]), batch=2, oldest_pinned=2).evicted_keys.tolist()
    [7]
    """

    def __init__(self, state: SlotState, make_queue: Callable[[SlotState], VictimQueue] = VictimQueue) -> None:
        self._queue = make_queue(state)
        super().__init__(state, self._queue)

    def plan(self, keys: Tensor, batch: int, oldest_pinned: int) -> CachePlan | Shortage:
        self._begin()
        slots, first_hits, missed = self._map.find(keys, batch)
        if not missed.numel():
            return CachePlan(batch, slots, missed, missed, missed, missed, missed, missed, first_hits, missed)
        fill_keys, inverse = self._distinct(keys.index_select(0, missed))
        victims = self._choose_victims(fill_keys.numel(), oldest_pinned)
        num_missing = fill_keys.numel() - self._map.num_free - victims.numel()
        if num_missing > 0:
            return Shortage(num_missing, fill_keys)
        num_free = fill_keys.numel() - victims.numel()
        fill_slots = torch.cat([self._map.next_free(num_free), victims]) if num_free else victims
        evicted_keys, dirty, num_dirty = self._fill(slots, missed, inverse, fill_slots, victims)
        fills, evictions, write_backs = (fill_keys, fill_slots), (evicted_keys, victims), (evicted_keys, victims)
        if num_dirty < victims.numel():
            write_backs = evicted_keys[dirty], victims[dirty]
        return CachePlan(batch, slots, *fills, *evictions, *write_backs, first_hits, missed)

    def _fill(
        self, slots: Tensor, missed: Tensor, inverse: Tensor, fill_slots: Tensor, victims: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """Give the missed ids the slots of their rows; return the victims' keys, which of them are dirty, and how many.
        Arguments as for `loops.fill`."""
        evicted_keys, dirty = torch.empty_like(victims), torch.empty_like(victims, dtype=torch.bool)
        ids = (missed.numpy(), inverse.numpy(), fill_slots.numpy(), victims.numpy())
        state = (self._map.keys_array, self._map.stamps_array, self.state.clean_through)
        return evicted_keys, dirty, loops.fill(*ids, *state, slots.numpy(), evicted_keys.numpy(), dirty.numpy())

    def worst(self, count: int, oldest_pinned: int) -> Tensor:
        """Return the `count` slots to evict first, by a new ranking; fewer if the others are pinned: int64. The caller
        evicts them."""
        self._queue.clear()
        victims = self._queue.pop(count, oldest_pinned)
        self._queue.clear()
        return victims

    def _choose_victims(self, count: int, oldest_pinned: int) -> Tensor:
        """Slots to evict so that `count` rows fit: int64; fewer than needed when the others are pinned."""
        needed = count - self._map.num_free
        if needed <= 0:
            return torch.empty(0, dtype=torch.int64, device=self._map.device)
        return self._queue.pop(needed, oldest_pinned)

    @staticmethod
    def _distinct(keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distinct `keys` (int64 [M]) ascending, and for each key its number among them: int64 [M]."""
        array = keys.numpy()
        inverse = np.empty_like(array)
        return keys[: loops.distinct(array, array.argsort(), inverse)], torch.from_numpy(inverse)


_LEAST_SHARE = 0.25  # a cache grows by what is missing, and by at least this share of its slots


class CacheGrowthWarning(UserWarning):
    """One batch needed more rows than the cache had slots, so the cache took more device memory."""


def grown_slots(
    pool: str, num_slots: int, num_missing: int, num_rows: int, slot_bytes: int, in_flight: InFlight, overflow: Overflow
) -> int:
    """Return the number of slots to grow to so that the newest batch fits, and warn.

    Raises:
        CacheOverflowError: growth is forbidden, or other batches in flight are not held.
    """
    batch, pinned, needed_slots = in_flight.newest, len(in_flight), num_slots + num_missing
    num_held = sum(ticket.held for ticket in in_flight.tickets)  # these have no graph over the slots
    waiting, held = pinned - num_held, f" ({num_held} of which train together with it)" if num_held else ""
    needed = f"batch {batch} and {pinned} in flight{held} need {needed_slots} slots at once, there are {num_slots}"
    advice = "set a larger cache.ratio or cache.device_bytes, or a smaller batch"
    if overflow == "raise":
        raise CacheOverflowError(f"{pool}: {needed}; {advice}")
    if waiting:
        raise CacheOverflowError(
            f"{pool}: {needed}, and the cache cannot grow while {waiting} earlier batches wait for "
            f"their backward; run each backward before the next forward, or {advice}"
        )
    grown = min(max(needed_slots, num_slots + int(num_slots * _LEAST_SHARE)), num_rows)
    warnings.warn(
        f"{pool}: {needed}; the cache grows to {grown} slots "
        f"({size((grown - num_slots) * slot_bytes)} more device memory). To avoid it {advice}",
        CacheGrowthWarning,
        stacklevel=3,
    )
    return grown


_ABOVE_ALL = torch.iinfo(torch.int64).max


class PinWatch:
    """Counts pinned slots that plans passed over: they rank below a victim, so that only their pins saved them.

    A cache that ignored pins equals one that keeps them where this never happens. Every plan that evicts ranks all
    slots: this is for checks, not for training.

    Attributes:
        in_flight: slots pinned by earlier batches in flight, counted once per plan.
        own: slots that the planned batch itself uses, likewise, where no batch was in flight.

    >>> from embershard.cache.planner import CachePlanner
    >>> from embershard.cache.policies import RecencyScores
    >>> from embershard.cache.slot_map import SlotMap
    >>> state = SlotState(SlotMap(num_keys=9, num_slots=1), RecencyScores())
    >>> planner, watch = CachePlanner(state), PinWatch(state)
    >>> planner.note_filled(planner.plan(torch.tensor([7]), batch=1, oldest_pinned=1))
    >>> watch.note(planner.plan(torch.tensor([5]), batch=2, oldest_pinned=1), batch=2, oldest_pinned=1)
    >>> watch.in_flight, watch.own
    (1, 0)
    """

    def __init__(self, state: SlotState) -> None:
        self._state = state
        self._order = VictimQueue(state)
        self.in_flight = self.own = 0

    def note(self, found: CachePlan | Shortage, batch: int, oldest_pinned: int) -> None:
        """Count for what `Planner.plan` found for these arguments. Called before the plan is executed."""
        state, bound = self._state, _ABOVE_ALL
        if isinstance(found, CachePlan):
            if not found.evicted_slots.numel():
                return
            bound = int(self._order.ranks(found.evicted_slots).max())
        slots = torch.arange(state.num_pinned + 1, state.map.num_used + 1, device=state.map.device)
        last_batches = state.map.last_batch(slots)
        is_low = self._order.ranks(slots) < bound
        if oldest_pinned < batch:
            self.in_flight += int((is_low & (last_batches >= oldest_pinned) & (last_batches < batch)).sum())
        else:
            self.own += int((is_low & (last_batches == batch)).sum())
