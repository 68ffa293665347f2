"""Popularity of the rows of generated tables: an exact head and a Zipf tail."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_HEAD = 10
_LEAST_TAIL = 0.0003
"""Published shares have three digits: a tail of "0.000" is at most half of the last digit, not nothing."""


class PublishedTable(NamedTuple):
    """Measured popularity of one table: rows, shares of lookups, and the exponent of rank ** -exponent."""

    num_rows: int
    top_1: float
    top_10: float
    zipf_exponent: float


CRITEO_KAGGLE: tuple[PublishedTable, ...] = tuple(
    PublishedTable(*row)
    for row in (
        (1460, 0.503, 0.909, 1.90),
        (583, 0.126, 0.429, 1.19),
        (10131227, 0.039, 0.186, 0.98),
        (2202608, 0.054, 0.251, 0.98),
        (305, 0.670, 0.979, 2.46),
        (24, 0.464, 1.000, 4.06),
        (12517, 0.010, 0.068, 0.66),
        (633, 0.592, 0.957, 2.18),
        (3, 0.885, 1.000, 6.71),
        (93145, 0.268, 0.327, 0.80),
        (5683, 0.021, 0.106, 0.73),
        (8351593, 0.039, 0.186, 0.98),
        (3194, 0.023, 0.124, 0.76),
        (27, 0.364, 0.987, 2.73),
        (14992, 0.020, 0.104, 0.76),
        (5461306, 0.039, 0.186, 0.97),
        (10, 0.425, 1.000, 1.05),
        (5652, 0.054, 0.233, 0.95),
        (2173, 0.414, 0.829, 1.23),
        (4, 0.414, 1.000, 0.62),
        (7046547, 0.039, 0.186, 0.98),
        (18, 0.817, 1.000, 4.41),
        (15, 0.444, 0.995, 2.86),
        (286181, 0.073, 0.381, 1.07),
        (105, 0.414, 0.930, 2.29),
        (142572, 0.414, 0.573, 1.08),
    )
)
"""Criteo Kaggle display advertising, C1..C26: 33,762,577 rows; shares over the data set's 45,840,617 samples,
exponents fitted to 80,000 samples. Counts and shares are facts about the data; no data are included."""


class Popularity:
    """Draws popularity ranks 0 (most often) .. num_ids - 1.

    The first ten ranks have shares `top_1 * rank ** -a`, with `a` such that they sum to `top_10`. The others share the
    rest by a power law of continuous rank with the measured exponent, whose inverse distribution function is a formula,
    so that drawing costs the same for 100 rows and for 10 million. A table that is scaled below a few hundred rows
    keeps its shares, and so gets a flat or even a rising tail.
    """

    def __init__(self, table: PublishedTable, num_ids: int) -> None:
        num_head = min(NUM_HEAD, num_ids)
        tail = 0.0 if num_ids <= NUM_HEAD else max(1.0 - table.top_10, _LEAST_TAIL)
        self.num_ids = num_ids
        self.head = _head_shares(num_head, table.top_1, 1.0 - tail)
        self._steps = np.cumsum(self.head)
        self._head_sum = 1.0 - tail
        if not tail:
            self._steps[-1] = 1.0  # rounding must not leave room for a tail that is not there
        power = 1.0 - table.zipf_exponent
        self._power = power if abs(power) > 1e-6 else 1e-6
        self._low = (num_head + 0.5) ** self._power
        self._high = (num_ids + 0.5) ** self._power

    def ranks(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the ranks of uniform numbers in [0, 1): the inverse distribution function."""
        ranks = np.searchsorted(self._steps, uniform, side="right")
        tail = np.flatnonzero(ranks == NUM_HEAD)
        if len(tail):
            part = (uniform[tail] - self._head_sum) / (1.0 - self._head_sum)
            place = (self._low + part * (self._high - self._low)) ** (1.0 / self._power)
            ranks[tail] = np.clip(place - 0.5, NUM_HEAD, self.num_ids - 1)
        return ranks


def _head_shares(count: int, first: float, total: float) -> NDArray[np.float64]:
    """Return `count` falling shares that sum to `total`, the first of them `first` where that is possible."""
    ranks = np.arange(1, count + 1)
    shares = ranks ** -bisect(lambda power: first * (ranks**-power).sum() > total, 0.0, 64.0, 60)
    return shares * (total / shares.sum())


def bisect(is_too_low: Callable[[float], bool], low: float, high: float, num_steps: int) -> float:
    """Return the lower end of the interval [low, high] after so many halvings.

    >>> round(bisect(lambda x: x * x < 2, 0.0, 2.0, 40), 6)
    1.414214
    """
    for _ in range(num_steps):
        middle = (low + high) / 2
        low, high = (middle, high) if is_too_low(middle) else (low, middle)
    return low
