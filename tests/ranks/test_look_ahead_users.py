"""What users do around the pipeline: found by a review that followed the docs and tried to break what they promise."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from embershard import cache_stats
from tests.covering import keep
from tests.ranks.look_ahead import (
    Batch,
    Case,
    Run,
    batches,
    build,
    differs,
    only_our_warnings_raise,
    pipeline,
    reference,
    train,
)
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks


class PlainBatch:
    """A batch of a class that neither TorchRec nor the pipeline knows."""

    def __init__(self, batch: Batch) -> None:
        self.features, self.labels = batch.features, batch.labels

    def to(self, device: torch.device, non_blocking: bool = False) -> PlainBatch:
        """The batch is there already."""
        return self

    def record_stream(self, stream: Any) -> None:
        """As TorchRec's batches."""


def reused_buffers(case: Case, run: Run, what: str, kind: Callable[[Batch], Any]) -> str:
    """A loader that refills the tensors of its batches, of a `kind`; the error's text."""
    ring = [kind(batch) for batch in batches(case, 3)]

    def refill() -> Iterator[Any]:
        for number in itertools.count():
            batch = ring[number % len(ring)]
            if number >= len(ring):
                tensor = batch.labels if what == "labels" else batch.features.values()
                tensor.zero_()
            yield batch

    loop, stream = pipeline(build(case, cached=True), run), refill()
    try:
        for _ in range(case.steps):
            loop.progress(stream)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def load_states_between_steps(case: Case, run: Run) -> list[str]:
    """The fused optimizer's own state is loaded after every third step; what differs from stock."""
    only_our_warnings_raise()
    reference(case)
    model = build(case, cached=True)

    def reload(step: int) -> None:
        if step % 3 == 0:
            model.fused_optimizer.load_state_dict(model.fused_optimizer.state_dict())

    losses = train(pipeline(model, run), batches(case), reload)
    return differs(case, case.steps, model, losses)


def evaluate_the_next_batch(case: Case, run: Run) -> list[str]:
    """Between two steps the batch that trains next is evaluated, and one without any id; what differs from stock."""
    only_our_warnings_raise()
    reference(case)
    model, data = build(case, cached=True), batches(case)

    @torch.no_grad()
    def evaluate(step: int) -> None:
        for batch in data[step + 1 : step + 3]:
            model(batch)

    losses = train(pipeline(model, run), data, evaluate)
    return differs(case, case.steps, model, losses)


def interrupt_a_step_that_ends(case: Case, run: Run, rank: int) -> list[str]:
    """On one rank an interrupt comes when a step has trained, before the next batch was offered to the others, and the
    training goes on; what differs from stock."""
    only_our_warnings_raise()
    expected = reference(case)
    model, stream = build(case, cached=True), iter(batches(case))
    loop = pipeline(model, run)
    end, ends = loop._inputs.step.end, itertools.count()

    def interrupted(is_ahead: bool) -> None:
        end(is_ahead)
        if next(ends) == 3 and dist.get_rank() == rank:
            raise KeyboardInterrupt

    loop._inputs.step.end = interrupted
    losses = []
    for step in range(case.steps):
        try:
            losses.append(loop.progress(stream).item())
        except KeyboardInterrupt:
            losses.append(expected.losses[step])
    return differs(case, case.steps, model, losses)


def leave_a_pipeline(case: Case, run: Run, how: str) -> dict[str, Any]:
    """A pipeline is left in mid-window, and another one goes on with the data; what differs, and what is left over."""
    only_our_warnings_raise()
    reference(case)
    model, data = build(case, cached=True), batches(case)
    old = pipeline(model, run)
    losses = [old.progress(iter(data[:2])).item() for _ in range(1)]
    new, rest = pipeline(model, run), iter(data[1:])
    losses.append(new.progress(rest).item())
    if how == "detached later":
        old.detach()
    else:
        del old
    losses += train(new, rest)
    late = sum(stats.critical_path_fills for stats in cache_stats(model))
    known = [len(pool.cache.next_use_index._known) for pool in new._pools]
    return {"different": differs(case, case.steps, model, losses), "late": late, "known": known}


def bad_id_on_one_rank(case: Case, run: Run, failing: int, number: int) -> tuple[str, int]:
    """A batch of one rank has an id out of range; the error's text on this rank, and how many steps it had trained."""
    data = batches(case)
    if dist.get_rank() == failing:
        data[number].features.values()[0] = 10**6
    loop, stream = pipeline(build(case, cached=True), run), iter(data)
    trained = 0
    try:
        while True:
            loop.progress(stream)
            trained += 1
    except Exception as error:
        return f"{type(error).__name__}: {error}", trained


CASE = Case(sharding="row_wise", ratio=0.6, policy="lookahead")


@pytest.mark.parametrize(("what", "kind"), [("labels", copy.copy), ("ids", copy.copy), ("ids", PlainBatch)])
def test_batches_that_are_refilled_in_place_are_refused(one_rank: RankPool, what: str, kind: Any) -> None:
    (message,) = one_rank.run(reused_buffers, CASE, Run(4, 2), what, kind)
    assert message.startswith("DataError: a batch was written to in place")


@pytest.mark.parametrize("worker", keep([True], [True, False]))
def test_loading_optimizer_states_between_steps(two_ranks: RankPool, worker: bool) -> None:
    assert two_ranks.run(load_states_between_steps, CASE, Run(4, 2, worker=worker)) == [[], []]


@pytest.mark.parametrize("empty_every", keep([2], [0, 2]))
def test_evaluating_the_batch_that_trains_next(two_ranks: RankPool, empty_every: int) -> None:
    case = Case(sharding="table_wise", ratio=0.6, policy="lookahead", empty_every=empty_every)
    assert two_ranks.run(evaluate_the_next_batch, case, Run(4, 2)) == [[], []]


def test_an_interrupt_as_a_step_ends(two_ranks: RankPool) -> None:
    """The other rank counts on the batch that this one offers then."""
    assert two_ranks.run(interrupt_a_step_that_ends, CASE, Run(4, 2), 0) == [[], []]


@pytest.mark.parametrize("how", keep(["freed"], ["freed", "detached later"]))
def test_a_pipeline_that_is_left_does_not_disturb_the_next_one(two_ranks: RankPool, how: str) -> None:
    for result in two_ranks.run(leave_a_pipeline, CASE, Run(4, 2), how):
        assert result["different"] == []
        assert set(result["known"]) == {0}


@pytest.mark.parametrize("number", [0, 6])
@pytest.mark.parametrize("failing", keep([1], [0, 1]))
def test_an_id_out_of_range_stops_all_ranks(two_ranks: RankPool, failing: int, number: int) -> None:
    """The others do not wait for the rank that found it."""
    answers = two_ranks.run(bad_id_on_one_rank, CASE, Run(2, 1), failing, number)
    message, trained = answers[failing]
    other, others_trained = answers[1 - failing]
    assert message.startswith("IdOutOfRangeError")
    assert "id 1000000" in message
    assert other.startswith("DataError")
    assert f"rank {failing}" in other
    assert trained == others_trained
