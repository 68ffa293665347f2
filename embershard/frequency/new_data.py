"""How often rows will be looked up in new data, those included that were not looked up yet.

Counts of few data mislead: a row that was seen once is rarer than its count says, and rows that were not seen have some
of the lookups, too. Frequencies of ids follow a power law, so one is fitted to the rare rows of a table: it has as many
rows as were seen rarely or never, and as many lookups, and of all such laws it explains best how many rows were seen
once, twice, and so on. Frequent rows keep their counts.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from embershard.frequency.statistics import CountHistogram, Floats

#: Rows that were seen more often keep their counts: the error of such a count is small.
_MOST_RARE = 8
#: The number of rows with a frequency above f is in proportion to f**-exponent. Zipf's law has 1.
_EXPONENTS = np.arange(0.1, 4.01, 0.1) + 1e-6  # 1 itself needs a logarithm
_NUM_BINS = 48
_BISECTIONS = 50
#: The law must explain how many rows were seen so many times.
_EXPLAINED = np.arange(1, 5)
_FACTORIALS = np.array([math.factorial(count) for count in _EXPLAINED], np.float64)


@lru_cache(maxsize=1024)  # a search asks for each table many times
def in_new_data(histogram: CountHistogram, num_rows: int) -> CountHistogram:
    """Return the expected lookups of a table's `num_rows` rows in as many new samples; all rows are in it.

    >>> seen = CountHistogram.of_counts(np.repeat([40, 3, 2, 1], [10, 20, 60, 300]))
    >>> expected = in_new_data(seen, num_rows=10_000)
    >>> round(expected.num_rows), round(expected.num_lookups) == seen.num_lookups, expected.counts[0].item()
    (10000, True, 40.0)
    """
    rare = histogram.counts <= _MOST_RARE
    unseen = num_rows - histogram.num_rows
    if unseen < 1.0 or not rare.any():
        return histogram
    counts, rows = histogram.counts[rare], histogram.rows[rare]
    seen = np.array([rows[(counts > times - 1) & (counts <= times)].sum() for times in _EXPLAINED])
    expected, of_law = _law(seen, float(rows.sum()) + unseen, float((counts * rows).sum()))
    frequent = ~rare
    return CountHistogram.joined(
        np.concatenate([histogram.counts[frequent], expected]), np.concatenate([histogram.rows[frequent], of_law])
    )


def _law(seen: Floats, num_rows: float, num_lookups: float) -> tuple[Floats, Floats]:
    """Return the fitted law as bins: lookups per row [B], and rows [B].

    Args:
        seen: rows that were seen once, twice, and so on.
        num_rows, num_lookups: that the law has.
    """
    most, mean = _MOST_RARE + 0.5, num_lookups / num_rows
    low, high = np.full(len(_EXPONENTS), -40.0), np.full(len(_EXPONENTS), math.log(most) - 1e-6)
    for _ in range(_BISECTIONS):  # for the logarithm of the least frequency with which each law has this mean
        middle = (low + high) / 2
        least = np.exp(middle)
        lookups = _EXPONENTS / (1.0 - _EXPONENTS) * (most ** (1.0 - _EXPONENTS) - least ** (1.0 - _EXPONENTS))
        is_low = lookups / (least**-_EXPONENTS - most**-_EXPONENTS) < mean
        low, high = np.where(is_low, middle, low), np.where(is_low, high, middle)
    edges = np.exp(low[:, None] + (math.log(most) - low[:, None]) * np.linspace(0.0, 1.0, _NUM_BINS + 1))
    power = _EXPONENTS[:, None]
    shares = -np.diff(edges**-power, axis=1)
    rates = power / (1.0 - power) * np.diff(edges ** (1.0 - power), axis=1) / shares
    rows = shares * (num_rows / shares.sum(axis=1, keepdims=True))
    chances = np.exp(-rates[..., None]) * rates[..., None] ** _EXPLAINED / _FACTORIALS  # Poisson
    explained = (rows[..., None] * chances).sum(axis=1)
    best = int((np.square(explained - seen) / np.maximum(explained, 1.0)).sum(axis=1).argmin())
    return rates[best] * (num_lookups / (rates[best] * rows[best]).sum()), rows[best]
