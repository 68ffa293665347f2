"""The cache inside TorchRec: kernels, lookups, shardings, sharded modules, sharders. A new TorchRec version touches
this folder."""

from embershard.cache.homes.home import FrozenRows
from embershard.sharding.torchrec.inspection import (
    cache_stats,
    cached_embeddings,
    cancel_forward,
    copied_rows,
    file_counts,
    flush,
    freeze,
    host_rows_changed,
    pools_by_module,
    without_flushes,
)
from embershard.sharding.torchrec.planner.torchrec_planner import plan_sharding
from embershard.sharding.torchrec.sharders import (
    CachedEmbeddingBagCollectionSharder,
    CachedEmbeddingCollectionSharder,
    StockEmbeddingBagCollectionSharder,
    StockEmbeddingCollectionSharder,
)

__all__ = [
    "CachedEmbeddingBagCollectionSharder",
    "CachedEmbeddingCollectionSharder",
    "FrozenRows",
    "StockEmbeddingBagCollectionSharder",
    "StockEmbeddingCollectionSharder",
    "cache_stats",
    "cached_embeddings",
    "cancel_forward",
    "copied_rows",
    "file_counts",
    "flush",
    "freeze",
    "host_rows_changed",
    "plan_sharding",
    "pools_by_module",
    "without_flushes",
]
