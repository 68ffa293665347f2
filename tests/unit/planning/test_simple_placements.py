"""No plan is slower than a simple placement: whole tables round robin, greedily by some weight, or at random."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from embershard.planning.cost_arrays import cost_arrays
from embershard.planning.local_search import local_search
from embershard.planning.make_plan import all_sized, best_candidate
from embershard.planning.request import Budget, PlanRequest, cached
from embershard.sharding.shards import TablePlacement
from tests.covering import keep
from tests.unit.planning.requests import make_request, random_rows, tight_task

pytestmark = pytest.mark.slow

_RANDOM = 40


def small_task(seed: int) -> PlanRequest:
    """Eight tables on four GPUs: memory is roomy, tight or too little for all rows, by the seed."""
    rng = np.random.default_rng(seed)
    rows = random_rows(seed, 8)
    dims = tuple(int(dim) for dim in rng.choice([16, 32, 64, 128], len(rows)))
    request = make_request(Budget(device_bytes=10**9), rows=rows, dims=dims, world_size=4, batch_size=512)
    without_tables = sum(request.workload.memory([], {}).device.values())
    share = (3.0, 1.3, 0.4)[seed % 3]
    budget = Budget(device_bytes=round(share * request.workload.model.table_bytes / 4 + 1.3 * without_tables) + 2**20)
    return replace(request, budget=budget, rates=replace(request.rates, step_overhead_seconds=0.0))


def simple_placements(request: PlanRequest) -> Iterator[list[int]]:
    """Yield the rank of each table."""
    tables, world_size = request.sharded, request.workload.shape.world_size
    yield [number % world_size for number in range(len(tables))]
    lookups = [request.workload.lookups_per_sample[table.table] for table in tables]
    for weights in (
        lookups,
        [each * table.row_bytes() for each, table in zip(lookups, tables, strict=True)],
        [table.rows * table.row_bytes() for table in tables],
        [table.dim for table in tables],
    ):
        load, ranks = [0.0] * world_size, [0] * len(tables)
        for number in sorted(range(len(tables)), key=lambda number: -weights[number]):
            ranks[number] = int(np.argmin(load))
            load[ranks[number]] += weights[number]
        yield ranks
    yield from np.random.default_rng(0).integers(0, world_size, (_RANDOM, len(tables))).tolist()


def steps_of(request: PlanRequest) -> list[float]:
    """Return the seconds of a step of all simple placements that fit, with caches and without."""
    tried: list[tuple[TablePlacement, ...]] = []
    for ranks in simple_placements(request):
        tables = [cached(table, "table_wise", [rank]) for table, rank in zip(request.sharded, ranks, strict=True)]
        found = request.placed(tables)
        tried += [found, tuple(table.without_cache for table in found)]
    return [each.step_seconds for each in all_sized(request, tried)]


@pytest.mark.matrix
@pytest.mark.parametrize("seed", keep((1, 5), range(24)))
def test_no_simple_placement_is_faster_than_the_plan(seed):
    request = small_task(seed)
    steps = steps_of(request)  # none fits where little memory is left
    assert best_candidate(request).step_seconds <= min(steps, default=math.inf) * (1 + 1e-9)


@pytest.mark.parametrize("seed", keep((6,), (1, 6, 7)))
def test_what_the_search_finds_fits(seed):
    """A search without the memory finds placements that are faster and do not fit; what is left of them is slow."""
    request = tight_task(seed)
    costs = cost_arrays(request, resident=True, cached=False)
    limits = (costs.device_limit, 2.0**60)
    within, without = (local_search(replace(costs, device_limit=limit), 100)[0] for limit in limits)
    assert all_sized(request, [request.placed(within.tables)])
    assert without.step_seconds < within.step_seconds
    assert not all_sized(request, [request.placed(without.tables)])
    assert best_candidate(request).step_seconds <= within.step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("seed", keep((4,), (0, 4)))
def test_collectives_are_whole_in_the_bound(seed):
    """A bound with fractions of collectives was 7 and 10 % below a plan that is the best."""
    best = best_candidate(tight_task(seed))
    assert best.bound is not None
    assert -1e-9 <= best.bound.gap(best.step_seconds) < 0.01
