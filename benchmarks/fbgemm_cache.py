"""What a forward of FBGEMM's tables takes longer with its cache in HBM than with all rows there: a model of its code.

FBGEMM's table-batched embeddings with `EmbeddingLocation.MANAGED_CACHING` and LRU, as NVIDIA's benchmark builds them
(`create_split_table_batched_embeddings` in recsys-examples corelib/dynamicemb/benchmark): the cache has sets of 32
slots, a row belongs to one of them by a hash, and the benchmark asks for a counter of misses
(`RecordCacheMetrics(True, False)`), for which FBGEMM looks up all ids once more, sorts what `torch.unique` gets, and
waits for the GPU.

Read in pytorch/FBGEMM at 71d6f8b2: `_prefetch` and `_update_cache_miss_counter` of
split_table_batched_embeddings_ops_training.py; linearize_cache_indices.cu, lru_cache_populate.cu, lru_cache_find.cu and
lxu_cache.cu of fbgemm_gpu/src/split_embeddings_cache. Speeds are a plan's; nothing was fitted to published times.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from embershard.planning.cost.rates import Rates

WAYS = 32
_STATE_BYTES, _SECTOR_BYTES = 8 * WAYS, 32  # of a set's ids, or of its stamps
#: How much faster than memory L2 is, as a plan has it (docs/planning.md, costs): sets of repeated ids are there.
_L2_SPEEDUP = 3.0
_SAMPLED = 16  # one in so many sets is followed
#: Bytes of an id in memory: linear ids are made (16), put together (16), and found twice (2 x 12, without the sets). A
#: pass of a radix sort is over 8 bits, reads and writes, behind a histogram (CUB's Onesweep, as `gpu_embedding_bytes`).
_MADE, _FOUND = 16 + 16, 2 * 12
#: The counter: misses compared (5) and chosen (17), sorted over 64 bits (8 passes of 16, and 8), distinct ones (16).
_COUNTED = 5 + 17 + 8 * 16 + 8 + 16
#: Kernels beside the lookup's own: as many as the lines above and below have steps, each at least a launch.
_LAUNCHES = 2 + 2 + (2 + 9 + 2 + 8) + (5 + 2) + (1 + 1 + 4) + 1
#: Operations of torch behind the counter's wait, until the cache's kernels are launched: where, sum, compare, cast, two
#: reads and two sums of the counter, and the operator that fills the cache. 29 us each: 5.2 ms for 178
#: (`benchmarks.host_thread`), on an H100's node.
_WAIT_SECONDS = 9 * 5.2e-3 / 178


class Misses(NamedTuple):
    """Of a batch, over all tables: rows that come, and go. `num_sets`: of the cache."""

    rows: float
    num_sets: int


def extra_seconds(
    num_ids: float, distinct: float, row_bytes: int, total_rows: int, misses: Misses, rates: Rates
) -> float:
    """Return the seconds that a forward takes longer than without a cache.

    Args:
        num_ids, distinct: lookups of a batch, and distinct rows, over all tables.
        total_rows: of all tables: ids are sorted by as many bits.
    """
    by_row, by_set = _passes(total_rows), _passes(misses.num_sets)
    of_ids = _MADE + _FOUND + _COUNTED
    of_ids += 16 * by_row + 8 + 16  # distinct ids: sorted, and taken
    of_ids += 4 + 24 * by_set + 4  # those that miss, by their sets: as many places as ids
    probes = 2 * _STATE_BYTES * (distinct + (num_ids - distinct) / _L2_SPEEDUP)
    probes += distinct * (8 + _STATE_BYTES + 2 * _SECTOR_BYTES)  # each distinct one, whose stamp is written
    inserted = misses.rows * (_STATE_BYTES + 2 * _SECTOR_BYTES + 2 * row_bytes)
    device = (num_ids * of_ids + probes + inserted) * rates.seconds_per_embedding_byte
    link = misses.rows * row_bytes * rates.seconds_per_byte_to_device  # both ways at once
    return device + link + _LAUNCHES * rates.seconds_per_launch + _WAIT_SECONDS


def _passes(numbers: int) -> int:
    return math.ceil((math.floor(math.log2(numbers + 1)) + 1) / 8)


def missed_rows(drawn: np.ndarray, num_slots: int, num_tables: int) -> Misses:
    """Return what a batch misses, of batches that come again and again in the same order, after the first time.

    Args:
        drawn: rows of a table that each batch looks up [batches, lookups]; the other tables are alike.
        num_slots: of the cache for each table; all share its sets.
    """
    num_sets = max(1, round(num_slots / WAYS))
    sets = np.random.default_rng(1).integers(num_sets, size=int(drawn.max()) + 1, dtype=np.int32)
    followed = [
        [(int(sets[row]), int(row)) for row in np.unique(batch[sets[batch] % _SAMPLED == 0])] for batch in drawn
    ]
    kept: dict[int, OrderedDict[int, int]] = {}
    missed = 0
    for turn in range(2):
        for number, batch in enumerate(followed):
            stamp = turn * len(followed) + number
            new = [(slot_set, row) for slot_set, row in batch if not _touch(kept, slot_set, row, stamp)]
            missed += len(new) if turn else 0
            for slot_set, row in new:
                _insert(kept[slot_set], row, stamp)
    num_sampled = len(range(0, num_sets, _SAMPLED))
    return Misses(missed / len(drawn) * num_sets / num_sampled * num_tables, num_sets * num_tables)


def _touch(kept: dict[int, OrderedDict[int, int]], slot_set: int, row: int, stamp: int) -> bool:
    """Stamp a row that is there; return whether it is."""
    rows = kept.setdefault(slot_set, OrderedDict())
    if row not in rows:
        return False
    rows[row] = stamp
    rows.move_to_end(row)
    return True


def _insert(rows: OrderedDict[int, int], row: int, stamp: int) -> None:
    """Put a row in the place of that with the oldest stamp; none of this batch leaves."""
    if len(rows) >= WAYS:
        oldest = next(iter(rows))
        if rows[oldest] == stamp:
            return
        del rows[oldest]
    rows[row] = stamp


@functools.cache
def drawn_rows(num_rows: int, num_batches: int, batch_size: int, exponent: float) -> np.ndarray:
    """Return rows of a table that batches look up [batches, lookups], drawn by the benchmark's law: numbers from 1 to
    the table's rows with a density of `x ** -exponent`, cut to whole ones."""
    power, uniform = 1 - exponent, np.random.default_rng(0).random(num_batches * batch_size)
    drawn = (1 + uniform * (num_rows**power - 1)) ** (1 / power)
    return np.minimum(drawn, num_rows - 1).astype(np.int64).reshape(num_batches, batch_size)
