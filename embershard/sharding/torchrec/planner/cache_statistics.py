"""Cache statistics for TorchRec's planner, from a profile of real data."""

from __future__ import annotations

from dataclasses import dataclass

from torchrec.distributed.types import CacheAlgorithm, CacheParams, CacheStatistics

from embershard.frequency import FrequencyProfile
from embershard.frequency.curves import BatchMisses


@dataclass(frozen=True)
class ProfileCacheStatistics(CacheStatistics):
    """A profile's statistics of one table, in TorchRec's terms: lookups are the distinct rows of a global batch."""

    misses: BatchMisses

    @property
    def expected_lookups(self) -> float:
        """Distinct rows of a global batch."""
        return self.misses.expected_lookups

    def expected_miss_rate(self, clf: float) -> float:
        """Return the share of a batch's distinct rows that a cache of `clf` times the table misses."""
        return self.misses.expected_miss_rate(clf)

    @property
    def cacheability(self) -> float:
        """Area under the miss curve, from 0 (easy to cache) to 1 (impossible)."""
        return self.misses.cacheability


def cache_params_from(
    profile: FrequencyProfile,
    table: str,
    *,
    global_batch_size: int,
    load_factor: float | None = None,
    algorithm: CacheAlgorithm | None = None,
) -> CacheParams:
    """Return cache parameters with statistics, for `ParameterConstraints(cache_params=...)`.

    Args:
        profile: with statistics.
        table: its name.
        global_batch_size: samples of a step, over all ranks.
        load_factor: slots per row. None: as many slots as a batch has distinct rows, the minimum, from which TorchRec's
            `EmbeddingOffloadScaleupProposer` scales up.
        algorithm: as in `CacheParams`.

    Raises:
        ConfigError: the profile has no statistics of this table.
    """
    misses = profile.cache_statistics(table, global_batch_size)
    if load_factor is None:
        load_factor = min(1.0, max(misses.expected_lookups, 1.0) / max(profile.num_rows(table), 1))
    return CacheParams(algorithm=algorithm, load_factor=load_factor, stats=ProfileCacheStatistics(misses))
