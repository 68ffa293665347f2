"""A stream whose samples are dealt: the same samples in each global batch, each once; what a rank reads; bad rows."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.data import BatchStream, DataConfig, StreamState, open_source
from embershard.data.hashing import make_key
from embershard.errors import ConfigError
from embershard.extras.deal.deal import deal
from embershard.extras.deal.reader import Dealing, DealtReader, Loads, SampleCost
from tests.covering import examples
from tests.unit.data.test_bad_rows import BAD, ROWS, write_criteo

pytestmark = pytest.mark.extra

COST = SampleCost("bag", 1, 2)
Batches = list[list[list[int]]]


@pytest.fixture(scope="module")
def batches(numbers):
    """The numbers of all samples, by step and rank; streams are made one after another."""

    def read(make_source: Any, *, size: int, ranks: int, group: int = 0, pieces: int = 1, **settings: Any) -> Batches:
        of_ranks = []
        for rank in range(ranks):
            how = Dealing(COST, rank % (group or 1), group, pieces)
            reader = partial(DealtReader, dealing=how, loads={}) if group else None
            options = {"epochs": 1, "split": "train", "config": DataConfig(num_workers=0, seed=5)} | settings
            place = {"batch_size": size, "rank": rank, "world_size": ranks, "reader": reader}
            with BatchStream(make_source(), **place, **options) as stream:
                of_ranks.append([numbers(batch) for batch in stream])
        return [list(step) for step in zip(*of_ranks, strict=True)]

    return read


@pytest.mark.slow
@given(
    rows=st.lists(st.integers(4, 60), min_size=1, max_size=3), chunk_rows=st.integers(1, 40), size=st.integers(1, 9),
    ranks=st.sampled_from([(1, 1), (2, 2), (3, 3), (4, 2), (4, 4)]), pieces=st.integers(1, 3),
)  # fmt: skip
@examples(40)
def test_each_global_batch_has_its_samples_and_each_rank_as_many(
    counting_source, batches, rows, chunk_rows, size, ranks, pieces
):
    world, group = ranks
    if sum(rows) < size * world:
        rows = [size * world]
    make = partial(counting_source, rows, chunk_rows)
    undealt = batches(make, size=size, ranks=world, epochs=2)
    dealt = batches(make, size=size, ranks=world, group=group, pieces=pieces, epochs=2)
    for step, (slices, parts) in enumerate(zip(undealt, dealt, strict=True)):
        assert all(len(part) == size for part in parts)
        for first in range(0, world, group):
            samples = list(itertools.chain(*slices[first : first + group]))
            assert sorted(itertools.chain(*parts[first : first + group])) == sorted(samples)
            per_epoch = sum(rows) // (size * world)
            epoch, position = step // per_epoch, (step % per_epoch * world + first) * size
            numbers = np.array(samples)
            tokens = numbers % 3
            key = make_key(5, epoch, position)
            places = deal(tokens + 2 * tokens**2, group, pieces, key)
            assert parts[first : first + group] == numbers[places].tolist(), "a function of seed and position"


def test_a_stream_goes_on_with_the_same_deals(counting_source, batches):
    make = partial(counting_source, [400], 50)
    whole = batches(make, size=8, ranks=2, group=2)
    assert batches(make, size=8, ranks=2, group=2, state=StreamState(0, 16 * 10, 5)) == whole[10:]
    assert whole != batches(make, size=8, ranks=2)


def test_dealing_costs_alike(counting_source, batches):
    make = partial(counting_source, [3000], 100)

    def slowest(found: Batches) -> int:
        return sum(max(sum(n % 3 + 2 * (n % 3) ** 2 for n in part) for part in step) for step in found)

    dealt, undealt = batches(make, size=10, ranks=4, group=4), batches(make, size=10, ranks=4)
    total = sum(n % 3 + 2 * (n % 3) ** 2 for step in dealt for part in step for n in part)
    assert slowest(dealt) < 1.05 * total / 4 < 1.15 * total / 4 < slowest(undealt)


@pytest.mark.parametrize(("chunk_rows", "group", "times"), [(64, 4, 1), (256, 4, 1), (16, 4, 4), (16, 2, 2)])
def test_a_rank_reads_no_more_where_a_chunk_has_a_global_batch(counting_source, open_stream, chunk_rows, group, times):
    """Parsed rows of a rank: those of the chunks that it reads, each kept while it is the last one. Global batches have
    64 samples."""

    def parsed(reader: Any) -> int:
        source = counting_source([4096], chunk_rows)
        config = DataConfig(num_workers=0)
        for batch in open_stream(source, config, batch_size=16, rank=1, world_size=4, reader=reader):
            assert batch.num_samples == 16
        return sum(chunk_rows for _ in itertools.groupby(source.reads))

    how = Dealing(COST, 1 % group, group, 1)
    assert parsed(partial(DealtReader, dealing=how, loads={})) == times * parsed(None)


def test_a_chunk_is_asked_for_once_where_it_has_a_global_batch(counting_source, open_stream):
    """Its samples are taken together, and not those before the slice, of it and behind it apart."""
    source = counting_source([1024], 64)
    reader = partial(DealtReader, dealing=Dealing(COST, 1, 4, 1), loads={})
    for _ in open_stream(source, DataConfig(num_workers=0), batch_size=16, rank=1, world_size=4, reader=reader):
        pass
    assert len(source.reads) == 1024 // 64


def test_costs_of_the_steps_are_noted(counting_source, open_stream):
    loads: dict[tuple[int, int], Loads] = {}
    reader = partial(DealtReader, dealing=Dealing(COST, 1, 2, 1), loads=loads)
    for _ in open_stream(counting_source([96], 96), DataConfig(num_workers=0), batch_size=12, rank=1, world_size=2,
                         reader=reader):  # fmt: skip
        pass
    assert list(loads) == [(0, 24 * step) for step in range(1, 5)]
    assert all(each.mean <= each.dealt <= each.undealt for each in loads.values())


def test_a_bad_row_counts_once(criteo_line, tmp_path):
    """On the rank whose slice it is in, though all ranks meet it."""
    config = replace(write_criteo(tmp_path, criteo_line), eval_fraction=0.0)
    found: dict[bool, list[Any]] = {}
    for deals in (False, True):
        samples, tallies = [], []
        for rank in range(3):
            how = Dealing(SampleCost("C1", 1, 0), rank, 3, 1)
            reader = partial(DealtReader, dealing=how, loads={}) if deals else None
            stream = BatchStream(
                open_source(config), batch_size=10, rank=rank, world_size=3, split="train", epochs=1, config=config,
                reader=reader,
            )  # fmt: skip
            samples += [int(number) for batch in stream for number in batch.dense_features[:, 0]]
            tallies.append((stream.bad_rows.num_samples, sorted(row.row for row in stream.bad_rows.rows)))
        found[deals] = [sorted(samples), tallies]
    assert found[True] == found[False]
    assert sorted(row for _, rows in found[True][1] for row in rows) == sorted(row + 1 for row in BAD)
    assert sum(count for count, _ in found[True][1]) == ROWS


def test_a_cost_beyond_64_bits_is_refused(counting_source, open_stream):
    how = Dealing(SampleCost("bag", 0, 2**60), 0, 1, 1)
    reader = partial(DealtReader, dealing=how, loads={})
    stream = open_stream(counting_source([96], 96), DataConfig(num_workers=0), batch_size=12, reader=reader)
    with pytest.raises(ConfigError, match=r"data.deal_cost: got 0 T \+ 1152921504606846976 T\^2"):
        next(stream)
