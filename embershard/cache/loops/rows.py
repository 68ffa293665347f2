"""Compiled loops over a batch's ids and rows: from ids to keys, and copies of rows."""

from __future__ import annotations

from typing import Any

import numba
from numpy.typing import NDArray

from embershard.cache.loops.compiled import Int64s, compiled, compiled_for

_WORDS = (numba.uint8, numba.int16, numba.int32, numba.int64)


@compiled
def add_per_feature(ids: Int64s, addends: Int64s, lengths: Int64s, sums: Int64s) -> None:
    """Write to `sums` [N] the `ids` [N], each with the addend of its feature; feature f has `lengths[f]` of them."""
    position = 0
    for feature in range(lengths.size):
        end = min(position + lengths[feature], ids.size)
        addend = addends[feature]
        for place in range(position, end):
            sums[place] = ids[place] + addend
        position = end


@compiled_for([(word[:, ::1], numba.int64[::1], word[:, ::1], numba.int64[::1]) for word in _WORDS])
def copy_rows(target: NDArray[Any], target_rows: Int64s, source: NDArray[Any], source_rows: Int64s) -> None:
    """Do `target[target_rows] = source[source_rows]` for tables of integers [rows, words per row]."""
    for i in range(target_rows.size):
        target_row, source_row = target_rows[i], source_rows[i]
        for word in range(target.shape[1]):
            target[target_row, word] = source[source_row, word]
