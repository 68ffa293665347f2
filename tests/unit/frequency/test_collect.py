"""Parts put together are the whole; memory and traces stay bounded, and say so."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.errors import IdOutOfRangeError
from embershard.frequency import SampledTrace, TableTrace, is_sampled, row_hashes
from embershard.frequency.collect import BYTES_PER_ROW, WINDOWS, Collector, count_part
from embershard.frequency.counts import RowCounter, RowCounts, bound_memory, histogram_of, sum_counts
from embershard.frequency.downsampling import SampledRows, downsampled
from embershard.frequency.profile_file import decode, encode
from tests.covering import examples

ROWS = {"user": 1000, "item": 50}
PLENTY = {"max_lookups": 10**9, "memory_bytes": 1 << 30}


def zipf_samples(num_samples, seed=0):
    """For each table of ROWS: bag sizes [num_samples] and lookups [M]."""
    random = np.random.default_rng(seed)
    tables = []
    for rows in ROWS.values():
        sizes = random.integers(0, 4, num_samples)
        tables.append((sizes, (rows * random.random(int(sizes.sum())) ** 4).astype(np.int64)))
    return tables


def cut(tables, borders):
    """Parts of samples [a, b): lookups and bag sizes of every table."""
    parts = []
    for start, stop in itertools.pairwise(borders):
        rows = [values[sizes[:start].sum() : sizes[:stop].sum()] for sizes, values in tables]
        parts.append((rows, [sizes[start:stop] for sizes, _ in tables], stop - start))
    return parts


def collect(parts, sampled=None, **options):
    collector = Collector(ROWS, **(PLENTY | options))
    for rows, sizes, samples in parts:
        given = collector.sampled if sampled is None else sampled
        collector.add(count_part(list(ROWS.values()), rows, sizes, samples, given))
    return collector.finish()


@pytest.mark.slow
@given(st.lists(st.integers(0, 600), max_size=4), st.integers(0, 3))
@settings(max_examples=15)
def test_parts_together_are_the_whole(cuts, seed):
    tables = zipf_samples(600, seed)
    found = collect(cut(tables, [0, *sorted(cuts), 600]))
    for (table, num_rows), (sizes, rows) in zip(ROWS.items(), tables, strict=True):
        dense = np.zeros(num_rows, np.int64)
        dense[found.counts[table].rows] = found.counts[table].hits
        assert dense.tolist() == np.bincount(rows, minlength=num_rows).tolist()
        statistics = found.statistics.tables[table]
        assert statistics.num_lookups == len(rows) == statistics.histogram.num_lookups
        assert statistics.histogram.num_rows == len(np.unique(rows))
        assert statistics.bag_sizes.tolist() == pytest.approx((np.bincount(sizes, minlength=4) / 600).tolist())
        trace = found.statistics.trace.tables[table]
        assert trace.rows.tolist() == rows.tolist()
        assert trace.samples.tolist() == np.repeat(np.arange(600), sizes).tolist()


def test_distinct_rows_of_windows_are_those_of_a_slow_count():
    num_samples = 2 * 1024 + 300
    tables = zipf_samples(num_samples)
    statistics = collect(cut(tables, [0, num_samples])).statistics
    for table, (sizes, rows) in zip(ROWS, tables, strict=True):
        samples = np.repeat(np.arange(num_samples), sizes)
        found = statistics.tables[table]
        assert found.window_samples.tolist() == [256, 1024, num_samples]
        for size, mean in zip(found.window_samples.tolist(), found.window_rows.tolist(), strict=True):
            windows = [rows[samples // size == number] for number in range(num_samples // size)]
            assert mean == pytest.approx(np.mean([len(np.unique(window)) for window in windows]))


def test_bags_of_one_size_are_counted_as_bags_of_any():
    rows = np.array([3, 3, 5, 1, 3, 0])
    one = count_part([9], [rows], [2], 3)
    any_size = count_part([9], [rows], [np.array([2, 2, 2])], 3)
    for name in ("bag_counts", "window_rows"):
        assert getattr(one.tables[0], name).tolist() == getattr(any_size.tables[0], name).tolist()
    assert one.tables[0].trace.samples.tolist() == any_size.tables[0].trace.samples.tolist() == [0, 0, 1, 1, 2, 2]
    assert count_part([9], [rows[:0]], [np.zeros(3, np.int64)], 3).tables[0].bag_counts.tolist() == [3]


@pytest.mark.parametrize("bad", [-1, 9, 2**60])
def test_an_id_that_is_no_row_is_named(bad):
    with pytest.raises(IdOutOfRangeError, match=rf"id {bad} is not in \[0, 9\)"):
        count_part([9], [np.array([1, bad])], [1], 2)


def test_ids_too_large_to_carry_their_place_are_sorted_all_the_same():
    rows = np.array([2**61, 5, 2**61, 7])
    part = count_part([2**62], [rows], [1], 4, SampledRows(1.0, {0: np.array([5])}))
    assert part.tables[0].counts.rows.tolist() == [5, 7, 2**61]
    assert part.tables[0].counts.hits.tolist() == [1, 1, 2]
    assert part.tables[0].trace.rows.tolist() == [2**61, 2**61, 7]


def test_a_long_trace_follows_fewer_rows_and_leaves_constant_ones_out():
    tables = zipf_samples(3000)
    parts = cut(tables, [0, 500, 1000, 2000, 3000])
    whole, short = collect(parts).statistics.trace, collect(parts, max_lookups=800).statistics.trace
    assert (whole.rate, dict(whole.constant_rows)) == (1.0, {})
    assert short.rate <= 0.5
    assert short.num_lookups <= 800
    for number, (table, (_, rows)) in enumerate(zip(ROWS, tables, strict=True)):
        counts = RowCounts.of_rows(rows)
        constant = short.constant_rows[table]
        assert set(counts.at_least(3000 / 512).rows) <= set(constant)
        assert short.constant_lookups[table].tolist() == counts.hits_of(constant).tolist()
        kept = is_sampled(row_hashes(number, rows), short.rate) & ~np.isin(rows, constant)
        assert short.tables[table].rows.tolist() == rows[kept].tolist()
        assert short.tables[table].samples.tolist() == whole.tables[table].samples[kept].tolist()


def test_what_workers_filter_early_changes_nothing():
    parts = cut(zipf_samples(2000), [0, 300, 700, 1100, 2000])
    early = collect(parts, max_lookups=500).statistics
    late = collect(parts, max_lookups=500, sampled=SampledRows()).statistics
    assert early.trace.rate == late.trace.rate < 1
    for table in ROWS:
        assert early.trace.tables[table].rows.tolist() == late.trace.tables[table].rows.tolist()
        assert early.trace.constant_rows[table].tolist() == late.trace.constant_rows[table].tolist()


@given(st.integers(100, 1500))
@settings(max_examples=10)
def test_a_thinner_trace_is_a_part_of_the_thicker_one(max_lookups):
    trace = collect(cut(zipf_samples(1000), [0, 1000])).statistics.trace
    once = downsampled(trace, max_lookups)
    twice = downsampled(once, max_lookups // 2)
    assert twice.num_lookups <= max_lookups // 2
    assert twice.rate <= once.rate
    for table in ROWS:
        thick, thin = ({*zip(t.samples, t.rows, strict=True)} for t in (once.tables[table], twice.tables[table]))
        assert thin <= thick
        assert set(once.constant_rows.get(table, [])) <= set(twice.constant_rows.get(table, []))
    assert downsampled(trace, trace.num_lookups) is trace


def test_counts_stay_below_the_memory_given_and_are_low_by_no_more_than_said():
    random = np.random.default_rng(0)
    parts = [(1e6 * random.random(4000) ** 3).astype(np.int64) for _ in range(10)]
    exact = RowCounts.of_rows(np.concatenate(parts))
    collector = Collector({"t": 10**6}, max_lookups=10**9, memory_bytes=5000 * BYTES_PER_ROW)
    for rows in parts:
        collector.add(count_part([10**6], [rows], [1], len(rows)))
    found = collector.finish()
    table, counts = found.statistics.tables["t"], found.counts["t"]
    assert len(exact.rows) > 5000 >= len(counts.rows)
    assert table.undercount > 0
    lost = exact.hits - counts.hits_of(exact.rows)
    assert lost.min() >= 0
    assert lost.max() <= table.undercount
    assert table.num_lookups == 40_000 == table.histogram.num_lookups


def test_rows_are_only_forgotten_when_merging_made_no_room():
    counters = [RowCounter(), RowCounter()]
    for counter in counters:
        for _ in range(4):
            counter.add(RowCounts(np.arange(10), np.ones(10, np.int64)))
    bound_memory(counters, 20)
    assert [counter.undercount for counter in counters] == [0, 0]
    bound_memory(counters, 19)
    assert [counter.undercount for counter in counters] == [4, 4]
    assert counters[0].total().rows.tolist() == []


def test_lost_lookups_stay_in_the_histogram():
    counts = RowCounts(np.array([1, 2]), np.array([9, 4]))
    histogram = histogram_of(counts, 12, 13 + 20)
    assert histogram.counts.tolist() == [9, 4, 2]
    assert histogram.rows.tolist() == [1, 1, 10]
    assert histogram_of(counts, 2, 20).counts.tolist() == [9, 4]  # no row left that could have them


@given(st.lists(st.lists(st.integers(0, 40)), max_size=6))
@examples(20)
def test_sums_of_counts(parts):
    arrays = [np.array(part, dtype=np.int64) for part in parts]
    total = sum_counts([RowCounts.of_rows(array) for array in arrays])
    expected = RowCounts.of_rows(np.concatenate([np.empty(0, np.int64), *arrays]))
    assert total.rows.tolist() == expected.rows.tolist()
    assert total.hits.tolist() == expected.hits.tolist()


def test_nothing_at_all():
    statistics = Collector(ROWS, **PLENTY).finish().statistics
    assert (statistics.num_samples, statistics.drift, statistics.trace.num_lookups) == (0, None, 0)
    assert statistics.tables["user"].histogram.num_rows == 0
    assert decode(*encode(statistics)).num_samples == 0


@pytest.mark.parametrize("options", [{}, {"max_lookups": 2000}])
def test_statistics_survive_being_written(options):
    statistics = collect(cut(zipf_samples(3000), [0, 1000, 3000]), **options).statistics
    copy = decode(*encode(statistics))
    assert flat(copy) == flat(statistics)
    assert len(statistics.trace.constant_rows) == (2 if options else 0)


def flat(value):
    """Nested values as plain lists, to be compared."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: flat(each) for name, each in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return {name: flat(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


def test_windows_rise():
    assert list(WINDOWS) == sorted(set(WINDOWS))


def test_a_trace_without_constant_rows_is_thinned_by_what_it_counts():
    rows = np.concatenate([np.zeros(600, np.int64), np.arange(1, 401)])
    trace = SampledTrace(1.0, 1000, {"t": TableTrace(np.arange(1000), rows)}, {}, {})
    thin = downsampled(trace, 450)
    assert thin.constant_rows["t"].tolist() == [0]
    assert thin.constant_lookups["t"].tolist() == [600]
    assert 0.99 < thin.rate < 1
    assert len(thin.tables["t"].rows) == 400
