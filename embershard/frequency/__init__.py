"""Lookups of rows: counts, curves, traces, and the profile that holds them. This room knows no cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embershard.lazy_names import lazy_names

if TYPE_CHECKING:
    from embershard.frequency.profile import FrequencyProfile, HotRows
    from embershard.frequency.statistics import (
        CountHistogram,
        DataStatistics,
        Drift,
        SampledTrace,
        StackDistances,
        TableStatistics,
        TableTrace,
        is_sampled,
        row_hashes,
    )
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "CountHistogram",
    "DataStatistics",
    "Drift",
    "FrequencyProfile",
    "HotRows",
    "SampledTrace",
    "StackDistances",
    "TableStatistics",
    "TableTrace",
    "is_sampled",
    "row_hashes",
]
