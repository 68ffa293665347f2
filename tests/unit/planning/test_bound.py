"""The bound against every plan of tiny tasks, and the formula of a step against its replay."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from embershard.cache.config import CachePolicy
from embershard.errors import ShardingError
from embershard.planning.bound import Bound, lower_bound, tightened
from embershard.planning.cost.rates import Rates, StepWork
from embershard.planning.cost_arrays import cost_arrays
from embershard.planning.local_search import local_search
from embershard.planning.make_plan import PlanSearch, best_candidate, make_plan, sized
from embershard.planning.request import Budget, PlanRequest
from embershard.planning.simulate.step_formula import STAGES, StepFormula
from embershard.planning.simulate.step_replay import Pipeline, replay_steps
from embershard.sharding.plan import Plan
from embershard.sharding.plan_diff import diff_lines
from embershard.sharding.run_shape import ReplaySettings
from tests.covering import keep
from tests.unit.planning.exhaustive import (
    NUM_TASKS,
    by_default,
    every_plan,
    on_shared_cores,
    on_two_nodes,
    on_two_ranks,
    tried,
)
from tests.unit.planning.requests import data_of, make_request, tight_task

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", keep(range(1, 5), range(NUM_TASKS[on_two_ranks])))
def test_no_plan_is_faster_than_the_bound(seed):
    check(on_two_ranks(seed))


@pytest.mark.parametrize("seed", keep((1, 2), range(30)))
def test_no_plan_is_faster_than_the_bound_where_ranks_share_cores(seed):
    check(on_shared_cores(seed))


@pytest.mark.parametrize("seed", keep((4, 16), range(NUM_TASKS[by_default])))
def test_no_plan_is_faster_than_the_bound_where_slots_are_a_share_of_the_rows(seed):
    check(by_default(seed))


def test_caches_take_no_slots_of_tables_with_other_columns(monkeypatch, capfd):
    """The plan is the best of all; a bound as if all tables shared one cache is much further from it."""
    assert _told(by_default(16)) < 0.5
    monkeypatch.setattr("embershard.planning.bound._add_pools", lambda *_: None)
    assert _told(by_default(16)) > 0.8
    monkeypatch.undo()
    best_candidate(by_default(4))
    assert capfd.readouterr().out == "", "its solver writes a line"
    monkeypatch.setattr(sys, "stdout", None)  # as of a process that was started without one
    assert best_candidate(by_default(4)).bound is not None


def _told(request: PlanRequest) -> float:
    found = best_candidate(request)
    assert found.bound is not None
    return found.bound.gap(found.step_seconds)


def check(request: PlanRequest) -> None:
    found = tried(request)
    assert not found.problem
    if found.best is not None:
        assert found.found is not None
        assert found.found <= 1.02 * found.best


def test_a_bound_as_if_every_rank_were_busy_is_above_plans(monkeypatch):
    """A negative control: a rank whose node is idle has a core of its own."""
    monkeypatch.setattr("embershard.planning.bound._alone", lambda *_: 1.0)
    wrong = [tried(on_shared_cores(seed)).problem for seed in (1, 2)]
    assert all(problem.startswith("a bound of ") for problem in wrong), wrong


def test_a_bound_above_the_plan_is_said_to_be_none(monkeypatch, tmp_path):
    """It is not lowered to the plan, which then would seem to be the best."""
    right = best_candidate(make_request()).bound
    wrong = Bound(1.5 * right.step_seconds, right.fixed_seconds)
    monkeypatch.setattr(PlanSearch, "bound", lambda self: wrong)
    plan = make_plan(make_request())
    assert plan.bound.least_seconds == wrong.step_seconds
    assert plan.bound.sentence.startswith("The bound is not valid here: no plan should take less than ")
    assert "please report it with this plan's file" in plan.bound.sentence
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").bound == plan.bound


@given(st.integers(0, 2**32 - 1), st.sampled_from([(4, 1), (4, 2), (4, 3), (2, 1), (4, 4), (3, 2)]))
def test_ranks_that_share_cores_are_done_when_the_replay_says(seed, node):
    """The totals of all ranks, with one more shard on each of them in turn, as if steps were replayed."""
    local, cores = node
    rng, pipeline = np.random.default_rng(seed), Pipeline("cpu", local, cores)
    formula = StepFormula(pipeline, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 1, 0.0, 0.0)
    num_ranks = local * int(rng.integers(1, 3))
    totals = rng.exponential(size=(num_ranks, len(STAGES))) * (rng.random((num_ranks, 1)) < 0.6)
    added = rng.exponential(size=len(STAGES))
    for each in (totals, added):  # a rank that updates rows has looked them up
        each[..., STAGES.index("lookup")] += each[..., STAGES.index("update")]
    for rank in range(num_ranks):
        totals[rank] += added
        assert float(formula.seconds(formula.slowest(totals), 0)) == pytest.approx(_replayed(formula, totals))
        totals[rank] -= added


def _replayed(formula: StepFormula, totals: NDArray[np.float64]) -> float:
    """The seconds of a step of ranks with such work, replayed."""
    of = dict(zip(STAGES, totals.T, strict=True))
    amounts = {
        "planned_ids": of["plan"],
        "fills": of["copies"],
        "embedding_bytes": 1.5 * of["update"],  # of which a lookup has half of what the update has
        "row_ids": of["lookup"] - 0.5 * of["update"],
        "sent_embedding_bytes": of["embeddings"],
        "sent_gradient_bytes": of["gradients"],
        "sent_id_bytes": of["ids"],
    }
    names = ("planned_id", "fill", "embedding_byte", "row_id", "all_to_all_byte")
    rates = Rates(**{f"seconds_per_{name}": 1.0 for name in names})
    works = [StepWork(**{name: float(each[rank]) for name, each in amounts.items()}) for rank in range(len(totals))]
    fixed = formula.input + formula.overhead + formula.forward + formula.backward + formula.optimizer
    return replay_steps(works, rates, formula.pipeline).step_seconds + fixed + formula.all_reduce


@pytest.mark.parametrize(("device", "cores_per_node"), [("cpu", None), ("cpu", 1), ("cuda", None)])
@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (4, 1), (2, 4)])
def test_the_formula_of_a_step_is_its_replay(device, cores_per_node, world_size, accumulate):
    request = make_request(
        Budget(device_bytes=10**9),
        rows=(9000, 4000, 700, 300),
        device=device,
        cores_per_node=cores_per_node,
        world_size=world_size,
        ranks_per_node=2,
        accumulate=accumulate,
    )
    costs = cost_arrays(request, resident=True, cached=False)
    for found in local_search(costs, 20):
        candidate = sized(request, request.placed(found.tables))
        assert found.step_seconds == pytest.approx(candidate.step_seconds, rel=1e-9)
    assert PlanSearch(request).bound().step_seconds <= best_candidate(request).step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("budget", [Budget(device_bytes=10**9), Budget(ratio=0.1)], ids=["resident", "cached"])
@pytest.mark.parametrize(("lookahead", "prefetch"), [(0, 2), (3, 1)])
def test_the_formula_is_the_replay_where_nothing_else_is_slower(budget, lookahead, prefetch):
    """Without samples to read and without a host: what is sent, planned and filled between steps counts. Caches'
    sizes are taken from all ranks together, so their fills are nearly those."""
    rows = (9000, 4000, 700, 300)
    data = replace(data_of(rows), read_seconds_per_sample=None)
    replayed = ReplaySettings(CachePolicy("lfu"), lookahead, prefetch)
    types = ["table_wise", "column_wise"]
    request = make_request(budget, rows=rows, data=data, cache=replayed, batch_size=2048, types=types)
    request = replace(request, rates=replace(request.rates, step_overhead_seconds=0.0))
    is_cached = budget.ratio is not None
    costs = cost_arrays(request, resident=not is_cached, cached=is_cached)
    for found in local_search(costs, 20):
        candidate = sized(request, request.placed(found.tables))
        assert found.step_seconds == pytest.approx(candidate.step_seconds, rel=0.02 if is_cached else 1e-9)
    bound = PlanSearch(request).bound()
    assert bound.step_seconds <= best_candidate(request).step_seconds * (1 + 1e-9)


def test_what_cannot_run_beside_a_step_makes_it_longer():
    """The control: with look-ahead, the same work takes less."""
    work = StepWork(sent_id_bytes=1.0, planned_ids=1.0, fills=1.0, row_ids=1.0, dense_flops=1.0)
    rates = Rates(
        **{f"seconds_per_{name}": 1.0 for name in ("all_to_all_byte", "planned_id", "fill", "row_id", "flop")}
    )
    steps = [
        replay_steps([work] * 2, rates, Pipeline("cuda", 2, None, *ahead)).step_seconds for ahead in ((0, 2), (4, 1))
    ]
    assert steps == pytest.approx([5.0, 2.0])


@pytest.mark.matrix
def test_a_tighter_bound_is_between_the_bound_and_the_plan():
    """Some tables need another sharding type, of whose collectives the first bound has a fraction."""
    request = tight_task(0)
    loose, best = PlanSearch(request).bound(), best_candidate(request)
    tight = tightened(PlanSearch(request).costs_at_best, loose, 2 * best.step_seconds)
    assert loose.step_seconds * 1.02 < tight.step_seconds <= best.step_seconds
    assert tight.fixed_seconds == loose.fixed_seconds


@pytest.mark.parametrize("seed", keep((2,), (0, 2, 3)))
def test_a_tighter_bound_is_below_every_plan(seed):
    request = on_two_nodes(seed)
    loose = PlanSearch(request).bound()
    tight = tightened(PlanSearch(request).costs_at_best, loose, 2 * loose.step_seconds)
    assert loose.step_seconds <= tight.step_seconds <= min(every_plan(request)) * (1 + 1e-9)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", keep((0, 3), range(NUM_TASKS[on_two_nodes])))
def test_no_plan_is_faster_than_the_bound_on_two_nodes(seed):
    check(on_two_nodes(seed))


def test_a_bound_of_what_cannot_fit_is_refused():
    request = make_request(Budget(device_bytes=150_000))
    with pytest.raises(ShardingError, match="no plan fits"):
        lower_bound(cost_arrays(request, resident=True, cached=True, at_best=True))


def test_the_search_cuts_tables_over_nodes():
    """A grid has a block of columns on each node, and of rows on each of its ranks."""
    request = make_request(
        Budget(device_bytes=10**9), world_size=8, ranks_per_node=4, types=["grid_shard"], dims=(128,) * 4
    )
    found = local_search(cost_arrays(request, resident=True, cached=False), 10)
    assert {len(table.ranks) for table in found[0].tables} == {8}
    assert sized(request, request.placed(found[0].tables)) is not None


def test_equal_costs_give_equal_placements():
    costs = cost_arrays(make_request(), resident=True, cached=True)
    assert local_search(costs, 30) == local_search(costs, 30)


def test_a_plan_says_how_far_it_can_be_from_the_best(tmp_path):
    plan = make_plan(make_request(world_size=2))
    assert plan.bound.least_seconds <= plan.bound.step_seconds
    assert plan.bound.sentence.startswith("Within ")
    assert plan.bound.change
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").bound == plan.bound
    older = json.loads((tmp_path / "plan.json").read_text())
    del older["bound"], older["prediction"]["contents"]
    (tmp_path / "plan.json").write_text(json.dumps(older))
    read = Plan.load(tmp_path / "plan.json")
    assert read.bound is None
    assert read.prediction == plan.prediction
    assert diff_lines(read, plan) == [f"bound: none -> {plan.bound.sentence}"]


def test_the_named_change_makes_a_step_shorter():
    """On a machine whose steps are lookups, only faster memory helps; twice as fast is more than enough."""
    rates = Rates(seconds_per_embedding_byte=1e-9)
    request = make_request(Budget(device_bytes=10**9), rates=rates)
    plan = make_plan(request)
    assert plan.bound.change == "memory of the device: 1.1 times as fast"
    faster = replace(request, rates=replace(rates, seconds_per_embedding_byte=1e-9 / 1.07))
    assert best_candidate(faster).step_seconds <= 0.95 * plan.bound.step_seconds
