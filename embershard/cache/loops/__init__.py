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
    from embershard.cache.ids.loops import *
    from embershard.cache.loops.compiled import Counters as Counters
    from embershard.cache.loops.compiled import Int32s as Int32s
    from embershard.cache.loops.compiled import Int64s as Int64s
    from embershard.cache.loops.initial_rows import *
    from embershard.cache.loops.next_uses import *
    from embershard.cache.loops.pages import *
    from embershard.cache.loops.rows import *
    from embershard.cache.loops.slots import *
    from embershard.cache.loops.small import *
    from embershard.cache.loops.victims import *
    from embershard.cache.loops.victims import KNOWN_USE as KNOWN_USE
    from embershard.cache.loops.victims import LAST_BATCH as LAST_BATCH
else:
    _get, _ = lazy_names(__name__)

    def __getattr__(name: str) -> Any:
        with interrupts_wait():  # an import of Numba that is cut off cannot be repeated
            found = globals()[name] = _get(name)  # the next use finds it here: they are called in every step
        return found


def load_those_of_a_cache() -> None:
    """Load the loops that every cache on a CPU calls, or compile them: when it is built, and not in its first step."""
    for name in ("find", "know", "candidates", "copy_rows"):  # one of each file
        getattr(sys.modules[__name__], name)
