"""Hit rates by the size of a cache for all tables: with look-ahead, replayed, and the most that any cache has.

That most is the optimum of Belady (MIN, 1966): the fewest rows that any cache can fill for a stream of batches whose
future is known, with whole batches resident. It shares no code with the cache. A batch needs its rows all at once, so
its missing rows are filled in any case. The only choice is the victim: the row that is not held and whose next use is
furthest. A late eviction never costs a fill, so rows are evicted only when the slots run out. Among rows with the same
next batch, or without one, the choice does not matter: nothing uses them until then, and then all of them are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embershard.cache.statistics import CacheReport
from embershard.frequency import SampledTrace
from embershard.planning.simulate.pool_report import RowRange
from embershard.planning.simulate.replay import SettledRows, TraceBatches, replay_pool
from embershard.sharding.run_shape import ReplaySettings

#: Batches that are replayed at most.
MOST_STEPS = 4000
Ids = NDArray[np.int64]
_BITS = 20  # batches are numbered below 2**20, so that three such numbers make one int64


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
    stream: _Stream | None = None
    found = []
    for done, num_slots in enumerate(sizes, start=1):
        replayed = replay_pool(trace, shards, num_slots, global_batch_size, settings, num_steps=steps)
        stream = stream or _Stream.of([batches.get(step)[0].numpy() for step in range(steps)])
        sampled_slots = max(1, num_slots if trace.rate >= 1 else round((num_slots - settled) * trace.rate))
        fewest = _fills(stream, sampled_slots, prefetch=0, lookahead=steps)
        if progress is not None:
            progress(done, len(sizes))
        if replayed.grew or fewest is None:
            continue
        total = CacheReport.total(replayed.shards)
        fewest_fills = (fewest / trace.rate + settled) / steps
        lookups = max(total.lookups, 1e-300)
        found.append(CurvePoint(num_slots, 1 - total.fills / lookups, 1 - fewest_fills / lookups))
    return found


def offline_optimum(batches: Sequence[Ids], capacity: int, prefetch: int = 0) -> int | None:
    """Return the fills of the optimum with `capacity` slots, all empty at the start.

    With `prefetch`, so many batches beyond the one in training are resident, too. While the last of them is filled, the
    rows of all of them must stay: this is MIN over the unions of `prefetch + 1` consecutive batches, and no rule for
    victims has fewer fills.

    Args:
        batches: the keys of each batch, int64, each at least 0; repeats in a batch count once.

    Returns:
        None when the rows that must be resident at once do not fit.
    """
    return _fills(_Stream.of(batches), capacity, prefetch, lookahead=len(batches) + prefetch)


def look_ahead_rule(
    batches: Sequence[Ids], capacity: int, lookahead: int, prefetch: int, counts_known: bool = False
) -> int | None:
    """Return the fills of the look-ahead rule when every choice uses the newest ranking of all slots.

    `lookahead` batches beyond the one in training are known, `prefetch` of them resident. Rows without a known use are
    evicted first: the row used by the fewest batches, then the longest unused; then the row whose next use is furthest.
    Fills of a cache beyond this number are due to the cache, not to the rule. With `counts_known`, a row counts by all
    batches of the stream that use it, those to come, too: what no profile knows better.
    """
    return _fills(_Stream.of(batches), capacity, prefetch, lookahead, counts_known)


@dataclass(frozen=True, eq=False)
class _Stream:
    """Batches of keys, numbered from 0 without gaps: the same for caches of all sizes.

    Attributes:
        batches: the distinct keys of each batch.
        next_uses: for each of these, the next batch that has it; the number of batches where none has.
    """

    batches: Sequence[Ids]
    next_uses: Sequence[Ids]
    num_keys: int

    @classmethod
    def of(cls, batches: Sequence[Ids]) -> _Stream:
        """Number the keys of these batches."""
        distinct = [np.unique(batch) for batch in batches]
        keys = np.unique(np.concatenate(distinct))
        numbered = [np.searchsorted(keys, batch) for batch in distinct]
        upcoming, next_uses = np.full(keys.size, len(batches), dtype=np.int64), []
        for now in reversed(range(len(batches))):
            next_uses.append(upcoming[numbered[now]])
            upcoming[numbered[now]] = now
        return cls(numbered, next_uses[::-1], keys.size)


def _fills(stream: _Stream, capacity: int, prefetch: int, lookahead: int, counts_known: bool = False) -> int | None:
    assert len(stream.batches) + prefetch < 1 << _BITS
    resident = np.zeros(stream.num_keys, dtype=bool)
    next_use, last_use, num_uses = np.zeros((3, stream.num_keys), dtype=np.int64)
    if counts_known:
        num_uses = np.bincount(np.concatenate(stream.batches), minlength=stream.num_keys)
    fills = held = 0
    for now, (batch, next_uses) in enumerate(zip(stream.batches, stream.next_uses, strict=True)):
        missing = batch.size - int(resident[batch].sum())
        fills += missing
        held += missing
        resident[batch], next_use[batch], last_use[batch] = True, next_uses, now
        num_uses[batch] += not counts_known
        if (excess := held - capacity) > 0:
            in_training = max(0, now - prefetch)
            others = np.flatnonzero(resident & (last_use < in_training))
            if others.size < excess:
                return None
            known_use = np.minimum(next_use[others], in_training + lookahead + 1)
            staying = (num_uses[others] << _BITS) + last_use[others] - (known_use << 2 * _BITS)
            resident[others[np.argpartition(staying, excess - 1)[:excess]]] = False
            held = capacity
    return fills
