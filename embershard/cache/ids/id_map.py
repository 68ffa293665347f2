"""Which id has which row of a table's shard, as a function of the batches alone.

Batches are resolved in their order, many ahead of their training. A log of each batch that has not trained yet tells
what it changed, so that the state of the newest trained batch can be read, and returned to. `ChangedIds` notes which
rows changed hands since somebody asked.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embershard.cache import loops
from embershard.cache.guards import ChangeGuard
from embershard.cache.ids.config import Buckets, IdTable
from embershard.errors import CacheError

#: The id that no data may have: missing values are none.
RESERVED_ID = -(2**63)
_SAME_RULES = "Give the table the rows, the buckets and the rules that it was saved with"


def mixed(ids: loops.Int64s) -> loops.Int64s:
    """Return ids as the map takes them: a bijection, after which any bits choose evenly.

    >>> mixed(np.array([0, 1])).tolist()
    [0, 6238072747940578789]
    """
    found = np.empty(len(ids), np.int64)
    loops.mix_ids(np.ascontiguousarray(ids, np.int64), found)
    return found


def unmixed(ids: loops.Int64s) -> loops.Int64s:
    """Return ids as data have them, of mixed ones.

    >>> unmixed(mixed(np.array([7, -5, RESERVED_ID]))).tolist() == [7, -5, RESERVED_ID]
    True
    """
    z = np.ascontiguousarray(ids, np.int64).view(np.uint64)
    for shift, factor in ((31, 0x319642B2D24D8EC3), (27, 0x96DE1B173F119089), (30, 1)):
        z = (z ^ (z >> np.uint64(shift)) ^ (z >> np.uint64(2 * shift))) * np.uint64(factor)
    return z.view(np.int64)


_NOTHING = np.empty((0, 3), np.int64)


@dataclass(frozen=True, eq=False)
class ResolvedIds:
    """Rows of a batch's ids.

    Attributes:
        rows: [N] of the shard; -1 for an id whose embedding is zero.
        born: [K] rows that the batch gives to ids, and
        ids: [K] these ids, mixed.
        evicted_in: the newest batch that evicted one of these rows from another id: it must have trained before they
            are written to; 0 if none did.
        log_bytes: memory of the log of the batch.
    """

    rows: loops.Int64s
    born: loops.Int64s
    ids: loops.Int64s
    evicted_in: int
    log_bytes: int


@dataclass(frozen=True, eq=False)
class _Change:
    """What a batch changed, in the order of the changes.

    Attributes:
        used: [U, 2], rows that were used, and their uses before.
        born: [K, 3], rows that were given to ids, their uses before, and the ids.
        evicted: [E, 3], rows that were taken from ids, these, and their uses.
        candidates: [C, 3], places of candidates, and ids and uses before.
        refused: ids that got no row because none was free.
        evicted_age: batches since the last use of the evicted ids, in all.
    """

    used: loops.Int64s
    born: loops.Int64s
    evicted: loops.Int64s
    candidates: loops.Int64s
    refused: int
    evicted_age: int

    @property
    def num_bytes(self) -> int:
        """Memory, in bytes."""
        return self.used.nbytes + self.born.nbytes + self.evicted.nbytes + self.candidates.nbytes

    def undo(self, records: loops.Int64s, candidates: loops.Int64s) -> None:
        """Restore the records [R, 2] before the batch, and the candidates [C, 2]."""
        records[self.evicted[:, 0]] = self.evicted[:, 1:]
        records[self.born[:, 0], 0], records[self.born[:, 0], 1] = 0, self.born[:, 1]
        records[self.used[:, 0], 1] = self.used[:, 1]
        places, firsts = np.unique(self.candidates[:, 0], return_index=True)  # what was there before the first change
        candidates[places] = self.candidates[firsts, 1:]


@dataclass
class IdCounts:
    """What became of the ids of a table's shard, in the batches that trained.

    Attributes:
        live: ids with a row.
        admitted: ids that got a row, each time.
        evicted: ids that lost theirs.
        refused: times that an id should have got a row and none was free.
        evicted_age: batches since the last use of the evicted ids, in all.
    """

    live: int = 0
    admitted: int = 0
    evicted: int = 0
    refused: int = 0
    evicted_age: int = 0


class IdGuard(ChangeGuard):
    """Refuses maps that changed only in part."""

    doubt = "it is not certain which id has which row"


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


class IdMap:
    """Ids and rows of whole buckets of one table.

    Args:
        table: its name, for messages and coins.
        config: rules.
        buckets: of the whole table.
        seed: of the coins.
        first_bucket, num_buckets: those here; all by default.

    Attributes:
        head: newest batch resolved, counted from 1.
        committed: newest batch that trained.
        counts: of what happened up to `committed`.
        changed: rows that changed hands up to `committed`, and whose they were; None: they are not noted.

    >>> table = IdTable(buckets=1)
    >>> ids = IdMap("users", table, table.buckets_of("users", 16), seed=1)
    >>> ids.resolve(mixed(np.array([10**18, -5, 10**18]))).rows.tolist()
    [1, 2, 1]
    >>> ids.find(mixed(np.array([-5]))).tolist()  # before the batch has trained: the bucket's shared row
    [0]
    >>> ids.commit()
    >>> ids.find(mixed(np.array([-5]))).tolist()
    [2]
    """

    def __init__(
        self,
        table: str,
        config: IdTable,
        buckets: Buckets,
        seed: int,
        first_bucket: int = 0,
        num_buckets: int | None = None,
    ) -> None:
        self.table, self.config = table, config
        self._all, self._first = buckets, first_bucket
        self._num = buckets.num_buckets if num_buckets is None else num_buckets
        self.num_rows = self._num * buckets.rows
        digest = hashlib.blake2b(f"{seed} {table} admission".encode(), digest_size=8).digest()
        coin_key = int.from_bytes(digest, "little", signed=True)
        self._records = np.zeros(2 * self.num_rows, np.int64)
        self._records[1::2] = -1
        self._candidates = np.zeros(2 * config.candidates_of(buckets) * self._num, np.int64)
        self._cells = np.empty(2 * self.num_rows + 1, np.int32)
        self._ring = np.empty(self.num_rows, np.int32)
        self._heads, self._num_free = np.empty(self._num, np.int64), np.empty(self._num, np.int64)
        self._index = (self._cells, self._records, self._ring, self._heads, self._num_free)
        of_buckets = (buckets.num_buckets, first_bucket, buckets.rows, config.candidates_of(buckets) // 8)
        others = (buckets.least_free, config.unadmitted == "shared")
        self._rules = np.array([config.admit_after, coin_key, config.coin_bound, *of_buckets, *others], np.int64)
        self._guard = IdGuard(f"ids of table {table}")
        self.changed: ChangedIds | None = None
        self._reset(0, IdCounts())

    def _reset(self, clock: int, counts: IdCounts) -> None:
        loops.rebuild_ids(self._records, self._all.rows, self._cells, self._ring, self._heads, self._num_free)
        self.head = self.committed = clock
        self.counts = counts
        self._log: deque[_Change] = deque()
        self._committed: tuple[loops.Int64s, loops.Int64s, loops.Int64s] | None = None

    # -- batches, in their order

    def resolve(self, ids: loops.Int64s) -> ResolvedIds:
        """Resolve the next batch: count its ids, give rows to those that may have one, and evict others.

        Args:
            ids: int64 [N] of buckets that are here, mixed, in any order: how often each occurs is all that matters.
        """
        clock, most = self.head + 1, min(len(ids), self.num_rows)
        rows, missing, used = (np.empty(size, np.int64) for size in (len(ids), len(ids), 2 * most))
        born, changes, refused, due = _NOTHING, _NOTHING, 0, _NOTHING[:, 0]
        with self._guard.change(f"resolving the ids of batch {clock}"):
            state = (self.config.decay, self._cells, self._records)
            num_used, num_missing = loops.use_ids(ids, clock, *state, rows, used, missing)
            if num_missing:
                born, changes, refused, due = self._admit(ids, missing[:num_missing], clock, rows)
            evicted, age = self._evict(due, clock)
            change = _Change(used[: 2 * num_used].reshape(-1, 2).copy(), born, evicted, changes, refused, age)
            self._log.append(change)
            self.head, self._committed = clock, None
        evicted_in = max(0, -1 - int(born[:, 1].min()) - self.config.quarantine) if len(born) else 0
        return ResolvedIds(rows, born[:, 0], born[:, 2], evicted_in, change.num_bytes)

    def _admit(
        self, ids: loops.Int64s, missing: loops.Int64s, clock: int, rows: loops.Int64s
    ) -> tuple[loops.Int64s, loops.Int64s, int, loops.Int64s]:
        """Give rows to ids at positions `missing`; return births, changed candidates and ids refused, as `_Change` has
        them, and the buckets in which ids are to be evicted."""
        ids, num = ids[missing], len(missing)
        order = ids.argsort()
        counts_candidates = self.config.admit_after > 1 and not self.config.coin_bound
        born, changes = np.empty(3 * min(num, self.num_rows), np.int64), np.empty(3 * num * counts_candidates, np.int64)
        is_due = np.zeros(self._num, np.bool_)
        state, found = (*self._index, self._candidates), (rows, born, changes, is_due)
        num_born, num_changes, refused = loops.give_rows_to_ids(
            ids[order], missing[order], clock, self._rules, *state, *found
        )
        assert num_born >= 0, "ids of another rank's buckets"
        born, changes = born.reshape(-1, 3)[:num_born].copy(), changes.reshape(-1, 3)[:num_changes].copy()
        return born, changes, refused, np.flatnonzero(is_due)

    def _evict(self, due: loops.Int64s, clock: int) -> tuple[loops.Int64s, int]:
        """Evict ids of the buckets `due`, and, one bucket of the table in each batch, those that expired. Return what
        `_Change` has."""
        ttl, turn = self.config.ttl_steps, clock % self._all.num_buckets - self._first
        if ttl is not None and 0 <= turn < self._num:
            due = np.union1d(due, turn)
        if not len(due):
            return _NOTHING, 0
        evicted = np.empty(3 * len(due) * self._all.rows, np.int64)
        oldest, release = 0 if ttl is None else clock - ttl, clock + self.config.quarantine
        rules = (clock, oldest, self.config.decay, release, self._all.rows, self._all.reserve, self._all.least_free)
        num = loops.evict_ids(due, *rules, *self._index, evicted)
        found = evicted.reshape(-1, 3)[:num].copy()
        return found, int((clock - (found[:, 2] & (2**32 - 1))).sum())

    def commit(self) -> None:
        """Note that the oldest batch that was resolved and not committed has trained."""
        change = self._log.popleft()
        self.committed += 1
        self._committed = None
        counts = self.counts
        counts.admitted += len(change.born)
        counts.evicted += len(change.evicted)
        counts.live += len(change.born) - len(change.evicted)
        counts.refused += change.refused
        counts.evicted_age += change.evicted_age
        if self.changed is not None:
            self.changed.add(change.born[:, 0].copy(), np.full(len(change.born), RESERVED_ID))
            self.changed.add(change.evicted[:, 0].copy(), unmixed(change.evicted[:, 1]))

    def undo(self) -> None:
        """Take back all batches that were not committed."""
        if not self._log:
            return
        with self._guard.change("taking back resolved batches"):
            for change in reversed(self._log):
                change.undo(self._records.reshape(-1, 2), self._candidates.reshape(-1, 2))
            self._reset(self.committed, self.counts)

    # -- the state of the newest batch that trained

    def find(self, ids: loops.Int64s) -> loops.Int64s:
        """Return the rows of ids (int64 [N], mixed) after the newest batch that trained; -1 for zeros."""
        self._guard.check()
        rows = np.empty(len(ids), np.int64)
        loops.find_ids(ids, self._cells, self._records, rows)
        if self._log:
            born, left, left_rows = self._of_committed()
            rows[np.isin(rows, born)] = -1
            if len(left):
                places = np.minimum(np.searchsorted(left, ids), len(left) - 1)
                rows = np.where(left[places] == ids, left_rows[places], rows)
        missing = np.flatnonzero(rows < 0)
        if self.config.unadmitted == "shared" and len(missing):
            buckets = np.empty(len(missing), np.int64)
            loops.buckets_of_ids(ids[missing], self._all.num_buckets, buckets)
            buckets -= self._first
            assert 0 <= buckets.min() <= buckets.max() < self._num, "ids of another rank's buckets"
            rows[missing] = buckets * self._all.rows
        return rows

    def owners(self, rows: loops.Int64s) -> loops.Int64s:
        """Return the ids of rows [N] after the newest batch that trained, as data have them; `RESERVED_ID`: of none."""
        self._guard.check()
        ids = np.where(self._records[2 * rows + 1] >= 0, unmixed(self._records[2 * rows]), RESERVED_ID)
        if self._log:
            born, left, left_rows = self._of_committed()
            ids[np.isin(rows, born)] = RESERVED_ID
            if len(left):
                order = np.argsort(left_rows)
                places = np.minimum(np.searchsorted(left_rows, rows, sorter=order), len(order) - 1)
                was_left = left_rows[order[places]] == rows
                ids[was_left] = unmixed(left[order[places[was_left]]])
        return ids

    def is_used(self, rows: loops.Int64s) -> NDArray[np.bool_]:
        """Return of rows [N] whether an id had each after the newest batch that trained, or ids without a row share
        it."""
        is_shared = rows % self._all.rows == 0
        return (self.owners(rows) != RESERVED_ID) | (is_shared & (self.config.unadmitted == "shared"))

    def _of_committed(self) -> tuple[loops.Int64s, loops.Int64s, loops.Int64s]:
        """Return what differs from the newest batch resolved: rows given since; ids evicted since, and their rows."""
        if self._committed is None:
            born, left, rows = set[int](), [np.empty(0, np.int64)], [np.empty(0, np.int64)]
            for change in self._log:
                had_ids = ~np.isin(change.evicted[:, 0], np.fromiter(born, np.int64, len(born)))
                left.append(change.evicted[had_ids, 1])
                rows.append(change.evicted[had_ids, 0])
                born.update(change.born[:, 0].tolist())
            ids = np.concatenate(left)
            order = np.argsort(ids)
            self._committed = (np.array(sorted(born), np.int64), ids[order], np.concatenate(rows)[order])
        return self._committed

    def tensors(self) -> dict[str, loops.Int64s]:
        """Return the state after the newest batch that trained: `records` [R, 2], `candidates` [C, 2].

        In place of an id, the first row of each bucket has the number of that batch.
        """
        self._guard.check()
        records, candidates = self._records.reshape(-1, 2).copy(), self._candidates.reshape(-1, 2).copy()
        for change in reversed(self._log):
            change.undo(records, candidates)
        records[:: self._all.rows, 0] = self.committed
        return {"records": records, "candidates": candidates}

    def load(self, tensors: Mapping[str, loops.Int64s]) -> None:
        """Take a state over, in place of this one: what `tensors` returned, of these buckets. Counts begin anew.

        Raises:
            CacheError: it is that of another number of rows or buckets.
        """
        mine = {"records": self._records.reshape(-1, 2), "candidates": self._candidates.reshape(-1, 2)}
        for name, into in mine.items():
            shape = list(tensors[name].shape) if name in tensors else [0, 2]
            if shape != list(into.shape):
                raise CacheError(
                    f"ids of table {self.table}: got {name} {shape}, needed {list(into.shape)}. {_SAME_RULES}"
                )
        records = tensors["records"]
        live = np.flatnonzero(records[:, 1] >= 0)
        clocks, buckets = records[:: self._all.rows, 0], np.empty(len(live), np.int64)
        loops.buckets_of_ids(np.ascontiguousarray(records[live, 0]), self._all.num_buckets, buckets)
        if (clocks != clocks[:1]).any() or (buckets - self._first != live // self._all.rows).any():
            raise CacheError(
                f"ids of table {self.table}: the state is not one of {self._all.num_buckets} buckets of "
                f"{self._all.rows} rows. {_SAME_RULES}"
            )
        with self._guard.change("loading ids"):
            for name, part in tensors.items():
                mine[name][:] = part
            self._records[:: 2 * self._all.rows] = 0
            self._reset(int(clocks[0]), IdCounts(live=len(live)))

    @property
    def num_bytes(self) -> int:
        """Memory of the map, in bytes, without the logs of the batches ahead."""
        return sum(array.nbytes for array in self._index) + self._candidates.nbytes
