"""How often and in which order rows are looked up: counts, curves, traces. numpy only; it knows no cache."""

from embershard.frequency.statistics import (
    CountHistogram,
    DataStatistics,
    Drift,
    StackDistances,
    TableStatistics,
)
from embershard.frequency.trace import SampledTrace, TableTrace, is_followed, row_hashes

__all__ = [
    "CountHistogram",
    "DataStatistics",
    "Drift",
    "SampledTrace",
    "StackDistances",
    "TableStatistics",
    "TableTrace",
    "is_followed",
    "row_hashes",
]
