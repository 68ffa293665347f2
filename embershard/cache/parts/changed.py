"""Which rows changed since somebody asked: `ChangedKeys` of a pool, `ComparedRows` of tensors that no cache trains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from embershard.cache.homes.home import Home
from embershard.cache.parts.part import PoolPart

#: Rows whose marks are looked at together: on a GPU, their keys take 16 MiB.
_BLOCK = 1 << 21


def rows_that_differ(first: Tensor, second: Tensor) -> Tensor:
    """Return the numbers of rows of two tensors [n, ...] whose bits are not equal: int64, ascending.

    >>> rows_that_differ(torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[-0.0], [1.0], [3.0]]))
    tensor([0, 2])
    """
    if not first.numel():
        return torch.empty(0, dtype=torch.int64)
    pair = [part.reshape(len(part), -1).contiguous().view(torch.uint8) for part in (first, second)]
    return (pair[0] != pair[1]).any(1).nonzero().flatten()


class ChangedKeys(PoolPart):
    """A mark for each row of a pool that changed since its owner asked. Lookups, fills and evictions leave them alone.
    Where somebody wrote to the home in a way that torch counts, all rows changed.

    >>> from embershard.cache import MemoryRows, PoolShape
    >>> changed = ChangedKeys(MemoryRows(PoolShape([5], dim=2)), torch.device("cpu"))
    >>> changed.changed(torch.tensor([3, 1, 3])), changed.changed([range(4, 5)])
    (None, None)
    >>> changed.take().tolist(), changed.take().tolist()
    ([1, 3, 4], [])

    Args:
        home: of the rows.
        device: of the keys.
    """

    hears_changes = True

    def __init__(self, home: Home, device: torch.device) -> None:
        self._home, self._version = home, home.version
        self._marks = torch.zeros(home.num_rows, dtype=torch.bool, device=device)

    def changed(self, keys: Tensor | Sequence[range] | None) -> None:
        if not isinstance(keys, Tensor):
            for each in [range(len(self._marks))] if keys is None else keys:
                self._marks[each.start : each.stop] = True
        elif keys.is_cpu and self._marks.is_cpu:
            self._marks.numpy()[keys.numpy()] = True  # a tenth of the time that torch takes
        else:
            self._marks.index_fill_(0, keys.to(self._marks.device), True)

    def take(self) -> Tensor:
        """Return all marked rows, in host memory: int64 [M] ascending; remove their marks."""
        if self._version != self._home.version:
            self._version = self._home.version
            self.changed(None)
        found = []
        for start in range(0, max(1, len(self._marks)), _BLOCK):
            marks = self._marks[start : start + _BLOCK]
            keys = torch.from_numpy(np.flatnonzero(marks.numpy())) if marks.is_cpu else marks.nonzero().flatten()
            marks[keys] = False
            found.append(keys.cpu() + start)
        return torch.cat(found)


class ComparedRows:
    """Rows of tensors [n, ...], of a table or a part of it, compared with a copy in host memory, bit by bit.

    >>> rows = torch.zeros(3, 2)
    >>> compared = ComparedRows([rows])
    >>> rows[1] += 1
    >>> compared.take([rows]).tolist(), compared.copies[0][1].tolist()
    ([1], [1.0, 1.0])

    Attributes:
        copies: as they were when somebody asked last.
        taken: what `take` returned last.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.copies = [rows.detach().to("cpu", copy=True).contiguous() for rows in tensors]
        self._others = self.taken = torch.empty(0, dtype=torch.int64)

    def add(self, rows: Tensor) -> None:
        """Count rows (int64 [k]) as changed."""
        self._others = torch.cat([self._others, rows])

    def take(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the rows that changed since the last call: int64, ascending.

        Args:
            tensors: the same as before, as they are now.
        """
        now = [rows.detach().cpu() for rows in tensors]
        found = torch.cat([self._others, *map(rows_that_differ, self.copies, now)]).unique()
        for copy, rows in zip(self.copies, now, strict=True):
            copy[found] = rows[found]
        self._others, self.taken = found[:0], found
        return found
