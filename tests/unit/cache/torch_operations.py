"""Planning in torch's operations: what the compiled loops do on a CPU, and the kernels on a GPU.

The oracle of `test_loops.py`. In the model of a GPU it plans where Triton's interpreter would take too long.
"""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from embershard.cache import SlotMap, SlotState, row_cache
from embershard.cache.config import MapKind
from embershard.cache.eviction import VictimQueue, _Ranked, sample_stride
from embershard.cache.key_map import BUCKET, HASHES, LOAD, NOBODY, HashedKeyMap, KeyMap
from embershard.cache.next_use import KnownBatch, NextUseIndex
from embershard.cache.planner import CachePlanner
from embershard.cache.slot_map import NULL_SLOT
from embershard.cache.statistics import Counter

_NEVER = torch.iinfo(torch.int64).max


class TorchHashedKeyMap(HashedKeyMap):
    def put(self, keys: Tensor, entries: Tensor | int) -> None:
        if not isinstance(entries, Tensor):
            entries = torch.full(keys.shape, entries, dtype=torch.int32, device=keys.device)
        cells, _ = self._look_up(keys)
        present = (cells >= 0).nonzero().flatten()
        taken, values = cells.index_select(0, present), entries.index_select(0, present)
        self._entries.scatter_(0, taken, values)
        self._keys.index_fill_(0, taken.index_select(0, (values == 0).nonzero().flatten()), NOBODY)
        absent = ((cells < 0) & (entries != 0)).nonzero().flatten()
        if absent.numel():
            self._insert(keys.index_select(0, absent), entries.index_select(0, absent))

    def _look_up(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return cells (int64 [N], -1 for absent keys) and entries (int32 [N], 0 for absent keys) of `keys`."""
        wanted, cells = keys.int().unsqueeze(1), torch.full_like(keys, NOBODY)
        held = self._keys[: self._num_buckets * BUCKET].view(-1, BUCKET)
        for buckets in self._buckets(keys):
            is_it = held.index_select(0, buckets) == wanted
            lane = is_it.to(torch.uint8).argmax(1)
            cells = torch.where(is_it.any(1), buckets * BUCKET + lane, cells)
        return cells, self._entries.gather(0, cells.clamp_min(0)).masked_fill_(cells < 0, 0)

    def _buckets(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return both buckets of `keys`: int64 [N] each."""
        first, second = (((keys * factor) >> 32) & 0xFFFFFFFF for factor in HASHES)
        return (first * self._num_buckets) >> 32, (second * self._num_buckets) >> 32

    def _insert(self, keys: Tensor, entries: Tensor) -> None:
        """Insert keys that are absent. Of several keys that choose one cell, one gets it; the others try again."""
        count = keys.numel()
        if self._most_live + count > LOAD * self._num_cells:
            self._most_live = int((self._keys != NOBODY).sum())
            while self._most_live + count > LOAD * self._num_cells:
                self._grow()
        self._most_live += count
        while keys.numel():
            cells = self._free_cells(keys)
            if cells is None:
                self._grow()
                self._most_live += keys.numel()
                continue
            wanted = keys.int()
            self._keys.scatter_(0, cells, wanted)
            is_placed = self._keys.gather(0, cells) == wanted
            placed, left = is_placed.nonzero().flatten(), (~is_placed).nonzero().flatten()
            self._entries.scatter_(0, cells.index_select(0, placed), entries.index_select(0, placed))
            keys, entries = keys.index_select(0, left), entries.index_select(0, left)

    def _free_cells(self, keys: Tensor) -> Tensor | None:
        """Return the first free cell of each key's emptier bucket: int64 [M]; None if both buckets of a key are full.
        So a bucket takes one key per round, and the next round sees how full it is."""
        held = self._keys[: self._num_buckets * BUCKET].view(-1, BUCKET)
        first, second = self._buckets(keys)
        is_free = [held.index_select(0, buckets) == NOBODY for buckets in (first, second)]
        num_free = [free.sum(1) for free in is_free]
        takes_second = num_free[1] > num_free[0]
        if not bool(torch.maximum(*num_free).all()):
            return None
        free = torch.where(takes_second.unsqueeze(1), is_free[1], is_free[0])
        lane = free.to(torch.uint8).argmax(1)
        return torch.where(takes_second, second, first) * BUCKET + lane


class TorchSlotMap(SlotMap):
    def _make_entries(self, kind: MapKind) -> KeyMap:
        if kind == "hashed":
            return TorchHashedKeyMap(self.num_keys, self.num_slots, self.device)
        return super()._make_entries(kind)

    def find(self, keys: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        slots, first = self.lookup(keys), self.first_stamp(batch)
        stamps = torch.arange(first, first + slots.numel(), dtype=torch.int64, device=self.device)
        self.use_stamp.scatter_(0, slots, stamps)
        first_hits = self.use_stamp.gather(0, slots) == stamps
        missed = (slots == NULL_SLOT).nonzero().flatten()
        return slots, first_hits.index_fill_(0, missed, False), missed

    def bind(self, keys: Tensor, slots: Tensor, batch: int) -> None:
        self._entries.put(keys, slots.int())
        self.key_of_slot.scatter_(0, slots, keys.int())
        self.use_stamp.scatter_(0, slots, self.first_stamp(batch))


class TorchNextUseIndex(NextUseIndex):
    def _know(self, keys: Tensor, feature_lengths: Tensor | None) -> KnownBatch:
        keys, positions = self._others(keys)
        first_use, count = self._reserve(keys.numel()), keys.numel()
        uses = self._numbers(first_use, torch.arange(count, dtype=torch.int32, device=keys.device))
        entries = self._map.entries(keys)
        cached = entries > 0
        slots = entries.clamp_min(0).long()
        last = torch.where(cached, self._last_use.gather(0, slots), -entries)
        self._next_batch.index_fill_(0, self._cells(last), self._newest)
        unused_so_far = cached.logical_and_(last == 0).nonzero().flatten()
        self.next_use.index_fill_(0, slots.index_select(0, unused_so_far), self._newest)
        # Of several uses of a row in this batch any one is kept; it stands for the others.
        self._last_use.scatter_(0, slots, uses)
        kept = self._last_use.gather(0, slots) == uses
        absent = (entries <= 0).nonzero().flatten()
        if absent.numel():
            absent_keys, traces = keys.index_select(0, absent), -uses.index_select(0, absent)
            self._map.set_traces(absent_keys, traces)
            kept.scatter_(0, absent, self._map.entries(absent_keys) == traces)
        chosen = kept.nonzero().flatten().int()
        places = chosen if positions is None else positions.index_select(0, chosen)
        return KnownBatch(self._newest, first_use, chosen, places)

    def _others(self, keys: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return those of `keys` that are not pinned, and their positions; None: all."""
        if self._tables is None or not self._tables.num_pinned:
            return keys, None
        entries = self._map.entries(keys)  # below 1: not cached, so not pinned
        positions = ((entries < 1) | (entries > self._tables.num_pinned)).nonzero().flatten().int()
        return keys.index_select(0, positions), positions

    def take_traces(self, keys: Tensor, slots: Tensor) -> None:
        last = -self._map.entries(keys)
        self._last_use.scatter_(0, slots, last)
        self.next_use.scatter_(0, slots, (last > 0).int() * self._soon)

    def arrive(self, batch: KnownBatch, slots: Tensor) -> tuple[Tensor, Tensor] | None:
        if not self._is_oldest(batch):
            return None
        self._known.popleft()
        distinct = slots.index_select(0, batch.positions)
        later = self._later(batch)
        self._advance(distinct, later)
        return distinct, later


class TorchVictimQueue(VictimQueue):
    def _better(self, slots: Tensor, next_uses: Tensor) -> _Ranked:
        """Return those of `slots` that rank among the ranked ones; arguments as for `offer`."""
        worth = ((next_uses == 0) | (next_uses >= self._worst_next_use)).nonzero().flatten()
        ranked = self._rank(slots.index_select(0, worth))
        return ranked.select((ranked.ranks <= self._worst).nonzero().flatten())

    def _lowest(self, count: int, oldest_pinned: int, ready: list[_Ranked]) -> tuple[Tensor, int, _Ranked]:
        """Return the `count` lowest slots of the queue and of `ready`, which were offered; the number of entries of the
        queue that are done with; and the slots that stay offered."""
        window, usable = self._next_usable(count, oldest_pinned)
        queued = usable.numel()
        again, places = self._rank_again(window, usable, ready, oldest_pinned)
        candidates = _join(window.select(usable), again)
        total = candidates.slots.numel()
        if total <= count:
            chosen = torch.arange(total, device=candidates.slots.device)
        else:
            bound = candidates.ranks.kthvalue(count).values
            below = (candidates.ranks < bound).nonzero().flatten()
            equal = (candidates.ranks == bound).nonzero().flatten()
            chosen = torch.cat([below, equal[: count - below.numel()]])
        left = torch.ones(total, dtype=torch.bool, device=candidates.slots.device).scatter_(0, chosen, False)
        first_left = left[:queued].nonzero().flatten()[:1]
        passed = int(usable[first_left]) if first_left.numel() else window.slots.numel()
        # Entries of the window from `passed` on are still in the queue.
        waiting = again.select((left[queued:] & (places < passed)).nonzero().flatten())
        return candidates.slots.index_select(0, chosen), passed, waiting

    def _rank_again(
        self, window: _Ranked, usable: Tensor, ready: list[_Ranked], oldest_pinned: int
    ) -> tuple[_Ranked, Tensor]:
        """Rank the slots whose rank may have changed: those of `window` with another next use, and all of `ready`.

        Returns:
            The slots that belong into the ranking, and their positions in the window, int64; -1 for those of `ready`.
        """
        changed = self._unused(window, oldest_pinned).index_fill_(0, usable, False).nonzero().flatten()
        slots, places = [window.slots.index_select(0, changed)], [changed]
        for part in ready:
            slots.append(part.slots.index_select(0, self._unused(part, oldest_pinned).nonzero().flatten()))
            places.append(torch.full_like(slots[-1], -1))
        ranked = self._rank(torch.cat(slots))
        before_end = (ranked.ranks <= self._worst).nonzero().flatten()
        return ranked.select(before_end), torch.cat(places).index_select(0, before_end)

    def _lowest_ranks(self, least: int, about: int, oldest_pinned: int) -> tuple[_Ranked, _Ranked]:
        """Return the `about` lowest slots that may be evicted, ascending by rank and slot, fewer if there are not so
        many, but `least` if possible; and slots in flight, among them all of a rank that low."""
        ranked = self._rank()
        pinned = ranked.stamps >> 32 >= oldest_pinned
        pinned[: self._num_pinned_slots] = True
        ranks = ranked.ranks.masked_fill(pinned, _NEVER)
        pinned[: self._num_pinned_slots] = False
        pinned &= ranked.stamps != _NEVER  # empty
        return ranked.select(_lowest(ranks, least, about)), ranked.select(pinned.nonzero().flatten())


class TorchPlanner(CachePlanner):
    def __init__(self, state: SlotState) -> None:
        super().__init__(state, TorchVictimQueue)

    @staticmethod
    def _distinct(keys: Tensor) -> tuple[Tensor, Tensor]:
        return keys.unique(return_inverse=True)

    def _fill(
        self, slots: Tensor, missed: Tensor, inverse: Tensor, fill_slots: Tensor, victims: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        slots.scatter_(0, missed, fill_slots.index_select(0, inverse))
        dirty = self.state.is_dirty(victims)
        return self._map.keys(victims), dirty, int(dirty.sum())


def count_plan(
    values: Tensor,
    table_of_feature: Tensor,
    table_ends: Tensor,
    feature_lengths: Tensor,
    parts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    critical_path: bool,
) -> None:
    """As that of `embershard/cache/gpu/counters.py`."""
    first_hits, missed, filled, evicted, written_back = parts
    of_ids = table_of_feature.repeat_interleave(feature_lengths)
    of_fills, of_evicted, of_written = (
        torch.bucketize(keys, table_ends, right=True) for keys in (filled, evicted, written_back)
    )
    for counter, tables in (
        (Counter.LOOKUPS, of_ids),
        (Counter.MISSED_LOOKUPS, of_ids[missed]),
        (Counter.HITS_UNIQUE, of_ids[first_hits]),
        (Counter.FILLS, of_fills),
        (Counter.CRITICAL_PATH_FILLS, of_fills[: len(of_fills) * critical_path]),
        (Counter.EVICTIONS, of_evicted),
        (Counter.WRITE_BACKS, of_written),
    ):
        values[:, counter] += torch.bincount(tables, minlength=len(values))


def torch_planning() -> mock._patch[object]:
    """Caches that are made inside plan by torch's operations."""
    classes = (TorchSlotMap, TorchNextUseIndex, TorchPlanner)
    return mock.patch.object(row_cache, "planning_classes", return_value=classes)


def _join(*parts: _Ranked) -> _Ranked:
    next_uses = [part.next_uses for part in parts if part.next_uses is not None]
    return _Ranked(
        torch.cat([part.slots for part in parts]),
        torch.cat([part.stamps for part in parts]),
        torch.cat([part.ranks for part in parts]),
        torch.cat(next_uses) if next_uses else None,
    )


def _lowest(rank: Tensor, least: int, about: int) -> Tensor:
    """Return positions of the `about` lowest values of `rank`, ascending by value, without any `_NEVER`.

    May return fewer, but at least `least` if there are so many. A regular sample of a long vector gives a bound, and
    only the values below it are sorted.
    """
    found = None
    stride = sample_stride(about, rank.numel())
    if stride:
        sample = rank[::stride].sort().values
        margin = sample.numel() // 64
        bound = min(int(sample[sample.numel() * about // rank.numel() + margin]), _NEVER - 1)
        found = (rank <= bound).nonzero().flatten()
    if found is None or found.numel() < least:  # a short vector, or an unlucky sample
        found = (rank < _NEVER).nonzero().flatten()
    return found.index_select(0, rank.index_select(0, found).sort(stable=True).indices[:about])
