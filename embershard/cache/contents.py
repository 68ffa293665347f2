"""`CacheContents`: the rows of a cache as a checkpoint holds them, for a cache of any size and policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


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
