"""Replayed steps: closed forms where there are some, what overlap and waiting may do, and that no work is lost."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.planning.cost.rates import PARTS, TERMS, Rates, StepWork, step_parts
from embershard.planning.simulate import step_replay
from embershard.planning.simulate.step_replay import STAGES, STRAGGLERS, Pipeline, replay_steps

pytestmark = pytest.mark.slow

AMOUNTS = [field.name for field in dataclasses.fields(StepWork)]
#: Kinds of work that one rank alone does not have.
EXCHANGED = [
    name
    for name in AMOUNTS
    if name.startswith(("sent_", "network_")) or name in ("all_reduce_bytes", "num_collectives")
]
COLLECTIVE_STAGES = ("ids", "embeddings", "all_reduce", "gradients")
#: A second, or some, of every kind of work: seconds that add up without rounding away.
RATES = Rates(**dict.fromkeys(Rates().to_dict(), 1.0))
amounts = st.integers(0, 9).map(float)
works = st.builds(StepWork, **dict.fromkeys(AMOUNTS, amounts))
ranks = st.lists(works, min_size=1, max_size=6)
rates_ = st.builds(Rates, **dict.fromkeys(Rates().to_dict(), st.integers(0, 3).map(float)))
gpus = st.builds(Pipeline, st.just("cuda"), st.integers(1, 8), st.none(), st.integers(0, 9), st.integers(0, 4))
cpus = st.builds(Pipeline, st.just("cpu"), st.integers(1, 8), st.none() | st.integers(1, 4))
jitters = st.sampled_from([0.0, 0.1])


def alone(work: StepWork) -> StepWork:
    """The work of a rank without others."""
    return dataclasses.replace(work, **dict.fromkeys(EXCHANGED, 0.0))


def beside_disk(work: StepWork, rates: Rates, seconds: float) -> float:
    """Of a step that takes so long without its disk, which works beside it."""
    return max(seconds, work.moved_pages * rates.seconds_per_page)


def in_all(work: StepWork, rates: Rates) -> float:
    """Seconds of all parts but the disk's."""
    return sum(seconds for part, seconds in step_parts(work, rates).items() if part != "disk")


def stage_seconds(work: StepWork, rates: Rates, stage: str) -> float:
    rate_of = {amount: rate for amount, rate, _ in TERMS}
    return sum(share * getattr(work, name) * getattr(rates, rate_of[name]) for name, share in STAGES[stage].items())


def in_turn(pipeline: Pipeline) -> Pipeline:
    """The same ranks, which do one thing after the other, with cores of their own."""
    return dataclasses.replace(pipeline, device="cpu", cores_per_node=None)


def test_every_kind_of_work_is_done_once_in_some_stage() -> None:
    for amount in AMOUNTS:
        assert sum(shares.get(amount, 0.0) for shares in STAGES.values()) == pytest.approx(1), amount


@given(works, rates_, cpus)
def test_one_rank_of_a_cpu_does_one_thing_after_the_other(work, rates, pipeline) -> None:
    replayed = replay_steps([alone(work)], rates, pipeline)
    own = in_all(alone(work), rates)
    expected = beside_disk(work, rates, own)
    assert replayed.step_seconds == pytest.approx(expected)
    parts = {**step_parts(alone(work), rates), "disk": expected - own, STRAGGLERS: 0.0}
    assert replayed.mean_parts == pytest.approx(parts)


@given(works, rates_, st.integers(2, 9))
def test_one_rank_of_a_gpu_takes_its_longest_stream(work, rates, lookahead) -> None:
    """Two batches of rows ahead: plans and copies of two batches overlap, too."""
    work = alone(work)
    train = ("lookup", "forward", "backward", "update", "optimizer")
    streams = {
        "train": sum(stage_seconds(work, rates, stage) for stage in train),
        "host": (1 + work.more_pieces) * rates.step_overhead_seconds,
        "plan": stage_seconds(work, rates, "plan"),
        "copies": stage_seconds(work, rates, "fills") + stage_seconds(work, rates, "write_backs"),
        "both": (sum(stage_seconds(work, rates, stage) for stage in ("plan", "fills", "write_backs"))) / 2,
        "input": stage_seconds(work, rates, "input"),
        "disk": stage_seconds(work, rates, "disk"),
    }
    replayed = replay_steps([work], rates, Pipeline("cuda", 1, None, lookahead, 2))
    assert replayed.step_seconds == pytest.approx(max(streams.values()), rel=1 / 32)


@given(ranks, rates_, gpus | cpus, jitters)
def test_the_parts_of_every_rank_add_up_to_the_step(works, rates, pipeline, jitter) -> None:
    replayed = replay_steps(works, rates, pipeline, jitter=jitter)
    assert set(replayed.parts) == {*PARTS, STRAGGLERS}
    total = np.sum(list(replayed.parts.values()), axis=0)
    np.testing.assert_allclose(total, replayed.step_seconds, rtol=1e-9, atol=1e-9)
    assert min(seconds.min() for seconds in replayed.parts.values()) > -1e-9


@given(works, rates_, gpus | cpus)
def test_equal_ranks_do_not_wait_for_each_other(work, rates, pipeline) -> None:
    replayed = replay_steps([work] * 4, rates, pipeline)
    assert replayed.parts[STRAGGLERS] == pytest.approx(0, abs=1e-9)
    if pipeline.device == "cpu":
        assert replayed.step_seconds == pytest.approx(beside_disk(work, rates, in_all(work, rates)))


@given(ranks, rates_, gpus | cpus, jitters)
def test_a_disk_is_seen_only_where_it_is_slower_than_all_else(works, rates, pipeline, jitter) -> None:
    """Each rank has its own pages; all wait for the slowest disk, the others as for a slower rank."""
    without = [dataclasses.replace(work, moved_pages=0.0) for work in works]
    alone = replay_steps(without, rates, pipeline, jitter=jitter)
    together = replay_steps(works, rates, pipeline, jitter=jitter)
    disks = [work.moved_pages * rates.seconds_per_page for work in works]
    assert together.step_seconds == pytest.approx(max(alone.step_seconds, *disks))
    waits = [max(0.0, disk - alone.step_seconds) for disk in disks]
    np.testing.assert_allclose(together.parts["disk"], waits, atol=1e-9)


@given(ranks, rates_, gpus, jitters)
def test_overlap_never_makes_a_step_longer(works, rates, pipeline, jitter) -> None:
    together = replay_steps(works, rates, pipeline).step_seconds
    assert together <= replay_steps(works, rates, in_turn(pipeline)).step_seconds * (1 + 1e-9) + 1e-9


@given(ranks, rates_, gpus | cpus, jitters, st.sampled_from(AMOUNTS), st.floats(0, 1))
def test_a_faster_machine_is_never_slower(works, rates, pipeline, jitter, amount, factor) -> None:
    rate = next(name for kind, name, _ in TERMS if kind == amount)
    faster = dataclasses.replace(rates, **{rate: factor * getattr(rates, rate)})
    before = replay_steps(works, rates, pipeline, jitter=jitter).step_seconds
    assert replay_steps(works, faster, pipeline, jitter=jitter).step_seconds <= before * (1 + 1e-9) + 1e-9


@given(ranks, rates_, gpus | cpus)
def test_rates_twice_as_large_take_twice_the_time(works, rates, pipeline) -> None:
    seconds = replay_steps(works, rates, pipeline).step_seconds
    assert replay_steps(works, rates.scaled(2), pipeline).step_seconds == pytest.approx(2 * seconds)


@given(ranks, rates_, cpus)
def test_ranks_that_share_cores_lose_none_of_them(works, rates, pipeline) -> None:
    """A node's C cores do the work of its L > C ranks: no faster than C of them can, and no slower than in turn."""
    works = [dataclasses.replace(alone(work), moved_pages=0.0) for work in works]
    local = len(works)
    pipeline = dataclasses.replace(pipeline, ranks_per_node=local)
    shared = replay_steps(works, rates, pipeline).step_seconds
    apart = replay_steps(works, rates, in_turn(pipeline)).step_seconds
    own = [sum(step_parts(work, rates).values()) for work in works]
    cores = pipeline.cores_per_node
    if cores is None or cores >= local:
        assert shared == apart
    else:
        assert sum(own) / local <= shared + 1e-9
        assert max(own) * cores / local <= shared + 1e-9
        assert shared <= apart + 1e-9


def test_a_rank_that_waits_leaves_its_core_to_the_others() -> None:
    """Two ranks on one core with 2 and 6 seconds of work (1 and 3 of a core alone): after 2 the first waits, and the
    other has the core for its 2 remaining seconds."""
    works = [StepWork(planned_ids=2), StepWork(planned_ids=6)]
    shared = replay_steps(works, Rates(seconds_per_planned_id=1), Pipeline("cpu", 2, cores_per_node=1))
    assert shared.step_seconds == pytest.approx(4)
    assert shared.parts[STRAGGLERS].tolist() == pytest.approx([2, 0])
    apart = replay_steps(works, Rates(seconds_per_planned_id=1), Pipeline("cpu", 2, cores_per_node=2))
    assert apart.step_seconds == pytest.approx(6)


def test_cores_copy_what_ranks_of_one_node_send() -> None:
    """A rank with less to send leaves its core, as above; over nodes there is a link, which no rank that waits speeds
    up. With as much to send, nothing is shared."""
    rates, pipeline = Rates(seconds_per_all_to_all_byte=1), Pipeline("cpu", 2, cores_per_node=1)
    works = [StepWork(sent_embedding_bytes=2), StepWork(sent_embedding_bytes=6)]
    assert replay_steps(works, rates, pipeline).step_seconds == pytest.approx(4)
    assert replay_steps(works * 2, rates, pipeline).step_seconds == pytest.approx(6)
    assert replay_steps(works[1:] * 2, rates, pipeline).step_seconds == pytest.approx(6)
    assert replay_steps(works, rates, in_turn(pipeline)).step_seconds == pytest.approx(6)


BY_HAND = StepWork(
    dense_flops=9,  # 3 forward, 6 backward
    embedding_bytes=3,  # 1 lookup, 2 update
    update_bytes=1,
    planned_ids=2,
    fills=4,
    sent_id_bytes=5,
    sent_embedding_bytes=2,
    sent_gradient_bytes=3,
    all_reduce_bytes=4,
)


def test_a_step_of_two_equal_ranks_as_computed_by_hand() -> None:
    """Training 1 + [2] + 3 + 6 + [3] + 2, then the all-reduce (behind the gradients: 4) is done 2 later, and 1: 20.
    The ids of the batch ahead go out behind it, beside the next step's lookup (1): 4 of their 5 seconds hold up the
    embeddings."""
    ahead = replay_steps([BY_HAND] * 2, RATES_WITHOUT_OVERHEAD, Pipeline("cuda", 2, None, 4, 2))
    assert ahead.step_seconds == pytest.approx(1 + 4 + 2 + 3 + 6 + 3 + 2 + 2 + 1)
    assert ahead.mean_parts["all_reduce"] == pytest.approx(2)
    assert ahead.mean_parts["all_to_all"] == pytest.approx(2 + 3 + 4)
    assert ahead.mean_parts["planning"] == ahead.mean_parts["fills"] == 0
    no_ids = dataclasses.replace(BY_HAND, sent_id_bytes=0)
    assert replay_steps([no_ids] * 2, RATES_WITHOUT_OVERHEAD, Pipeline("cuda", 2, None, 4, 2)).step_seconds == 20


def test_without_look_ahead_plan_and_fills_are_part_of_the_step() -> None:
    ahead = replay_steps([BY_HAND] * 2, RATES_WITHOUT_OVERHEAD, Pipeline("cuda", 2, None, 4, 2)).step_seconds
    none = replay_steps([BY_HAND] * 2, RATES_WITHOUT_OVERHEAD, Pipeline("cuda", 2, None, 0, 0))
    # Ids 5, then plan 2 and fills 4, then the lookup: the ids hold up nothing else.
    assert none.step_seconds == pytest.approx(20 + 5 + 2 + 4)
    assert (none.mean_parts["planning"], none.mean_parts["fills"]) == (2, 4)
    assert none.step_seconds > ahead


def test_an_all_reduce_of_several_buckets_overlaps_with_the_backward() -> None:
    one = dataclasses.replace(BY_HAND, sent_id_bytes=0, sent_gradient_bytes=0)
    rates = dataclasses.replace(RATES_WITHOUT_OVERHEAD, seconds_per_update_byte=0)
    two = dataclasses.replace(one, update_bytes=2 * 25 * 2**20)
    pipeline = Pipeline("cuda", 2, None, 4, 2)
    # The update takes 2 of the last bucket's 4 seconds; of the last of two buckets it takes both.
    assert replay_steps([one] * 2, rates, pipeline).step_seconds == pytest.approx(1 + 2 + 3 + 6 + 4)
    assert replay_steps([two] * 2, rates, pipeline).step_seconds == pytest.approx(1 + 2 + 3 + 6 + 2)


def test_jitter_costs_more_with_more_ranks_and_is_the_same_each_time() -> None:
    def seconds(num_ranks: int) -> float:
        return replay_steps([BY_HAND] * num_ranks, RATES, Pipeline("cuda", 8, None, 4, 2), jitter=0.05).step_seconds

    assert seconds(1) < seconds(8) < seconds(512)
    assert seconds(512) == seconds(512)


def test_a_removed_overlap_would_be_seen(monkeypatch) -> None:
    """The control of the test by hand: if plans and fills ran in the training's stream, the step would be longer."""
    pipeline = Pipeline("cuda", 2, None, 4, 2)
    before = replay_steps([BY_HAND] * 2, RATES_WITHOUT_OVERHEAD, pipeline).step_seconds
    make_resident = step_replay._Overlapping._make_resident

    def in_the_way(self, batch, factor) -> None:
        make_resident(self, batch, factor)
        self._wait("fills", self._free["copies"])

    monkeypatch.setattr(step_replay._Overlapping, "_make_resident", in_the_way)
    after = replay_steps([BY_HAND] * 2, RATES_WITHOUT_OVERHEAD, pipeline).step_seconds
    # Plan and fills take 6 seconds, during which the link sends the ids: those 4 seconds are not waited for again.
    assert after - before == pytest.approx(6 - 4)


RATES_WITHOUT_OVERHEAD = dataclasses.replace(RATES, step_overhead_seconds=0.0)
