"""Compiled loops over a batch's ids and rows: checks of ids, from ids to keys, copies of rows, sums of rows by bag and
of bags' gradients by row; and which rows were put aside, with a copy of their earlier contents.

For the last: keys are in groups of 2^shift. Each group has a chain of places: it begins at `heads[group]`, and
`next_places[place]` is the next one. Places count from 1, and 0 ends a chain. `kept[place]` is the key of a row.
`free[0]` begins the chain of places that were given back, `free[1]` is the highest place that was ever given out.
"""

from __future__ import annotations

from typing import Any

import numba
from numpy.typing import NDArray

from embershard.cache.loops.compiled import Float32s, Int32s, Int64s, compiled, compiled_for

_WORDS = (numba.uint8, numba.int16, numba.int32, numba.int64)


@compiled
def are_rows(ids: Int64s, lengths: Int64s, limits: Int64s) -> bool:
    """True if all `ids` [N] are in [0, limit) of their feature; feature f has `lengths[f]` of them. A limit of 0 is
    none."""
    signs, position = 0, 0
    for feature in range(lengths.size):
        end = min(position + lengths[feature], ids.size)
        last = limits[feature] - 1
        for place in range(position, end if last >= 0 else position):  # without a branch, several ids at a time
            signs |= ids[place] | (last - ids[place])
        position = end
    return signs >= 0


@compiled_for([(ids[::1], *4 * (numba.int64[::1],)) for ids in (numba.int32, numba.int64)])
def keys_of_ids(ids: NDArray[Any], offsets: Int64s, first_keys: Int64s, keys: Int64s, lengths: Int64s) -> None:
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


@compiled
def pool_rows(
    rows: Float32s, pooled: Float32s, dim: int, places: Int64s, offsets: Int64s, scales: Float32s, num_features: int
) -> None:
    """Add up rows by bag, in the order of the bag's ids.

    Args:
        rows: [M * D].
        pooled: [B * F * D], written: sample after sample.
        dim: D.
        places: [N] of the ids' rows.
        offsets: [F * B + 1] bounds of the bags, feature after feature.
        scales: [N] factors of the rows; [0]: all are 1.
        num_features: F.
    """
    num_samples = (offsets.size - 1) // max(1, num_features)
    for bag in range(offsets.size - 1):
        out = (bag % num_samples * num_features + bag // num_samples) * dim
        for column in range(dim):
            pooled[out + column] = 0.0
        for position in range(offsets[bag], offsets[bag + 1]):
            row = places[position] * dim
            if scales.size:
                scale = scales[position]
                for column in range(dim):
                    pooled[out + column] += scale * rows[row + column]
            else:
                for column in range(dim):
                    pooled[out + column] += rows[row + column]


@compiled
def pool_gradients(
    gradients: Float32s, sums: Float32s, dim: int, places: Int64s, offsets: Int64s, scales: Float32s, num_features: int
) -> None:
    """Add up the gradients of bags by row, in the order of the ids: the backward of `pool_rows`.

    Args:
        gradients: [B * F * D] of the pooled rows.
        sums: [M * D], zeros; written.
    """
    num_samples = (offsets.size - 1) // max(1, num_features)
    for bag in range(offsets.size - 1):
        out = (bag % num_samples * num_features + bag // num_samples) * dim
        for position in range(offsets[bag], offsets[bag + 1]):
            row = places[position] * dim
            if scales.size:
                scale = scales[position]
                for column in range(dim):
                    sums[row + column] += scale * gradients[out + column]
            else:
                for column in range(dim):
                    sums[row + column] += gradients[out + column]


@compiled
def give_places(
    keys: Int64s, start: int, lowest: int, shift: int, heads: Int32s, next_places: Int32s, kept: Int64s, free: Int64s,
    places: Int64s, placed: Int64s,
) -> tuple[int, int]:  # fmt: skip
    """Give a place to each of `keys[start:]` that is at least `lowest` and has none, until no place is free.

    Writes the new places to `places`, and their keys to `placed`. Returns the position of the first key that was not
    dealt with, and the number of new places.
    """
    count = 0
    for position in range(start, keys.size):
        key = keys[position]
        if key < lowest:
            continue
        group = key >> shift
        place = heads[group]
        while place and kept[place] != key:
            place = next_places[place]
        if place:
            continue
        place = free[0]
        if place:
            free[0] = next_places[place]
        elif free[1] + 1 < kept.size:
            free[1] += 1
            place = free[1]
        else:
            return position, count
        kept[place], next_places[place], heads[group] = key, heads[group], place
        places[count], placed[count] = place, key
        count += 1
    return keys.size, count


@compiled
def take_places(
    first: int, stop: int, shift: int, heads: Int32s, next_places: Int32s, kept: Int64s, places: Int64s,
    placed: Int64s,
) -> int:  # fmt: skip
    """Remove the keys below `stop` from the chains of the groups of [first, stop).

    Writes their places to `places`, and the keys to `placed`. Returns their number.
    """
    count = 0
    for group in range(first >> shift, ((stop - 1) >> shift) + 1):
        place, before = heads[group], 0
        while place:
            after = next_places[place]
            if kept[place] >= stop:
                before = place
            else:
                places[count], placed[count] = place, kept[place]
                count += 1
                if before:
                    next_places[before] = after
                else:
                    heads[group] = after
            place = after
    return count


@compiled
def free_places(places: Int64s, next_places: Int32s, free: Int64s) -> None:
    """Give `places` back."""
    for place in places:
        next_places[place] = free[0]
        free[0] = place
