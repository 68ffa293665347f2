"""The bound against every plan of tiny tasks, and the formula of a step against its replay."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from embershard.cache.config import CachePolicy
from embershard.errors import ShardingError
from embershard.planning.bound import lower_bound
from embershard.planning.budget import placed
from embershard.planning.cost.rates import Rates
from embershard.planning.cost_arrays import cost_arrays
from embershard.planning.local_search import local_search
from embershard.planning.make_plan import Candidate, best_bound, best_candidate, make_plan, sized
from embershard.planning.request import Budget, PlanRequest
from embershard.sharding.plan import Plan
from embershard.sharding.plan_diff import diff_lines
from embershard.sharding.run_shape import ReplaySettings
from embershard.sharding.shards import TablePlacement, no_rows_problem
from tests.covering import keep
from tests.unit.planning.requests import make_request

pytestmark = pytest.mark.slow


def tiny(seed: int) -> PlanRequest:
    """Two tables on two ranks, of any size, on a GPU or not, with much memory, little, a ratio, or caches of a size."""
    rng = np.random.default_rng(seed)
    rows = tuple(int(count) for count in 10 ** rng.uniform(1.5, 4, 2))
    dims = tuple(int(dim) for dim in rng.choice([16, 64, 128], 2))
    taken = sum(count * (4 * dim + 4) for count, dim in zip(rows, dims, strict=True))
    budgets = (
        Budget(device_bytes=10**9),
        Budget(device_bytes=400_000 + round(float(rng.uniform(0.3, 0.8)) * taken)),
        Budget(ratio=float(rng.uniform(0.05, 0.5))),
        Budget(cache_bytes=200_000 + taken // 3),
    )
    policy, lookahead = (CachePolicy("lru"), 4) if seed % 3 == 0 else (CachePolicy("lfu"), 0)
    return make_request(
        budgets[seed % len(budgets)],
        rows=rows,
        dims=dims,
        batch_size=int(rng.choice([16, 256])),
        device="cpu" if seed % 5 == 0 else "cuda",
        exchange="auto" if seed % 7 == 0 else "pooled",
        cache=ReplaySettings(policy, lookahead),
    )


def every_plan(request: PlanRequest) -> Iterator[Candidate]:
    """All placements that fit: all sharding types, widths and ranks, with caches and without."""
    of_tables = []
    for table in request.sharded:
        own = []
        for name, kernel in itertools.product(request.allowed[table.table], ("cached", "device")):
            both = [(0, 1), (1, 0)] if name == "column_wise" else [(0, 1)]
            for ranks in [(0,), (1,)] if name == "table_wise" else both:
                own.append(TablePlacement(table.table, table.rows, table.dim, table.dtype, name, kernel, ranks))
        of_tables.append(own)
    for tables in itertools.product(*of_tables):
        if not no_rows_problem(tables, 2) and (found := sized(request, placed(request, tables))) is not None:
            yield found


@pytest.mark.parametrize("seed", keep(range(1, 8), range(200)))
def test_no_plan_is_faster_than_the_bound(seed):
    request = tiny(seed)
    best = min((each.step_seconds for each in every_plan(request)), default=None)
    bound = best_bound(request)
    if best is None:
        with pytest.raises(ShardingError):
            best_candidate(request)
        return
    assert bound is not None, "a plan fits"
    assert bound.fixed_seconds <= bound.step_seconds <= best * (1 + 1e-9)
    found = best_candidate(request).step_seconds
    assert best * (1 - 1e-9) <= found
    assert found <= 1.02 * best


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_formula_of_a_step_is_its_replay(device, world_size):
    request = make_request(
        Budget(device_bytes=10**9), rows=(9000, 4000, 700, 300), device=device, world_size=world_size, ranks_per_node=2
    )
    costs = cost_arrays(request, resident=True, cached=False)
    for found in local_search(costs, 20):
        candidate = sized(request, placed(request, found.tables))
        assert candidate is not None
        assert found.step_seconds == pytest.approx(candidate.step_seconds, rel=1e-9)


def test_a_bound_of_what_cannot_fit_is_refused():
    request = make_request(Budget(device_bytes=150_000))
    with pytest.raises(ShardingError, match="no plan fits into the memory of all ranks together"):
        lower_bound(cost_arrays(request, resident=True, cached=True, at_best=True))


def test_the_search_cuts_tables_over_nodes():
    """A grid has a block of columns on each node, and of rows on each of its ranks."""
    request = make_request(
        Budget(device_bytes=10**9), world_size=8, ranks_per_node=4, types=["grid_shard"], dims=(128,) * 4
    )
    found = local_search(cost_arrays(request, resident=True, cached=False), 10)
    assert {len(table.ranks) for table in found[0].tables} == {8}
    assert sized(request, placed(request, found[0].tables)) is not None


def test_equal_costs_give_equal_placements():
    costs = cost_arrays(make_request(), resident=True, cached=True)
    assert local_search(costs, 30) == local_search(costs, 30)


def test_a_plan_says_how_far_it_can_be_from_the_best(tmp_path):
    plan = make_plan(make_request(world_size=2))
    assert plan.bound is not None
    assert plan.bound.least_seconds <= plan.bound.step_seconds
    assert plan.bound.sentence.startswith("Within ")
    assert plan.bound.change
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").bound == plan.bound
    older = json.loads((tmp_path / "plan.json").read_text())
    del older["bound"]
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
    assert plan.bound is not None
    assert plan.bound.change == "memory of the device: 1.1 times as fast"
    faster = replace(request, rates=replace(rates, seconds_per_embedding_byte=1e-9 / 1.07))
    assert best_candidate(faster).step_seconds <= 0.95 * plan.bound.step_seconds
