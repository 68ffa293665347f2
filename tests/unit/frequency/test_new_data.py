"""The lookups to expect in new data: right where the law of the data is known, and nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.frequency import CountHistogram
from embershard.frequency.curves import static_curve
from embershard.frequency.new_data import in_new_data
from tests.covering import examples

NUM_ROWS = 200_000


@pytest.mark.parametrize("exponent", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("num_lookups", [3_000, 30_000])
def test_a_prefix_tells_the_hit_rate_of_all(exponent, num_lookups):
    """Of Zipf's law, from fewer lookups than rows: within 3 points. What was seen, as it is, is off by 13 and more."""
    chances = np.arange(1, NUM_ROWS + 1) ** -exponent
    chances /= chances.sum()
    drawn = np.searchsorted(np.cumsum(chances), np.random.default_rng(1).random(num_lookups) * (1 - 1e-9))
    seen = CountHistogram.of_counts(np.bincount(drawn, minlength=NUM_ROWS))
    slots = np.array([0.01, 0.05, 0.2]) * NUM_ROWS
    true = np.cumsum(chances)[slots.astype(int) - 1]
    expected = static_curve(in_new_data(seen, NUM_ROWS), slots)
    np.testing.assert_allclose(expected, true, atol=0.03)
    assert (np.diff(expected) > 0.005).all(), "sizes differ, although all rows that were seen fit the larger ones"
    if num_lookups < 0.02 * NUM_ROWS and exponent < 1.2:
        assert np.abs(static_curve(seen, slots) - true).max() > 0.13


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(0, 10_000))
@examples(40)
def test_rows_and_lookups_stay(counts, unseen):
    seen = CountHistogram.of_counts(np.array(counts))
    found = in_new_data(seen, len(counts) + unseen)
    assert found.num_lookups == pytest.approx(seen.num_lookups)
    assert found.num_rows == pytest.approx(len(counts) + unseen * (seen.counts.min() <= 8))
    frequent = seen.counts > 8
    assert set(seen.counts[frequent]) <= set(found.counts)


def test_where_all_rows_were_seen_nothing_changes():
    seen = CountHistogram.of_counts(np.array([5, 3, 1]))
    assert in_new_data(seen, 3) is seen
    assert in_new_data(seen, 4) is not seen
