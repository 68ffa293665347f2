"""Compiled loops over the rows put aside: which rows have a copy of their earlier contents, and where.

Keys are in groups of 2^shift. Each group has a chain of places: it begins at `heads[group]`, and `following[place]` is
the next one. Places count from 1, and 0 ends a chain. `kept[place]` is the key of the row there. `free[0]` begins the
chain of places that were given back, `free[1]` is the highest place that was ever given out.
"""

from __future__ import annotations

from embershard.cache.loops.compiled import Int32s, Int64s, compiled


@compiled
def give_places(
    keys: Int64s,
    start: int,
    lowest: int,
    shift: int,
    heads: Int32s,
    following: Int32s,
    kept: Int64s,
    free: Int64s,
    places: Int64s,
    placed: Int64s,
) -> tuple[int, int]:
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
            place = following[place]
        if place:
            continue
        place = free[0]
        if place:
            free[0] = following[place]
        elif free[1] + 1 < kept.size:
            free[1] += 1
            place = free[1]
        else:
            return position, count
        kept[place], following[place], heads[group] = key, heads[group], place
        places[count], placed[count] = place, key
        count += 1
    return keys.size, count


@compiled
def take_places(
    first: int,
    stop: int,
    shift: int,
    heads: Int32s,
    following: Int32s,
    kept: Int64s,
    places: Int64s,
    placed: Int64s,
) -> int:
    """Remove the keys below `stop` from the chains of the groups of [first, stop).

    Writes their places to `places`, and the keys to `placed`. Returns their number.
    """
    count = 0
    for group in range(first >> shift, ((stop - 1) >> shift) + 1):
        place, before = heads[group], 0
        while place:
            after = following[place]
            if kept[place] >= stop:
                before = place
            else:
                places[count], placed[count] = place, kept[place]
                count += 1
                if before:
                    following[before] = after
                else:
                    heads[group] = after
            place = after
    return count


@compiled
def free_places(places: Int64s, following: Int32s, free: Int64s) -> None:
    """Give `places` back."""
    for place in places:
        following[place] = free[0]
        free[0] = place
