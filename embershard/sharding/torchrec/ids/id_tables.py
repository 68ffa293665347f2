"""Tables of ids without a bound in a pool: from the ids of a batch to keys, and to rows that are reinitialised.

A batch's ids are resolved once, when it becomes known, in the order in which batches train. What was found is kept with
the batch: a second answer would be another one.

An id is evicted when batch s is known, and its row given away with batch n >= s + Q at the earliest (the row is in
quarantine). The row is reinitialised when batch n is prepared, while batch t >= n - P may train: at most P batches are
prepared ahead. The cache relies on Q >= P, and on uses of the old id before s only. Then

* no batch in flight uses the row: those are t and later, and t >= n - P >= s. So its slot may be emptied;
* nobody asks for what the row held. States of steps t >= s do not have the old id, so no evaluation, checkpoint or
  publication needs it; a save that began earlier keeps its own copy (`Home.before_write`);
* taking back all batches after t brings back ids that were evicted after t only. Their rows are given away from
  t + 1 + Q on, and no such batch was prepared. So nothing has to be undone in the cache: a row that was reinitialised
  for a batch that is cancelled, forgotten or fails holds what no id has, until it is given away again.

So a row may be reinitialised twice, but not left out: a batch that is resolved again does it again, and so does one
that is skipped. Whoever replaces the host rows cancels the prepared batches first.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_types import ShardedEmbeddingTable

from embershard.cache.gpu.readback import Reads
from embershard.cache.ids.config import IdTable
from embershard.cache.ids.id_map import ChangedIds, IdCounts, IdGuard, IdMap, mixed
from embershard.cache.next_use import KnownBatch
from embershard.cache.row_cache import RowCache
from embershard.cache.tickets import Ticket
from embershard.errors import CacheError, ConfigError
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings
from embershard.sharding.torchrec.feature_keys import FeatureIds, PoolKeys
from embershard.sharding.torchrec.inspection import cached_embeddings
from embershard.sharding.torchrec.spec import RAW_IDS_KEY, first_row

if TYPE_CHECKING:
    from embershard.distributed.changed_rows import ChangedRows


@dataclass(eq=False)
class KnownIds:
    """A batch whose ids were resolved.

    Attributes:
        keys: int64 [N] of the pool; -1 for an id whose embedding is zero.
        lengths: int64 [F], ids per feature.
        births: rows that the batch gives to ids, and these: int64 [M] both.
        evicted_in: the newest batch that evicted one of them from another id.
        generation: of the maps that resolved it: they were not taken back since.
        log_bytes: memory of what the maps note to take it back.
        is_row: bool [N], where `keys` are not -1; None if they never are.
        known: the batch in the index of next uses, if there is one; None once it is prepared.
        has_begun: these rows are reinitialised.
        ticket: number of the cache's batch that it was last prepared as.
        step: the first one of the batches that were resolved together, for one update; None: itself.
        others: of that one, the others.
    """

    keys: Tensor
    lengths: Tensor
    births: tuple[Tensor, Tensor] | None
    evicted_in: int
    generation: int
    log_bytes: int
    is_row: Tensor | None = None
    known: KnownBatch | None = None
    has_begun: bool = False
    ticket: int = -1
    step: KnownIds | None = None
    others: tuple[KnownIds, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Memory, in bytes."""
        return self.keys.nbytes + self.log_bytes + (0 if self.known is None else self.known.num_bytes)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return what the cache takes: keys of rows, without zeros, and their number per feature."""
        if self.is_row is None:
            return self.keys, self.lengths
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), self.is_row.cumsum(0)])[self.lengths.cumsum(0)]
        return self.keys[self.is_row], ends.diff(prepend=torch.zeros(1, dtype=torch.int64))


class PoolIdMaps(PoolKeys):
    """The maps of a pool's tables, and its batches that are resolved and have not trained.

    Args:
        maps: of each table.
        row_offsets: first key of each table.
        table_of_feature: number of each feature's table, ascending.
        cache: of the pool.
        are_raw: batches have ids as data have them; False: mixed.
    """

    gives_rows = True

    def __init__(
        self,
        maps: Sequence[IdMap],
        row_offsets: Sequence[int],
        table_of_feature: Sequence[int],
        cache: RowCache,
        are_raw: bool = False,
    ) -> None:
        self._maps, self._guard = list(maps), IdGuard(cache.name)  # all maps are at the same batch
        self._offsets, self._cache, self._are_raw = list(row_offsets), cache, are_raw
        self._features = np.bincount(table_of_feature, minlength=len(self._maps)).tolist()
        self._num_features = len(table_of_feature)
        self._ahead: deque[KnownIds] = deque()  # the first one of each step
        self._begun: KnownIds | None = None  # of the step in training
        self.has_zeros = any(ids_map.config.unadmitted == "zero" for ids_map in self._maps)
        self._generation = 0
        self._lock = threading.RLock()  # a worker prepares batches while the next one's forward begins

    @classmethod
    def of_tables(
        cls,
        ids: Mapping[str, IdTable],
        seed: int,
        tables: Sequence[ShardedEmbeddingTable],
        cache: RowCache,
        table_of_feature: Sequence[int],
    ) -> PoolIdMaps:
        """Make the maps of table shards, whose rules and coins are by `ids` and `seed`."""
        maps = []
        for table in tables:
            rules = ids[table.name]
            buckets = rules.buckets_of(table.name, table.num_embeddings)
            first, number = first_row(table) // buckets.rows, table.local_rows // buckets.rows
            maps.append(IdMap(table.name, rules, buckets, seed, first, number))
        are_raw = RAW_IDS_KEY in (tables[0].fused_params or {})
        return cls(maps, cache.host.row_offsets, table_of_feature, cache, are_raw)

    @property
    def maps(self) -> list[IdMap]:
        """The map of each table."""
        self._guard.check()
        return self._maps

    def know(self, *batches: FeatureIds) -> list[KnownIds]:
        """Resolve a batch that trains after all batches resolved so far; or several that train together."""
        with self._lock:
            with self._guard.change("resolving the ids of a batch"):
                found = self._resolve([(ids.indices, ids.lengths(self._num_features)) for ids in batches])
            if self._cache.next_use_index is not None:
                for known in found:
                    known.known = self._cache.know(*known.rows())
            return found

    def _resolve(self, batches: Sequence[tuple[Tensor, Tensor]]) -> list[KnownIds]:
        words = [self._mixed(ids) for ids, _ in batches]
        keys, born = [np.empty(len(each), np.int64) for each in words], list[tuple[np.ndarray, np.ndarray]]()
        evicted_in = log_bytes = 0
        for of_batches in zip(*(self._parts(lengths) for _, lengths in batches), strict=True):
            (ids_map, offset, *_), places = of_batches[0], [slice(start, stop) for _, _, start, stop in of_batches]
            own = [each[place] for each, place in zip(words, places, strict=True)]
            found = ids_map.resolve(own[0] if len(own) == 1 else np.concatenate(own))
            of_table, first = self._keys(found.rows, ids_map, offset), 0
            for each, place in zip(keys, places, strict=True):
                size = place.stop - place.start
                each[place], first = of_table[first : first + size], first + size
            if len(found.born):
                born.append((found.born + offset, found.ids))
            evicted_in, log_bytes = max(evicted_in, found.evicted_in), log_bytes + found.log_bytes
        step, *others = (
            KnownIds(torch.from_numpy(own), lengths, None, 0, self._generation, 0, self._is_row(own))
            for own, (_, lengths) in zip(keys, batches, strict=True)
        )
        if born:
            rows, ids = (torch.from_numpy(np.concatenate(part)) for part in zip(*born, strict=True))
            step.births = rows, ids
        step.evicted_in, step.log_bytes, step.others = evicted_in, log_bytes, tuple(others)
        for other in others:
            other.step = step
        self._ahead.append(step)
        return [step, *others]

    def _is_row(self, keys: np.ndarray) -> Tensor | None:
        return torch.from_numpy(keys >= 0) if self.has_zeros and bool((keys < 0).any()) else None

    def _mixed(self, ids: Tensor) -> np.ndarray:
        return mixed(ids.numpy()) if self._are_raw else ids.numpy()

    @staticmethod
    def _keys(rows: np.ndarray, ids_map: IdMap, offset: int) -> np.ndarray:
        """Return the pool's keys of a map's rows."""
        return rows + offset if ids_map.config.unadmitted == "shared" else np.where(rows >= 0, rows + offset, -1)

    def _parts(self, lengths: Tensor) -> list[tuple[IdMap, int, int, int]]:
        """Return each table's map, first key, and the bounds of its ids among those of a batch."""
        ends, found, feature, start = lengths.cumsum(0).tolist(), [], 0, 0
        for ids_map, offset, features in zip(self._maps, self._offsets, self._features, strict=True):
            feature += features
            stop = ends[feature - 1]
            found.append((ids_map, offset, start, stop))
            start = stop
        return found

    def find(self, ids: FeatureIds) -> Tensor:
        words = self._mixed(ids.indices)
        keys = np.empty(len(words), np.int64)
        with self._lock:
            self._guard.check()
            for ids_map, offset, start, stop in self._parts(ids.lengths(self._num_features)):
                keys[start:stop] = self._keys(ids_map.find(words[start:stop]), ids_map, offset)
        return torch.from_numpy(keys)

    def prepare(self, ids: FeatureIds, critical_path: bool, known: KnownIds | None, if_it_fits: bool) -> Ticket | None:
        """Do what `RowCache.prepare` does for a batch, with its births and those of earlier batches that were never
        prepared.

        Returns:
            The ticket; None, too, if a row of these was evicted in a batch that has not begun to train: until then,
            that row's old content is the present state.
        """
        with self._lock:
            if known is None or known.generation != self._generation:
                (known,) = self.know(ids)
            step = known.step or known
            due = []  # batches up to this one whose births are not done
            if step in self._ahead:  # else another part of its update has begun to train, and its births are there
                before = itertools.takewhile(lambda batch: batch is not step, self._ahead)
                due = [batch for batch in (*before, step) if not batch.has_begun]
            evicted_in = max((batch.evicted_in for batch in due), default=0)
            if evicted_in > self._maps[0].committed:
                if if_it_fits and not critical_path:
                    return None
                if not critical_path:
                    raise CacheError(
                        f"{self._cache.name}: a batch that is prefetched gives away a row that was taken from another "
                        "id in a batch that has not trained yet. Give IdTable a longer quarantine: at least one more "
                        "than batches are prefetched"
                    )
                self._commit(evicted_in)  # those before this batch that did not train are over
        for batch in due:
            if batch.births is not None:
                self._cache.reinitialise(*batch.births)
            batch.has_begun = True
        keys, lengths = known.rows()
        ticket = self._cache.prepare(keys, lengths, critical_path, known.known, if_it_fits)
        if ticket is None:
            return None
        known.known, known.ticket = None, ticket.batch
        if known.is_row is not None:
            slots = torch.zeros(known.keys.numel(), dtype=ticket.slots.dtype)
            slots[known.is_row] = ticket.slots
            ticket.slots = slots
        return ticket

    def preparing(
        self, ids: FeatureIds, critical_path: bool, known: KnownIds | None, if_it_fits: bool
    ) -> Reads[Ticket | None]:
        yield from ()  # on a CPU
        return self.prepare(ids, critical_path, known, if_it_fits)

    def skip(self, ids: FeatureIds, known: KnownIds) -> None:
        """Take back the announcement of a batch's rows. Its ids stay counted if a later batch trains."""
        if known.known is not None:
            self._cache.skip(known.rows()[0], known.known)
            known.known = None

    def begin(self, ticket: Ticket) -> bool:
        """As every pool's keys: the state is now the one behind the batch."""
        with self._lock:
            if self._begun is not None and self._begun.generation == self._generation:
                for known in self._begun.others:
                    if known.ticket == ticket.batch:
                        return known.is_row is not None
            for number, step in enumerate(self._ahead, self._maps[0].committed + 1):
                for known in (step, *step.others):
                    if known.ticket == ticket.batch:
                        self._begun = step
                        self._commit(number)
                        return known.is_row is not None
        raise CacheError(
            f"{self._cache.name}: the ids of this batch were taken back since it was prepared (another pipeline took "
            "over, or a state was loaded), or a later batch has trained. Forward batches in the order in which they "
            "became known"
        )

    def check_updates(self, micro_batches: int, num_held: int | None = None) -> None:
        if micro_batches == 1:
            raise ConfigError(
                f"gradient accumulation with tables of ids, {', '.join(self._cache.tables[:5])}, whose ids get rows "
                "batch by batch. Train with LookAheadPipeline(..., micro_batches=K) for updates of K batches "
                "(look_ahead.lookahead of at least 1 with train.accumulate), so that those of all of them get rows "
                "together"
            )
        together = 0 if self._begun is None else 1 + len(self._begun.others)
        if num_held not in (None, 0, together):  # at the end of the data there may be fewer
            raise CacheError(
                f"{self._cache.name}: {num_held} batches in one update, and the ids of {together} got rows together. "
                "Make the pipeline with as many micro_batches as an update has"
            )

    def _commit(self, through: int) -> None:
        with self._guard.change(f"noting that batch {through} trains"):
            while self._maps[0].committed < through:
                for ids_map in self._maps:
                    ids_map.commit()
                self._ahead.popleft()

    def forget(self) -> None:
        """Take back all batches that have not begun to train: they are resolved again when they come again."""
        with self._lock:
            if self._ahead:
                with self._guard.change("taking back resolved batches"):
                    for ids_map in self._maps:
                        ids_map.undo()
                    self._ahead.clear()
                    self._generation += 1

    # -- what is published

    def note_changes(self) -> None:
        """Note from now on which rows change hands."""
        for ids_map in self._maps:
            ids_map.changed = ChangedIds(ids_map.num_rows)

    def take_changes(self, keys: Tensor) -> tuple[Tensor, list[ChangedRows]]:
        """As every pool's keys; rows that changed hands are numbered in their shard."""
        from embershard.distributed.changed_rows import ChangedRows

        found, changes = list[np.ndarray](), list[ChangedRows]()
        with self._lock:
            for ids_map, offset in zip(self._maps, self._offsets, strict=True):
                assert ids_map.changed is not None, "changes are not noted"
                rows, old = ids_map.changed.take()
                bounds = np.searchsorted(keys.numpy(), (offset, offset + ids_map.num_rows))
                touched = np.union1d(keys[bounds[0] : bounds[1]].numpy() - offset, rows)
                found.append(touched[ids_map.is_used(touched)] + offset)
                new = ids_map.owners(rows)
                parts = [torch.from_numpy(part[new != old]) for part in (rows, old, new)]
                changes.append(ChangedRows(parts[0], parts[1], parts[2], ids_map.counts.live))
        return torch.from_numpy(np.concatenate(found)), changes

    def touch(self, table: str, first_row: int, rows: Tensor, ids: Tensor) -> None:
        """As every pool's keys; rows outside of the shard are ignored."""
        for ids_map in self._maps:
            if ids_map.table == table:
                assert ids_map.changed is not None, "changes are not noted"
                own = (rows >= first_row) & (rows < first_row + ids_map.num_rows)
                ids_map.changed.add(rows[own].numpy() - first_row, ids[own].numpy(), at_first=True)


def maps_of(pool: CachedTableBatchedEmbeddings) -> list[IdMap]:
    """Return the maps of a pool's tables; none of row numbers."""
    return pool.keys.maps if isinstance(pool.keys, PoolIdMaps) else []


def id_counts(model: nn.Module) -> dict[str, IdCounts]:
    """Return what became of the ids of this rank's shards, in the batches that trained, by table.

    >>> id_counts(model)  # a sharded model, without tables of ids
    {}
    """
    return {each.table: each.counts for pool in cached_embeddings(model) for each in maps_of(pool)}
