"""Batches of hot and of cold samples: which samples are hot, and in which order they come."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.data import BatchStream, DataConfig
from embershard.data.block import Block
from embershard.data.order.order import EpochOrder
from embershard.data.order.segments import PackedState
from embershard.errors import ConfigError, DataError
from embershard.extras.hot_cold.hot_samples import HotChunks, HotRowsFilter, HotSamples, PackedOrder
from tests.covering import examples

pytestmark = pytest.mark.extra


@pytest.fixture(scope="module")
def kit(counting_source, numbers):
    """Streams of a counting source, whose hot samples are drawn."""

    def hot_of(source, share, seed=0, digest="d"):
        total = source.chunks("train").num_samples
        flags = np.random.default_rng(seed).random(total) < share
        return flags, HotSamples(np.packbits(flags), total, digest)

    def opened(source, hot, *, global_batch, world_size=1, rank=0, epochs=1, state=None, **options):
        config = DataConfig(**{"num_workers": 0} | options)
        place = {"batch_size": global_batch // world_size, "rank": rank, "world_size": world_size}
        return BatchStream(source, split="train", epochs=epochs, config=config, state=state, hot=hot, **place)

    def run(source, hot, losses=(1.0,) * 200, **options):
        """Return the samples of all ranks' steps, and which steps are hot."""
        found, ranks = [], [opened(source, hot, rank=r, **options) for r in range(options.get("world_size", 1))]
        for loss, batches in zip(losses, zip(*ranks, strict=True), strict=False):
            assert len({batch.is_hot for batch in batches}) == 1
            found.append((list(itertools.chain(*map(numbers, batches))), batches[0].is_hot))
            for stream in ranks:
                stream.observe(loss)
        return found

    return SimpleNamespace(source=counting_source, hot_of=hot_of, opened=opened, run=run, numbers=numbers)


shapes = st.fixed_dictionaries(
    {
        "file_rows": st.lists(st.integers(1, 60), min_size=1, max_size=4),
        "chunk_rows": st.integers(1, 25),
        "share": st.sampled_from([0.0, 0.1, 0.5, 0.97, 1.0]),
        "global_batch": st.sampled_from([4, 8, 12]),
        "shuffle": st.booleans(),
        "seed": st.integers(0, 2**63 - 1),
    }
)


@pytest.mark.slow
@given(shapes)
@examples(50)
def test_every_sample_once_and_one_order_for_any_number_of_ranks(kit, shape):
    source = kit.source(shape["file_rows"], shape["chunk_rows"])
    flags, hot = kit.hot_of(source, shape["share"], shape["seed"])
    total, size = len(flags), shape["global_batch"]
    if total < size:
        return
    options = {"global_batch": size, "shuffle": shape["shuffle"], "seed": shape["seed"], "epochs": 2}
    steps = kit.run(source, hot, **options)
    num_steps = kit.opened(source, hot, **options).num_steps
    assert len(steps) == num_steps == 2 * (total // size)
    for epoch in (steps[: total // size], steps[total // size :]):
        seen = list(itertools.chain(*(samples for samples, _ in epoch)))
        assert len(seen) == len(set(seen)) == total // size * size
        mixed = 0
        for samples, is_hot in epoch:
            assert is_hot == flags[samples].all()
            mixed += bool(flags[samples].any() and not flags[samples].all())
        assert mixed <= 1
    for world_size in (2, 4):
        assert kit.run(source, hot, world_size=world_size, **options) == steps


@given(shapes)
@examples(30)
def test_the_samples_of_a_kind_keep_the_epoch_s_order(kit, shape):
    source = kit.source(shape["file_rows"], shape["chunk_rows"])
    flags, hot = kit.hot_of(source, shape["share"], shape["seed"])
    chunks = source.chunks("train")
    order = EpochOrder(chunks, seed=shape["seed"], epoch=1, shuffle=shape["shuffle"], window=3)
    starts = np.cumsum(chunks.rows) - chunks.rows

    def samples(found, start, stop):
        return [int(starts[chunk] + row) for chunk, rows in found.locate(start, stop) for row in rows]

    plain = samples(order, 0, len(flags))
    packed = PackedOrder(order, HotChunks(hot, chunks))
    expected = [n for n in plain if flags[n]] + [n for n in plain if not flags[n]]
    assert packed.num_hot == flags.sum()
    assert samples(packed, 0, len(flags)) == expected
    for start in range(0, len(flags), 7):
        assert samples(packed, start, min(start + 9, len(flags))) == expected[start : start + 9]


@pytest.mark.slow
@given(shapes, st.integers(0, 10**6), st.sampled_from([1, 2, 4]))
@examples(40)
def test_a_state_goes_on_in_the_middle_of_a_segment_on_any_number_of_ranks(kit, shape, place, world_size):
    source = kit.source(shape["file_rows"], shape["chunk_rows"])
    _, hot = kit.hot_of(source, shape["share"], shape["seed"])
    size = shape["global_batch"]
    if hot.num_samples < size:
        return
    options = {"global_batch": size, "epochs": 3, "seed": shape["seed"]}
    losses = np.random.default_rng(shape["seed"]).choice([1.0, 2.0, 3.0], 3 * (hot.num_samples // size)).tolist()
    steps = kit.run(source, hot, losses, **options)
    stop = 1 + place % len(steps)
    stream = kit.opened(source, hot, **options)
    for loss in losses[:stop]:
        next(stream)
        stream.observe(loss)
    state = stream.to_save(stream.state)
    assert kit.run(source, hot, losses[stop:], state=state, world_size=world_size, **options) == steps[stop:]


def test_the_order_follows_seed_epoch_and_hot_samples(kit):
    source = kit.source([400], 50)
    _, hot = kit.hot_of(source, 0.5)
    first = kit.run(source, hot, global_batch=20, epochs=2)
    assert first == kit.run(source, hot, global_batch=20, epochs=2, num_workers=2)
    assert first[:20] != first[20:]
    assert first != kit.run(source, hot, global_batch=20, epochs=2, seed=1)
    assert first != kit.run(source, kit.hot_of(source, 0.5, seed=1)[1], global_batch=20, epochs=2)


def test_other_hot_samples_are_refused(kit):
    source = kit.source([100], 10)
    _, hot = kit.hot_of(source, 0.5)
    stream = kit.opened(source, hot, global_batch=10)
    next(stream)
    with pytest.raises(ConfigError, match="was saved with hot samples d, and these are e: the order"):
        kit.opened(source, kit.hot_of(source, 0.5, digest="e")[1], global_batch=10, state=stream.state)
    with pytest.raises(DataError, match="of 90 training samples, and there are 100"):
        kit.opened(source, HotSamples(np.zeros(12, np.uint8), 90, "d"), global_batch=10)


def test_a_state_of_another_order_or_batch_begins_a_new_schedule(kit):
    source = kit.source([200], 10)
    _, hot = kit.hot_of(source, 0.5)
    stream = kit.opened(source, None, global_batch=10)
    steps = list(itertools.islice(stream, 10))
    assert len(steps) == 10
    from_plain = kit.opened(source, hot, global_batch=10, state=stream.state)
    assert from_plain.num_steps == len(list(from_plain)) == 10
    packed = kit.opened(source, hot, global_batch=10)
    next(packed)
    other = kit.opened(source, hot, global_batch=19, state=packed.state)
    assert other.num_steps == len(list(other)) == 10
    back = kit.opened(source, None, global_batch=10, state=packed.state)
    assert back.num_steps == len(list(back)) == 19


@given(shapes, st.integers(0, 10**6), st.booleans())
@examples(40)
def test_a_plain_epoch_goes_on_packed_without_a_sample_twice(kit, shape, place, second_epoch):
    source = kit.source(shape["file_rows"], shape["chunk_rows"])
    _, hot = kit.hot_of(source, shape["share"], shape["seed"])
    size, total = shape["global_batch"], hot.num_samples
    if total < size:
        return
    options = {"global_batch": size, "shuffle": shape["shuffle"], "seed": shape["seed"], "epochs": 1 + second_epoch}
    plain = kit.opened(source, None, **options)
    before = [kit.numbers(next(plain)) for _ in range(second_epoch * (total // size) + 1 + place % (total // size))]
    after = kit.run(source, hot, state=plain.state, **options)
    of_epoch = before[second_epoch * (total // size) :] + [samples for samples, _ in after]
    epoch = list(itertools.chain(*of_epoch))
    assert len(epoch) == len(set(epoch)) == total // size * size


def test_is_hot_stays_with_a_batch(kit):
    source = kit.source([40], 10)
    _, hot = kit.hot_of(source, 1.0)
    batch = next(kit.opened(source, hot, global_batch=10))
    assert batch.is_hot
    assert batch.to(torch.device("meta")).is_hot
    plain = next(kit.opened(source, None, global_batch=10))
    assert not plain.is_hot
    assert not plain.to(torch.device("meta")).is_hot


bags = st.lists(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=4, max_size=4), min_size=1, max_size=3)


@given(bags, st.lists(st.sets(st.integers(0, 9)), min_size=3, max_size=3))
def test_a_sample_is_hot_when_all_its_ids_are(features, hot_rows):
    rows = [np.array(sorted(hot), np.int64) for hot in hot_rows[: len(features)]]
    values = tuple(np.array(list(itertools.chain(*feature)), np.int64) for feature in features)
    lengths = np.array([[len(bag) for bag in feature] for feature in features], np.int32)
    block = Block(np.zeros((4, 1), np.float32), np.zeros(4, np.float32), values, lengths)
    pairs = list(zip(features, hot_rows, strict=False))
    expected = [all(set(feature[n]) <= hot for feature, hot in pairs) for n in range(4)]
    assert HotRowsFilter(rows).hot_samples(block).tolist() == expected


def test_bags_of_one_size():
    block = Block(np.zeros((3, 1)), np.zeros(3), (np.array([1, 2, 1, 9, 3, 3]), np.array([0, 0, 5])), (2, 1))
    found = HotRowsFilter([np.array([1, 2, 3]), np.array([0, 4])]).hot_samples(block)
    assert found.tolist() == [True, False, False]


def test_a_file_gives_the_bits_back_or_is_refused(tmp_path):
    flags = np.random.default_rng(0).random(1003) < 0.3
    path = tmp_path / "hot_samples.npz"
    HotSamples(np.packbits(flags), 1003, "abc").save(path)
    found = HotSamples.load(path)
    assert (found.digest, found.num_samples) == ("abc", 1003)
    assert found.between(0, 1003).tolist() == flags.tolist()
    assert found.between(13, 29).tolist() == flags[13:29].tolist()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataError, match=r"no file of hot samples .*remove it"):
        HotSamples.load(path)
    HotSamples(np.packbits(flags[:80]), 1003, "abc").save(path)
    with pytest.raises(DataError, match="of another number of samples"):
        HotSamples.load(path)


def test_a_position_is_part_of_a_stream_s_state(kit):
    source = kit.source([40], 10)
    _, hot = kit.hot_of(source, 0.5)
    stream = kit.opened(source, hot, global_batch=4)
    next(stream)
    assert stream.state.packed == PackedState("d", 4, 0, 1, 1, "cold", stream.state.packed.left)
    assert stream.state.to_dict()["packed"]["kind"] == "cold"
    assert "packed" not in kit.opened(source, None, global_batch=4).state.to_dict()
