"""The cache: pure machinery. It knows tensors, not TorchRec and not process groups."""

from embershard.cache.config import CacheConfig
from embershard.cache.next_use import KnownBatch, NextUseIndex
from embershard.cache.planner import CachePlan, CachePlanner
from embershard.cache.policies import make_scores
from embershard.cache.row_cache import CacheGrowthWarning, RowCache
from embershard.cache.rows.host_store import HostStore
from embershard.cache.slot_map import SlotMap
from embershard.cache.statistics import TableStats
from embershard.cache.tickets import Ticket

__all__ = [
    "CacheConfig",
    "CacheGrowthWarning",
    "CachePlan",
    "CachePlanner",
    "HostStore",
    "KnownBatch",
    "NextUseIndex",
    "RowCache",
    "SlotMap",
    "TableStats",
    "Ticket",
    "make_scores",
]
