"""Which id has which row of a table's shard, as a function of the batches alone.

Batches are resolved in their order, many ahead of their training. A log of each batch that has not trained yet tells
what it changed, so that the state of the newest trained batch can be read, and returned to.
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
from embershard.cache.ids.changed_ids import ChangedIds
from embershard.cache.ids.config import Buckets, IdTable
from embershard.errors import CacheError

#: The id that no data may have: missing values are none.
RESERVED_ID = -(2**63)
_SAME_RULES = "Give the table the rows, the buckets and the rules that it was saved with"
_STEP = 0x9E3779B97F4A7C15
_WORD = 2**64


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
    """What a batch changed: rows and what their records were before, in the order of the changes."""

    used: loops.Int64s
    used_before: loops.Int64s
    born: loops.Int64s
    born_before: loops.Int64s
    evicted: loops.Int64s
    evicted_before: loops.Int64s
    candidates: loops.Int64s
    refused: int

    def undo(self, records: loops.Int64s, candidates: loops.Int64s) -> None:
        """Restore the records [2 * R] before the batch, and the candidates."""
        records[2 * self.evicted], records[2 * self.evicted + 1] = self.evicted_before[::2], self.evicted_before[1::2]
        records[2 * self.born], records[2 * self.born + 1] = 0, self.born_before
        records[2 * self.used + 1] = self.used_before
        places, firsts = np.unique(self.candidates[::3], return_index=True)  # what was there before the first change
        candidates[2 * places] = self.candidates[1::3][firsts]
        candidates[2 * places + 1] = self.candidates[2::3][firsts]


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
        self._coin_key = int.from_bytes(digest, "little")
        self._records = np.zeros(2 * self.num_rows, np.int64)
        self._records[1::2] = -1
        self._candidates = np.zeros(2 * config.candidates_of(buckets) * self._num, np.int64)
        self._cells = np.empty(2 * self.num_rows + 1, np.int32)
        self._ring = np.empty(self.num_rows, np.int32)
        self._heads, self._num_free = np.empty(self._num, np.int64), np.empty(self._num, np.int64)
        self._index = (self._cells, self._records, self._ring, self._heads, self._num_free)
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
        with self._guard.change(f"resolving the ids of batch {self.head + 1}"):
            return self._resolve(ids)

    def _resolve(self, ids: loops.Int64s) -> ResolvedIds:
        clock, decay = self.head + 1, self.config.decay
        rows = np.empty(len(ids), np.int64)
        used, before = (
            np.empty(min(len(ids), self.num_rows), np.int64),
            np.empty(min(len(ids), self.num_rows), np.int64),
        )
        num_missing = loops.find_ids(ids, self._cells, self._records, rows)
        num_used = loops.count_ids(rows, clock, decay, self._records, used, before)
        born, born_before = np.empty(0, np.int64), np.empty(0, np.int64)
        changes, refused, touched = np.empty(0, np.int64), 0, np.empty(0, np.int64)
        if num_missing:
            missing = np.flatnonzero(rows < 0)
            distinct, inverse, counts = np.unique(ids[missing], return_inverse=True, return_counts=True)
            buckets = self._buckets(distinct)
            given, born, born_before, changes, refused = self._admit(distinct, counts, buckets, clock)
            given = np.where(given >= 0, given, self._of_others(buckets))
            rows[missing] = given[inverse]
            touched = born // self._all.rows
        evicted, evicted_before = self._evict(touched, clock)
        used, before = used[:num_used].copy(), before[:num_used].copy()
        log = (used, before, born, born_before, evicted, evicted_before, changes)
        self._log.append(_Change(*log, refused))
        self.head, self._committed = clock, None
        releases = -1 - born_before
        evicted_in = max(0, int(releases.max(initial=0)) - self.config.quarantine)
        return ResolvedIds(rows, born, self._records[2 * born], evicted_in, sum(part.nbytes for part in log))

    def _buckets(self, ids: loops.Int64s) -> loops.Int64s:
        """Return the buckets of ids, counted from the first one here."""
        buckets = np.empty(len(ids), np.int64)
        loops.buckets_of_ids(ids, self._all.num_buckets, buckets)
        buckets -= self._first
        assert len(ids) == 0 or 0 <= buckets.min() <= buckets.max() < self._num, "ids of another rank's buckets"
        return buckets

    def _of_others(self, buckets: loops.Int64s) -> loops.Int64s:
        """Return the rows of ids without one of their own."""
        return buckets * self._all.rows if self.config.unadmitted == "shared" else np.full(len(buckets), -1)

    def _admit(
        self, ids: loops.Int64s, counts: loops.Int64s, buckets: loops.Int64s, clock: int
    ) -> tuple[loops.Int64s, loops.Int64s, loops.Int64s, loops.Int64s, int]:
        num = len(ids)
        rows, born, before = np.empty(num, np.int64), np.empty(num, np.int64), np.empty(num, np.int64)
        changes = np.empty(3 * num, np.int64)
        coin_key = mixed(np.array([(self._coin_key + clock * _STEP) % _WORD], np.uint64).view(np.int64))[0]
        num_born, num_changes, refused = loops.admit_ids(
            ids,
            counts,
            buckets,
            clock,
            self.config.admit_after,
            coin_key,
            self.config.coin_bound,
            self._all.rows,
            self.config.candidates_of(self._all) // 8,
            *self._index,
            self._candidates,
            rows,
            born,
            before,
            changes,
        )
        return rows, born[:num_born].copy(), before[:num_born].copy(), changes[: 3 * num_changes].copy(), refused

    def _evict(self, buckets: loops.Int64s, clock: int) -> tuple[loops.Int64s, loops.Int64s]:
        """Evict ids of buckets that gave rows, and, one bucket of the table in each batch, those that expired."""
        ttl, turn = self.config.ttl_steps, clock % self._all.num_buckets - self._first
        due = buckets[self._num_free[buckets] < self._all.least_free]
        if ttl is not None and 0 <= turn < self._num:
            due = np.append(due, turn)
        if not len(due):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        due = np.unique(due)
        evicted, before = (
            np.empty(len(due) * self._all.rows, np.int64),
            np.empty(2 * len(due) * self._all.rows, np.int64),
        )
        num = loops.evict_ids(
            due,
            clock,
            0 if ttl is None else clock - ttl,
            self.config.decay,
            clock + self.config.quarantine,
            self._all.rows,
            self._all.reserve,
            self._all.least_free,
            *self._index,
            evicted,
            before,
        )
        return evicted[:num].copy(), before[: 2 * num].copy()

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
        counts.evicted_age += int((self.committed - (change.evicted_before[1::2] & (2**32 - 1))).sum())
        if self.changed is not None:
            self.changed.add(change.born, np.full(len(change.born), RESERVED_ID))
            self.changed.add(change.evicted, unmixed(change.evicted_before[::2]))

    def undo(self) -> None:
        """Take back all batches that were not committed."""
        if not self._log:
            return
        with self._guard.change("taking back resolved batches"):
            for change in reversed(self._log):
                change.undo(self._records, self._candidates)
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
        rows[missing] = self._of_others(self._buckets(ids[missing]))
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
                had_ids = ~np.isin(change.evicted, np.fromiter(born, np.int64, len(born)))
                left.append(change.evicted_before[::2][had_ids])
                rows.append(change.evicted[had_ids])
                born.update(change.born.tolist())
            ids = np.concatenate(left)
            order = np.argsort(ids)
            self._committed = (np.array(sorted(born), np.int64), ids[order], np.concatenate(rows)[order])
        return self._committed

    def tensors(self) -> dict[str, loops.Int64s]:
        """Return the state after the newest batch that trained: `records` [R, 2], `candidates` [C, 2].

        In place of an id, the first row of each bucket has the number of that batch.
        """
        self._guard.check()
        records, candidates = self._records.copy(), self._candidates.copy()
        for change in reversed(self._log):
            change.undo(records, candidates)
        records[:: 2 * self._all.rows] = self.committed
        return {"records": records.reshape(-1, 2), "candidates": candidates.reshape(-1, 2)}

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
