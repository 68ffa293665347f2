"""Replays a trace through a cache: the cache's own planner runs over the ids, and no row is moved.

The hit rate of a policy is not a formula. It follows from ties, pins, warm-up and how far ahead is known, so nothing is
modelled here: the batches of the trace go through the same `RowCache` that trains, over rows of one byte. On a
trace of all rows the result is what training will count. On a trace that follows a share of the rows, the cache has
that share of the slots (miniature simulation: Waldspurger et al., ATC'17).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embershard.cache.config import CachePolicy
from embershard.cache.row_cache import RowCache
from embershard.cache.statistics import CacheReport
from embershard.frequency import SampledTrace, TableTrace
from embershard.frequency.counts import RowCounts
from embershard.planning.simulate.file_tier import FileTier, FileTraffic, Levels
from embershard.planning.simulate.pool_report import PoolReport, RowRange, ShardReport
from embershard.planning.simulate.stages import bare_cache, run_stages
from embershard.sharding.run_shape import ReplaySettings

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class StepCut:
    """How the samples of a step are cut: among so many ranks, and on each into pieces, as `Batch.micro_batches` does.

    Attributes:
        is_distinct: of each rank's piece, a table gets distinct rows, each as one lookup.

    >>> order, bounds = StepCut(num_ranks=2, pieces=2).order(6)
    >>> order.tolist(), bounds.tolist()
    ([0, 1, 3, 4, 2, 5], [0, 4, 6])
    """

    num_ranks: int = 1
    pieces: int = 1
    is_distinct: bool = False

    def order(self, num_samples: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the samples of a step, [N], piece after piece of all ranks, and the pieces' bounds, [pieces + 1]."""
        parts = np.array_split(np.arange(num_samples).reshape(self.num_ranks, -1), self.pieces, axis=1)
        return np.concatenate([part.ravel() for part in parts]), np.cumsum([0, *(part.size for part in parts)])


_WHOLE = StepCut()


def replay_pool(
    trace: SampledTrace,
    shards: Sequence[RowRange],
    num_slots: int,
    global_batch_size: int,
    settings: ReplaySettings,
    *,
    pinned_tables: Sequence[str] = (),
    num_steps: int | None = None,
    levels: Levels | None = None,
    cut: StepCut = _WHOLE,
) -> PoolReport:
    """Replay the batches of a trace, of the whole data set, through one pool of slots on one rank.

    Args:
        shards: what the pool holds, in its order.
        global_batch_size: samples of a step, over all ranks.
        pinned_tables: tables whose rows are resident for ever.
        num_steps: steps to replay; None: all whole batches of the trace. After them the trace begins again.
        levels: with as many slots, of rows in a file; None: all rows are in host memory.
        cut: of a step, whose pieces `settings` count.

    Raises:
        ValueError: the trace is shorter than one batch; or a batch and the rows on the device do not fit the places.
    """
    steps = _steps(trace, global_batch_size, num_steps)
    settled = [SettledRows.of(trace, shard, shard.table in pinned_tables) for shard in shards]
    slots = num_slots if trace.rate >= 1 else round((num_slots - sum(rows.num_rows for rows in settled)) * trace.rate)
    sampled = [number for number, rows in enumerate(settled) if not rows.is_whole]
    parts = [shards[number] for number in sampled]
    mixed = settings.profile_samples, settings.shuffle_window
    batches = TraceBatches(trace, parts, global_batch_size, *mixed, cut)
    stay = pinned_tables if trace.rate >= 1 else ()
    tier = None if levels is None else _tier(levels, batches, sum(rows.num_rows for rows in settled), trace.rate)
    cache = _make_cache(batches, parts, max(1, slots), settings, stay, tier)
    touches = _FirstTouches(batches.rows_per_table, [part.table in stay for part in parts])
    halves = _Halves(cache, touches, steps // 2, tier, cut.pieces)
    halves.run(batches, steps, settings)
    held = {number: stats.slots / trace.rate for number, stats in zip(sampled, cache.stats(), strict=False)}
    sizes, warmup, late = (trace, global_batch_size, cut), settings.policy.warmup, steps - steps // 2
    each = ((steps, False), (late, True))
    of_settled = [[rows.report(*sizes, *part, warmup) for rows in settled] for part in each]
    return PoolReport(
        _joined(shards, of_settled[0], held, *halves.counts, trace.rate * steps),
        _joined(shards, of_settled[1], held, *halves.late_counts, trace.rate * late),
        steps,
        num_slots + round(halves.grown / trace.rate),
        halves.grown > 0,
        *halves.files,
    )


def _joined(
    shards: Sequence[RowRange],
    settled: Sequence[ShardReport],
    held: Mapping[int, float],
    replayed: Sequence[CacheReport],
    first_touches: NDArray[np.int64],
    steps: float,
) -> tuple[ShardReport, ...]:
    """Return the reports of all shards per step: of their settled rows, and of those that were replayed.

    Args:
        held: rows by the number of each replayed shard.
        steps: that were replayed, times the share of the rows that the trace follows.
    """
    found = list(settled)
    for number, counts, touched in zip(held, replayed, first_touches.tolist(), strict=False):  # a pool of no table
        own = {**vars(counts.scaled(1.0 / steps)), "first_touches": touched / steps}
        found[number] += ShardReport(**own, held_rows=held[number], shard=shards[number])
    return tuple(found)


def _steps(trace: SampledTrace, global_batch_size: int, num_steps: int | None) -> int:
    """Return the steps to replay; None: all whole batches."""
    if trace.num_samples < global_batch_size:
        raise ValueError(f"the trace has {trace.num_samples} samples, less than a batch of {global_batch_size}")
    return trace.num_samples // global_batch_size if num_steps is None else num_steps


def _tier(levels: Levels, batches: TraceBatches, settled: int, rate: float) -> FileTier:
    """Return the places for the followed rows: the settled ones stay in theirs."""
    room = levels.num_places - (settled if rate < 1 else 0)
    return FileTier(replace(levels, num_places=max(1, room)), batches.pool_rows // levels.rows_per_page, min(1.0, rate))


def _make_cache(
    batches: TraceBatches,
    shards: Sequence[RowRange],
    num_slots: int,
    settings: ReplaySettings,
    pinned: Sequence[str],
    tier: FileTier | None,
) -> RowCache:
    names = [shard.table for shard in shards]
    rows, are_pinned = batches.rows_per_table, [name in pinned for name in names]
    row_counts = None if settings.profile_samples == 0 else batches.row_counts
    names, rows = names or ["none"], rows or [1]
    return bare_cache(names, rows, num_slots, settings, row_counts=row_counts, are_pinned=are_pinned, tier=tier)


class _FirstTouches:
    """Counts, by table, the misses of rows that the cache never had before: int64 [T].

    Args:
        rows_per_table: [T].
        are_pinned: [T] tables whose rows are resident from the start.
    """

    def __init__(self, rows_per_table: Sequence[int], are_pinned: Sequence[bool]) -> None:
        self._known = np.repeat(np.array(are_pinned, np.bool_), rows_per_table)
        self._tables = np.split(self._known, np.cumsum(rows_per_table)[:-1])
        self._before = -self._num_known()

    @property
    def counts(self) -> NDArray[np.int64]:
        """First touches so far."""
        return self._before + self._num_known()

    def begin(self, cache: RowCache) -> None:
        """Take over from a cache that has planned the first batch: what it has beside is there from the start. Rows of
        a warm-up that this batch evicted count as new."""
        self._known[cache.contents().rows.numpy()] = True
        missed = [round(stats.unique_ids - stats.hits_unique) for stats in cache.stats()]
        self._before = np.array(missed, np.int64) - self._num_known()

    def add(self, keys: Tensor) -> None:
        """Count those of a batch's keys that are new."""
        self._known[keys.numpy()] = True

    def _num_known(self) -> NDArray[np.int64]:
        return np.array([np.count_nonzero(rows) for rows in self._tables], np.int64)


class _Halves:
    """Watches a replay: what it counts in all, and in its second half.

    Args:
        half: the step that begins the second half.
        pieces: of a step.
    """

    def __init__(self, cache: RowCache, touches: _FirstTouches, half: int, tier: FileTier | None, pieces: int) -> None:
        self._cache, self._touches, self._half, self._tier = cache, touches, half * pieces, tier
        self._pieces = pieces
        self._began = sum(stats.slots for stats in cache.stats())
        self.at_piece(self._half)

    def run(self, batches: TraceBatches, steps: int, settings: ReplaySettings) -> None:
        """Replay so many steps."""
        run_stages(
            self._cache,
            batches.get,
            steps * self._pieces,
            settings,
            tier=self._tier,
            at_step=self.at_piece,
            at_batch=self.at_batch,
            pieces=self._pieces,
        )

    def at_piece(self, piece: int) -> None:
        """Note the counts at half time."""
        if piece == self._half:
            self._early = self.counts
            self._traffic = None if self._tier is None else self._tier.traffic

    def at_batch(self, step: int, keys: Tensor) -> None:
        """Count first touches."""
        if step == 0:
            self._touches.begin(self._cache)
        self._touches.add(keys)

    @property
    def grown(self) -> int:
        """Slots that the cache got beside those that it began with."""
        return sum(stats.slots for stats in self._cache.stats()) - self._began

    @property
    def counts(self) -> tuple[list[CacheReport], NDArray[np.int64]]:
        """Counts and first touches of each table so far."""
        return [stats.counts for stats in self._cache.stats()], self._touches.counts

    @property
    def late_counts(self) -> tuple[list[CacheReport], NDArray[np.int64]]:
        """Those since half time."""
        (counts, touches), (early, early_touches) = self.counts, self._early
        return [after - before for after, before in zip(counts, early, strict=True)], touches - early_touches

    @property
    def files(self) -> tuple[FileTraffic, FileTraffic] | tuple[()]:
        """What was read from the file and written to it per step: in all, and in the second half; nothing without."""
        if self._tier is None or self._traffic is None:
            return ()
        every = self._tier.traffic
        late = every - self._traffic
        of_step = [each.scaled(self._pieces / max(1, each.steps)) for each in (every, late)]
        return of_step[0], of_step[1]


def replay_preferences(
    trace: SampledTrace, rows: Mapping[str, int], global_batch_size: int, share_of_rows: float = 0.05
) -> dict[str, float]:
    """Return the misses per lookup of each policy on the data, with slots for a share of the rows that occur; see
    `docs/planning.md`."""
    shards = [RowRange(table, 0, num_rows) for table, num_rows in rows.items()]
    occurring = sum(len(np.unique(trace.tables[t].rows)) for t in rows) / trace.rate
    occurring += sum(len(trace.constant_rows.get(t, ())) for t in rows)
    num_slots = max(1, round(share_of_rows * occurring))
    policies = {
        "frequency": ReplaySettings(CachePolicy("frequency", False, warmup=True), 0, profile_samples=None),
        "lfu": ReplaySettings(CachePolicy("lfu", False), 0),
        "lru": ReplaySettings(CachePolicy("lru", False), 0),
        "lookahead": ReplaySettings(),
    }
    found = {}
    for name, settings in policies.items():
        report = CacheReport.total(replay_pool(trace, shards, num_slots, global_batch_size, settings).shards)
        found[name] = 0.0 if report.hit_rate_lookups is None else 1.0 - report.hit_rate_lookups
    return found


@dataclass(frozen=True, eq=False)
class SettledRows:
    """A shard's rows that stay in any cache: its constant rows, and all rows of a pinned table where rows are sampled.

    Attributes:
        shard: whose rows.
        is_whole: all of the shard's rows, of a pinned table.
        constant: lookups of each constant row, int64 [C].
        others: the followed lookups of a whole shard.
    """

    shard: RowRange
    is_whole: bool
    constant: NDArray[np.int64]
    others: TableTrace

    @classmethod
    def of(cls, trace: SampledTrace, shard: RowRange, is_pinned: bool) -> SettledRows:
        """The settled rows of a shard; `is_pinned` says that its table is resident for ever."""
        constant = trace.constant_lookups.get(shard.table, _NONE)
        constant = constant[shard.has(trace.constant_rows.get(shard.table, _NONE))]
        if not is_pinned or trace.rate >= 1:
            return cls(shard, False, constant, TableTrace(_NONE, _NONE))
        table = trace.tables[shard.table]
        inside = shard.has(table.rows)
        return cls(shard, True, constant, TableTrace(table.samples[inside], table.rows[inside]))

    @property
    def num_rows(self) -> int:
        """Rows, and so slots that they keep."""
        return self.shard.num_rows if self.is_whole else len(self.constant)

    def report(
        self,
        trace: SampledTrace,
        global_batch_size: int,
        cut: StepCut,
        num_steps: int,
        is_late: bool,
        warmup: bool,
    ) -> ShardReport:
        """Return what happens to the rows, per step. They are filled once: in the first of `num_steps` steps, or
        before it by a warm-up; `is_late`: before these steps."""
        unique_ids = cut.pieces * self._distinct(trace, global_batch_size / cut.pieces)
        if cut.is_distinct:
            parts = cut.num_ranks * cut.pieces
            lookups = parts * self._distinct(trace, global_batch_size / parts)
        else:
            every = float(self.constant.sum()) + len(self.others.rows) / trace.rate
            lookups = every * global_batch_size / trace.num_samples
        fills = 0.0 if is_late else self.num_rows / num_steps
        missed = 0.0 if is_late or warmup or self.is_whole else min(fills, unique_ids)
        return ShardReport(
            lookups=lookups,
            unique_ids=unique_ids,
            hits_unique=unique_ids - missed,
            hits_lookups=lookups * (1.0 - missed / max(unique_ids, 1e-300)),
            fills=fills,
            write_backs=0.0,
            held_rows=float(self.num_rows),
            shard=self.shard,
            first_touches=missed,
        )

    def _distinct(self, trace: SampledTrace, batch_size: float) -> float:
        # A row that occurs in a share p of the samples is missing from a batch of B with (1 - p)^B.
        absent = (1.0 - np.minimum(self.constant / trace.num_samples, 1.0)) ** batch_size
        found = float((1.0 - absent).sum())
        if len(self.others.rows):
            pairs = np.unique(self.others.samples // batch_size * self.shard.stop + self.others.rows)
            batches = max(1.0, trace.num_samples / batch_size)
            found += min(len(pairs) / trace.rate / batches, self.shard.num_rows - found)
        return found


_MOST_IDLE_ROWS = 10_000_000  # of a table; more need not take memory to be left out


class TraceBatches:
    """The pieces of a pool's batches: keys [N] with the tables one after another, and lookups per table [T].

    After the last batch the samples of the trace come again, in another order: mixed inside windows of
    `shuffle_window` samples, as training mixes them. 0: in the same order.

    Args:
        cut: of a step.

    Attributes:
        rows_per_table: keys of each shard: its rows, or only those that occur where many do not.
        pool_rows: numbers of the keys' rows among all rows of these shards, int64 [K], ascending.
        row_counts: lookups of every key in the first `profile_samples` samples (None: in all).
    """

    def __init__(
        self,
        trace: SampledTrace,
        shards: Sequence[RowRange],
        global_batch_size: int,
        profile_samples: int | None,
        shuffle_window: int,
        cut: StepCut = _WHOLE,
    ) -> None:
        self._num_samples, self._shuffle_window, self._epoch = trace.num_samples, shuffle_window, 0
        order, bounds = cut.order(global_batch_size)
        self._ranks = order // (global_batch_size // cut.num_ranks) if cut.is_distinct else None
        self._place = None if cut.pieces == 1 else np.argsort(order)
        starts = np.arange(trace.num_samples // global_batch_size + 1)[:, None] * global_batch_size + bounds[:-1]
        self._edges = starts.ravel()[: 1 - cut.pieces or None]  # and the end of the last batch
        self._looked_up: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []  # samples and keys of each table
        self._parts: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []
        self.rows_per_table: list[int] = []
        counts, pool_rows = [], [_NONE]
        for shard, first in zip(shards, np.cumsum([0, *(shard.num_rows for shard in shards)]), strict=False):
            table = trace.tables[shard.table]
            inside = shard.has(table.rows)
            whole = bool(inside.all())
            rows = table.rows if whole else table.rows[inside]
            samples = table.samples if whole else table.samples[inside]
            # Rows that never occur matter only in a table that stays whole; and those are small.
            is_dense = trace.rate >= 1 and shard.num_rows <= _MOST_IDLE_ROWS + len(rows)
            distinct, keys = (_NONE, rows - shard.start) if is_dense else np.unique(rows, return_inverse=True)
            num_keys = max(1, shard.num_rows if is_dense else len(distinct))
            counted = keys if profile_samples is None else keys[: np.searchsorted(samples, profile_samples)]
            counts.append(np.bincount(counted, minlength=num_keys))
            self._looked_up.append((samples, keys + sum(self.rows_per_table)))
            pool_rows.append(first + (np.arange(num_keys) if is_dense or not distinct.size else distinct - shard.start))
            self._parts.append(self._cut(*self._looked_up[-1]))
            self.rows_per_table.append(num_keys)
        self.pool_rows = np.concatenate(pool_rows)
        self.row_counts = RowCounts.of_dense(torch.from_numpy(np.concatenate(counts))) if counts else None

    def get(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the keys and lengths of a step's piece. They must be asked for in order."""
        epoch, number = divmod(step, len(self._edges) - 1)
        if epoch != self._epoch and self._shuffle_window:
            self._shuffle(epoch)
        self._epoch = epoch
        parts = [self._part(*part, number) for part in self._parts]
        lengths = torch.tensor([len(part) for part in parts], dtype=torch.int64)
        return torch.from_numpy(np.concatenate(parts) if parts else _NONE), lengths

    def _cut(
        self, samples: NDArray[np.int64], keys: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return a table's lookups piece after piece: the places of their samples, their keys, and the pieces' bounds
        among them."""
        if self._place is not None:
            within = samples % len(self._place)
            places = samples - within + self._place[within]
            order = np.argsort(places, kind="stable")
            samples, keys = places[order], keys[order]
        return samples, keys, np.searchsorted(samples, self._edges)

    def _part(
        self, places: NDArray[np.int64], keys: NDArray[np.int64], bounds: NDArray[np.int64], number: int
    ) -> NDArray[np.int64]:
        piece = slice(bounds[number], bounds[number + 1])
        if self._ranks is None:
            return keys[piece]
        ranks = self._ranks[places[piece] % len(self._ranks)]
        _, firsts = np.unique(np.stack([ranks, keys[piece]]), axis=1, return_index=True)
        return keys[piece][np.sort(firsts)]

    def _shuffle(self, epoch: int) -> None:
        generator = np.random.default_rng(epoch)
        windows = np.arange(self._num_samples) // self._shuffle_window
        place = np.empty(self._num_samples, np.int64)
        place[np.lexsort((generator.random(self._num_samples), windows))] = np.arange(self._num_samples)
        for table, (samples, keys) in enumerate(self._looked_up):
            order = np.argsort(place[samples], kind="stable")
            self._looked_up[table] = place[samples][order], keys[order]
            self._parts[table] = self._cut(*self._looked_up[table])
