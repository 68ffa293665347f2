"""What a cache would do on a trace: the cache's own planner runs over the ids, and no row is moved.

The hit rate of a policy is not a formula. It follows from ties, pins, warm-up and how far ahead is known, so nothing is
modelled here: the batches of the trace go through the same :class:`RowCache` that trains, over rows of one byte. On a
trace of all rows the result is what training will count. On a trace that follows a share of the rows, the cache has
that share of the slots (miniature simulation: Waldspurger et al., ATC'17).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embershard.cache.config import CachePolicy
from embershard.cache.growth import CacheGrowthWarning
from embershard.cache.next_use import KnownBatch
from embershard.cache.report import CacheReport
from embershard.cache.row_cache import RowCache
from embershard.cache.rows.host_store import HostStore
from embershard.cache.statistics import TableStats
from embershard.cache.tickets import Ticket
from embershard.frequency import SampledTrace, TableTrace

_NONE = np.empty(0, np.int64)
_MOST_IDLE_ROWS = 10_000_000  # of a table; more need not take memory to be left out


@dataclass(frozen=True)
class ReplaySettings:
    """Which rows stay, and how far ahead is looked; as `CacheConfig` and the trainer resolve it.

    Attributes:
        policy: rule by which the cache chooses its rows.
        lookahead: batches known beyond the one in training; 0: a batch's rows come in at its own step.
        prefetch: batches resident beyond the one in training.
        profile_samples: training has the counts of the first so many samples: `frequency` needs them, `lfu` starts
            with them. 0: it has none; None: those of the whole trace.
        shuffle_window: samples among which an epoch's order is mixed; 0: every epoch has the same order.
    """

    policy: CachePolicy = dataclasses.field(default_factory=CachePolicy)
    lookahead: int = 64
    prefetch: int = 2
    profile_samples: int | None = 0
    shuffle_window: int = 0


@dataclass(frozen=True)
class Shard:
    """The rows [start, stop) of a table."""

    table: str
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """Rows of the shard."""
        return self.stop - self.start


@dataclass(frozen=True)
class ShardReport(CacheReport):
    """What happened to one shard's rows: means over the steps. Fills include those of a warm-up.

    Attributes:
        held_rows: slots that hold the shard's rows.
        shard: whose rows.
    """

    LABELS = frozenset({"shard"})

    held_rows: float
    shard: Shard


@dataclass(frozen=True)
class PoolReport:
    """One pool.

    Attributes:
        shards: what happened to each shard's rows, over all steps.
        late: the same over the second half of the steps, when the cache is no longer new.
        num_steps: of how many steps this is the mean.
        num_slots: slots at the end: more than planned where one batch did not fit.
        grew: whether it did not.
    """

    shards: tuple[ShardReport, ...]
    late: tuple[ShardReport, ...]
    num_steps: int
    num_slots: int
    grew: bool

    def over(self, num_steps: int | None) -> tuple[ShardReport, ...]:
        """Means over so many steps: those that there are, and then more of the late ones. None: as they are."""
        if num_steps is None or num_steps <= self.num_steps:
            return self.shards
        weight = self.num_steps / num_steps
        return tuple(
            early.scaled(weight) + late.scaled(1 - weight) for early, late in zip(self.shards, self.late, strict=True)
        )


def replay_pool(
    trace: SampledTrace,
    shards: Sequence[Shard],
    num_slots: int,
    global_batch_size: int,
    settings: ReplaySettings,
    *,
    pinned_tables: Sequence[str] = (),
    num_steps: int | None = None,
) -> PoolReport:
    """One pool of slots on one rank, over the batches that the trace has.

    Args:
        trace: of the whole data set.
        shards: what the pool holds, in its order.
        num_slots: S.
        global_batch_size: samples of a step, over all ranks.
        settings: which rows stay, and how far ahead is looked.
        pinned_tables: those whose rows are resident for ever.
        num_steps: stop after so many; None: all whole batches of the trace. More than those begin it again.

    Raises:
        ValueError: the trace is shorter than one batch.
    """
    available = trace.num_samples // global_batch_size
    if available < 1:
        raise ValueError(f"the trace has {trace.num_samples} samples, less than a batch of {global_batch_size}")
    steps = available if num_steps is None else num_steps
    is_sampled = trace.rate < 1
    apart = [_apart(trace, shard, shard.table in pinned_tables) for shard in shards]
    followed = [shard for shard, rows in zip(shards, apart, strict=True) if not rows.is_pinned]
    taken = sum(rows.num_rows for rows in apart)
    slots = max(1, round((num_slots - taken) * trace.rate) if is_sampled else num_slots)
    batches = _Batches(trace, followed, global_batch_size, available, settings.profile_samples, settings.shuffle_window)
    cache = _make_cache(batches, slots, settings, [] if is_sampled else pinned_tables)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheGrowthWarning)
        half = _run(cache, batches, steps, settings)
    whole = cache.stats()
    held = [stats.slots for stats in whole]
    counts = [stats.counts for stats in whole]
    late = [after - before.counts for after, before in zip(counts, half, strict=True)]

    def reports(replayed_counts: list[CacheReport], num_steps: int, is_late: bool) -> tuple[ShardReport, ...]:
        of_shard = iter(zip(replayed_counts, held, strict=True))
        replayed = [None if rows.is_pinned else next(of_shard) for rows in apart]
        missed_once = not (is_late or settings.policy.warmup)
        return tuple(
            _together(*pair, num_steps, global_batch_size, trace, is_late, missed_once)
            for pair in zip(apart, replayed, strict=True)
        )

    grown = max(0, cache.num_slots - min(slots, cache.num_rows))
    return PoolReport(
        reports(counts, steps, is_late=False),
        reports(late, steps - steps // 2, is_late=True),
        steps,
        num_slots + round(grown / trace.rate),
        grown > 0,
    )


@dataclass(frozen=True, eq=False)
class _Apart:
    """A shard's rows that stay in any cache and so are counted, not replayed: constant ones and, where rows are
    sampled, all rows of a pinned table. ``constant`` int64 [C] are their lookups, ``others`` what else was followed."""

    shard: Shard
    is_pinned: bool
    constant: NDArray[np.int64]
    others: TableTrace

    @property
    def num_rows(self) -> int:
        return self.shard.num_rows if self.is_pinned else len(self.constant)


def _apart(trace: SampledTrace, shard: Shard, is_pinned: bool) -> _Apart:
    rows = trace.constant_rows.get(shard.table, _NONE)
    inside = (rows >= shard.start) & (rows < shard.stop)
    constant = trace.constant_lookups.get(shard.table, _NONE)[inside]
    if not is_pinned or trace.rate >= 1:
        return _Apart(shard, False, constant, TableTrace(_NONE, _NONE))
    table = trace.tables[shard.table]
    inside = (table.rows >= shard.start) & (table.rows < shard.stop)
    return _Apart(shard, True, constant, TableTrace(table.samples[inside], table.rows[inside]))


def _together(
    apart: _Apart,
    replayed: tuple[CacheReport, int] | None,
    steps: int,
    batch: int,
    trace: SampledTrace,
    is_late: bool,
    missed_once: bool,
) -> ShardReport:
    """Rows that were counted and rows that were replayed (their counts, and slots that hold them), per step."""
    lookups = float(apart.constant.sum()) * batch / trace.num_samples
    # A row that occurs in a share p of the samples is missing from a batch of B with (1 - p)^B.
    absent = (1.0 - np.minimum(apart.constant / trace.num_samples, 1.0)) ** batch
    unique_ids = float((1.0 - absent).sum())
    if len(apart.others.rows):
        pairs = np.unique(apart.others.samples // batch * apart.shard.stop + apart.others.rows)
        batches = max(1.0, trace.num_samples / batch)
        lookups += len(apart.others.rows) / trace.rate / batches
        unique_ids += min(len(pairs) / trace.rate / batches, apart.shard.num_rows - unique_ids)
    fills = 0.0 if is_late else apart.num_rows / steps
    missed = min(fills, unique_ids) if missed_once and not apart.is_pinned else 0.0
    found = ShardReport(
        lookups=lookups,
        unique_ids=unique_ids,
        hits_unique=unique_ids - missed,
        hits_lookups=lookups * (1.0 - missed / max(unique_ids, 1e-300)),
        fills=fills,
        write_backs=0.0,
        held_rows=float(apart.num_rows),
        shard=apart.shard,
    )
    if replayed is None:
        return found
    counts, slots = replayed
    per_step = vars(counts.scaled(1.0 / (trace.rate * steps)))
    return found + ShardReport(**per_step, held_rows=slots / trace.rate, shard=apart.shard)


class _Batches:
    """The trace cut into batches of a pool: keys [N] with the tables one after another, and lookups per table [T].

    Every epoch has an order of its own: behind its end the samples of the trace come again in another order, mixed
    inside windows of ``shuffle_window`` samples as training mixes them. 0: in the same order.
    """

    def __init__(
        self,
        trace: SampledTrace,
        shards: Sequence[Shard],
        global_batch_size: int,
        available: int,
        profile_samples: int | None,
        shuffle_window: int,
    ) -> None:
        self.shards = list(shards)
        self.available = available
        self.rows_per_table: list[int] = []
        self.counts: list[NDArray[np.int64]] = []
        self._keys: list[NDArray[np.int64]] = []
        self._samples: list[NDArray[np.int64]] = []
        self._bounds: list[NDArray[np.int64]] = []
        self._edges = np.arange(available + 1, dtype=np.int64) * global_batch_size
        self._num_samples, self._shuffle_window, self._epoch = trace.num_samples, shuffle_window, 0
        offset = 0
        for shard in shards:
            table = trace.tables[shard.table]
            inside = (table.rows >= shard.start) & (table.rows < shard.stop)
            whole = bool(inside.all())
            rows = table.rows if whole else table.rows[inside]
            samples = table.samples if whole else table.samples[inside]
            # Rows that never occur matter only in a table that stays whole; and those are small.
            is_dense = trace.rate >= 1 and shard.num_rows <= _MOST_IDLE_ROWS + len(rows)
            distinct, keys = (_NONE, rows - shard.start) if is_dense else np.unique(rows, return_inverse=True)
            num_keys = max(1, shard.num_rows if is_dense else len(distinct))
            counted = keys if profile_samples is None else keys[: np.searchsorted(samples, profile_samples)]
            self.rows_per_table.append(num_keys)
            self.counts.append(np.bincount(counted, minlength=num_keys))
            self._keys.append(keys + offset)
            self._samples.append(samples)
            self._bounds.append(np.searchsorted(samples, self._edges))
            offset += num_keys

    def get(self, step: int) -> tuple[Tensor, Tensor]:
        """Keys and lengths of a step. Steps are asked for in order."""
        epoch, number = divmod(step, self.available)
        if epoch != self._epoch and self._shuffle_window:
            self._shuffle(epoch)
        self._epoch = epoch
        parts = [keys[b[number] : b[number + 1]] for keys, b in zip(self._keys, self._bounds, strict=True)]
        lengths = torch.tensor([len(part) for part in parts], dtype=torch.int64)
        return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, np.int64)), lengths

    def _shuffle(self, epoch: int) -> None:
        generator = np.random.default_rng(epoch)
        windows = np.arange(self._num_samples) // self._shuffle_window
        place = np.empty(self._num_samples, np.int64)
        place[np.lexsort((generator.random(self._num_samples), windows))] = np.arange(self._num_samples)
        for table, samples in enumerate(self._samples):
            moved = place[samples]
            order = np.argsort(moved, kind="stable")
            self._samples[table], self._keys[table] = moved[order], self._keys[table][order]
            self._bounds[table] = np.searchsorted(self._samples[table], self._edges)


def _make_cache(batches: _Batches, num_slots: int, settings: ReplaySettings, pinned: Sequence[str]) -> RowCache:
    rows = batches.rows_per_table or [1]
    names = [shard.table for shard in batches.shards] or ["none"]
    host = HostStore(rows, 1, torch.uint8, [])
    are_pinned = [number for number in np.argsort(rows, kind="stable") if names[number] in pinned]
    pinned_keys = [torch.arange(rows[number]) + host.row_offsets[number] for number in are_pinned]
    counts = None
    if settings.profile_samples != 0 and batches.counts:
        counts = torch.from_numpy(np.concatenate(batches.counts))
    num_slots = min(num_slots, host.num_rows)
    cpu = torch.device("cpu")
    return RowCache(
        tables=names,
        host=host,
        device_payload=lambda slots: [torch.empty(slots + 1, 1, dtype=torch.uint8)],
        num_slots=num_slots,
        table_of_feature=range(len(names)),
        policy=dataclasses.replace(settings.policy, by_next_use=settings.lookahead > 0 and settings.policy.by_next_use),
        device=cpu,
        row_counts=counts,
        pinned_keys=torch.cat(pinned_keys) if pinned_keys else None,
        owner="replay",
    )


def _run(cache: RowCache, batches: _Batches, steps: int, settings: ReplaySettings) -> list[TableStats]:
    """The stages of `LookAheadPipeline`, in its order, without their contents. Returns the counters at half time."""
    half = cache.stats()
    known: deque[tuple[Tensor, Tensor, KnownBatch | None]] = deque()
    resident: deque[Ticket] = deque()
    next_step = 0
    for step in range(steps):
        if step == steps // 2:
            half = cache.stats()
        while next_step < min(steps, step + settings.lookahead + 1):
            keys, lengths = batches.get(next_step)
            known.append((keys, lengths, cache.know(keys, lengths)))
            next_step += 1
        if not resident:
            keys, lengths, batch = known[0]
            ticket = cache.prepare(keys, lengths, True, batch)
            assert ticket is not None
            resident.append(ticket)
        known.popleft()
        cache.freeze_pins()
        for ahead in range(len(resident) - 1, min(settings.prefetch, len(known)) if settings.lookahead else 0):
            keys, lengths, batch = known[ahead]
            prepared = cache.prepare(keys, lengths, False, batch, if_it_fits=True)
            if prepared is None:
                break
            resident.append(prepared)
        cache.unfreeze_pins()
        cache.release(resident.popleft())
    return half


def replay_preferences(
    trace: SampledTrace, rows: Mapping[str, int], global_batch_size: int, share_of_rows: float = 0.05
) -> dict[str, float]:
    """Misses per lookup of each policy on the data, with slots for a share of the rows that occur; see
    `docs/planning.md`."""
    shards = [Shard(table, 0, num_rows) for table, num_rows in rows.items()]
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
