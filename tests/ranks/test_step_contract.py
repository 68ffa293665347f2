"""What users do in and around a step is either as in stock TorchRec, bit for bit, or refused with a sentence."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.covering import covering, matrix
from tests.ranks import step_contract
from tests.ranks.commands import Process, forked, print_to
from tests.ranks.look_ahead import Case, Run
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

RUNS = [Run(4, 2, 3), Run(4, 3, 4, 0, True, worker=False)]


# -- host rows that change


def test_loading_in_place_between_steps_reaches_rows_that_are_resident(two_ranks: RankPool, tmp_path: Path) -> None:
    case = Case(sharding="row_wise", dims=(16, 8, 16, 8))
    for different in two_ranks.run(step_contract.load_in_place_between_steps, case, RUNS, str(tmp_path)):
        assert different == [[], []]


@pytest.mark.parametrize(("how", "sharding"), covering(("data", "numpy", "rows"), ("row_wise", "column_wise")))
def test_writes_past_torch_are_read_once_they_are_announced(two_ranks: RankPool, how: str, sharding: str) -> None:
    case, run = Case(sharding=sharding), Run(4, 2, 3)
    assert two_ranks.run(step_contract.write_past_torch, case, run, how, True) == [[], []]


def test_writes_past_torch_go_unnoticed_otherwise(two_ranks: RankPool) -> None:
    """The control of the test above, and what the documentation says."""
    case = Case(sharding="row_wise")
    assert all(two_ranks.run(step_contract.write_past_torch, case, Run(4, 2, 3), "data", False))


# -- steps that are left


@pytest.mark.parametrize(("failing", "worker"), covering((0, 1), (True, False)))
def test_a_rank_that_raises_after_its_update_trains_on_with_the_others(
    two_ranks: RankPool, failing: int, worker: bool
) -> None:
    case, run = Case(sharding="row_wise"), Run(4, 2, 3, worker=worker)
    assert two_ranks.run(step_contract.failing_metric, case, run, failing) == [[], []]


def leave(rank: int, folder: Path, catches: bool) -> None:
    """Be one of two ranks, in a process of its own."""
    print_to(folder / f"rank_{rank}.txt")
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    step_contract.left_before_its_backward(Case(sharding="row_wise", batch_size=4), Run(4, 2, 3), catches)
    sys.stdout.flush()
    os._exit(0)  # as a process that an exception ends: without a farewell


@pytest.mark.parametrize("then", [matrix("ends"), "catches"])
def test_a_rank_that_leaves_a_step_before_its_backward_stops_all_with_its_message(tmp_path: Path, then: str) -> None:
    """Its process ends, or it goes on as if nothing had happened: then it is refused."""
    ranks = [Process(forked().Process(target=leave, args=(rank, tmp_path, then == "catches"))) for rank in (0, 1)]
    try:
        for rank in ranks:
            rank.wait(600)
    finally:
        for rank in ranks:
            rank.kill()
    first, second = ((tmp_path / f"rank_{rank}.txt").read_text() for rank in (0, 1))
    assert "rank 1 got KeyError: 'no such metric'" in second, first + second
    assert "rank 0 got StepError: rank 1 left step 2, so no rank goes on. It raised KeyError: 'no such" in first
    refused = "then StepError: rank 1 left step 2 before the end of its backward pass (KeyError: 'no such metric')"
    assert (refused in second) == (then == "catches"), second


def test_ranks_that_left_at_different_collectives_do_not_go_on(two_ranks: RankPool) -> None:
    """The next collective of one would meet an earlier one of the other: wrong data, if the sizes are the same."""
    first, second = two_ranks.run(step_contract.left_at_different_collectives)
    assert "StepError: rank 0 left step 3 when it had begun" in first
    assert "StepError: rank 1 left step 3 when it had begun" in second
    assert "(KeyError: 'of rank 0')" in first
    assert "(KeyError: 'of rank 0')" in second
    assert two_ranks.run(step_contract.left_at_the_same_collective) == ["", ""]


# -- what was announced


#: How a batch was changed, and what is said.
CHANGES = (
    ("lengths", "a batch with other lengths"),
    ("weights", "a batch with other weights"),
    ("in place", "was written to in place after it was announced"),
    ("lengths in place", "was written to in place after it was announced"),
    ("the same", ""),
)


@pytest.mark.parametrize(("change", "worker"), covering(CHANGES, (True, False)))
def test_a_forward_of_anything_else_than_what_was_announced_is_refused(
    two_ranks: RankPool, change: tuple[str, str], worker: bool
) -> None:
    how, says = change
    case, run = Case(sharding="row_wise", weighted=True), Run(4, 2, 3, worker=worker)
    for result in two_ranks.run(step_contract.change_the_batch, case, run, how):
        assert result["different"] == []
        assert (says in result["error"]) if says else not result["error"]


@pytest.mark.parametrize(
    ("step", "worker"),
    [(0, True), (7, False), *(matrix(*each) for each in itertools.product((0, 2, 5, 7), (True, False)))],
)
def test_a_second_forward_of_a_step_is_always_refused(two_ranks: RankPool, step: int, worker: bool) -> None:
    case, run = Case(sharding="row_wise"), Run(4, 2, 3, worker=worker)
    for result in two_ranks.run(step_contract.second_forward, case, run, step):
        assert result["error"].startswith("CacheError: a second forward of one step's batch")
        assert result["different"] == []


# -- flushes in another thread


def test_flushing_beside_the_training_loses_no_update(one_rank: RankPool) -> None:
    case, run = Case(sharding="row_wise", steps=40, optimizer="adagrad"), Run(4, 2, 3)
    (result,) = one_rank.run(step_contract.flush_beside_a_backward, case, run)
    assert result["errors"] == []
    assert result["different"] == []
    assert result["flushes"] >= 5


def test_an_update_that_ends_while_a_flush_copies_is_not_taken_for_written(one_rank: RankPool) -> None:
    assert one_rank.run(step_contract.update_that_ends_during_a_flush, Case(sharding="row_wise")) == [[]]


# -- how far ahead rows are held


def test_one_batch_is_held_ahead_where_no_step_waits(two_ranks: RankPool) -> None:
    case, run = Case(sharding="row_wise", steps=24, batch_size=8), Run(8, 3, 4, 0, True, adaptive=True, worker=True)
    for result in two_ranks.run(step_contract.depth_of, case, run, 0):
        assert result["different"] == []
        assert result["evictions"] > 300
        assert set(result["depths"]) == {1}


def test_all_ranks_hold_more_where_one_of_them_waits(two_ranks: RankPool) -> None:
    case, run = Case(sharding="row_wise", steps=44, batch_size=8), Run(8, 3, 4, 0, True, adaptive=True, worker=True)
    results = two_ranks.run(step_contract.depth_of, case, run, 40)
    assert results[0]["depths"] == results[1]["depths"]
    assert sorted(set(results[0]["depths"])) == [1, 2]
    assert results[0]["depths"][-1] == 2, "waiting ended with it, so it stays"
    for result in results:
        assert result["different"] == []
        assert result["evictions"] > 300
