"""Simulated scaling: what it says of each number of ranks."""

from __future__ import annotations

import dataclasses

import pytest

from embershard.errors import ShardingError
from embershard.extras.what_if.simulate_scaling import simulate_plan, simulate_run, simulate_scaling
from embershard.planning.cost.rates import Rates
from embershard.planning.cost.topology import Topology
from embershard.planning.make_plan import best_candidate
from embershard.planning.request import Budget, PlanRequest
from embershard.planning.simulate.step_replay import STRAGGLERS
from tests.unit.planning.runs import predicted_plan
from tests.unit.planning.test_many_ranks import request_on

pytestmark = [pytest.mark.slow, pytest.mark.extra]


@pytest.mark.smoke
def test_every_number_of_ranks_is_planned_and_replayed() -> None:
    seen: list[int] = []
    runs = simulate_scaling([1, 2, 8, 64], request_on, seen.append)
    assert seen == runs, "each when it is done"
    assert [run.num_ranks for run in runs] == [1, 2, 8, 64]
    assert [run.global_batch_size for run in runs] == [64, 128, 512, 4096]
    assert [run.is_searched for run in runs] == [True, True, True, False]
    for run in runs:
        assert sum(run.parts.values()) == pytest.approx(run.step_seconds)
        assert run.samples_per_second == pytest.approx(run.global_batch_size / run.step_seconds)
        assert run.limit in run.parts
        assert 0 < run.low_seconds < run.step_seconds < run.high_seconds
    one, *others = runs
    assert one.parts is not None
    assert not {"all_to_all", "all_reduce", "latency", STRAGGLERS} & set(one.parts)
    assert one.efficiency(runs) == 1
    for run in others:
        losses = run.losses(runs)
        assert sum(losses.values()) == pytest.approx(1 - (run.efficiency(runs) or 0), abs=1e-9)
        assert list(losses.values()) == sorted(losses.values(), reverse=True)
    efficiencies = [run.efficiency(runs) for run in others]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert efficiencies[0] < 1


def test_what_does_not_fit_says_why_and_does_not_end_the_others() -> None:
    def request(num_ranks: int) -> tuple[PlanRequest, Topology]:
        return request_on(num_ranks, budget=Budget(device_bytes=12_000_000 if num_ranks > 1 else 1000))

    runs = simulate_scaling([1, 2], request)
    assert "the plan does not fit" in runs[0].problem
    assert (runs[0].samples_per_second, runs[0].efficiency(runs)) == (0, None)
    assert runs[1].efficiency(runs) == 1


def test_jitter_slows_many_ranks() -> None:
    asked, topology = request_on(8)
    assumptions = dataclasses.replace(topology.assumptions, jitter=0.0)
    without = simulate_run(asked, dataclasses.replace(topology, assumptions=assumptions))
    found = simulate_run(asked, topology)
    assert found.step_seconds > without.step_seconds
    # The plan's own time is the simulation without jitter: there is one model of a step.
    candidate = best_candidate(asked)
    assert without.step_seconds == candidate.step_seconds


def test_a_plan_is_simulated_with_the_cores_of_its_machine() -> None:
    plan = predicted_plan(world_size=4)
    rates = Rates(seconds_per_planned_id=1e-6, seconds_per_flop=1e-9)
    apart = Topology("t", "s", "cpu", 4, 10**9, rates={4: rates})
    shared = dataclasses.replace(apart, cores_per_node=2)
    assert simulate_plan(plan, shared).step_seconds < simulate_plan(plan, apart).step_seconds
    with pytest.raises(ShardingError, match="the plan has no prediction"):
        simulate_plan(dataclasses.replace(plan, prediction=None), apart)
