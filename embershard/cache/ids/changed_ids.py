"""`ChangedIds`: which rows of a table's shard changed hands since somebody asked, and whose they were then."""

from __future__ import annotations

import numpy as np

from embershard.cache import loops


class ChangedIds:
    """Rows that were given to ids or taken from them, with the id that each had at first.

    >>> changed = ChangedIds(num_rows=8)
    >>> changed.add(np.array([3, 5]), np.array([70, 90]))
    >>> changed.add(np.array([3]), np.array([71]))  # it went on meanwhile
    >>> rows, ids = changed.take()
    >>> rows.tolist(), ids.tolist()
    ([3, 5], [70, 90])

    Args:
        num_rows: of the shard: notes do not take more memory than some such rows.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._rows, self._ids = list[loops.Int64s](), list[loops.Int64s]()
        self._num_notes = 0

    def add(self, rows: loops.Int64s, ids: loops.Int64s, at_first: bool = False) -> None:
        """Note that rows [K] changed hands, and whose they were [K]: before all changes noted so far if `at_first`."""
        if not len(rows):
            return
        place = 0 if at_first else len(self._rows)
        self._rows.insert(place, rows)
        self._ids.insert(place, ids)
        self._num_notes += len(rows)
        if self._num_notes > 2 * self._num_rows:
            first, ids = self.take()
            self._rows, self._ids, self._num_notes = [first], [ids], len(first)

    def take(self) -> tuple[loops.Int64s, loops.Int64s]:
        """Return the rows, ascending, and whose they were at first; forget them."""
        rows, ids = (np.concatenate([np.empty(0, np.int64), *parts]) for parts in (self._rows, self._ids))
        self._rows, self._ids, self._num_notes = [], [], 0
        rows, first = np.unique(rows, return_index=True)
        return rows, ids[first]
