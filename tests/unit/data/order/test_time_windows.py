"""Windows of time: none before an earlier one, whatever the ranks, batches, threads and resumes; late samples too."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.data import BatchStream, DataConfig, StreamState
from embershard.data.order import time_windows
from embershard.data.order.time_windows import TimeWindows
from embershard.data.sources.held_out import HeldOut
from embershard.data.sources.source import SplitChunks, WindowSource
from embershard.errors import DataError
from tests.covering import examples

SECONDS = 600
WORLD_SIZES = (1, 2, 3)

shapes = st.fixed_dictionaries(
    {
        "files": st.lists(st.lists(st.integers(-3, 4), min_size=1, max_size=40), min_size=1, max_size=4),
        "is_sorted": st.booleans(),
        "in_turn": st.booleans(),
        "chunk_rows": st.integers(1, 15),
        "batch_size": st.integers(1, 9),
        "shuffle": st.booleans(),
        "seed": st.integers(0, 2**63 - 1),
        "shuffle_window": st.integers(1, 4),
        "num_workers": st.sampled_from([0, 0, 2]),
    }
).filter(lambda shape: len({number for file in shape["files"] for number in file}) > 1)


def in_windows(counting_source: Any, shape: dict[str, Any]) -> tuple[Any, list[int], list[int]]:
    """A source in time order; and of each sample its own window's number, and that with which it trains, found row by
    row."""
    files = [sorted(file) if shape["is_sorted"] else file for file in shape["files"]]
    own = [number for file in files for number in file]
    taken, newest = [], -(10**9)
    for file in files:
        taken += [max(number, newest) if shape["in_turn"] else number for number in file]
        newest = max(newest, *file)
    source = counting_source([len(file) for file in files], shape["chunk_rows"])
    owner = np.repeat(np.arange(len(files)), [-(-len(file) // shape["chunk_rows"]) for file in files])
    numbers = [np.array(own[start : start + size]) for start, size in zip(source.starts, source.sizes, strict=True)]
    windows = TimeWindows.of(range(len(numbers)), owner, numbers, SECONDS, in_turn=shape["in_turn"])
    source.split = SplitChunks(owner, source.sizes, [0.0] * len(files), HeldOut("", windows=windows))
    return source, own, taken


def read(numbers: Any, source: Any, shape: dict[str, Any], **place: Any) -> list[list[int]]:
    """The samples of each global batch."""
    options = {name: shape[name] for name in ("shuffle", "seed", "shuffle_window", "num_workers")}
    settings = {"split": "train", "epochs": 1, "config": DataConfig(**options), "world_size": 1} | place
    of_ranks = []
    for rank in range(settings["world_size"]):
        with BatchStream(source, rank=rank, **settings) as stream:
            of_ranks.append([numbers(batch) for batch in stream])
    return [list(itertools.chain(*parts)) for parts in zip(*of_ranks, strict=True)]


def assert_in_time_order(order: list[int], own: list[int], taken: list[int]) -> None:
    """No sample of a later window is before one of an earlier window, but late ones, which come with the newest."""
    on_time = [own[sample] for sample in order if own[sample] == taken[sample]]
    assert on_time == sorted(on_time), "a later window came first"
    assert [taken[sample] for sample in order] == sorted(taken[sample] for sample in order), "a late sample waited"


@pytest.mark.slow
@given(shapes, st.data())
@examples(60)
def test_no_window_trains_before_an_earlier_one(counting_source, numbers, shape, data):
    source, own, taken = in_windows(counting_source, shape)
    order = list(itertools.chain(*read(numbers, source, shape, batch_size=1)))
    assert sorted(order) == list(range(len(own))), "every sample once"
    assert_in_time_order(order, own, taken)
    if not shape["shuffle"]:
        assert order == sorted(order, key=lambda sample: taken[sample]), "in a window as they are in the files"
    windows = source.split.held_out.windows
    distinct = sorted(set(taken))
    assert windows.numbers.tolist() == distinct
    assert windows.firsts.tolist() == [sum(number < each for number in taken) for each in distinct]
    pairs = list(zip(own, taken, strict=True))
    assert windows.late.tolist() == [sum(o < t == each for o, t in pairs) for each in distinct]
    assert shape["in_turn"] or not windows.late.any()
    for world_size in WORLD_SIZES:
        size = min(shape["batch_size"], len(own) // world_size)
        if size:
            batches = read(numbers, source, shape, batch_size=size, world_size=world_size)
            batch = size * world_size
            assert batches == [order[k * batch : (k + 1) * batch] for k in range(len(own) // batch)]
    start = data.draw(st.integers(0, len(own)))
    state = StreamState(0, start, shape["seed"])
    assert list(itertools.chain(*read(numbers, source, shape, batch_size=1, state=state))) == order[start:]


@pytest.mark.slow
@given(shapes)
@examples(40)
def test_a_window_s_samples_come_once_each_in_its_evaluation(counting_source, numbers, shape):
    source, _, taken = in_windows(counting_source, shape)
    source.held_out, source.notes = source.split.held_out, ()
    for window, number in enumerate(source.held_out.windows.numbers.tolist()):
        for world_size in WORLD_SIZES:
            place = {"split": "eval", "batch_size": shape["batch_size"], "world_size": world_size}
            batches = read(numbers, WindowSource(source, window), shape, **place)
            found = list(itertools.chain(*batches))
            assert sorted(found) == [sample for sample, each in enumerate(taken) if each == number]


def test_an_order_over_windows_is_caught(counting_source, numbers):
    options = {"chunk_rows": 5, "shuffle": True, "seed": 1, "shuffle_window": 64, "num_workers": 0}
    shape = {"files": [[0, 1, 2] * 10], "is_sorted": True, "in_turn": False, **options}
    source, own, taken = in_windows(counting_source, shape)
    source.split = SplitChunks([0] * 6, source.sizes, [0.0], HeldOut(""))
    order = list(itertools.chain(*read(numbers, source, shape, batch_size=1)))
    with pytest.raises(AssertionError, match="a later window came first"):
        assert_in_time_order(order, own, taken)


def test_too_few_windows_and_too_many_are_refused(monkeypatch):
    with pytest.raises(DataError, match=r"got 1 window of samples; needed two or more.* Set a shorter one"):
        TimeWindows.of([0], np.array([0]), [np.array([4, 4])], 60)
    monkeypatch.setattr(time_windows, "MOST_WINDOWS", 3)
    with pytest.raises(DataError, match=r"window = 60: got 4 windows; needed at most 3. Set a longer one, in seconds"):
        TimeWindows.of([0], np.array([0]), [np.arange(4)], 60)


def test_files_of_many_windows_are_told_to_be_slow():
    rows = [np.arange(5) for _ in range(4)]
    said = TimeWindows.of(range(4), np.zeros(4, np.int64), rows, 3600).sentence()
    assert "5 windows of 3,600 s, from 1970-01-01 00:00:00 to 1970-01-01 04:00:00 UTC" in said
    assert "rows of 5.0 windows, and is parsed as often" in said
    ordered = TimeWindows.of(range(4), np.zeros(4, np.int64), [np.full(5, n) for n in range(4)], 3600)
    assert "is parsed as often" not in ordered.sentence()
    assert {len(each) for each in ordered.of_rows.values()} == {1}, "no memory for rows of chunks of one window"
