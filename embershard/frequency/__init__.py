"""Lookups of rows: counts, curves, traces, and the profile that holds them. This room knows no cache."""

from embershard.frequency.hot_rows import HotRows
from embershard.frequency.profile import FrequencyProfile
from embershard.frequency.statistics import CountHistogram, DataStatistics, Drift, StackDistances, TableStatistics
from embershard.frequency.trace import SampledTrace, TableTrace, is_followed, row_hashes

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
    "is_followed",
    "row_hashes",
]
