"""Segments of hot and cold batches: FAE's rule, its delay, and states that go on."""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.data.order.segments import (
    FALLS,
    MOST_HALVINGS,
    Decision,
    Learned,
    PackedBatch,
    PackedState,
    SegmentSchedule,
    batches_of_epoch,
)
from embershard.errors import ConfigError, DataError
from embershard.settings.decoding import decode
from tests.covering import examples

Emitted = list[tuple[str, int]]
START = PackedState(digest="d", global_batch=1)


def batches(schedule: SegmentSchedule, num_cold: int, num_hot: int, state: PackedState = START, start: int = 0):
    """All epochs from a position on, of samples that are batches of their own."""
    while True:
        yield from batches_of_epoch(schedule, num_cold + num_hot, num_hot, start, state)
        schedule.begin_epoch()
        state, start = replace(START, global_batch=state.global_batch), 0


def segments(kinds: Sequence[str]) -> Emitted:
    return [(kind, len(list(run))) for kind, run in itertools.groupby(kinds)]


def train(losses: Sequence[float], num_cold: int, num_hot: int, *, delay: int, ahead: int) -> tuple[Emitted, list]:
    """Train one batch per loss; `ahead` more batches are read than trained. Return the segments, and all batches."""
    schedule = SegmentSchedule(START, read_ahead=delay)
    source, read, waiting = batches(schedule, num_cold, num_hot), [], deque()
    for loss in losses:
        while len(waiting) <= ahead:
            waiting.append(next(source))
        read.append(waiting.popleft())
        schedule.observe(loss)
    return segments([batch.kind for batch in read]), read


def test_half_of_the_cold_then_half_of_the_hot_batches():
    found, _ = train([1.0] * 24, 8, 4, delay=4, ahead=2)
    assert found == [("cold", 4), ("hot", 2)] * 4


def test_a_rise_halves_the_rate_two_segments_later():
    # Segments of an epoch of 8 cold and 8 hot batches, with a loss each; the third one, cold, is worse than the first.
    losses = [*[1.0] * 4, *[5.0] * 4, *[2.0] * 4, *[5.0] * 4, *[2.0, 2.0, 5.0, 5.0] * 4]
    found, _ = train(losses, 8, 8, delay=0, ahead=0)
    assert found[:4] == [("cold", 4), ("hot", 4), ("cold", 4), ("hot", 4)]
    assert found[4:] == [("cold", 2), ("hot", 2)] * 4, "decided after segment 2, from segment 4 on"


def test_a_decision_waits_until_read_batches_are_trained():
    # Decided at the end of batch 12; segment 4 begins 4 batches later.
    losses = [*[1.0] * 4, *[5.0] * 4, *[2.0] * 4, *[5.0] * 4, *[2.0] * 4]
    exact, _ = train(losses, 8, 8, delay=4, ahead=3)
    late, _ = train(losses, 8, 8, delay=5, ahead=3)
    assert exact[4:] == [("cold", 2), ("hot", 2)]  # in time
    assert late[4:] == [("cold", 4)]


def test_falls_in_a_row_double_the_rate():
    per_segment = [9.0, 9.0, 8.0, 8.0, 7.0, 7.0, 6.0, 6.0]
    losses = [loss for loss in per_segment for _ in range(4)] + [5.0] * 16
    found, _ = train(losses, 8, 8, delay=0, ahead=0)
    # Falls after segments 2, 3 and 4: R = 1 from segment 6 on, which has the last 4 cold batches of the second epoch.
    assert found == [("cold", 4), ("hot", 4)] * 4 + [("cold", 8), ("hot", 8)]


def test_the_kinds_are_not_compared_with_each_other():
    cold_is_worse = [loss for _ in range(10) for loss in (*[3.0] * 4, *[1.0] * 4)]
    assert set(train(cold_is_worse, 8, 8, delay=0, ahead=0)[0]) == {("cold", 4), ("hot", 4)}


def test_a_skipped_batch_has_no_loss():
    schedule = SegmentSchedule(START, read_ahead=0)
    source = batches(schedule, 4, 4)
    for loss in (math.nan, 1.0, math.nan, math.nan):
        next(source)
        schedule.observe(loss)
    learned = schedule.with_learned(START).learned
    assert learned.last_losses == {"cold": 1.0}
    assert [made.segment for made in learned.decisions] == [0], "a segment without a loss decides nothing"


def test_an_epoch_begins_with_cold_batches_and_one_kind_alone_has_its_segments():
    assert train([1.0] * 10, 5, 0, delay=0, ahead=0)[0] == [("cold", 10)]
    _, read = train([1.0] * 6, 3, 0, delay=0, ahead=0)
    assert [batch.state.segments for batch in read] == [1, 1, 2, 3, 3, 4]
    assert [batch.state.left for batch in read] == [1, 0, 0, 1, 0, 0]


def test_reading_too_far_ahead_is_refused():
    source = batches(SegmentSchedule(START, read_ahead=4), 8, 8)
    with pytest.raises(ConfigError, match="batch 9 was asked for when the losses of 0 batches are known; needed"):
        list(itertools.islice(source, 20))


shapes = st.fixed_dictionaries(
    {
        "num_cold": st.integers(0, 40),
        "num_hot": st.integers(0, 40),
        "size": st.integers(1, 7),
        "delay": st.integers(0, 12),
        "losses": st.lists(st.sampled_from([0.5, 1.0, 2.0, math.nan]), min_size=1, max_size=120),
    }
)


@pytest.mark.slow
@given(shapes, st.data())
@examples(80)
def test_the_order_does_not_depend_on_reading_ahead_and_a_state_goes_on(shape, data):
    """Every sample once an epoch; the same batches for any read-ahead; a state saved in between gives the same rest."""
    size, num_hot, total = shape["size"], shape["num_hot"], shape["num_cold"] + shape["num_hot"]
    if total < size:
        return
    start = PackedState("d", size)

    def run(ahead: int, losses: Sequence[float], saved: PackedBatch | None = None) -> list[PackedBatch]:
        state = start if saved is None else saved.state
        schedule = SegmentSchedule(state, read_ahead=shape["delay"])
        source = batches(schedule, shape["num_cold"], num_hot, state, saved.stop if saved else 0)
        waiting, found = deque(), []
        for loss in losses:
            while len(waiting) <= ahead:
                waiting.append(next(source))
            batch = waiting.popleft()
            schedule.observe(loss)
            found.append(batch._replace(state=schedule.with_learned(batch.state)))
        return found

    losses = shape["losses"]
    plain = run(0, losses)
    assert run(data.draw(st.integers(0, shape["delay"])), losses) == plain
    stop = data.draw(st.integers(1, len(losses)))
    saved = plain[stop - 1]
    text = json.loads(json.dumps(asdict(saved.state)))
    assert decode(PackedState, text) == saved.state
    ahead = data.draw(st.integers(0, shape["delay"]))
    assert run(ahead, losses[stop:], saved) == plain[stop:]
    epoch = total // size
    for first in range(0, len(plain) - epoch + 1, epoch):
        seen = [at for batch in plain[first : first + epoch] for low, high in batch.ranges for at in range(low, high)]
        assert len(seen) == len(set(seen)) == epoch * size
        for batch in plain[first : first + epoch]:
            places = [at for low, high in batch.ranges for at in range(low, high)]
            assert {"hot": all, "cold": lambda hot: not any(hot), "mixed": any}[batch.kind](
                at < num_hot for at in places
            )
        mixed = [batch.kind for batch in plain[first : first + epoch]].count("mixed")
        assert mixed == (num_hot % size + shape["num_cold"] % size) // size <= 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: PackedState("d", 1, left=-1),
        lambda: PackedState("d", 1, batches=1, segments=2),
        lambda: PackedState("d", 1, left=1),
        lambda: Learned(loss_sum=math.inf),
        lambda: Learned(falls=-1),
        lambda: Learned(decisions=(Decision(0, 1, MOST_HALVINGS + 1),)),
    ],
)
def test_a_damaged_state_is_refused(make):
    with pytest.raises(DataError, match="packed"):
        make()


def test_the_rate_has_bounds():
    up = [float(n) for n in range(400)]
    schedule = SegmentSchedule(START, read_ahead=0)
    source = batches(schedule, 8, 8)
    for loss in up:
        next(source)
        schedule.observe(loss)
    assert schedule.rate == 2.0**-MOST_HALVINGS
    schedule = SegmentSchedule(START, read_ahead=0)
    source = batches(schedule, 8, 8)
    for loss in reversed(up):
        next(source)
        schedule.observe(loss)
    assert schedule.rate == 1.0
    assert FALLS > 1
