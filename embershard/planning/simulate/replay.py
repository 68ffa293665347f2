"""Replays a trace through a cache: the cache's own planner runs over the ids, and no row is moved.

The hit rate of a policy is not a formula. It follows from ties, pins, warm-up and how far ahead is known, so nothing is
modelled here: the batches of the trace go through the same `RowCache` that trains, over rows of one byte. On a
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
from torch import Tensor

from embershard.cache.config import CachePolicy
from embershard.cache.next_use import KnownBatch
from embershard.cache.planner import CacheGrowthWarning
from embershard.cache.row_cache import RowCache
from embershard.cache.rows.host_store import HostStore
from embershard.cache.statistics import CacheReport, TableStats
from embershard.cache.tickets import Ticket
from embershard.frequency import SampledTrace
from embershard.planning.simulate.pool_report import PoolReport, RowRange, ShardReport
from embershard.planning.simulate.settled_rows import SettledRows
from embershard.planning.simulate.trace_batches import TraceBatches


@dataclass(frozen=True)
class ReplaySettings:
    """The rows that stay, and how far ahead is looked; as `CacheConfig` and the trainer resolve it.

    Attributes:
        policy: rule by which the cache chooses its rows.
        lookahead: batches known beyond the one in training; 0: a batch's rows come in at its own step.
        prefetch: batches resident beyond the one in training.
        profile_samples: samples that were counted before training: `frequency` needs counts, `lfu` starts with them.
            0: none were counted; None: all of the trace.
        shuffle_window: samples among which an epoch's order is mixed; 0: every epoch has the same order.
    """

    policy: CachePolicy = dataclasses.field(default_factory=CachePolicy)
    lookahead: int = 64
    prefetch: int = 2
    profile_samples: int | None = 0
    shuffle_window: int = 0


def replay_pool(
    trace: SampledTrace,
    shards: Sequence[RowRange],
    num_slots: int,
    global_batch_size: int,
    settings: ReplaySettings,
    *,
    pinned_tables: Sequence[str] = (),
    num_steps: int | None = None,
    rank_batch_size: int | None = None,
) -> PoolReport:
    """Replay the batches of a trace through one pool of slots on one rank.

    Args:
        trace: of the whole data set.
        shards: what the pool holds, in its order.
        global_batch_size: samples of a step, over all ranks.
        pinned_tables: tables whose rows are resident for ever.
        num_steps: steps to replay; None: all whole batches of the trace. After them the trace begins again.
        rank_batch_size: samples of a rank, where distinct rows are exchanged: a row that several of them look up is one
            lookup. None: where pooled embeddings are.

    Raises:
        ValueError: the trace is shorter than one batch.
    """
    available = _whole_batches(trace, global_batch_size)
    steps = available if num_steps is None else num_steps
    settled = [SettledRows.of(trace, shard, shard.table in pinned_tables) for shard in shards]
    slots = num_slots if trace.rate >= 1 else round((num_slots - sum(rows.num_rows for rows in settled)) * trace.rate)
    followed = [number for number, rows in enumerate(settled) if not rows.is_whole]
    parts = [shards[number] for number in followed]
    counted, window = settings.profile_samples, settings.shuffle_window
    batches = TraceBatches(trace, parts, global_batch_size, counted, window, rank_batch_size)
    cache = _make_cache(batches, parts, max(1, slots), settings, pinned_tables if trace.rate >= 1 else ())
    slots = sum(stats.slots for stats in cache.stats())
    half, last = _run(cache, batches, steps, settings), cache.stats()
    sizes, warmup = (trace, global_batch_size, rank_batch_size), settings.policy.warmup

    def reports(replayed: Sequence[CacheReport], num_steps: int, *, is_late: bool) -> tuple[ShardReport, ...]:
        found = [rows.report(*sizes, num_steps, is_late, warmup) for rows in settled]
        for number, counts, stats in zip(followed, replayed, last, strict=False):  # a pool of no table has one
            per_step = vars(counts.scaled(1.0 / (trace.rate * num_steps)))
            found[number] += ShardReport(**per_step, held_rows=stats.slots / trace.rate, shard=shards[number])
        return tuple(found)

    late = [after.counts - before.counts for after, before in zip(last, half, strict=True)]
    grown = sum(stats.slots for stats in last) - slots
    all_steps = reports([stats.counts for stats in last], steps, is_late=False)
    late_steps = reports(late, steps - steps // 2, is_late=True)
    return PoolReport(all_steps, late_steps, steps, num_slots + round(grown / trace.rate), grown > 0)


def _whole_batches(trace: SampledTrace, global_batch_size: int) -> int:
    if trace.num_samples < global_batch_size:
        raise ValueError(f"the trace has {trace.num_samples} samples, less than a batch of {global_batch_size}")
    return trace.num_samples // global_batch_size


def _make_cache(
    batches: TraceBatches, shards: Sequence[RowRange], num_slots: int, settings: ReplaySettings, pinned: Sequence[str]
) -> RowCache:
    rows, names = batches.rows_per_table or [1], [shard.table for shard in shards] or ["none"]
    host = HostStore(rows, 1, torch.uint8, [])
    are_pinned = [number for number in np.argsort(rows, kind="stable") if names[number] in pinned]
    pinned_keys = [torch.arange(rows[number]) + host.row_offsets[number] for number in are_pinned]
    return RowCache(
        tables=names,
        host=host,
        device_payload=lambda slots: [torch.empty(slots + 1, 1, dtype=torch.uint8)],
        num_slots=min(num_slots, host.num_rows),
        table_of_feature=range(len(names)),
        policy=dataclasses.replace(settings.policy, by_next_use=settings.lookahead > 0 and settings.policy.by_next_use),
        device=torch.device("cpu"),
        row_counts=None if settings.profile_samples == 0 else batches.row_counts,
        pinned_keys=torch.cat(pinned_keys) if pinned_keys else None,
        owner="replay",
    )


def _run(cache: RowCache, batches: TraceBatches, steps: int, settings: ReplaySettings) -> list[TableStats]:
    """Run the stages of `LookAheadPipeline`, in its order, without their contents; return the counts at half time."""
    half = cache.stats()
    known: deque[tuple[Tensor, Tensor, KnownBatch | None]] = deque()
    resident: deque[Ticket] = deque()
    next_step = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheGrowthWarning)
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
