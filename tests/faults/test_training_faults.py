"""An exception in the caches of a training, or a real interrupt of it: the model is stock's, or refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.covering import keep, matrix
from tests.faults import leaving
from tests.faults.interrupts import KINDS, interrupted_runs
from tests.faults.model_level import MODES, NAMES_OF_MODES, TRAININGS, try_sample
from tests.ranks.workers import RankPool


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    """By number of ranks; their own, because their groups are made anew."""
    made = {world_size: RankPool(world_size, timeout_seconds=600.0) for world_size in (1, 2)}
    yield made
    for pool in made.values():
        pool.close()


@pytest.mark.parametrize(
    ("name", "count"),
    [("worker, staged", 4), ("inline, lfu", 4)] + [matrix(name, 12) for name in TRAININGS],
)
def test_a_fault_in_the_caches(name: str, count: int, pools: dict[int, RankPool], tmp_path: Path) -> None:
    training = TRAININGS[name]
    tally = try_sample(pools[training.world_size], training, count, 3, str(tmp_path))
    assert tally.problems == []
    assert tally.totals["equal"] + tally.totals["refused"] >= count - 1, tally.totals
    # Whether a worker's fault is met by a step or by the end is up to the threads: two faults may both be refused.
    assert tally.totals["equal"] > 0 or count < 8, tally.totals


@pytest.mark.parametrize("operation", ["Intake.enter", "Intake.offer"])
def test_a_fault_as_a_batch_is_taken(operation: str, pools: dict[int, RankPool], tmp_path: Path) -> None:
    """It trains once, with its own sizes."""
    tally = try_sample(pools[1], TRAININGS["worker, staged"], 40, 0, str(tmp_path), operation)
    assert tally.problems == []
    assert tally.totals == {"equal": 40}


@pytest.mark.matrix
def test_a_step_that_is_interrupted_before_it_told_the_others(pools: dict[int, RankPool], tmp_path: Path) -> None:
    """The rank does what it owes the others before anything else: collectives stay in one order on all ranks."""
    tally = try_sample(pools[2], TRAININGS["two ranks, inline"], 4, 0, str(tmp_path), "Window.send")
    assert tally.problems == []
    assert tally.totals["equal"] + tally.totals["refused"] == 4, tally.totals


@pytest.mark.parametrize("mode", keep(["rows"], NAMES_OF_MODES))
def test_all_ranks_leave_a_step(mode: str, pools: dict[int, RankPool], tmp_path: Path) -> None:
    """At lines of their own. `python -m tests.faults --modes 400` tries more of them, and faults of one rank."""
    tally = leaving.try_sample(pools[2], MODES[f"{mode}, inline"], 3, 1, str(tmp_path))
    assert tally.problems == []
    assert tally.totals.total() == 3


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["hot_cold", "data_parallel"])
def test_without_guards_copies_that_differ_are_found(mode: str, pools: dict[int, RankPool], tmp_path: Path) -> None:
    tally = leaving.try_sample(pools[2], MODES[f"{mode}, inline"], 1, 1, str(tmp_path), is_guarded=False)
    assert any("rows are not as on the other ranks" in problem for problem in tally.problems), tally.problems


def test_real_interrupts(pools: dict[int, RankPool]) -> None:
    (ended,) = pools[1].run(interrupted_runs, len(KINDS), 0)
    assert [each.problem for _, each in ended if each.problem] == []
    assert len(ended) == len(KINDS)
