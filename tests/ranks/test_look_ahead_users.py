"""What users do around the pipeline: found by a review that followed the docs and tried to break what they promise."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.ranks import look_ahead_users as users
from tests.ranks.look_ahead import Case, Run
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks
CASE = Case(sharding="row_wise", ratio=0.6, policy="lookahead")


@pytest.mark.parametrize(("what", "kind"), [("labels", copy.copy), ("ids", copy.copy), ("ids", users.PlainBatch)])
def test_batches_that_are_refilled_in_place_are_refused(one_rank: RankPool, what: str, kind: Any) -> None:
    (message,) = one_rank.run(users.reused_buffers, CASE, Run(4, 2), what, kind)
    assert message.startswith("DataError: a batch was written to in place")


@pytest.mark.parametrize("worker", [True, False])
def test_loading_optimizer_states_between_steps(two_ranks: RankPool, worker: bool) -> None:
    assert two_ranks.run(users.load_states_between_steps, CASE, Run(4, 2, worker=worker)) == [[], []]


@pytest.mark.parametrize("empty_every", [0, 2])
def test_evaluating_the_batch_that_trains_next(two_ranks: RankPool, empty_every: int) -> None:
    case = Case(sharding="table_wise", ratio=0.6, policy="lookahead", empty_every=empty_every)
    assert two_ranks.run(users.evaluate_the_next_batch, case, Run(4, 2)) == [[], []]


def test_an_interrupt_as_a_step_ends(two_ranks: RankPool) -> None:
    """The other rank counts on the batch that this one offers then."""
    assert two_ranks.run(users.interrupt_a_step_that_ends, CASE, Run(4, 2), 0) == [[], []]


@pytest.mark.parametrize("how", ["freed", "detached later"])
def test_a_pipeline_that_is_left_does_not_disturb_the_next_one(two_ranks: RankPool, how: str) -> None:
    for result in two_ranks.run(users.leave_a_pipeline, CASE, Run(4, 2), how):
        assert result["different"] == []
        assert set(result["known"]) == {0}


@pytest.mark.parametrize("number", [0, 6])
@pytest.mark.parametrize("failing", [0, 1])
def test_an_id_out_of_range_stops_all_ranks(two_ranks: RankPool, failing: int, number: int) -> None:
    """The others do not wait for the rank that found it."""
    answers = two_ranks.run(users.bad_id_on_one_rank, CASE, Run(2, 1), failing, number)
    message, trained = answers[failing]
    other, others_trained = answers[1 - failing]
    assert message.startswith("IdOutOfRangeError")
    assert "id 1000000" in message
    assert other.startswith("DataError")
    assert f"rank {failing}" in other
    assert trained == others_trained
