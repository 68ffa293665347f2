"""Counts of the rows that occur say what counts of all rows would."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.frequency.counts import RowCounts
from tests.covering import examples

dense = st.lists(st.integers(0, 4), max_size=40)


def of(counts: list[int]) -> RowCounts:
    return RowCounts.of_dense(torch.tensor(counts, dtype=torch.int64))


@given(dense)
@examples(30)
def test_counts_of_all_rows_and_back(counts):
    assert of(counts).dense(len(counts)).tolist() == counts
    assert of(counts).hits.tolist() == [count for count in counts if count]


@given(dense, st.integers(0, 45))
@examples(100)
def test_the_top_rows_are_those_of_a_sort(counts, num_rows):
    occur = sorted((row for row, count in enumerate(counts) if count), key=lambda row: (-counts[row], row))
    assert of(counts).top(num_rows).tolist() == occur[:num_rows]


@given(dense, st.sets(st.integers(0, 45)))
@examples(60)
def test_counts_without_some_rows(counts, left_out):
    rest = of(counts).without(np.array(sorted(left_out), np.int64))
    expected = [0 if row in left_out else count for row, count in enumerate(counts)]
    assert rest.dense(len(counts)).tolist() == expected


@given(dense, st.integers(0, 40), st.integers(0, 45))
@examples(60)
def test_the_counts_of_a_range_of_rows(counts, start, num_rows):
    part = of(counts).between(start, num_rows)
    expected = counts[start : start + num_rows]
    assert part.dense(len(expected)).tolist() == expected


@given(st.lists(dense, max_size=4))
@examples(30)
def test_shards_follow_each_other(shards):
    whole = RowCounts.of_shards((of(shard), len(shard)) for shard in shards)
    counts = [count for shard in shards for count in shard]
    assert whole.dense(len(counts)).tolist() == counts
