"""Replays batches through two levels: slots on the device, places in host memory in front of a file.

As in `replay.py`, nothing is modelled: a cache of rows of one byte makes the plans of the device, and the places are
chosen by the classes that choose slots. A row on the device keeps its place, which is no victim meanwhile. Batches
claim their places some steps before they train; then their rows are read from the file, those that were ever written.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embershard.cache.config import CachePolicy
from embershard.cache.eviction import VictimQueue
from embershard.cache.next_use import KnownBatch, NextUseIndex
from embershard.cache.planner import CacheGrowthWarning, CachePlan, CachePlanner
from embershard.cache.policies import make_scores
from embershard.cache.row_cache import RowCache
from embershard.cache.slot_map import SlotMap
from embershard.cache.slot_state import SlotState
from embershard.cache.tickets import Ticket
from embershard.planning.simulate.replay import bare_cache
from embershard.sharding.run_shape import ReplaySettings

#: With a smaller share of the places free, the worst rows leave, which are the second share of the places. Many that
#: leave together have pages in common.
LEAST_FREE, LEAVING = 0.02, 1 / 16
_LENT = SlotMap.first_stamp(2**31 - 2)  # of a place whose row is on the device: newer than any batch


@dataclass(frozen=True)
class Levels:
    """Sizes of the levels, in rows, and how the file is read.

    Attributes:
        num_slots: on the device.
        num_places: in host memory.
        rows_per_page: of the file; a page is read and written as a whole, a row at a time is kept.
        lookahead: batches beyond the one in training that the places know; the device knows those of its settings.
        read_ahead: batches beyond the one in training that have their places.
    """

    num_slots: int
    num_places: int
    rows_per_page: int
    lookahead: int
    read_ahead: int = 8


@dataclass(frozen=True)
class FileTraffic:
    """What a replay read from the file and wrote to it.

    Attributes:
        steps: that were replayed.
        rows_drawn: that were never written before, so that their initial values are drawn.
        rows_read, pages_read: that were written before.
        rows_written, pages_written: that left host memory.
        pages_patched: of the written ones, those that have other written rows, so that they are read first.
        crowded_steps: that found no places for all batches of the read-ahead.
    """

    steps: int = 0
    rows_drawn: int = 0
    rows_read: int = 0
    pages_read: int = 0
    rows_written: int = 0
    pages_written: int = 0
    pages_patched: int = 0
    crowded_steps: int = 0


def replay_two_levels(
    batches: Iterable[tuple[Tensor, Tensor]], rows: Sequence[int], levels: Levels, settings: ReplaySettings
) -> FileTraffic:
    """Replay all batches; device and host memory are empty at the start.

    Args:
        batches: keys of each batch (int64 [N], tables one after another), and ids per table (int64 [T]).
        rows: of each table.
        settings: of the device. Its policy chooses the places, too.

    Raises:
        ValueError: the cache is filled before the first batch; or a batch and the rows on the device do not fit the
            places.

    >>> few = [(torch.tensor([row]), torch.tensor([1])) for row in (0, 1, 2, 3, 0)]
    >>> levels = Levels(num_slots=1, num_places=2, rows_per_page=8, lookahead=1, read_ahead=0)
    >>> found = replay_two_levels(few, [4], levels, ReplaySettings(lookahead=1, prefetch=1))
    >>> found.rows_drawn, found.rows_read, found.rows_written
    (4, 1, 3)
    """
    if settings.policy.warmup:
        raise ValueError("got a policy that fills the cache first, needed one without warm-up: places start empty")
    policy = dataclasses.replace(settings.policy, by_next_use=levels.lookahead > 0 and settings.policy.by_next_use)
    places = _Places(sum(rows), levels, policy)
    recorder = _Recorder(places)
    names = [str(number) for number in range(len(rows))]
    cache = bare_cache(names, rows, levels.num_slots, settings, transfer=lambda *_: recorder)
    _run(batches, cache, places, levels, settings)
    return FileTraffic(**places.counts)


@dataclass(eq=False)
class _Batch:
    """A batch that is known, and how far it is."""

    keys: Tensor
    lengths: Tensor
    of_places: KnownBatch | None
    of_device: KnownBatch | None = None
    is_claimed: bool = False
    ticket: Ticket | None = None


def _run(
    batches: Iterable[tuple[Tensor, Tensor]], cache: RowCache, places: _Places, levels: Levels, settings: ReplaySettings
) -> None:
    """Run the stages of `LookAheadPipeline`, in its order, without their contents."""
    unknown, known = iter(batches), deque[_Batch]()  # from the one in training on
    device_lookahead = min(settings.lookahead, levels.lookahead)
    prefetch = min(settings.prefetch, device_lookahead)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheGrowthWarning)
        while True:
            for keys, lengths in itertools.islice(unknown, levels.lookahead + 1 - len(known)):
                known.append(_Batch(keys, lengths, places.know(keys)))
            if not known:
                return
            for batch in itertools.islice(known, device_lookahead + 1):
                batch.of_device = batch.of_device or cache.know(batch.keys, batch.lengths)
            now = known[0]
            if now.ticket is None:
                if not now.is_claimed:
                    places.claim_now(now.keys, now.of_places)
                now.ticket = cache.prepare(now.keys, now.lengths, True, now.of_device)
            cache.freeze_pins()
            for batch in itertools.islice(known, 1, levels.read_ahead + 1):
                batch.is_claimed = batch.is_claimed or places.claim(batch.keys, batch.of_places)
                if not batch.is_claimed:
                    places.counts["crowded_steps"] += 1
                    break
            for batch in itertools.islice(known, 1, prefetch + 1):
                if batch.is_claimed and batch.ticket is None:
                    batch.ticket = cache.prepare(batch.keys, batch.lengths, False, batch.of_device, if_it_fits=True)
                if batch.ticket is None:
                    break
            cache.unfreeze_pins()
            assert now.ticket is not None, "prepared above"
            cache.release(now.ticket)
            known.popleft()
            places.counts["steps"] += 1


class _Places:
    """Places in host memory, of which those of rows on the device are lent; and the rows that are in the file."""

    def __init__(self, num_rows: int, levels: Levels, policy: CachePolicy) -> None:
        self._num_places, self._rows_per_page = min(levels.num_places, num_rows), levels.rows_per_page
        self._map = SlotMap(num_rows, self._num_places)
        self._index = NextUseIndex(self._map) if policy.by_next_use else None
        scores = make_scores(policy, num_rows, self._num_places, self._map.device)
        state = SlotState(self._map, scores, self._index)
        self._planner, self._queue = CachePlanner(state), VictimQueue(state)
        self._last = torch.zeros(self._num_places + 1, dtype=torch.int64)  # by place: the last batch that claimed it
        self._claimed: deque[int] = deque()  # batches whose rows are not all on the device yet
        self._newest = 0
        self._is_filed = np.zeros(-(-num_rows // self._rows_per_page) * self._rows_per_page, np.bool_)
        self.counts = {field.name: 0 for field in dataclasses.fields(FileTraffic)}

    def know(self, keys: Tensor) -> KnownBatch | None:
        """Announce a batch that will claim places after all those known."""
        return None if self._index is None else self._index.know(keys)

    def claim(self, keys: Tensor, known: KnownBatch | None) -> bool:
        """Give the rows of a batch places, and read them; False if they do not fit beside the other claims."""
        self._newest = number = self._newest + 1
        oldest = self._claimed[0] if self._claimed else number
        slots = self._map.lookup(keys)
        lent = slots[self._map.use_stamp[slots] == _LENT]
        _, _, missed = self._map.find(keys, number)  # stamps the others, which are no victims
        fits = self._make_room(keys[missed].unique().numel(), oldest)
        if fits:
            plan = self._planner.plan(keys, number, oldest)
            assert isinstance(plan, CachePlan), "room was made"
            self._planner.admit(plan, known)
            self._read(plan.fill_keys.numpy())
            self._last[plan.slots] = number
            self._claimed.append(number)
        self._map.use_stamp[lent] = _LENT
        return fits

    def claim_now(self, keys: Tensor, known: KnownBatch | None) -> None:
        """Claim for a batch that the device needs."""
        if not self.claim(keys, known):
            raise ValueError(
                f"a batch of {keys.unique().numel()} rows and those on the device need more than {self._num_places} "
                "places in host memory; give it more, or train smaller batches"
            )

    def lend(self, keys: Tensor) -> None:
        """Note that the rows of the oldest claim are on the device; `keys` (int64 [M]) come there now."""
        self._map.use_stamp[self._map.lookup(keys)] = _LENT
        self._claimed.popleft()

    def give_back(self, keys: Tensor) -> None:
        """Note that rows `keys` (int64 [M]) left the device."""
        slots = self._map.lookup(keys)
        assert bool((slots > 0).all()), "rows on the device lost their places"
        self._map.use_stamp[slots] = self._last[slots] << 32

    def _make_room(self, num_missing: int, oldest: int) -> bool:
        """Let the worst rows leave if the missing ones would leave too few places free; False if they do not fit."""
        lacking = num_missing + math.ceil(LEAST_FREE * self._num_places) - self._map.num_free
        if lacking <= 0:
            return True
        leaving = self._queue.pop(max(lacking, int(LEAVING * self._num_places)), oldest)
        self._queue.clear()  # the next ones are many again, and come from a new ranking
        if num_missing > self._map.num_free + leaving.numel():
            return False
        plan = self._planner.removal(leaving)
        self._write(plan.evicted_keys.numpy())
        self._planner.remove(plan)
        return True

    def _read(self, keys: NDArray[np.int64]) -> None:
        filed = keys[self._is_filed[keys]]
        self.counts["rows_drawn"] += keys.size - filed.size
        self.counts["rows_read"] += filed.size
        self.counts["pages_read"] += np.unique(filed // self._rows_per_page).size

    def _write(self, keys: NDArray[np.int64]) -> None:
        self._is_filed[keys] = True
        pages, written = np.unique(keys // self._rows_per_page, return_counts=True)
        filed = np.count_nonzero(self._is_filed.reshape(-1, self._rows_per_page)[pages], axis=1)
        self.counts["rows_written"] += keys.size
        self.counts["pages_written"] += pages.size
        self.counts["pages_patched"] += int(np.count_nonzero(filed > written))


class _Recorder:
    """A `Transfer` that tells the places which rows the device has."""

    key_device = torch.device("cpu")

    def __init__(self, places: _Places) -> None:
        self._places = places
        self._evicted = torch.empty(0, dtype=torch.int64)

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        self._evicted = keys

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        self._places.lend(keys)
        self._places.give_back(self._evicted)

    def finish(self) -> None:
        pass

    def discard(self) -> int:
        return 0
