"""Device cache of embedding rows. It depends on tensors only, not on TorchRec or process groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embershard.lazy_names import lazy_names

if TYPE_CHECKING:
    from embershard.cache.config import CacheConfig
    from embershard.cache.homes.memory import MemoryRows
    from embershard.cache.homes.shape import PoolShape
    from embershard.cache.next_use import KnownBatch, NextUseIndex
    from embershard.cache.planner import CacheGrowthWarning, CachePlan, CachePlanner
    from embershard.cache.policies import SlotScores, make_scores
    from embershard.cache.row_cache import RowCache
    from embershard.cache.slot_map import SlotMap
    from embershard.cache.slot_state import SlotState
    from embershard.cache.statistics import TableStats
    from embershard.cache.tickets import Ticket
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "CacheConfig",
    "CacheGrowthWarning",
    "CachePlan",
    "CachePlanner",
    "KnownBatch",
    "MemoryRows",
    "NextUseIndex",
    "PoolShape",
    "RowCache",
    "SlotMap",
    "SlotScores",
    "SlotState",
    "TableStats",
    "Ticket",
    "make_scores",
]
