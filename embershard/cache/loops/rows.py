"""Compiled loops over a batch's ids and rows: checks of ids, from ids to keys, and copies of rows."""

from __future__ import annotations

from typing import Any

import numba
from numpy.typing import NDArray

from embershard.cache.loops.compiled import Int64s, compiled, compiled_for

_WORDS = (numba.uint8, numba.int16, numba.int32, numba.int64)


@compiled
def are_rows(ids: Int64s, lengths: Int64s, limits: Int64s) -> bool:
    """True if all `ids` [N] are in [0, limit) of their feature; feature f has `lengths[f]` of them."""
    signs, position = 0, 0
    for feature in range(lengths.size):
        end = min(position + lengths[feature], ids.size)
        last = limits[feature] - 1
        for place in range(position, end):  # without a branch, several ids at a time
            signs |= ids[place] | (last - ids[place])
        position = end
    return signs >= 0


@compiled
def keys_of_ids(ids: Int64s, offsets: Int64s, first_keys: Int64s, keys: Int64s, lengths: Int64s) -> None:
    """Write to `keys` [N] the `ids` [N], each with the first key of its feature's table; to `lengths` [F] the number
    of ids per feature, by the `offsets` [F * B + 1] of the bags."""
    num_samples = (offsets.size - 1) // first_keys.size
    position = 0
    for feature in range(first_keys.size):
        lengths[feature] = offsets[(feature + 1) * num_samples] - offsets[feature * num_samples]
        end = min(position + lengths[feature], ids.size)
        for place in range(position, end):
            keys[place] = ids[place] + first_keys[feature]
        position = end


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
