"""Places of rows in host memory, in front of a file: which rows have one, and which leave when others need theirs.

What chooses slots chooses places: a map, an index of next uses, a queue of victims and a planner. A batch claims places
some steps before it trains. A row that is on the device keeps its place: it is *pinned*, and no victim.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from embershard.cache.next_use import KnownBatch, NextUseIndex
from embershard.cache.planner import CachePlan, CachePlanner
from embershard.cache.policies import SlotScores
from embershard.cache.slot_map import SlotMap
from embershard.cache.slot_state import SlotState

#: Batches whose rows are read from files ahead of the one in training: a disk's queue is full, and no step waits.
READ_AHEAD = 8
#: Stamp of a place whose row is on the device: newer than any batch, so it is no victim.
_PINNED = SlotMap.first_stamp(2**31 - 2)
#: With fewer free places than the first share, the worst rows leave, as many as the second. Many that leave together
#: have pages of the file in common.
_LEAST_FREE, _LEAVING = 0.02, 1 / 16
#: Most rows of either: what leaves is copied at once, while a step may wait.
_MOST_FREE, _MOST_LEAVING = 1 << 17, 1 << 17


def leaving_together(num_places: int) -> int:
    """Return how many rows leave host memory with so many places at once, at least.

    >>> leaving_together(1600), leaving_together(3)
    (100, 1)
    """
    return max(1, min(int(_LEAVING * num_places), _MOST_LEAVING))


@dataclass(frozen=True, eq=False)
class Claim:
    """What a batch's places ask for, all int64.

    Attributes:
        leaving_keys, leaving_places: [E] rows whose places are given away, ascending by key.
        keys, places: [M] rows that are not in memory yet, ascending by key, and their places.
    """

    leaving_keys: Tensor
    leaving_places: Tensor
    keys: Tensor
    places: Tensor


class _RowScores(SlotScores):
    """Scores of the rows in places, as the device's policy counts them."""

    def __init__(self, slot_map: SlotMap) -> None:
        self._map, self._slot_scores = slot_map, torch.empty(0)
        self.of_rows: Callable[[], Tensor | None] = lambda: None

    def of_slots(self) -> Tensor | None:
        return self._slot_scores if self._slot_scores.numel() else None

    def refresh(self) -> None:
        """Read the scores, for all places."""
        if (scores := self.of_rows()) is not None:
            self._slot_scores = scores[self._map.key_of_slot.clamp(min=0).long()]


class RowPlaces:
    """H places for R rows. Keys number the rows: int64, in host memory.

    Args:
        num_rows, num_places: R and H.

    >>> places = RowPlaces(num_rows=9, num_places=4)
    >>> claim = places.claim_now(torch.tensor([7, 5, 7]))
    >>> claim.keys.tolist(), claim.places.tolist()
    ([5, 7], [1, 2])
    >>> places.pin(torch.tensor([5, 7]))  # the device has them: others leave
    True
    >>> places.claim_now(torch.tensor([1])).leaving_keys.tolist()
    []
    >>> places.claim_now(torch.tensor([3])).leaving_keys.tolist()
    [1]
    """

    def __init__(self, num_rows: int, num_places: int) -> None:
        self.num_places = min(num_places, num_rows)
        self._map = SlotMap(num_rows, self.num_places)
        self._index = NextUseIndex(self._map)
        self._scores = _RowScores(self._map)
        self._planner = CachePlanner(SlotState(self._map, self._scores, self._index))
        self._last_claim = torch.zeros(self.num_places + 1, dtype=torch.int64)  # by place
        self._claims: deque[tuple[KnownBatch, int]] = deque()  # batches whose rows are not all on the device, by number
        self._newest = 0

    def rank_by(self, of_rows: Callable[[], Tensor | None]) -> None:
        """Let rows without a known use leave by score (float32 [R], of those that are not on the device), not by their
        last use alone."""
        self._scores.of_rows = of_rows

    @property
    def chain_bytes(self) -> int:
        """Memory of the links between known batches, in bytes."""
        return self._index.chain_bytes

    @property
    def knows_most(self) -> bool:
        """True if half of the numbers of uses are taken."""
        return self._index.knows_most

    def know(self, keys: Tensor, feature_lengths: Tensor | None = None) -> KnownBatch:
        """Announce a batch that will claim places after all those known; arguments as for `NextUseIndex.know`."""
        return self._index.know(keys, feature_lengths)

    def claim(self, keys: Tensor, known: KnownBatch) -> Claim | None:
        """Give the rows of the oldest known batch (`keys` int64 [N]) places, and keep them until `release`; None if
        they do not fit beside those of earlier claims. What leaves must be written before a place is used."""
        claim = self._claim(keys, known, self._claims[0][1] if self._claims else self._newest + 1)
        if claim is not None:
            self._claims.append((known, self._newest))
        return claim

    def claim_now(self, keys: Tensor) -> Claim | None:
        """Give rows `keys` (int64 [N]) places until others need them, even those of claims; None if too many rows are
        pinned."""
        return self._claim(keys, None, self._newest + 1)

    def has_claim(self, known: KnownBatch) -> bool:
        """True if the batch keeps places."""
        return any(batch is known for batch, _ in self._claims)

    def release(self, known: KnownBatch) -> int:
        """End a batch's claim, and those before it, which were lost; return how many, 0 if it has none."""
        found = next((number for number, (batch, _) in enumerate(self._claims, 1) if batch is known), 0)
        for _ in range(found):
            self._claims.popleft()
        return found

    def pin(self, keys: Tensor) -> bool:
        """Note that rows `keys` (int64 [M]) come to the device; False, and nothing is noted, if one has no place."""
        places = self._map.lookup(keys)
        if not bool((places > 0).all()):
            return False
        self._map.use_stamp.index_fill_(0, places, _PINNED)
        return True

    def unpin(self, keys: Tensor) -> None:
        """Note that rows `keys` (int64 [M], distinct) left the device."""
        places = self._map.lookup(keys)
        is_pinned = (places > 0) & (self._map.use_stamp[places] == _PINNED)
        assert bool(is_pinned.all()), "rows that were not pinned"
        self._map.use_stamp[places] = self._last_claim[places] << 32

    def are_pinned(self, keys: Tensor) -> bool:
        """Return True if the device has all rows `keys` (int64 [M])."""
        places = self._map.lookup(keys)
        return bool(((places > 0) & (self._map.use_stamp[places] == _PINNED)).all())

    def of(self, keys: Tensor) -> Tensor:
        """Return the places of rows: int64, as `keys`; 0 for none."""
        return self._map.lookup(keys)

    def skip(self, known: KnownBatch, keys: Tensor) -> None:
        """Take back the oldest known batch, with these keys (int64 [N]), or its claim."""
        if not self.release(known):
            self._index.skip(known, keys)

    def forget(self) -> None:
        """Take back all known batches and claims."""
        self._claims.clear()
        self._planner.forget_known()

    def _claim(self, keys: Tensor, known: KnownBatch | None, oldest: int) -> Claim | None:
        """Give a batch the next number and its rows places, but none of a batch from `oldest` on."""
        self._newest = number = self._newest + 1
        places = self._map.lookup(keys)
        pinned = places[self._map.use_stamp.index_select(0, places) == _PINNED]
        leaving, claim = self._leaving(keys, keys[places == 0].unique().numel(), oldest), None
        if leaving is not None:
            plan = self._planner.plan(keys, number, oldest)
            assert isinstance(plan, CachePlan), "there is room"
            assert not plan.evicted_keys.numel(), "there is room"
            self._planner.note_filled(plan, known)
            self._last_claim.index_fill_(0, plan.slots, number)
            claim = Claim(*leaving, plan.fill_keys, plan.fill_slots)
        self._map.use_stamp.index_fill_(0, pinned, _PINNED)
        return claim

    def _leaving(self, keys: Tensor, num_missing: int, oldest: int) -> tuple[Tensor, Tensor] | None:
        """Let the worst rows leave if the missing ones would leave too few places free, and return them; None if the
        missing ones do not fit."""
        none = keys[:0]
        reserve = min(math.ceil(_LEAST_FREE * self.num_places), _MOST_FREE)
        lacking = num_missing + reserve - self._map.num_free
        if num_missing == 0 or lacking <= 0:
            return none, none
        self._map.find(keys, self._newest)  # which are no victims
        self._scores.refresh()
        at_once = leaving_together(self.num_places)
        worst = self._planner.worst(max(lacking, at_once), oldest)
        if num_missing > self._map.num_free + worst.numel():
            return None
        leaving = self._planner.removal(worst)
        self._planner.remove(leaving)
        order = leaving.evicted_keys.argsort()
        return leaving.evicted_keys[order], leaving.evicted_slots[order]
