"""embershard: train recommendation models whose embedding tables are larger than the accelerators' memory.

A companion to TorchRec: change the sharder, and the tables live in host memory behind a frequency-aware
device cache.
"""

from typing import TYPE_CHECKING

from embershard.lazy_names import lazy_names

__version__ = "0.1.0"

#: torch and TorchRec take seconds to import: only once a name that needs them is used.
if TYPE_CHECKING:
    from embershard.cache.config import CacheConfig as CacheConfig
    from embershard.cache.ids.config import IdTable as IdTable
    from embershard.cache.statistics import TableStats as TableStats
    from embershard.distributed import process_group as process_group
    from embershard.extras.accumulation import accumulating as accumulating
    from embershard.extras.deal.deal import deal as deal
    from embershard.extras.groups.model import GroupedModelParallel as GroupedModelParallel
    from embershard.extras.verify.program import verify as verify
    from embershard.extras.warm_start.program import load_from as load_from
    from embershard.frequency.profile import FrequencyProfile as FrequencyProfile
    from embershard.pipeline import LookAheadPipeline as LookAheadPipeline
    from embershard.sharding.torchrec import CachedEmbeddingBagCollectionSharder as CachedEmbeddingBagCollectionSharder
    from embershard.sharding.torchrec import CachedEmbeddingCollectionSharder as CachedEmbeddingCollectionSharder
    from embershard.sharding.torchrec import StockEmbeddingBagCollectionSharder as StockEmbeddingBagCollectionSharder
    from embershard.sharding.torchrec import StockEmbeddingCollectionSharder as StockEmbeddingCollectionSharder
    from embershard.sharding.torchrec import cache_stats as cache_stats
    from embershard.sharding.torchrec import file_counts as file_counts
    from embershard.sharding.torchrec import flush as flush
    from embershard.sharding.torchrec import host_rows_changed as host_rows_changed
    from embershard.sharding.torchrec import plan_sharding as plan_sharding
    from embershard.sharding.torchrec.ids.id_tables import id_counts as id_counts
    from embershard.training.checkpoint.program import load_program as load_program
    from embershard.training.checkpoint.program import save_program as save_program
    from embershard.training.config import RunConfig as RunConfig
    from embershard.training.trainer import Trainer as Trainer
else:
    __getattr__, __all__ = lazy_names(__name__)
    __all__ = sorted([*__all__, "__version__"])
