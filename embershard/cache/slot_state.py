"""Rows, scores and next uses of a pool's slots, which change together; and what a checkpoint holds of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from embershard.cache.next_use import NextUseIndex
from embershard.cache.policies import SlotScores
from embershard.cache.slot_map import SlotMap


@dataclass(eq=False)
class SlotState:
    """State of the slots of one pool.

    Attributes:
        map: the row in each slot.
        scores: the row's score in each slot.
        next_use_index: the row's next known use in each slot; None if the policy does not look ahead.
        num_pinned: slots 1 to this one are never evicted.
        is_static: rows that a batch brought in leave once it has trained.
        clean_through: number of a batch; the host tier has the updates of all batches up to it.
        passing: int64 [?], the slots of such rows; empty unless `is_static`.

    >>> from embershard.cache.policies import RecencyScores
    >>> state = SlotState(SlotMap(num_keys=9, num_slots=3), RecencyScores())
    >>> state.preload(torch.tensor([5, 7]), state.map.next_free(2))
    >>> state.evict(torch.tensor([5]), torch.tensor([1]))
    >>> state.map.lookup(torch.tensor([5, 7])).tolist()
    [0, 2]
    """

    map: SlotMap
    scores: SlotScores
    next_use_index: NextUseIndex | None = None
    num_pinned: int = 0
    is_static: bool = False
    clean_through: int = 0
    passing: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.passing = torch.empty(0, dtype=torch.int64, device=self.map.device)

    @property
    def device_bytes(self) -> int:
        """Device memory of maps, scores and next uses, in bytes; without the known batches."""
        next_uses = 0 if self.next_use_index is None else self.next_use_index.device_bytes
        return self.map.device_bytes + self.scores.device_bytes + next_uses

    def is_dirty(self, slots: Tensor) -> Tensor:
        """Return True for each of `slots` (int64 [M]) whose row was trained since its last fill or write-back."""
        return self.map.last_batch(slots) > self.clean_through

    def evict(self, keys: Tensor, slots: Tensor) -> None:
        """Unbind `keys` from `slots` (both int64 [M]); scores and known uses stay with the rows."""
        self.scores.evict(keys, slots)
        if self.next_use_index is None:
            self.map.unbind(keys)
        else:
            self.next_use_index.unbind(keys, slots)

    def bind(self, keys: Tensor, slots: Tensor, batch: int) -> None:
        """Bind `keys` to claimed `slots` (both int64 [M], distinct), used by `batch`."""
        if not keys.numel():
            return
        (self.map if self.next_use_index is None else self.next_use_index).bind(keys, slots, batch)
        if self.is_static and batch:
            self.passing = torch.cat([self.passing, slots])
        self.scores.admit(keys, slots)

    def preload(self, keys: Tensor, slots: Tensor) -> None:
        """Claim the next free `slots` and bind `keys` to them (both int64 [M], distinct), used by no batch."""
        self.map.claim(slots.numel())
        self.bind(keys, slots, batch=0)

    def contents(self, newest: int) -> CacheContents:
        """Return the cached rows, without the pinned ones, in the order of their slots; ages count from batch
        `newest`."""
        parts = []
        for used in self.map.used_in_blocks():
            slots = used[used > self.num_pinned]
            ages = newest - self.map.last_batch(slots)
            parts.append((self.map.keys(slots).cpu(), ages.int().cpu(), self.scores.counted(slots)))
        return CacheContents(*(torch.cat(each) for each in zip(*parts, strict=True)))

    def grow(self, num_slots: int) -> None:
        """Add free slots, up to `num_slots` in all."""
        self.map.grow(num_slots)
        self.scores.grow(num_slots)
        if self.next_use_index is not None:
            self.next_use_index.grow(num_slots)


@dataclass(frozen=True, eq=False)
class CacheContents:
    """Cached rows, with what the policies rank them by.

    Attributes:
        rows: int64 [K], distinct.
        ages: int32 [K], batches since each row's last use.
        scores: float32 [K], uses of each row as its policy counts them; 0 where it counts none.
    """

    rows: Tensor
    ages: Tensor
    scores: Tensor

    @classmethod
    def join(cls, parts: Iterable[CacheContents]) -> CacheContents:
        """Return the rows of all parts. A row in several of them (shards by columns) counts as the first of them says.

        >>> one = CacheContents(torch.tensor([7, 5]), torch.tensor([0, 3], dtype=torch.int32), torch.tensor([2.0, 1.0]))
        >>> CacheContents.join([one, one]).rows.tolist()
        [5, 7]
        """
        found = list(parts)
        if not found:
            return cls(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32), torch.empty(0))
        rows, ages, scores = (torch.cat([getattr(part, name) for part in found]) for name in ("rows", "ages", "scores"))
        order = rows.sort(stable=True).indices
        is_first = torch.ones(len(order), dtype=torch.bool)
        is_first[1:] = rows[order[1:]] != rows[order[:-1]]
        kept = order[is_first]
        return cls(rows[kept], ages[kept], scores[kept])

    def select(self, which: Tensor) -> CacheContents:
        """Return the rows at positions `which` (int64 [M]), or where it is True (bool [K])."""
        return CacheContents(self.rows[which], self.ages[which], self.scores[which])

    def between(self, start: int, num_rows: int, first: int = 0) -> CacheContents:
        """Return the rows [start, start + num_rows), numbered from `first`."""
        part = self.select((self.rows >= start) & (self.rows < start + num_rows))
        return CacheContents(part.rows - start + first, part.ages, part.scores)

    def best(self, num_rows: int, by_age: bool) -> Tensor:
        """Return the rows to keep in a cache of `num_rows`: int64 [<= num_rows], those to evict first at the front.

        Args:
            by_age: rank by the last use alone; otherwise by score, and rows of one score by the last use.
        """
        order = self.ages.sort(descending=True, stable=True).indices
        if not by_age:
            order = order[self.scores[order].sort(stable=True).indices]
        return self.rows[order[max(0, len(order) - num_rows) :]]
