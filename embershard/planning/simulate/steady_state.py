"""A cache in the long run, from row counts alone: fast, and for batches larger than any trace.

Rows are taken to be looked up independently of each other and of the past. `frequency`, and `lfu` and look-ahead in
the long run, then hold the most frequent rows, except in the room that each batch's rare rows take; `lru` holds every
row for the same time (Che et al. 2002). The replay of a trace needs neither assumption.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embershard.cache.config import CachePolicy
from embershard.frequency import TableStatistics
from embershard.frequency.new_data import in_new_data
from embershard.planning.simulate.pool_report import PoolReport, RowRange, ShardReport

Floats = NDArray[np.float64]
_BISECTIONS = 60


@dataclass(frozen=True, eq=False)
class _RowGroups:
    """Groups of equally frequent rows of all shards; K groups.

    Attributes:
        shard: int64 [K] number of the shard.
        rows: [K] rows of the group.
        lookups: [K] lookups per step of one row.
        seen: [K] share of the steps in which one row occurs.
        in_pieces: [K] pieces of a step in which one row occurs.
    """

    shard: NDArray[np.int64]
    rows: Floats
    lookups: Floats
    seen: Floats
    in_pieces: Floats


def steady_state(
    tables: Sequence[TableStatistics],
    shards: Sequence[RowRange],
    shares: Sequence[float],
    num_samples: int,
    num_slots: int,
    global_batch_size: int,
    policy: CachePolicy,
    *,
    is_sample: bool,
    grows: bool = False,
    ahead: tuple[int, int] | None = None,
    pieces: int = 1,
) -> PoolReport:
    """Return the steady state of one pool of slots on one rank.

    Args:
        tables: statistics of each shard's table.
        shards: the pool's rows.
        shares: each shard's share of its table's lookups.
        num_samples: counted samples.
        num_slots: S.
        global_batch_size: samples of a step, over all ranks.
        policy: rule by which the cache chooses its rows.
        is_sample: training sees other samples than the counted ones: see `embershard.frequency.new_data`.
        grows: the cache grows until a batch fits.
        ahead: batches beyond the one in training that are known, and that are resident; None: what look-ahead gains is
            left out.
        pieces: of a step, which look their rows up one after the other, and keep all of them until its end.
    """
    groups = [
        _groups(number, *each, num_samples, global_batch_size, is_sample, pieces)
        for number, each in enumerate(zip(tables, shards, shares, strict=True))
    ]
    pool = _RowGroups(*(np.concatenate(parts) for parts in zip(*groups, strict=True)))  # type: ignore[arg-type]
    num_slots = max(num_slots, grows * math.ceil(float((pool.rows * pool.seen).sum())))
    if ahead is not None and policy.by_next_use:
        held = _held_by_next_use(pool, num_slots, ahead, policy.is_recency)
    else:
        held = _held_by_recency(pool, num_slots) if policy.is_recency else _held_by_count(pool, num_slots)
    # A missing row misses once in a step, with all of its lookups in the first piece that has it.
    missed = np.minimum(pool.seen * (1.0 - held), pool.in_pieces)
    found = pool.lookups * (1.0 - missed / np.maximum(pool.in_pieces, 1e-300))
    per_row = (pool.lookups, pool.in_pieces, pool.in_pieces - missed, found, missed, missed, held, pool.seen)
    columns = [np.bincount(pool.shard, pool.rows * values, len(shards)).astype(float).tolist() for values in per_row]
    reports = tuple(
        ShardReport(*(column[n] for column in columns[:-1]), shard, 0.0, columns[-1][n])  # type: ignore[call-arg]
        for n, shard in enumerate(shards)
    )
    return PoolReport(reports, reports, 0, num_slots, sum(report.step_rows for report in reports) > num_slots)


def _groups(
    number: int,
    table: TableStatistics,
    shard: RowRange,
    share: float,
    num_samples: int,
    batch: int,
    is_sample: bool,
    pieces: int,
) -> tuple[NDArray[np.int64], Floats, Floats, Floats, Floats]:
    """Return a shard's groups. The rows are its share of the table's; where hot rows are unevenly spread, its share of
    the lookups scales their rates."""
    part = shard.num_rows / table.num_rows
    histogram = in_new_data(table.histogram, table.num_rows) if is_sample else table.histogram
    counts, rows = histogram.counts, histogram.rows
    counts, rows = counts * (share / part if part else 0.0), rows * part
    lookups = counts / num_samples * batch
    bag = max(1.0, table.lookups_per_sample)
    draws = batch * bag  # a row that got c of the N * bag lookups misses all of a step's draws with (1 - p)^draws
    chance = np.clip(counts / max(1.0, num_samples * bag), 0.0, 1.0)
    missed = draws * np.log1p(-np.minimum(chance, 1.0 - 1e-12))
    return np.full(len(rows), number, np.int64), rows, lookups, -np.expm1(missed), -pieces * np.expm1(missed / pieces)


def _held_by_count(pool: _RowGroups, num_slots: int) -> Floats:
    """Return the share of the steps in which a row of each group is found, [K]: the most frequent rows stay, beside the
    rare rows of the batch in training."""
    order = np.argsort(-pool.lookups, kind="stable")
    rows = np.cumsum(pool.rows[order])

    def held(kept: float) -> Floats:
        before = rows - pool.rows[order]
        share = np.clip((kept - before) / np.maximum(pool.rows[order], 1e-300), 0.0, 1.0)
        found = np.empty_like(share)
        found[order] = share
        return found

    def room(kept: float) -> float:
        return kept + float((pool.rows * pool.seen * (1.0 - held(kept))).sum())

    return held(_bisect(room, num_slots, 0.0, float(num_slots)))


def _held_by_next_use(pool: _RowGroups, num_slots: int, ahead: tuple[int, int], is_recency: bool) -> Floats:
    """Return the chance that a row stays until its next use, [K].

    A row stays if that comes within so many steps that such rows fill the slots, at most within those that are known.
    If slots are left, rows stay without a known use: the most frequent ones, or those of the last T steps.
    """
    known, prefetch = ahead
    rate = -np.log1p(-np.minimum(pool.seen, 1.0 - 1e-12))  # uses of a row per step
    resident = min(prefetch + 1, max(1, int(num_slots / max(float((pool.rows * pool.seen).sum()), 1e-300))))

    def stays(steps: float) -> Floats:
        return -np.expm1(-rate * steps)

    def slots(reach: float, kept: float = 0.0) -> Floats:
        """Of rows that wait for a use within reach, of others that are kept for some steps, and while they train."""
        beyond = 1.0 - stays(reach)
        return pool.rows * (1.0 - beyond * (1.0 + rate * (reach - kept)) + beyond * pool.seen * resident)

    left = num_slots - float(slots(known).sum())
    if left <= 0:
        return stays(_bisect(lambda steps: float(slots(steps).sum()), num_slots, 0.0, known))
    if is_recency:
        return stays(known + _bisect(lambda steps: float(slots(known + steps, steps).sum()), num_slots, 0.0, 1e9))
    order = np.argsort(-pool.lookups, kind="stable")
    more = np.maximum((pool.rows - slots(known))[order], 1e-290)  # slots to keep all of a group
    always = np.empty_like(more)
    always[order] = np.clip((left - (np.cumsum(more) - more)) / more, 0.0, 1.0)
    return always + (1.0 - always) * stays(known)


def _held_by_recency(pool: _RowGroups, num_slots: int) -> Floats:
    """Return the chance that a row was used within the last T steps, [K]; T is such that they fill the slots."""
    steps_apart = -np.log1p(-np.minimum(pool.seen, 1.0 - 1e-12))

    def found(log_steps: float) -> Floats:
        return -np.expm1(-steps_apart * np.exp(log_steps))

    def taken(log_steps: float) -> float:
        return float((pool.rows * found(log_steps)).sum())

    return found(_bisect(taken, num_slots, -30.0, 60.0))


def _bisect(rising: Callable[[float], float], target: float, low: float, high: float) -> float:
    if rising(high) <= target:
        return high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > target else (middle, high)
    return low
