"""Planning in torch's operations: what the compiled loops do on a CPU, and the kernels on a GPU.

The oracle of `test_loops.py`. In the model of a GPU it plans where Triton's interpreter would take too long.
"""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from embershard.cache import SlotMap, SlotState, row_cache
from embershard.cache.eviction import VictimQueue, _Ranked, sample_stride
from embershard.cache.next_use import KnownBatch, NextUseIndex
from embershard.cache.planner import CachePlanner
from embershard.cache.statistics import Counter

_NEVER = torch.iinfo(torch.int64).max


class TorchSlotMap(SlotMap):
    """Without an array for loops."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.array = None


class TorchNextUseIndex(NextUseIndex):
    def arrive(self, batch: KnownBatch, slots: Tensor) -> tuple[Tensor, Tensor] | None:
        if not self._is_oldest(batch):
            return None
        self._known.popleft()
        distinct = slots.index_select(0, batch.positions)
        following = self._following(batch)
        self._advance(distinct, following)
        return distinct, following


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
