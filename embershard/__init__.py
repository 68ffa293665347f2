"""embershard: train recommendation models whose embedding tables are larger than the accelerators' memory.

A companion to TorchRec: change the sharder, and the tables live in host memory behind a frequency-aware
device cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from embershard.lazy_names import lazy_names

if TYPE_CHECKING:
    from embershard.cache.config import CacheConfig
    from embershard.cache.ids.config import IdTable
    from embershard.cache.statistics import TableStats
    from embershard.distributed import process_group
    from embershard.extras.accumulation import accumulating
    from embershard.extras.deal.deal import deal
    from embershard.extras.groups.model import GroupedModelParallel
    from embershard.extras.verify.program import verify
    from embershard.extras.warm_start.program import load_from
    from embershard.frequency.profile import FrequencyProfile
    from embershard.pipeline import LookAheadPipeline
    from embershard.sharding.torchrec import (
        CachedEmbeddingBagCollectionSharder,
        CachedEmbeddingCollectionSharder,
        StockEmbeddingBagCollectionSharder,
        StockEmbeddingCollectionSharder,
        cache_stats,
        file_counts,
        flush,
        host_rows_changed,
        plan_sharding,
    )
    from embershard.sharding.torchrec.ids.id_tables import id_counts
    from embershard.training.checkpoint.program import load_program, save_program
    from embershard.training.config import RunConfig
    from embershard.training.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "CacheConfig",
    "CachedEmbeddingBagCollectionSharder",
    "CachedEmbeddingCollectionSharder",
    "FrequencyProfile",
    "GroupedModelParallel",
    "IdTable",
    "LookAheadPipeline",
    "RunConfig",
    "StockEmbeddingBagCollectionSharder",
    "StockEmbeddingCollectionSharder",
    "TableStats",
    "Trainer",
    "__version__",
    "accumulating",
    "cache_stats",
    "deal",
    "file_counts",
    "flush",
    "host_rows_changed",
    "id_counts",
    "load_from",
    "load_program",
    "plan_sharding",
    "process_group",
    "save_program",
    "verify",
]


#: torch and TorchRec take seconds to import: only once a name that needs them is used.
__getattr__ = lazy_names(__name__)
