"""Compiled loops over the ids of a batch: what the cache's maps do on a CPU, in one pass each.

The same work as a chain of torch operations passes over the batch 5 to 20 times, and at small batches the calls cost
more than the work. Each loop changes its arrays exactly as the torch operations beside its call do (those run on a
GPU and with hashed maps), and releases Python's lock while it runs. Numba compiles them once per machine.

Arrays are one-dimensional and contiguous: N keys and positions of a batch, S + 1 slots, R rows.
"""

from embershard.cache.loops.compiled import Counters, Int32s, Int64s
from embershard.cache.loops.counts import count_plan, count_uses
from embershard.cache.loops.next_uses import admit, arrive, know
from embershard.cache.loops.slots import bind, distinct, find, out_of_range
from embershard.cache.loops.victims import (
    KNOWN_USE,
    LAST_BATCH,
    candidates,
    choose,
    lowest_ranks,
    offer,
    settle_ties,
)

__all__ = [
    "KNOWN_USE",
    "LAST_BATCH",
    "Counters",
    "Int32s",
    "Int64s",
    "admit",
    "arrive",
    "bind",
    "candidates",
    "choose",
    "count_plan",
    "count_uses",
    "distinct",
    "find",
    "know",
    "lowest_ranks",
    "offer",
    "out_of_range",
    "settle_ties",
]
