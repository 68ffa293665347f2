"""Every sample once, in one order, whatever the number of ranks; and threads that come and go."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.data import BatchStream, DataConfig, StreamState
from embershard.data.order.stream import SampleReader
from embershard.data.sample_bits import SampleBits
from embershard.errors import ConfigError, DataError
from tests.covering import examples

WORLD_SIZES = (1, 2, 3, 5)


@pytest.fixture(scope="module")
def kit(counting_source, numbers):
    """Reads whole streams of a counting source, without threads."""

    def run(source, *, batch_size, world_size, split="train", epochs=1, state=None, **settings):
        config = DataConfig(num_workers=0, **settings)
        batches = []
        for rank in range(world_size):
            stream = BatchStream(
                source,
                batch_size=batch_size,
                rank=rank,
                world_size=world_size,
                split=split,
                epochs=epochs,
                config=config,
                state=state,
            )
            batches.append([numbers(batch) for batch in stream])
        assert len({len(b) for b in batches}) == 1, "all ranks must take the same number of steps"
        return [list(itertools.chain(*step)) for step in zip(*batches, strict=True)]

    return SimpleNamespace(source=counting_source, run=run)


shapes = st.fixed_dictionaries(
    {
        "file_rows": st.lists(st.integers(1, 60), min_size=1, max_size=4),
        "chunk_rows": st.integers(1, 25),
        "batch_size": st.integers(1, 12),
        "shuffle": st.booleans(),
        "seed": st.integers(0, 2**63 - 1),
        "window": st.integers(1, 5),
        "eval_fraction": st.sampled_from([0.0, 0.1, 0.37, 0.9]),
        "chosen": st.none() | st.integers(0, 99),  # which samples are held out, by chance
    }
)


@pytest.mark.slow
@given(shapes)
@examples(60)
def test_every_sample_once_and_one_order_for_any_world_size(kit, shape):
    chosen = None
    if shape["chosen"] is not None:
        chance = np.random.default_rng(shape["chosen"]).random(sum(shape["file_rows"]))
        chosen = SampleBits.of([chance < shape["eval_fraction"]])
    source = kit.source(shape["file_rows"], shape["chunk_rows"], shape["eval_fraction"], chosen)
    total, order = source.chunks("train").num_samples, []
    options = {"shuffle": shape["shuffle"], "seed": shape["seed"], "shuffle_window": shape["window"]}
    if total:
        order = list(itertools.chain(*kit.run(source, batch_size=1, world_size=1, **options)))
    assert sorted(order) == sorted(set(order))
    held_out = set(range(sum(shape["file_rows"]))) - set(order)
    assert chosen is None or held_out == set(np.flatnonzero(chosen.between(0, chosen.num_samples)).tolist())
    for world_size in WORLD_SIZES:
        size = shape["batch_size"] * world_size
        if total >= size:
            steps = kit.run(source, batch_size=shape["batch_size"], world_size=world_size, **options)
            assert steps == [order[k * size : (k + 1) * size] for k in range(total // size)]
        if held_out:
            steps = kit.run(source, batch_size=shape["batch_size"], world_size=world_size, split="eval")
            assert list(itertools.chain(*steps)) == sorted(held_out)
            assert all(len(step) == size for step in steps[:-1])


@pytest.mark.slow
@given(shapes, st.integers(0, 3), st.integers(1, 50), st.integers(0, 250))
@examples(30)
def test_blocks_are_the_stream_s_first_samples(kit, shape, num_workers, size, stop):
    source = kit.source(shape["file_rows"], shape["chunk_rows"], shape["eval_fraction"])
    stop = min(stop, source.chunks("train").num_samples)
    options = {"shuffle": shape["shuffle"], "seed": shape["seed"], "shuffle_window": shape["window"]}
    reader = SampleReader(source, "train", DataConfig(num_workers=num_workers, **options))
    blocks = list(reader.blocks(stop, size))
    assert [block.num_samples for block in blocks[:-1]] == [size] * (len(blocks) - 1)
    order = [] if not stop else list(itertools.chain(*kit.run(source, batch_size=1, world_size=1, **options)))
    assert [int(number) for block in blocks for number in block.dense[:, 0]] == order[:stop]


@pytest.mark.slow
@given(shapes, st.data())
@examples(40)
def test_a_stream_goes_on_with_another_world_size(kit, shape, data):
    source = kit.source(shape["file_rows"], shape["chunk_rows"])
    total = source.chunks("train").num_samples
    options = {"shuffle": shape["shuffle"], "seed": shape["seed"]}
    size = min(shape["batch_size"], total)
    stream = BatchStream(
        source,
        batch_size=size,
        rank=0,
        world_size=1,
        split="train",
        epochs=2,
        config=DataConfig(num_workers=0, **options),
    )
    for _ in range(data.draw(st.integers(0, 2 * (total // size)))):
        next(stream)
    state = StreamState(**stream.state.to_dict())
    one_by_one = kit.run(source, batch_size=1, world_size=1, epochs=2, **options)
    order = list(itertools.chain(*one_by_one))
    epochs = [order[:total], order[total:]]
    epochs = [epochs[e][state.global_sample if e == state.epoch else 0 :] for e in range(state.epoch, 2)]
    for world_size in WORLD_SIZES:
        if total < world_size:
            continue
        steps = kit.run(source, batch_size=1, world_size=world_size, epochs=2, state=state, **options)
        whole = [rest[: len(rest) // world_size * world_size] for rest in epochs]
        assert list(itertools.chain(*steps)) == list(itertools.chain(*whole))


def test_order_depends_on_seed_and_epoch(kit):
    source = kit.source([400, 400], 50)
    first, second = (kit.run(source, batch_size=800, world_size=1, epochs=2, seed=seed) for seed in (1, 2))
    orders = [*first, *second]
    assert all(sorted(order) == list(range(800)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert kit.run(source, batch_size=800, world_size=1, epochs=2, seed=1) == first
    assert kit.run(source, batch_size=800, world_size=1, shuffle=False) == [list(range(800))]
    moved = sum(a // 50 != b // 50 for a, b in itertools.pairwise(orders[0]))
    assert moved < 20, "a chunk's rows must stay together, or every batch would parse many chunks"


def test_rows_of_a_chunk_are_mixed_anew_each_epoch_and_in_each_chunk(kit):
    steps = kit.run(kit.source([100, 100], 100), batch_size=200, world_size=1, epochs=2)
    chunks = [[number % 100 for number in step[half : half + 100]] for step in steps for half in (0, 100)]
    assert all(sorted(chunk) == list(range(100)) for chunk in chunks)
    assert len({tuple(chunk) for chunk in chunks}) == 4


def test_a_rank_reads_only_the_chunks_of_its_slices(kit, open_stream):
    source = kit.source([4096], 64)
    for batch in open_stream(source, DataConfig(num_workers=0), batch_size=64, rank=1, world_size=4):
        assert batch.num_samples == 64
    assert len(source.reads) == 16
    assert len(set(source.reads)) == 16


def test_eval_gives_empty_batches_to_ranks_without_samples(kit, open_stream):
    source = kit.source([10], 4, 1 / 2)
    last = list(open_stream(source, DataConfig(), batch_size=4, rank=1, world_size=2, split="eval"))[-1]
    assert last.num_samples == 1
    last = list(open_stream(source, DataConfig(), batch_size=4, rank=4, world_size=5, split="eval"))[-1]
    assert last.num_samples == 0
    assert last.dense_features.shape == (0, 1)
    assert last.sparse_features.stride() == 0
    assert last.sparse_features.values().dtype == torch.int64


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize(("epoch", "at"), [(0, 0), (1, 13), (2, 16), (2, 70), (3, 0), (5, 8)])
def test_steps_that_are_left(kit, open_stream, split, epoch, at):
    """From any position, also one that another batch size led to."""
    place = {"batch_size": 4, "world_size": 2, "split": split, "state": StreamState(epoch, min(at, 30))}
    stream = open_stream(kit.source([100], 10, 0.3), DataConfig(), epochs=3, **place)
    assert stream.num_steps == len(list(stream))
    assert open_stream(kit.source([100], 10, 0.3), DataConfig(), epochs=None, **place).num_steps is None


@pytest.mark.slow
def test_threads_give_the_same_batches_as_none(kit, open_stream, numbers):
    source = kit.source([1000, 777], 32)
    plain, threaded = (
        [numbers(b) for b in open_stream(source, DataConfig(num_workers=n), batch_size=24, epochs=3)] for n in (0, 3)
    )
    assert plain == threaded
    assert len(plain) == 3 * (1777 // 24)


def test_state_counts_what_was_handed_out_not_what_was_read(kit, open_stream):
    source = kit.source([1000], 32)
    stream = open_stream(source, DataConfig(num_workers=2, prefetch_batches=4), batch_size=10, world_size=3)
    assert stream.state == StreamState(0, 0, 0)
    next(stream)
    assert stream.state == StreamState(0, 30, 0)
    time.sleep(0.1)
    assert stream.state == StreamState(0, 30, 0)
    assert len(source.reads) <= 2 * (1 + 4), "no more than prefetch_batches may lie ahead"


def test_error_in_a_thread_reaches_the_caller_at_its_batch(kit, open_stream):
    source = kit.source([100], 10)
    source.poison = 3
    stream = open_stream(source, DataConfig(shuffle=False, num_workers=2), batch_size=10)
    for _ in range(3):
        next(stream)
    with pytest.raises(ValueError, match=r"chunk 3 is poisoned"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)


def _data_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("embershard-data")]


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["close", "exhausted", "forgotten"])
def test_threads_end_with_the_stream(kit, ending):
    before = set(_data_threads())
    config = DataConfig(num_workers=2)
    stream = BatchStream(
        kit.source([100], 10), batch_size=10, rank=0, world_size=1, split="train", epochs=1, config=config
    )
    next(stream)
    started = set(_data_threads()) - before
    assert started
    if ending == "exhausted":
        list(stream)
    elif ending == "close":
        stream.close()
        stream.close()
        assert list(stream) == []
    else:
        del stream
        gc.collect()
    for thread in started:
        thread.join(timeout=60)
        assert not thread.is_alive()


@pytest.mark.matrix
@pytest.mark.slow
def test_interpreter_ends_in_the_middle_of_a_stream():
    program = (
        "from embershard.data import *\n"
        "c = DataConfig(num_workers=2)\n"
        "s = BatchStream(open_source(c), batch_size=512, rank=0, world_size=1, split='train', epochs=None,"
        " config=c)\n"
        "print(next(s).num_samples)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "512"
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


@pytest.mark.gpu
def test_pinned_batches_are_moved_asynchronously(kit, open_stream, numbers):
    source, device = kit.source([10], 4, 1 / 2), torch.device("cuda")
    for rank, count in ((0, 4), (4, 0)):
        settings = {"batch_size": 4, "rank": rank, "world_size": 5, "split": "eval", "pin_memory": True}
        batch = list(open_stream(source, DataConfig(), **settings))[-1]
        assert batch.num_samples == count
        assert not count or (batch.dense_features.is_pinned() and batch.sparse_features.values().is_pinned())
        moved = batch.to(device, non_blocking=True)
        moved.record_stream(torch.cuda.current_stream())
        torch.cuda.synchronize()
        assert moved.sparse_features.device().type == "cuda"
        assert numbers(moved.to(torch.device("cpu"))) == numbers(batch)


def test_pinning_without_a_gpu_is_an_error(kit, open_stream, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="pin_memory needs a CUDA device"):
        open_stream(kit.source([10], 4), DataConfig(), batch_size=1, pin_memory=True)


def test_wrong_settings_are_named(kit, open_stream):
    source = kit.source([100], 10)
    with pytest.raises(DataError, match=r"100 samples, less than one global batch: 30 samples x 4 ranks = 120"):
        open_stream(source, DataConfig(), batch_size=30, world_size=4)
    with pytest.raises(ConfigError, match=r"nothing is held out"):
        open_stream(source, DataConfig(), batch_size=1, split="eval")
    with pytest.raises(ConfigError, match=r"data.seed = 7, but data.seed is 0"):
        open_stream(source, DataConfig(), batch_size=1, state=StreamState(seed=7))
    with pytest.raises(ConfigError, match=r"rank = 2 of world_size = 2"):
        open_stream(source, DataConfig(), batch_size=1, rank=2, world_size=2)
