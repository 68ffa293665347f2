"""Compiled loops of `IdMap`: ids without a bound, found, counted, given rows and evicted. Integers only.

An id is the mixed one everywhere: x. Rows [R] of whole buckets of `size` rows each; `records` [2 * R] has for each row
its id and its uses: count and newest batch of a live row, -1 - the first batch that may take any other.
"""

from __future__ import annotations

import numpy as np

from embershard.cache.loops.compiled import Bools, Int32s, Int64s, compiled

_BLOCK = 256  # ids whose state is fetched from memory together
_SPREAD = -7046029254386353131  # 2^64 over the golden ratio
_WORD = 32
_LOW = 2**32 - 1
_MOST_USES = 2**31 - 1
_WAYS = 8
_DIGIT = 11  # bits
_NEVER = 2**63 - 1
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@compiled
def _mix(word: int) -> int:
    z = np.uint64(word)
    z ^= z >> np.uint64(30)
    z *= _M1
    z ^= z >> np.uint64(27)
    z *= _M2
    z ^= z >> np.uint64(31)
    return np.int64(z)  # type: ignore[return-value]


@compiled
def mix_ids(ids: Int64s, mixed: Int64s) -> None:
    """Write the mixed ids [N]: the finaliser of SplitMix64, a bijection of 64-bit words."""
    for position in range(ids.size):
        mixed[position] = _mix(ids[position])


@compiled
def _bucket(x: int, num_buckets: int) -> int:
    return np.int64(np.uint64(x) % np.uint64(num_buckets))  # type: ignore[return-value]


@compiled
def buckets_of_ids(mixed: Int64s, num_buckets: int, buckets: Int64s) -> None:
    """Write each id's bucket."""
    for position in range(mixed.size):
        buckets[position] = _bucket(mixed[position], num_buckets)


@compiled
def _cell(x: int, num_cells: int) -> int:
    """Return the first cell of x to look at, of fewer than 2^32: the product needs all 64 bits."""
    return np.int64(  # type: ignore[return-value]
        np.uint64(((x * _SPREAD) >> _WORD) & _LOW) * np.uint64(num_cells) >> np.uint64(_WORD)
    )


@compiled
def _probe(x: int, cells: Int32s, records: Int64s) -> int:
    """Return the cell of x, or the free one where it would be."""
    place = _cell(x, cells.size)
    while cells[place] > 0 and records[2 * (cells[place] - 1)] != x:
        place = place + 1 if place + 1 < cells.size else 0
    return place


@compiled
def _decayed(count: int, age: int, decay: int) -> int:
    return count >> min(age // decay, 63) if decay > 0 else count


@compiled
def find_ids(mixed: Int64s, cells: Int32s, records: Int64s, rows: Int64s) -> None:
    """Look ids [N] up: their rows [N], -1 where an id has none.

    Args:
        cells: a hash table with linear probing: rows plus 1, 0 where a cell is free.
    """
    places = np.empty(_BLOCK, np.int64)
    for start in range(0, mixed.size, _BLOCK):
        num = min(_BLOCK, mixed.size - start)
        for i in range(num):
            places[i] = _cell(mixed[start + i], cells.size)
        for i in range(num):
            rows[start + i] = cells[places[i]] - 1
        for i in range(num):
            row = rows[start + i]
            if row >= 0 and records[2 * row] != mixed[start + i]:
                row = cells[_probe(mixed[start + i], cells, records)] - 1
                rows[start + i] = row


@compiled
def use_ids(
    mixed: Int64s, clock: int, decay: int, cells: Int32s, records: Int64s, rows: Int64s, used: Int64s, missing: Int64s
) -> tuple[int, int]:
    """Look ids [N] of batch `clock` up, as `find_ids` does, and count the uses of their rows. Return how many distinct
    rows, and how many ids without one.

    Args:
        rows, missing: [N], written: the row of each id, and the positions of those without one.
        used: [2 * N] or [2 * R], written: the distinct rows, each with its uses before.
    """
    find_ids(mixed, cells, records, rows)
    num_used, num_missing = 0, 0
    for position in range(rows.size):
        row = rows[position]
        if row < 0:
            missing[num_missing] = position
            num_missing += 1
            continue
        uses = records[2 * row + 1]
        count, last = uses >> _WORD, uses & _LOW
        if last != clock:
            used[2 * num_used], used[2 * num_used + 1] = row, uses
            num_used += 1
            count = _decayed(count, clock - last, decay)
        records[2 * row + 1] = (min(count + 1, _MOST_USES) << _WORD) | clock
    return num_used, num_missing


@compiled
def _candidate(x: int, first: int, clock: int, candidates: Int64s) -> int:
    """Return the place of x in its set: its own, a free one, or the lowest not of this batch; -1 if there is none."""
    free, lowest = -1, -1
    for place in range(first, first + _WAYS):
        uses = candidates[2 * place + 1]
        if uses == 0:
            free = place if free < 0 else free
        elif candidates[2 * place] == x:
            return place
        elif (uses & _LOW) != clock:
            least = candidates[2 * lowest + 1] if lowest >= 0 else _NEVER
            if uses < least or (uses == least and candidates[2 * place] < candidates[2 * lowest]):
                lowest = place
    return free if free >= 0 else lowest


@compiled
def _count_candidate(
    x: int, count: int, first: int, clock: int, candidates: Int64s, changes: Int64s, num_changes: int
) -> tuple[int, int]:
    """Add `count` to that of x in its set, and note the change; return the place, -1 if there is none, and the sum."""
    place = _candidate(x, first, clock, candidates)
    if place >= 0:
        before, uses = candidates[2 * place], candidates[2 * place + 1]
        changes[3 * num_changes], changes[3 * num_changes + 1], changes[3 * num_changes + 2] = place, before, uses
        if uses != 0 and before == x:
            count = min(count + (uses >> _WORD), _MOST_USES)
        candidates[2 * place], candidates[2 * place + 1] = x, (count << _WORD) | clock
    return place, count


@compiled
def _may_have_row(
    x: int, count: int, bucket: int, clock: int, rules: Int64s, candidates: Int64s, changes: Int64s, num_changes: int
) -> tuple[bool, int]:
    """Return whether x may have a row at `count` occurrences in batch `clock`, and its place among the candidates,
    whose change is noted; -1 if it has none. Coins of 53 bits below a bound win; where that is 0, counts decide."""
    admit_after, coin_key, coin_bound, sets = rules[0], rules[1], rules[2], rules[6]
    if coin_bound > 0:
        return ((_mix(x ^ _mix(coin_key + clock * _SPREAD)) >> 11) & (2**53 - 1)) < coin_bound, -1
    if admit_after <= 1:
        return True, -1
    first = _WAYS * (bucket * sets + ((x >> 8) & _LOW) % sets)
    place, count = _count_candidate(x, count, first, clock, candidates, changes, num_changes)
    return count >= admit_after, place


@compiled
def _give_row(
    x: int, count: int, bucket: int, clock: int, size: int, cells: Int32s, records: Int64s, ring: Int32s,
    heads: Int64s, num_free: Int64s, born: Int64s, num_born: int,
) -> int:  # fmt: skip
    """Give x the free row of its bucket that has waited for longest; note it in `born`. Return it, -1 if no row may be
    used yet."""
    row = ring[bucket * size + heads[bucket]]
    if num_free[bucket] == 0 or -1 - records[2 * row + 1] > clock:
        return -1
    heads[bucket] = (heads[bucket] + 1) % size
    num_free[bucket] -= 1
    born[3 * num_born], born[3 * num_born + 1], born[3 * num_born + 2] = row, records[2 * row + 1], x
    cells[_probe(x, cells, records)] = row + 1
    records[2 * row], records[2 * row + 1] = x, (min(count, _MOST_USES) << _WORD) | clock
    return row


@compiled
def give_rows_to_ids(
    mixed: Int64s, positions: Int64s, clock: int, rules: Int64s, cells: Int32s, records: Int64s, ring: Int32s,
    heads: Int64s, num_free: Int64s, candidates: Int64s, rows: Int64s, born: Int64s, changes: Int64s, is_due: Bools,
) -> tuple[int, int, int]:  # fmt: skip
    """Give rows to those of `mixed` ids [M] without one, ascending, that may have one. Return how many got one, how
    many `candidates` [2 * B * sets * 8] changed, and how many distinct ids found no row free; -1, and nothing else
    holds, if an id's bucket is not here. `ring` [R] has each bucket's rows that are not live, in the order in which
    they may be used. Written are `rows` [N] at the ids' `positions` [M]; `born` [3 * M], the rows given, their uses
    before, the ids; `changes` [3 * M], places of candidates, ids and uses before; `is_due` [B], where to evict."""
    num_buckets, first_bucket, size, least_free, is_shared = rules[3], rules[4], rules[5], rules[7], rules[8]
    num_born, num_changes, refused, stop = 0, 0, 0, 0
    while stop < mixed.size:
        start, x, row = stop, mixed[stop], -1
        while stop < mixed.size and mixed[stop] == x:
            stop += 1
        count, bucket = stop - start, _bucket(x, num_buckets) - first_bucket
        if not 0 <= bucket < heads.size:
            return -1, 0, 0
        may, place = _may_have_row(x, count, bucket, clock, rules, candidates, changes, num_changes)
        num_changes += place >= 0
        if may:
            row = _give_row(x, count, bucket, clock, size, cells, records, ring, heads, num_free, born, num_born)
            num_born, refused = num_born + (row >= 0), refused + (row < 0)
            is_due[bucket] |= row >= 0 and num_free[bucket] < least_free
            if row >= 0 and place >= 0:
                candidates[2 * place], candidates[2 * place + 1] = 0, 0
        if row < 0 and is_shared:
            row = bucket * size
        for i in range(start, stop):
            rows[positions[i]] = row
    return num_born, num_changes, refused


@compiled
def _lowest(keys: Int64s, num: int, count: int) -> tuple[int, int]:
    """Return the `count`-th lowest of the first `num` keys, none negative, and how many equal to it are among them."""
    bound, left = 0, count
    numbers = np.empty(1 << _DIGIT, np.int64)
    for shift in range(5 * _DIGIT, -1, -_DIGIT):
        numbers[:] = 0
        for i in range(num):
            if keys[i] >> min(shift + _DIGIT, 63) == bound:
                numbers[(keys[i] >> shift) & ((1 << _DIGIT) - 1)] += 1
        digit = 0
        while numbers[digit] < left:
            left -= numbers[digit]
            digit += 1
        bound = (bound << _DIGIT) | digit
    return bound, left


@compiled
def _remove(row: int, cells: Int32s, records: Int64s) -> None:
    """Take a row out of the hash table, and move those behind it to where they will be looked for."""
    hole = _probe(records[2 * row], cells, records)
    place = hole
    while True:
        place = place + 1 if place + 1 < cells.size else 0
        if cells[place] == 0:
            break
        wanted = _cell(records[2 * (cells[place] - 1)], cells.size)
        is_behind = hole < wanted <= place if hole <= place else wanted > hole or wanted <= place
        if not is_behind:
            cells[hole] = cells[place]
            hole = place
    cells[hole] = 0


@compiled
def _rank(uses: int, clock: int, decay: int) -> int:
    last = uses & _LOW
    return last if decay < 0 else (_decayed(uses >> _WORD, clock - last, decay) << _WORD) | last


@compiled
def rank_ids(uses: Int64s, clock: int, oldest: int, decay: int, ranks: Int64s) -> None:
    """Write the ranks [n] of live ids of these uses after batch `clock`: the lowest are evicted first, negative ones
    because no batch from `oldest` on used them."""
    for i in range(uses.size):
        rank = _rank(uses[i], clock, decay)
        ranks[i] = rank if (uses[i] & _LOW) >= oldest else rank - _NEVER


@compiled
def _last_of_ties(
    bucket: int, clock: int, oldest: int, decay: int, size: int, records: Int64s, bound: int, ties: int
) -> int:
    """Return the largest id to evict among those of rank `bound`, of which `ties` are evicted."""
    equal, num = np.empty(size, np.int64), 0
    for row in range(bucket * size, (bucket + 1) * size):
        uses = records[2 * row + 1]
        if uses >= 0 and oldest <= (uses & _LOW) < clock and _rank(uses, clock, decay) == bound:
            equal[num] = records[2 * row]
            num += 1
    if num == ties:
        return _NEVER
    found = np.sort(equal[:num])
    return int(found[ties - 1])


@compiled
def evict_ids(
    buckets: Int64s, clock: int, oldest: int, decay: int, release: int, size: int, reserve: int, least_free: int,
    cells: Int32s, records: Int64s, ring: Int32s, heads: Int64s, num_free: Int64s, evicted: Int64s,
) -> int:  # fmt: skip
    """Evict ids of `buckets`: those not used since batch `oldest`, and the lowest until the reserve is free. Return
    how many; write the rows, their ids and their uses to `evicted`. Batch `release` may use them again.
    """
    keys, total = np.empty(size, np.int64), 0
    for bucket in buckets:
        num, num_expired = 0, 0
        for row in range(bucket * size, (bucket + 1) * size):
            uses = records[2 * row + 1]
            if uses >= 0 and (uses & _LOW) < oldest:
                num_expired += 1
            elif uses >= 0 and (uses & _LOW) < clock:
                keys[num] = _rank(uses, clock, decay)
                num += 1
        wanted = reserve - num_free[bucket] - num_expired if num_free[bucket] < least_free else 0
        bound, last_x, wanted = -1, _NEVER, min(wanted, num)
        if wanted > 0:
            bound, ties = _lowest(keys, num, wanted)
            last_x = _last_of_ties(bucket, clock, oldest, decay, size, records, bound, ties)
        for row in range(bucket * size, (bucket + 1) * size):
            x, uses = records[2 * row], records[2 * row + 1]
            if uses < 0 or (uses & _LOW) >= clock:
                continue
            rank = _rank(uses, clock, decay)
            if (uses & _LOW) < oldest or rank < bound or (rank == bound and x <= last_x):
                evicted[3 * total], evicted[3 * total + 1], evicted[3 * total + 2] = row, x, uses
                total += 1
                _remove(row, cells, records)
                records[2 * row], records[2 * row + 1] = 0, -1 - release
                ring[bucket * size + (heads[bucket] + num_free[bucket]) % size] = row
                num_free[bucket] += 1
    return total


@compiled
def rebuild_ids(records: Int64s, size: int, cells: Int32s, ring: Int32s, heads: Int64s, num_free: Int64s) -> None:
    """Make hash table and rings of the records."""
    cells[:] = 0
    for bucket in range(heads.size):
        keys, num = np.empty(size, np.int64), 0
        for row in range(bucket * size, (bucket + 1) * size):
            uses = records[2 * row + 1]
            if uses >= 0:
                cells[_probe(records[2 * row], cells, records)] = row + 1
            elif row > bucket * size:  # the first one is shared
                keys[num] = ((-1 - uses) << _WORD) | row
                num += 1
        found = np.sort(keys[:num])
        for i in range(num):
            ring[bucket * size + i] = found[i] & _LOW
        heads[bucket], num_free[bucket] = 0, num
