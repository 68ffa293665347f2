"""Hit rates by the size of a cache for all tables: with look-ahead, replayed, and the most that any cache has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from embershard.cache.statistics import CacheReport
from embershard.frequency import SampledTrace
from embershard.planning.simulate.offline_optimum import offline_optimum
from embershard.planning.simulate.pool_report import RowRange
from embershard.planning.simulate.replay import ReplaySettings, replay_pool
from embershard.planning.simulate.settled_rows import SettledRows
from embershard.planning.simulate.trace_batches import TraceBatches

#: Batches that are replayed at most.
MOST_STEPS = 4000


@dataclass(frozen=True)
class CurvePoint:
    """A size of the cache, and the share of the lookups for which no row is moved to the device.

    Attributes:
        num_slots: rows that the cache holds.
        look_ahead: the share with the replayed settings.
        optimum: the share if the whole order of batches were known (Belady): no cache of this size has more.
    """

    num_slots: int
    look_ahead: float
    optimum: float


def hit_rate_curve(
    trace: SampledTrace,
    rows: Mapping[str, int],
    sizes: Sequence[int],
    global_batch_size: int,
    settings: ReplaySettings | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[CurvePoint]:
    """Replay the trace's first 4,000 batches, all tables in one cache that is empty at the start, at each size.

    Args:
        trace: of all tables.
        rows: of each table.
        sizes: slots. Sizes that the rows of one batch do not fit are left out.
        settings: None: the default of training.
        progress: called with the number of sizes done, and of all.

    >>> import numpy as np
    >>> from embershard.frequency import TableTrace
    >>> lookups = TableTrace(np.arange(12), np.array([0, 1, 0, 2, 0, 1, 0, 2, 0, 1, 0, 2]))
    >>> trace = SampledTrace(1.0, 12, {"t": lookups}, {}, {})
    >>> hit_rate_curve(trace, {"t": 3}, [3], global_batch_size=1)  # each row is moved once
    [CurvePoint(num_slots=3, look_ahead=0.75, optimum=0.75)]

    Raises:
        ValueError: the trace is shorter than one batch.
    """
    settings = settings or ReplaySettings()
    shards = [RowRange(table, 0, num_rows) for table, num_rows in rows.items()]
    steps = min(trace.num_samples // global_batch_size, MOST_STEPS)
    settled = sum(SettledRows.of(trace, shard, False).num_rows for shard in shards)
    batches = TraceBatches(trace, shards, global_batch_size, 0, 0)
    keys = [batches.get(step)[0].numpy() for step in range(steps)]
    found = []
    for done, num_slots in enumerate(sizes, start=1):
        replayed = replay_pool(trace, shards, num_slots, global_batch_size, settings, num_steps=steps)
        followed_slots = max(1, num_slots if trace.rate >= 1 else round((num_slots - settled) * trace.rate))
        fewest = offline_optimum(keys, followed_slots)
        if progress is not None:
            progress(done, len(sizes))
        if replayed.grew or fewest is None:
            continue
        total = CacheReport.total(replayed.shards)
        fewest_fills = (fewest / trace.rate + settled) / steps
        lookups = max(total.lookups, 1e-300)
        found.append(CurvePoint(num_slots, 1 - total.fills / lookups, 1 - fewest_fills / lookups))
    return found
