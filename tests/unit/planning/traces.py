"""Lookups to replay, and to plan for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from embershard.frequency import DataStatistics, FrequencyProfile, SampledTrace, TableTrace
from embershard.frequency.collect import Collector, count_part

Ints = NDArray[np.int64]


def trace_of(lookups: Mapping[str, Ints], bag_size: int = 1, rate: float = 1.0) -> SampledTrace:
    """Of these lookups, sample after sample, ``bag_size`` each. All rows are followed, whatever ``rate`` says."""
    tables = {name: TableTrace(np.arange(len(rows)) // bag_size, np.asarray(rows)) for name, rows in lookups.items()}
    return SampledTrace(rate, max(len(rows) for rows in lookups.values()) // bag_size, tables, {}, {})


def skewed(num_rows: int, count: int, seed: int = 0, power: float = 4.0, scattered: bool = True) -> Ints:
    """Independent lookups [count] of few hot rows and many cold ones; ``scattered``: hot rows do not lie together."""
    random = np.random.default_rng(seed)
    ranks = (num_rows * random.random(count) ** power).astype(np.int64)
    places = np.random.default_rng(1000 + seed).permutation(num_rows) if scattered else np.arange(num_rows)
    return places[ranks]


def counted(
    lookups: Mapping[str, tuple[int, Ints]], bag_size: int = 1, share_of_samples: float = 1.0
) -> DataStatistics:
    """Statistics of tables: name -> rows and lookups, ``bag_size`` per sample or none at all."""
    return profile_of(lookups, bag_size, share_of_samples).need_statistics()


def profile_of(
    lookups: Mapping[str, tuple[int, Ints]], bag_size: int = 1, share_of_samples: float = 1.0
) -> FrequencyProfile:
    """The profile with these statistics."""
    num_rows = {name: rows for name, (rows, _) in lookups.items()}
    collector = Collector(num_rows, max_lookups=10**9, memory_bytes=1 << 30)
    ids = [rows for _, rows in lookups.values()]
    sizes = [bag_size if len(rows) else 0 for rows in ids]
    num_samples = max(map(len, ids)) // bag_size
    collector.add(count_part(list(num_rows.values()), ids, sizes, num_samples, read_seconds=1e-6 * num_samples))
    found = collector.finish(share_of_samples=share_of_samples)
    return FrequencyProfile.of_sparse(num_rows, found.counts, 1, found.statistics)
