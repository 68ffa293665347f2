"""Simulated scaling: what it says of each number of ranks, and plain placements for those that are not searched."""

from __future__ import annotations

import dataclasses

import pytest

from embershard.errors import ShardingError
from embershard.planning import many_ranks
from embershard.planning.cost.rates import Rates
from embershard.planning.cost.topology import Topology, load_topology
from embershard.planning.make_plan import best_candidate
from embershard.planning.many_ranks import plan_quickly, plan_with_care, wide_candidate
from embershard.planning.request import Budget, PlanRequest
from embershard.planning.simulate.step_replay import STRAGGLERS
from embershard.planning.simulate_scaling import simulate_plan, simulate_run, simulate_scaling
from embershard.sharding.shards import shards_of
from tests.unit.planning.requests import LFU, make_request
from tests.unit.planning.runs import predicted_plan

pytestmark = pytest.mark.slow

ROWS = (40_000, 9000, 5000, 900, 300, 40)


def request_on(num_ranks: int, name: str = "h100", **changes) -> tuple[PlanRequest, Topology]:
    per_node = min(8, num_ranks)
    topology = load_topology(name).shaped(per_node, num_ranks // per_node)
    none = {"step_overhead_seconds": 0.0, "collective_host_seconds": 0.0}  # they would hide the rest
    assumptions = dataclasses.replace(topology.assumptions, **none)
    topology = dataclasses.replace(topology, assumptions=assumptions)
    asked = make_request(
        changes.pop("budget", Budget(device_bytes=12_000_000)),
        rows=ROWS,
        world_size=num_ranks,
        ranks_per_node=per_node,
        rates=topology.rates_for(num_ranks),
        cache=dataclasses.replace(LFU, lookahead=8),
        **changes,
    )
    return asked, topology


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


# ---------------------------------------------------------------------------------------- many ranks


@pytest.mark.parametrize("types", [["table_wise"], ["row_wise"], ["table_wise", "row_wise"]])
def test_where_the_search_finds_none_simple_placements_are_tried(types, monkeypatch) -> None:
    monkeypatch.setattr(many_ranks, "_searched", lambda request: [])
    asked, _ = request_on(16, dims=(128,) * len(ROWS), types=types)
    for table in wide_candidate(asked).tables:
        assert sum(shard.rows for shard in shards_of(table, ranks_per_node=8)) == table.rows
        assert table.sharding in types


@pytest.mark.parametrize("num_ranks", [16, 64])
def test_the_search_on_busy_nodes_is_near_that_on_all(num_ranks) -> None:
    """And the same twice."""
    asked, _ = request_on(num_ranks, dims=(128,) * len(ROWS))
    found = wide_candidate(asked)
    assert found.step_seconds <= 1.1 * best_candidate(asked).step_seconds
    assert found.tables == wide_candidate(asked).tables


def test_a_plan_of_many_ranks_is_the_same_twice_byte_for_byte() -> None:
    asked, _ = request_on(64, dims=(128,) * len(ROWS))
    plan = plan_quickly(asked)
    assert plan.to_text() == plan_quickly(asked).to_text()
    assert plan.to_text() != plan_quickly(dataclasses.replace(asked, types=["table_wise"])).to_text()
    with_care = plan_with_care(asked)
    assert with_care.prediction.step_seconds <= plan.prediction.step_seconds
    assert with_care.bound is not None


def test_4096_ranks_are_placed_where_bytes_are_least() -> None:
    """Tables cut over nodes, whose ranks send an embedding once to each other node; each rank of another node is sent
    one by a table on one rank."""
    asked, _ = request_on(4096, dims=(128,) * len(ROWS), budget=Budget(device_bytes=80 * 10**9), batch_size=1024)
    found, table_wise = wide_candidate(asked), dataclasses.replace(asked, types=["table_wise"])
    assert {"grid_shard", "table_row_wise"} & {table.sharding for table in found.tables}
    assert found.step_seconds < 0.5 * wide_candidate(table_wise).step_seconds


def test_tables_too_large_for_any_placement_are_refused() -> None:
    asked, _ = request_on(64, budget=Budget(device_bytes=1000))
    with pytest.raises(ShardingError, match="no plain placement of 6 tables on 64 ranks fits"):
        wide_candidate(asked)


def test_replicated_tables_stay_replicated() -> None:
    asked, _ = request_on(64, replicate_rows=300)
    kernels = {table.table: table.kernel for table in wide_candidate(asked).tables}
    assert (kernels["t4"], kernels["t5"]) == ("replicated", "replicated")
