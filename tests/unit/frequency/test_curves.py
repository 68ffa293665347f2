"""Curves from counts against counting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.frequency import CountHistogram, TableStatistics
from embershard.frequency.compare import half_split
from embershard.frequency.counts import RowCounts
from embershard.frequency.curves import BatchMisses, distinct_rows, pooled, static_curve, unseen_share
from tests.covering import examples

counts = st.lists(st.integers(1, 6), min_size=1, max_size=12)


@given(counts, counts, st.integers(0, 30))
@examples(40)
def test_tables_share_slots_by_count(first, second, num_rows):
    together = pooled(CountHistogram.of_counts(np.array(each)) for each in (first, second))
    expected = sum(sorted([*first, *second], reverse=True)[:num_rows])
    assert float(static_curve(together, np.array(float(num_rows)))) * together.num_lookups == pytest.approx(expected)


@given(counts, counts, st.integers(0, 30))
@examples(40)
def test_the_rows_of_a_half_are_chosen_from_all_tables(first, second, num_rows):
    """With itself as the other half both hit rates are the static curve's, ties at the last count shared evenly."""
    half = {str(n): RowCounts(np.arange(len(each)), np.array(each)) for n, each in enumerate((first, second))}
    expected = sum(sorted([*first, *second], reverse=True)[:num_rows]) / sum([*first, *second])
    split = half_split(half, half, num_rows)
    assert (split.own, split.other, split.difference) == (pytest.approx(expected), pytest.approx(expected), 0.0)


def test_curves_of_nothing():
    none = CountHistogram.of_counts(np.zeros(3, np.int64))
    empty = {"t": RowCounts.none()}
    assert (half_split({}, {}, 3).own, half_split(empty, empty, 3).other) == (0.0, 0.0)
    assert static_curve(none, np.array([0.0, 5.0])).tolist() == [0.0, 0.0]
    assert unseen_share(none) == 0.0


def zipf_table(num_samples: int = 40_000, num_rows: int = 5000) -> tuple[np.ndarray, TableStatistics]:
    rows = np.floor(num_rows ** np.random.default_rng(1).random(num_samples)).astype(np.int64) - 1
    sizes = np.array([256, 4096])
    means = [np.mean([len(np.unique(part)) for part in rows[: len(rows) // s * s].reshape(-1, s)]) for s in sizes]
    histogram = CountHistogram.of_counts(np.bincount(rows, minlength=num_rows))
    return rows, TableStatistics(
        "t", num_rows, num_samples, histogram, np.array([0.0, 1.0]), sizes, np.array(means, dtype=np.float64)
    )


@pytest.mark.parametrize("batch", [1, 64, 256, 1000, 4096, 10_000, 40_000])
def test_distinct_rows_of_a_batch(batch):
    rows, table = zipf_table()
    exact = np.mean([len(np.unique(part)) for part in rows[: len(rows) // batch * batch].reshape(-1, batch)])
    assert distinct_rows(table, batch, 40_000) == pytest.approx(exact, rel=0.08)
    assert distinct_rows(table, 10**9, 40_000) <= 5000


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_a_batch_misses_what_a_static_cache_misses(share):
    rows, table = zipf_table()
    cached = np.argsort(-np.bincount(rows, minlength=5000), kind="stable")[: int(share * 5000)]
    batches = [np.unique(part) for part in rows[:39_936].reshape(-1, 1024)]
    misses = sum((~np.isin(batch, cached)).sum() for batch in batches) / sum(len(batch) for batch in batches)
    assert BatchMisses.of(table, 1024, 40_000).expected_miss_rate(share) == pytest.approx(misses, abs=0.02)


def test_the_miss_curve_falls_from_one_to_zero():
    _, table = zipf_table()
    curve = BatchMisses.of(table, 1024, 40_000)
    rates = [curve.expected_miss_rate(share) for share in np.linspace(0, 1, 50)]
    assert (rates[0], rates[-1]) == (1.0, 0.0)
    assert rates == sorted(rates, reverse=True)
    assert curve.cacheability == pytest.approx(np.mean(rates), abs=0.02)
    empty = TableStatistics("e", 10, 0, CountHistogram.of_counts(np.zeros(1, int)), np.ones(1), *np.zeros((2, 0)))
    nothing = BatchMisses.of(empty, 1024, 40_000)
    assert (nothing.expected_lookups, nothing.expected_miss_rate(1.0)) == (0.0, 0.0)


def test_what_one_half_says_about_the_other():
    random = np.random.default_rng(0)
    halves = [{"t": RowCounts.of_rows((1000 * random.random(20_000) ** 4).astype(np.int64))} for _ in range(2)]
    split = half_split(*halves, 50)
    for a, b in (halves, halves[::-1]):
        top = a["t"].rows[np.argsort(-a["t"].hits, kind="stable")[:50]]
        assert split.other == pytest.approx(b["t"].hits_of(top).sum() / 20_000, abs=0.005)
    assert split.other < split.own
    assert split.difference < 0.02
    same = half_split(halves[0], halves[0], 50)
    assert (same.own, same.difference) == (pytest.approx(same.other), 0.0)
