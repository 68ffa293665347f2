"""`TouchedKeys`: which rows of a pool were trained, or written to, since somebody asked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

#: Rows whose marks are looked at together on a GPU: their keys take 16 MiB.
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


class TouchedKeys:
    """A mark per row. Lookups, fills and evictions leave them alone.

    >>> touched = TouchedKeys(5, torch.device("cpu"))
    >>> touched.add(torch.tensor([3, 1, 3]))
    >>> touched.take().tolist(), touched.take().tolist()
    ([1, 3], [])

    Args:
        num_rows: of the pool, or of copies of rows.
        device: of the keys.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._marks = torch.zeros(num_rows, dtype=torch.bool, device=device)

    def add(self, keys: Tensor) -> None:
        """Mark rows (int64 [N]; a row may be there several times)."""
        if keys.is_cpu and self._marks.is_cpu:
            self._marks.numpy()[keys.numpy()] = True  # a tenth of the time that torch takes
        else:
            self._marks.index_fill_(0, keys.to(self._marks.device), True)

    def add_ranges(self, ranges: Sequence[range]) -> None:
        """Mark all rows of these ranges."""
        for keys in ranges:
            self._marks[keys.start : keys.stop] = True

    def forget(self) -> None:
        """Remove all marks."""
        self._marks.zero_()

    def take_to_host(self) -> Tensor:
        """Return all marked rows, in host memory: int64 [M] ascending; remove their marks. A GPU finds them in blocks,
        whose keys take little of its memory."""
        if self._marks.is_cpu:
            return self.take()
        starts = range(0, max(1, self._marks.numel()), _BLOCK)
        return torch.cat([self.take(start, start + _BLOCK).cpu() + start for start in starts])

    def take(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the marked rows among `start` to `stop`, counted from `start`, int64 [M] ascending; remove their
        marks."""
        marks = self._marks[start:stop]
        keys = torch.from_numpy(np.flatnonzero(marks.numpy())) if marks.is_cpu else marks.nonzero().flatten()
        marks[keys] = False
        return keys
