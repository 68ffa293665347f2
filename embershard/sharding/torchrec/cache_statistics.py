"""The cache statistics that TorchRec's planner asks for, from a profile of real data."""

from __future__ import annotations

from dataclasses import dataclass

from torchrec.distributed.types import CacheAlgorithm, CacheParams, CacheStatistics

from embershard.frequency import FrequencyProfile
from embershard.frequency.curves import BatchMisses


@dataclass(frozen=True)
class ProfileCacheStatistics(CacheStatistics):
    """What a profile says about one table, in TorchRec's terms: lookups are distinct rows of a global batch."""

    misses: BatchMisses

    @property
    def expected_lookups(self) -> float:
        """Distinct rows of a global batch."""
        return self.misses.expected_lookups

    def expected_miss_rate(self, clf: float) -> float:
        """Share of a batch's distinct rows that a cache of ``clf`` times the table misses."""
        return self.misses.expected_miss_rate(clf)

    @property
    def cacheability(self) -> float:
        """Area under the miss curve: 0 is easy to cache, 1 cannot be."""
        return self.misses.cacheability


def cache_params_from(
    profile: FrequencyProfile,
    table: str,
    *,
    global_batch_size: int,
    load_factor: float | None = None,
    algorithm: CacheAlgorithm | None = None,
) -> CacheParams:
    """Cache parameters with statistics, for ``ParameterConstraints(cache_params=...)``.

    Args:
        profile: with statistics.
        table: its name.
        global_batch_size: samples of a step, over all ranks.
        load_factor: slots per row; None: as many as a batch has distinct rows, the least that works, from which
            TorchRec's ``EmbeddingOffloadScaleupProposer`` scales up.
        algorithm: as in ``CacheParams``.

    Raises:
        ConfigError: the profile has no statistics, or not of this table.
    """
    misses = profile.cache_statistics(table, global_batch_size)
    if load_factor is None:
        load_factor = min(1.0, max(misses.expected_lookups, 1.0) / max(profile.num_rows(table), 1))
    return CacheParams(algorithm=algorithm, load_factor=load_factor, stats=ProfileCacheStatistics(misses))
