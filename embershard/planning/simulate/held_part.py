"""Whether counts last: hits in the long run are estimated from counts, and popularity may move on.

The estimate is tried on the profile itself. Counts of its first tenth, quarter and half each tell hits, and a replay of
all of it counts the hits of its second half. So far as they were off there they may be off again, later in the data;
where they were far off, counts tell nothing (decision 0138).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from embershard.cache.statistics import CacheReport
from embershard.frequency import CountHistogram, DataStatistics, SampledTrace, TableStatistics
from embershard.frequency.downsampling import downsampled
from embershard.planning.simulate.pool_report import RowRange
from embershard.planning.simulate.replay import replay_pool
from embershard.planning.simulate.steady_state import Floats, steady_state
from embershard.sharding.plan import Prediction, TablePrediction, long_run_range
from embershard.sharding.run_shape import ReplaySettings

#: Shares of the samples that are counted, the first ones.
PARTS = (0.1, 0.25, 0.5)
#: Hits per lookup: where counts were off by more, they tell nothing.
_MOST_OFF = 0.1
#: A range that needs a word.
_WIDE = 0.1
#: More lookups are not replayed: of fewer rows, then.
_MOST_LOOKUPS = 500_000
#: Batches are as small as so many take.
_LEAST_STEPS = 200


@dataclass(frozen=True)
class HeldPart:
    """Hits per lookup of T tables in the second half of a profile, in one cache for as large a share of the rows that
    occur as the caches have of all rows; P parts.

    Attributes:
        tables: their names.
        told: [P, T] by counts of each part.
        replayed: [T] by a replay.
        lookups: [T] of a step of the replay.
    """

    tables: Sequence[str]
    told: Floats
    replayed: Floats
    lookups: Floats

    def range_of(self, table: str, told: float, in_profile: float) -> tuple[float, float]:
        """Return the least and the most hits per lookup of a table in the long run; (0, 1): counts do not tell.

        Args:
            told: by counts of the whole profile.
            in_profile: in a replay of the profile, whose misses are mostly first touches: the least that is known.
        """
        number = list(self.tables).index(table)
        off = self.told[:, number] - self.replayed[number]
        if np.abs(off).max() > _MOST_OFF:
            return 0.0, 1.0
        found = [told, *np.clip(told - off, 0.0, 1.0).tolist()]
        return min(found), max(*found, in_profile)

    def _with_range(self, table: TablePrediction) -> TablePrediction:
        told, in_profile = table.long_run_hit_rate, table.hit_rate_lookups
        if table.table not in self.tables or told is None or in_profile is None:
            return table
        return replace(table, long_run_range=self.range_of(table.table, told, in_profile))

    def ranged(self, prediction: Prediction, share_of_samples: float) -> tuple[Prediction, list[str]]:
        """Return a prediction with ranges of the hits in the long run, and a note where they are wide.

        Args:
            share_of_samples: of the data, that the profile has.
        """
        tables = tuple(self._with_range(table) for table in prediction.tables)
        found = long_run_range(tables)
        if found is None or found[1] - found[0] < _WIDE:
            return replace(prediction, tables=tables), []
        better = (
            "A profile of more samples tells more (embershard profile with a larger --sample)."
            if share_of_samples < 1
            else "Only later data can tell more: profile them, and compare (embershard profile compare)."
        )
        note = (
            f"Hits in the long run are a range, or are not told, where counts do not last: {self.sentence}, of all "
            f"tables together. {better}"
        )
        return replace(prediction, tables=tables), [note]

    @property
    def sentence(self) -> str:
        """What counts tell of all tables, and what a replay has."""
        shares = self.lookups / max(float(self.lookups.sum()), 1e-300)
        by_part = zip(PARTS, (self.told @ shares).tolist(), strict=True)
        told = ", ".join(f"{hits:.0%} (of its first {part:.0%})" for part, hits in by_part)
        replayed = float(self.replayed @ shares)
        return f"of its second half's hits, the profile's own counts tell {told}, and a replay has {replayed:.0%}"


def try_counts(
    data: DataStatistics, tables: Sequence[str], share_of_rows: float, global_batch_size: int, settings: ReplaySettings
) -> HeldPart | None:
    """Try on a profile what its counts tell of caches; None where it has too few samples in order.

    Args:
        tables: those with caches.
        share_of_rows: slots per row of these tables.
    """
    batch = 0 if data.trace is None else min(global_batch_size, data.trace.num_samples // _LEAST_STEPS)
    if data.trace is None or not batch or not tables:
        return None
    trace = downsampled(data.trace, _MOST_LOOKUPS)
    counted = [data.tables[table] for table in tables]
    shards = [RowRange(table.table, 0, table.num_rows) for table in counted]
    num_slots = max(1, round(share_of_rows * sum(table.histogram.num_rows for table in counted)))
    if settings.profile_samples != 0:  # the cache's own counts are of the past, too
        settings = replace(settings, profile_samples=int(PARTS[0] * trace.num_samples))
    replayed = replay_pool(trace, shards, num_slots, batch, settings).late
    told = [_told(trace, counted, shards, part, num_slots, batch, settings) for part in PARTS]
    return HeldPart(tables, np.array(told), _hits(replayed), np.array([report.lookups for report in replayed]))


def _told(
    trace: SampledTrace,
    tables: Sequence[TableStatistics],
    shards: Sequence[RowRange],
    part: float,
    num_slots: int,
    batch: int,
    settings: ReplaySettings,
) -> Floats:
    """Return the hits per lookup of each table [T] that counts of a first part of the samples tell."""
    num_samples = max(1, int(part * trace.num_samples))
    counted = [replace(table, histogram=_histogram(trace, table.table, num_samples)) for table in tables]
    sizes = (counted, shards, [1.0] * len(shards), num_samples, num_slots, batch, settings.policy)
    return _hits(steady_state(*sizes, is_sample=True, grows=True, ahead=settings.ahead).shards)


def _histogram(trace: SampledTrace, table: str, num_samples: int) -> CountHistogram:
    """Return how often a table's rows occur in the first samples of a trace: all rows, where it follows some."""
    followed = trace.tables[table]
    rows = followed.rows[: np.searchsorted(followed.samples, num_samples)]
    found = CountHistogram.of_counts(np.unique(rows, return_counts=True)[1])
    constant = trace.constant_lookups.get(table, np.empty(0)) * (num_samples / trace.num_samples)
    return CountHistogram.joined(
        np.concatenate([found.counts, constant]), np.concatenate([found.rows / trace.rate, np.ones(len(constant))])
    )


def _hits(reports: Sequence[CacheReport]) -> Floats:
    """Return the hits per lookup [T]; 0 where there are no lookups."""
    return np.array([report.hit_rate_lookups or 0.0 for report in reports])
