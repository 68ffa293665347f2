"""embershard: train recommendation models whose embedding tables are larger than the accelerators' memory.

A companion to TorchRec: change the sharder, and the tables live in host memory behind a frequency-aware
device cache.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from embershard.cache.config import CacheConfig
from embershard.cache.statistics import TableStats
from embershard.frequency.profile import FrequencyProfile

if TYPE_CHECKING:
    from embershard.pipeline import LookAheadPipeline
    from embershard.sharding.torchrec import (
        CachedEmbeddingBagCollectionSharder,
        CachedEmbeddingCollectionSharder,
        cache_stats,
        flush,
        host_rows_changed,
        plan_sharding,
    )

__version__ = "0.1.0"

__all__ = [
    "CacheConfig",
    "CachedEmbeddingBagCollectionSharder",
    "CachedEmbeddingCollectionSharder",
    "FrequencyProfile",
    "LookAheadPipeline",
    "TableStats",
    "__version__",
    "cache_stats",
    "flush",
    "host_rows_changed",
    "plan_sharding",
]


def __getattr__(name: str) -> Any:
    """TorchRec takes seconds to import: only once one of the names that need it is used."""
    if name in __all__:
        home = "embershard.pipeline" if name == "LookAheadPipeline" else "embershard.sharding.torchrec"
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'embershard' has no attribute {name!r}")
