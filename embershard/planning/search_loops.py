"""The compiled loop of the local search: what each option of a table costs on each rank, or on each node.

It adds up what `StepFormula` and `CostArrays` tell of a placement, shard by shard: a search asks a thousand times a
second. `tests/unit/planning/test_search_loops.py` compares it with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from embershard.cache.loops.compiled import compiled_for

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

#: Weight of the spread over the ranks beside the seconds of a step: it tells equal steps apart.
SPREAD = 0.02
#: Worth of an empty fullest rank: it decides between placements that are as fast.
FULLEST_SECONDS = 1e-9
#: Penalty, in steps, of a rank that needs twice its memory.
PENALTY = 100.0
#: Fields of `StepFormula`, in the order of `Machine.formula`.
FORMULA = (
    "overhead", "forward", "backward", "optimizer", "input", "all_reduce", "latency", "group_seconds", "buckets",
)  # fmt: skip
_STAGES, _MOST_COLUMNS = 7, 8
_CPU, _IN_STEPS, _NOT_AHEAD = 0, 1, 2  # what `Machine.overlap` is; else rows are brought in ahead
_F1, _F2, _F3 = numba.float64[::1], numba.float64[:, ::1], numba.float64[:, :, ::1]
_BOOLS = numba.boolean[::1]


@dataclass(frozen=True, eq=False)
class Machine:
    """What a step's formula and limits are made of, as arrays that a loop reads.

    Attributes:
        overlap: 0: a CPU; 1: a GPU that brings rows in between steps; 2: one without rows ahead; 3: with them.
        ranks_per_node, cores: of a node; cores 0: every rank has its own.
        cores_copy: cores copy what is sent, too.
        slowdown: [R, stages] of each rank for the same work; [0, stages]: all ranks are as fast.
        formula: the fields of `FORMULA`.
        limits: bytes of a rank, and of a node; those of the window: most, least, limit, by rows. Infinite ones limit
            nothing.
    """

    overlap: int
    ranks_per_node: int
    cores: int
    cores_copy: bool
    slowdown: Floats
    formula: Floats
    limits: Floats


@numba.njit(nogil=True)
def _columns(overlap: int, stages: Floats, added: Floats, out: Floats) -> None:
    """Write what the seconds of a step are maxima of: `StepFormula.columns`."""
    plan, copies, lookup = stages[0] + added[0], stages[1] + added[1], stages[2] + added[2]
    embeddings, gradients = stages[3] + added[3], stages[4] + added[4]
    update, ids = stages[5] + added[5], stages[6] + added[6]
    if overlap <= _IN_STEPS:
        first = plan + copies + lookup
        out[0], out[1], out[2], out[3], out[4], out[5] = first, embeddings, gradients, update, ids, first + update
    else:
        if overlap == _NOT_AHEAD:
            lookup = plan + copies + lookup
        out[0], out[1], out[2], out[3], out[4] = lookup + update, embeddings, gradients, update, ids
        out[5], out[6], out[7] = copies, plan, lookup


@numba.njit(nogil=True)
def _latest(
    overlap: int, cores: int, local: int, cores_copy: bool, slowdown: Floats, totals: Floats, first: int, stop: int,
    added: Floats, begin: int, end: int, found: Floats,
) -> None:  # fmt: skip
    """Raise `found` [columns] to when the last of the ranks [first, stop) is done: `StepFormula.slowest`.

    `added` [end - begin, stages] comes to the ranks from `begin` on. Where ranks share cores, these are whole nodes.
    """
    columns, none, more = np.empty((stop - first, _MOST_COLUMNS)), np.zeros(_STAGES), np.empty(_STAGES)
    for rank in range(first, stop):
        if slowdown.size and begin <= rank < end:
            more[:] = added[rank - begin] * slowdown[rank]
            _columns(overlap, totals[rank], more, columns[rank - first])
        else:
            _columns(overlap, totals[rank], added[rank - begin] if begin <= rank < end else none, columns[rank - first])
    num_columns, own = 6 if overlap <= _IN_STEPS else 8, np.empty(local)
    for column in range(num_columns):
        if cores and (cores_copy or column == 0 or column == 3 or column == 5):
            for node in range((stop - first) // local):
                own[:] = columns[node * local : (node + 1) * local, column]
                own.sort()
                done = (cores * own[local - 1] + own[: local - cores].sum()) / local
                found[column] = max(found[column], done)
        else:
            for rank in range(stop - first):
                found[column] = max(found[column], columns[rank, column])


@numba.njit(nogil=True)
def _seconds(overlap: int, formula: Floats, groups: float, slowest: Floats) -> float:
    """Return the seconds of a step: `StepFormula.seconds`."""
    overhead, forward, backward, optimizer, of_input, all_reduce, latency, of_group, buckets = formula
    each = 5 / 7 * groups * latency
    sent = 4 * each + groups * of_group
    reduced = all_reduce + each
    last_bucket, late = reduced, 0.0
    if buckets > 1:
        last_bucket = reduced / buckets
        longer = max(backward + (buckets - 1) * reduced, (buckets - 1) * backward + reduced)
        late = max(0.0, longer / buckets - backward)
    dense, exchanged = forward + backward, slowest[1] + slowest[2] + 2 * each
    if overlap == _CPU:
        return (
            of_input + overhead + dense + reduced + optimizer + slowest[0] + exchanged + slowest[3] + slowest[4] + sent
        )
    ids, at_least = slowest[4] + sent, max(of_input, overhead)
    if overlap == _IN_STEPS:
        train = slowest[0] + exchanged + dense + late + max(slowest[3], last_bucket) + optimizer + ids
        return max(train, at_least)
    looked_up, updated = max(slowest[0], last_bucket + slowest[7]), max(slowest[3], last_bucket)
    train = max(looked_up, updated + ids) + optimizer + exchanged + dense + late
    return max(train, exchanged + ids + reduced, slowest[5], slowest[6], at_least)


@numba.njit(nogil=True)
def _bytes(limits: Floats, memory: Floats, added: Floats) -> float:
    """Return the device memory of a rank: `CostArrays.device_bytes`."""
    batch = memory[3] + added[3]
    window = min(limits[2] * batch, max(limits[4], limits[3] * batch))
    by_rows = limits[5] if memory[4] + added[4] > 0 else 0.0
    return memory[0] + added[0] + max(memory[1] + added[1], memory[2] + added[2]) + window + by_rows


@numba.njit(nogil=True)
def _loads(limits: Floats, now: Floats, kept: Floats, loads: Floats, taken: Floats) -> tuple[float, float, float]:
    """Write the seconds and bytes of each rank, [R]; return the sum of the squared seconds, the bytes above the limit,
    and those of the fullest rank."""
    none, squares, over, fullest = np.zeros(_STAGES), 0.0, 0.0, 0.0
    for rank in range(loads.size):
        loads[rank] = now[rank].sum()
        squares += loads[rank] ** 2
        if limits[0] < np.inf:
            taken[rank] = _bytes(limits, kept[rank], none)
            over += max(0.0, taken[rank] - limits[0])
            fullest = max(fullest, taken[rank])
    return squares, over, fullest


@numba.njit(nogil=True)
def _more_memory(
    limits: Floats, kept: Floats, taken: Floats, memory: Floats, begin: int, end: int,
) -> tuple[float, float]:  # fmt: skip
    """Return how many bytes more are above the limit with a block on ranks [begin, end), and the most of one rank."""
    over, fullest = 0.0, 0.0
    for rank in range(begin, end):
        needed = _bytes(limits, kept[rank], memory[rank - begin])
        over += max(0.0, needed - limits[0]) - max(0.0, taken[rank] - limits[0])
        fullest = max(fullest, needed)
    return over, fullest


@numba.njit(nogil=True)
def _more_host(limits: Floats, nodes: Floats, ranks_per_node: int, host: Floats, begin: int, end: int) -> float:
    """Return how many bytes more are above the nodes' limit with a block on ranks [begin, end)."""
    over = 0.0
    for node in range(begin // ranks_per_node, (end - 1) // ranks_per_node + 1):
        first, stop = max(begin, node * ranks_per_node), min(end, (node + 1) * ranks_per_node)
        more = host[first - begin : stop - begin].sum()
        over += max(0.0, nodes[node] + more - limits[1]) - max(0.0, nodes[node] - limits[1])
    return over


@numba.njit(nogil=True)
def _best_block(
    seconds: Floats, memory: Floats, host: Floats, groups: float, now: Floats, kept: Floats, nodes: Floats,
    is_taken: Bools, overlap: int, ranks_per_node: int, cores: int, cores_copy: bool, slowdown: Floats, formula: Floats,
    limits: Floats,
) -> tuple[int, float]:  # fmt: skip
    """Return the block of neighbouring ranks that is best for these shards, one for each of them, and the value."""
    num_ranks, per_block = now.shape[0], host.size
    loads, taken, slowest = np.empty(num_ranks), np.empty(num_ranks), np.zeros(_MOST_COLUMNS)
    _latest(overlap, cores, ranks_per_node, cores_copy, slowdown, now, 0, num_ranks, seconds, 0, 0, slowest)
    squares, over, fullest = _loads(limits, now, kept, loads, taken)
    over_host = np.maximum(0.0, nodes - limits[1]).sum()
    best, lowest = -1, np.inf
    for block in range(is_taken.size):
        if is_taken[block]:
            continue
        begin, end = block * per_block, (block + 1) * per_block
        low, high = begin, end
        if cores and per_block < ranks_per_node:
            low = begin // ranks_per_node * ranks_per_node
            high = low + ranks_per_node
        then, spread = slowest.copy(), squares
        _latest(overlap, cores, ranks_per_node, cores_copy, slowdown, now, low, high, seconds, begin, end, then)
        for rank in range(begin, end):
            load = (seconds[rank - begin] * slowdown[rank]).sum() if slowdown.size else seconds[rank - begin].sum()
            spread += load * (2 * loads[rank] + load)
        value, penalty = _seconds(overlap, formula, groups, then) + SPREAD * np.sqrt(spread / num_ranks), 0.0
        if limits[0] < np.inf:
            more, most = _more_memory(limits, kept, taken, memory, begin, end)
            value += FULLEST_SECONDS * max(fullest, most) / limits[0]
            penalty = (over + more) / limits[0]
        if limits[1] < np.inf:
            penalty += (over_host + _more_host(limits, nodes, ranks_per_node, host, begin, end)) / limits[1]
        value *= 1 + PENALTY * penalty
        if value < lowest:
            best, lowest = block, value
    return best, lowest


@compiled_for([(_F3, _F3, _F2, _F2, _F1, _BOOLS, _F2, _F2, _F1, *4 * (numba.int64,), numba.boolean, _F2, _F1, _F1)])
def prices(
    seconds: Floats, memory: Floats, host: Floats, everywhere: Floats, groups: Floats, on_one_node: Bools,
    totals: Floats, rank_memory: Floats, rank_host: Floats, per_block: int, overlap: int, ranks_per_node: int,
    cores: int, cores_copy: bool, slowdown: Floats, formula: Floats, limits: Floats,
) -> tuple[Floats, Ints]:  # fmt: skip
    """Place the shards of a table, in blocks one after the other, each where the step becomes shortest.

    Args:
        seconds, memory, host: [O, N, stages], [O, N, columns] and [O, N] of the N shards of each of O options.
        everywhere: [O, stages] on all ranks.
        groups: [O] that exchange with this option.
        on_one_node: [O] all shards are on the first one's node.
        totals, rank_memory, rank_host: [R, stages], [R, columns] and [R] without the table.
        per_block: shards that are on neighbours: 1, or all of a node, or of all ranks.
        overlap, ranks_per_node, cores, cores_copy, slowdown, formula, limits: of `Machine`.

    Returns:
        The value with each option, [O], and the rank of each of its shards, [O, N].
    """
    (num_options, num_shards), num_ranks = host.shape, rank_host.size
    values, ranks = np.full(num_options, np.inf), np.zeros((num_options, num_shards), np.int64)
    for option in range(num_options):
        always = everywhere[option] * slowdown if slowdown.size else everywhere[option : option + 1]
        now, kept, nodes = totals + always, rank_memory.copy(), np.zeros(num_ranks // ranks_per_node)
        for rank in range(num_ranks):
            nodes[rank // ranks_per_node] += rank_host[rank]
        is_taken = np.zeros(num_ranks // per_block, np.bool_)
        for first in range(0, num_shards, per_block):
            stop = first + per_block
            block, values[option] = _best_block(
                seconds[option, first:stop], memory[option, first:stop], host[option, first:stop], groups[option], now,
                kept, nodes, is_taken, overlap, ranks_per_node, cores, cores_copy, slowdown, formula, limits,
            )  # fmt: skip
            if block < 0:
                break
            is_taken[block] = True
            for shard in range(first, stop):
                rank = block * per_block + shard - first
                ranks[option, shard] = rank
                if slowdown.size:
                    now[rank] += seconds[option, shard] * slowdown[rank]
                else:
                    now[rank] += seconds[option, shard]
                kept[rank] += memory[option, shard]
                nodes[rank // ranks_per_node] += host[option, shard]
            if first == 0 and per_block == 1 and on_one_node[option]:
                node = block // ranks_per_node
                is_taken[: node * ranks_per_node] = True
                is_taken[(node + 1) * ranks_per_node :] = True
    return values, ranks
