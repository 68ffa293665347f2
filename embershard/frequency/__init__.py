"""Lookups of rows: counts, curves, traces, and the profile that holds them. This room knows no cache."""

from typing import TYPE_CHECKING

from embershard.lazy_names import lazy_names

if TYPE_CHECKING:
    from embershard.frequency.profile import FrequencyProfile as FrequencyProfile
    from embershard.frequency.profile import HotRows as HotRows
    from embershard.frequency.statistics import CountHistogram as CountHistogram
    from embershard.frequency.statistics import DataStatistics as DataStatistics
    from embershard.frequency.statistics import Drift as Drift
    from embershard.frequency.statistics import SampledTrace as SampledTrace
    from embershard.frequency.statistics import StackDistances as StackDistances
    from embershard.frequency.statistics import TableStatistics as TableStatistics
    from embershard.frequency.statistics import TableTrace as TableTrace
    from embershard.frequency.statistics import is_sampled as is_sampled
    from embershard.frequency.statistics import row_hashes as row_hashes
else:
    __getattr__, __all__ = lazy_names(__name__)
