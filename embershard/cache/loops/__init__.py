"""Compiled loops over the ids of a batch: what the cache's maps do on a CPU, in one pass each.

The same work as a chain of torch operations passes over the batch 5 to 20 times, and at small batches the calls cost
more than the work. Each loop changes its arrays exactly as torch operations would (tests compare the two), and releases
Python's lock while it runs. Numba compiles them once per machine. It takes a second to import, and is when the first of
them is used: who scores on a CPU without a cache needs none.

Arrays are one-dimensional and contiguous: N keys and positions of a batch, S + 1 slots, R rows.
"""

import sys
from typing import TYPE_CHECKING, Any

from embershard.interrupts import interrupts_wait
from embershard.lazy_names import lazy_names

if TYPE_CHECKING:
    from embershard.cache.ids.loops import buckets_of_ids as buckets_of_ids
    from embershard.cache.ids.loops import evict_ids as evict_ids
    from embershard.cache.ids.loops import find_ids as find_ids
    from embershard.cache.ids.loops import give_rows_to_ids as give_rows_to_ids
    from embershard.cache.ids.loops import mix_ids as mix_ids
    from embershard.cache.ids.loops import rank_ids as rank_ids
    from embershard.cache.ids.loops import rebuild_ids as rebuild_ids
    from embershard.cache.ids.loops import use_ids as use_ids
    from embershard.cache.loops.compiled import Counters as Counters
    from embershard.cache.loops.compiled import Int32s as Int32s
    from embershard.cache.loops.compiled import Int64s as Int64s
    from embershard.cache.loops.initial_rows import make_blocks as make_blocks
    from embershard.cache.loops.initial_rows import make_blocks_of as make_blocks_of
    from embershard.cache.loops.initial_rows import read_blocks as read_blocks
    from embershard.cache.loops.initial_rows import read_rows as read_rows
    from embershard.cache.loops.initial_rows import write_rows as write_rows
    from embershard.cache.loops.initial_rows import write_rows_of_ids as write_rows_of_ids
    from embershard.cache.loops.next_uses import arrive as arrive
    from embershard.cache.loops.next_uses import know as know
    from embershard.cache.loops.next_uses import take_traces as take_traces
    from embershard.cache.loops.pages import are_set as are_set
    from embershard.cache.loops.pages import pages_to_keep as pages_to_keep
    from embershard.cache.loops.pages import read_pages as read_pages
    from embershard.cache.loops.pages import rows_from_pages as rows_from_pages
    from embershard.cache.loops.pages import rows_to_pages as rows_to_pages
    from embershard.cache.loops.pages import set_bits as set_bits
    from embershard.cache.loops.pages import sum_pages as sum_pages
    from embershard.cache.loops.pages import write_pages as write_pages
    from embershard.cache.loops.rows import add_per_feature as add_per_feature
    from embershard.cache.loops.rows import are_rows as are_rows
    from embershard.cache.loops.rows import copy_rows as copy_rows
    from embershard.cache.loops.rows import free_places as free_places
    from embershard.cache.loops.rows import give_places as give_places
    from embershard.cache.loops.rows import keys_of_ids as keys_of_ids
    from embershard.cache.loops.rows import pool_gradients as pool_gradients
    from embershard.cache.loops.rows import pool_rows as pool_rows
    from embershard.cache.loops.rows import take_places as take_places
    from embershard.cache.loops.slots import bind as bind
    from embershard.cache.loops.slots import count_plan as count_plan
    from embershard.cache.loops.slots import count_uses as count_uses
    from embershard.cache.loops.slots import distinct as distinct
    from embershard.cache.loops.slots import distinct_ids as distinct_ids
    from embershard.cache.loops.slots import fill as fill
    from embershard.cache.loops.slots import find as find
    from embershard.cache.loops.slots import out_of_range as out_of_range
    from embershard.cache.loops.small import mark_full as mark_full
    from embershard.cache.loops.small import narrow_to_codes as narrow_to_codes
    from embershard.cache.loops.small import narrow_to_halfs as narrow_to_halfs
    from embershard.cache.loops.small import round_to_codes as round_to_codes
    from embershard.cache.loops.small import round_to_halfs as round_to_halfs
    from embershard.cache.loops.small import widen_codes as widen_codes
    from embershard.cache.loops.small import widen_halfs as widen_halfs
    from embershard.cache.loops.victims import KNOWN_USE as KNOWN_USE
    from embershard.cache.loops.victims import LAST_BATCH as LAST_BATCH
    from embershard.cache.loops.victims import candidates as candidates
    from embershard.cache.loops.victims import choose as choose
    from embershard.cache.loops.victims import lowest_ranks as lowest_ranks
    from embershard.cache.loops.victims import offer as offer
    from embershard.cache.loops.victims import settle_ties as settle_ties
else:
    _get = lazy_names(__name__)

    def __getattr__(name: str) -> Any:
        with interrupts_wait():  # an import of Numba that is cut off cannot be repeated
            found = globals()[name] = _get(name)  # the next use finds it here: they are called in every step
        return found


def load_those_of_a_cache() -> None:
    """Load the loops that every cache on a CPU calls, or compile them: when it is built, and not in its first step."""
    for name in ("find", "know", "candidates", "copy_rows"):  # one of each file
        getattr(sys.modules[__name__], name)
