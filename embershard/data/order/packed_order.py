"""The order of an epoch in which hot samples come before cold ones: batches of either kind are ranges of it."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from embershard.data.hashing import Ids
from embershard.data.order.hot_samples import HotChunks
from embershard.data.order.order import EpochOrder, spans


class PackedOrder:
    """The order of one epoch with the hot samples first: positions [0, num_hot) are hot, the others are cold.

    Among each other, the samples of a kind are in the epoch's order. So neighbours still share chunks, and an epoch
    reads each chunk twice, once for each kind.

    Args:
        order: of the same epoch, without kinds.
        hot: the hot samples of each chunk.

    Attributes:
        num_hot: samples.
    """

    def __init__(self, order: EpochOrder, hot: HotChunks) -> None:
        self._order, self._hot = order, hot
        num_hot = hot.num_hot[order.chunks]
        self._sizes = np.concatenate([num_hot, hot.num_rows[order.chunks] - num_hot])
        self._ends = np.cumsum(self._sizes)
        self.num_hot = int(num_hot.sum())

        @lru_cache(maxsize=8)
        def rows_of(chunk: int, is_hot: bool) -> Ids:
            rows = order.rows_of(chunk)
            return rows[hot.flags(chunk)[rows] == is_hot]

        self._rows_of = rows_of

    def hot_among_first(self, count: int) -> int:
        """Return how many of the first `count` samples of the order without kinds are hot."""
        chunks = self._order.chunks
        ends, num_hot = np.cumsum(self._hot.num_rows[chunks]), self._hot.num_hot[chunks]
        whole = int(np.searchsorted(ends, count, side="right"))  # chunks
        found = int(num_hot[:whole].sum())
        for chunk, rows in self._order.locate(int(ends[whole - 1]) if whole else 0, count):
            found += int(self._hot.flags(chunk)[rows].sum())
        return found

    def locate(self, start: int, stop: int) -> list[tuple[int, Ids]]:
        """Return the places of the samples at positions [start, stop): pairs of a chunk and rows of it, in order."""
        parts = []
        for place, first, last in spans(self._ends, self._sizes, start, stop):
            kind, number = divmod(place, len(self._order.chunks))
            chunk = int(self._order.chunks[number])
            parts.append((chunk, self._rows_of(chunk, kind == 0)[first:last]))
        return parts
