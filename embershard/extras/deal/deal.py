"""`deal`: the samples of a global batch to ranks, by what each costs.

Samples go, costliest first, to the rank with the least so far that has room; then the fullest and the emptiest rank
exchange two samples as long as that lowers the most. Costs are integers, and all ties are broken by position, so every
rank and every machine finds the same deal.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import ArrayLike

from embershard.data.hashing import Ids, make_key, permutation
from embershard.errors import ConfigError

#: The most that all samples may cost together, so that no sum overflows.
MOST_COST = 1 << 61
#: Above so many samples they are dealt a round at a time: a sample for each rank. Sums over many samples differ little.
_MOST_ONE_BY_ONE = 1 << 14
_MOST_EXCHANGES = 16


def deal(costs: ArrayLike, ranks: int, pieces: int = 1, seed: int = 0) -> Ids:
    """Return which samples of a global batch each rank trains: int64 [ranks, samples / ranks], positions in `costs`.

    Each rank gets equally many, so that the mean of the ranks' mean losses is that of the batch, as without dealing.
    A rank's samples are in the order of their positions. Where dealing gains nothing, rank r has the r-th slice.

    >>> deal([9, 8, 1, 1, 1, 1, 2, 1], ranks=2)
    array([[0, 2, 3, 5],
           [1, 4, 6, 7]])

    Args:
        costs: of each sample, integers of 0 or more. Of attention over T events, a T + b T^2.
        ranks: that share the batch.
        pieces: micro-batches of a rank's batch, trained one after another: the costliest samples come in the first one,
            and each is dealt by itself. The first ones may have a sample more, as those of `torch.tensor_split`.
        seed: which rank gets the costliest sample is drawn from it; give each step its own, the same on all ranks.

    Raises:
        ConfigError: the ranks cannot share the samples evenly, or costs are no such integers.
    """
    given = _checked(costs, ranks, pieces)
    slices = np.arange(len(given)).reshape(ranks, -1)
    order, found, first = np.argsort(-given, kind="stable"), [], 0
    for piece, size in enumerate(_piece_sizes(slices.shape[1], pieces)):
        items = order[first : first + ranks * size]
        first += ranks * size
        of_ranks = items[_shares(given[items], ranks)]
        found.append(np.sort(of_ranks, axis=1)[permutation(make_key(seed, piece), ranks)])
    dealt = np.concatenate(found, axis=1)
    return dealt if slowest_cost(given, dealt, pieces) < slowest_cost(given, slices, pieces) else slices


def slowest_cost(costs: Ids, dealt: Ids, pieces: int = 1) -> int:
    """Return what the slowest rank's samples cost: the sum over the pieces, for the end of each of which all wait.

    >>> slowest_cost(np.array([9, 1, 1, 1]), np.array([[0, 1], [2, 3]]))
    10
    """
    ends = np.cumsum(_piece_sizes(dealt.shape[1], pieces))
    return sum(int(part.sum(axis=1).max()) for part in np.split(costs[dealt], ends[:-1], axis=1))


def _piece_sizes(samples: int, pieces: int) -> list[int]:
    """Return the samples of each piece of a rank's batch, as `Batch.micro_batches` cuts it."""
    count = min(pieces, samples)
    return [samples // count + (piece < samples % count) for piece in range(count)]


def _checked(costs: ArrayLike, ranks: int, pieces: int) -> Ids:
    given = np.asarray(costs)
    if given.ndim != 1 or given.dtype.kind not in "iu" or not len(given):
        raise ConfigError(
            f"costs: got {given.dtype} {list(given.shape)}, needed an integer of each sample: sums of integers are the "
            "same in any order, and so all ranks find the same deal. Multiply fractions, and round them."
        )
    if ranks < 1 or pieces < 1 or len(given) % ranks:
        raise ConfigError(
            f"got {len(given)} costs, ranks = {ranks} and pieces = {pieces}; needed at least 1 of each, and equally "
            "many samples for each rank."
        )
    if int(given.min()) < 0 or int(given.max()) * len(given) >= MOST_COST:
        raise ConfigError(
            f"costs: got {given.min()} to {given.max()}, needed 0 or more, and below {MOST_COST / len(given):.0e} for "
            f"{len(given)} samples. Divide them."
        )
    return given.astype(np.int64)


def _shares(costs: Ids, ranks: int) -> Ids:
    """Return the places of each rank's samples in costs that fall, [ranks, B]; the first one has the costliest."""
    if len(costs) > _MOST_ONE_BY_ONE:
        return _in_rounds(costs, ranks)
    room, heap = len(costs) // ranks, [(0, rank) for rank in range(ranks)]
    found: list[list[int]] = [[] for _ in range(ranks)]
    for place, cost in enumerate(costs.tolist()):
        load, rank = heap[0]
        found[rank].append(place)
        if len(found[rank]) < room:
            heapq.heapreplace(heap, (load + cost, rank))
        else:
            heapq.heappop(heap)
    return _exchanged(costs, np.array(found))


def _in_rounds(costs: Ids, ranks: int) -> Ids:
    """Deal a sample to each rank at a time, the costliest to that with the least so far."""
    load, found = np.zeros(ranks, np.int64), np.empty((ranks, len(costs) // ranks), np.int64)
    for number, places in enumerate(np.arange(len(costs)).reshape(-1, ranks)):
        found[np.argsort(load, kind="stable"), number] = places
        load += costs[found[:, number]]
    return found


def _exchanged(costs: Ids, shares: Ids) -> Ids:
    """Let the fullest and the emptiest rank exchange two samples, as long as that lowers the most."""
    load = costs[shares].sum(axis=1)
    for _ in range(_MOST_EXCHANGES):
        full, low = int(load.argmax()), int(load.argmin())
        excess = int(load[full] - load[low])
        others = shares[low, np.argsort(costs[shares[low]], kind="stable")]
        # The best exchange moves half of the excess. All numbers are doubled, as the half may be none.
        wanted, there = 2 * costs[shares[full]] - excess, 2 * costs[others]
        behind = np.searchsorted(there, wanted)
        near = np.stack([behind.clip(max=len(there) - 1), (behind - 1).clip(min=0)])
        miss = np.abs(wanted - there[near])
        side, place = divmod(int(miss.argmin()), len(wanted))
        if miss[side, place] >= excess:  # more than all of it would move, or nothing
            break
        mine, theirs = shares[full, place], others[near[side, place]]
        shares[low, shares[low] == theirs] = mine
        shares[full, place] = theirs
        load[[full, low]] += (costs[mine] - costs[theirs]) * np.array([-1, 1])
    return shares
