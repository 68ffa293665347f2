"""Device cache of embedding rows. It depends on tensors only, not on TorchRec or process groups."""

from typing import TYPE_CHECKING

from embershard.lazy_names import lazy_names

if TYPE_CHECKING:
    from embershard.cache.config import CacheConfig as CacheConfig
    from embershard.cache.homes.memory import MemoryRows as MemoryRows
    from embershard.cache.homes.shape import PoolShape as PoolShape
    from embershard.cache.next_use import KnownBatch as KnownBatch
    from embershard.cache.next_use import NextUseIndex as NextUseIndex
    from embershard.cache.planner import CacheGrowthWarning as CacheGrowthWarning
    from embershard.cache.planner import CachePlan as CachePlan
    from embershard.cache.planner import CachePlanner as CachePlanner
    from embershard.cache.policies import SlotScores as SlotScores
    from embershard.cache.policies import make_scores as make_scores
    from embershard.cache.row_cache import RowCache as RowCache
    from embershard.cache.slot_map import SlotMap as SlotMap
    from embershard.cache.slot_state import SlotState as SlotState
    from embershard.cache.statistics import TableStats as TableStats
    from embershard.cache.tickets import Ticket as Ticket
else:
    __getattr__, __all__ = lazy_names(__name__)
