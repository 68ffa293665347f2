"""The fewest rows that any cache can fill for a stream of batches whose future is known: MIN (Belady 1966), with
whole batches resident. It shares no code with the cache.

A batch needs its rows all at once, so its missing rows are filled in any case. The only choice is the victim: the row
that is not held and whose next use is furthest. A late eviction never costs a fill, so rows are evicted only when the
slots run out. Among rows with the same next batch, or without one, the choice does not matter: nothing uses them until
then, and then all of them are needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

_BITS = 20  # batches are numbered below 2**20, so that three such numbers make one int64


def offline_optimum(batches: Sequence[Ids], capacity: int, prefetch: int = 0) -> int | None:
    """Return the fills of the optimum with `capacity` slots, all empty at the start.

    With `prefetch`, so many batches beyond the one in training are resident, too. While the last of them is filled, the
    rows of all of them must stay: this is MIN over the unions of `prefetch + 1` consecutive batches, and no rule for
    victims has fewer fills.

    Args:
        batches: the keys of each batch, int64, each at least 0; repeats in a batch count once.

    Returns:
        None when the rows that must be resident at once do not fit.
    """
    return _fills(batches, capacity, prefetch, lookahead=len(batches) + prefetch)


def look_ahead_rule(batches: Sequence[Ids], capacity: int, lookahead: int, prefetch: int) -> int | None:
    """Return the fills of the look-ahead rule when every choice uses the newest ranking of all slots.

    `lookahead` batches beyond the one in training are known, `prefetch` of them resident. Rows without a known use are
    evicted first: the row used by the fewest batches, then the longest unused; then the row whose next use is furthest.
    Fills of a cache beyond this number are due to the cache, not to the rule.
    """
    return _fills(batches, capacity, prefetch, lookahead)


def _fills(batches: Sequence[Ids], capacity: int, prefetch: int, lookahead: int) -> int | None:
    numbered, num_keys = _number(batches)
    assert len(batches) + prefetch < 1 << _BITS
    resident = np.zeros(num_keys, dtype=bool)
    next_use, last_use, num_uses = np.zeros((3, num_keys), dtype=np.int64)
    fills = held = 0
    for now, (batch, following) in enumerate(zip(numbered, _next_uses(numbered, num_keys), strict=True)):
        missing = batch.size - int(resident[batch].sum())
        fills += missing
        held += missing
        resident[batch], next_use[batch], last_use[batch] = True, following, now
        num_uses[batch] += 1
        if (excess := held - capacity) > 0:
            in_training = max(0, now - prefetch)
            others = np.flatnonzero(resident & (last_use < in_training))
            if others.size < excess:
                return None
            known_use = np.minimum(next_use[others], in_training + lookahead + 1)
            staying = (num_uses[others] << _BITS) + last_use[others] - (known_use << 2 * _BITS)
            resident[others[np.argpartition(staying, excess - 1)[:excess]]] = False
            held = capacity
    return fills


def _number(batches: Sequence[Ids]) -> tuple[list[Ids], int]:
    """Return the distinct keys of each batch, numbered from 0 without gaps, and the number of keys."""
    distinct = [np.unique(batch) for batch in batches]
    keys = np.unique(np.concatenate(distinct))
    return [np.searchsorted(keys, batch) for batch in distinct], keys.size


def _next_uses(batches: Sequence[Ids], num_keys: int) -> list[Ids]:
    """Return for each key of each batch the next batch that has it; the number of batches where none has."""
    upcoming = np.full(num_keys, len(batches), dtype=np.int64)
    following = []
    for now in reversed(range(len(batches))):
        following.append(upcoming[batches[now]])
        upcoming[batches[now]] = now
    return following[::-1]
