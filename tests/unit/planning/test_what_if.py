"""Which machines reach a target."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from embershard.extras.what_if.cases import ComparedCase, cases_to, cheapest, efficiency, numbers_of_ranks, planned_case
from embershard.planning.make_plan import make_plan
from embershard.planning.request import Budget
from embershard.planning.uncertainty import Uncertainty, uncertainty
from tests.unit.planning.requests import make_request
from tests.unit.planning.test_uncertainty import MACHINE, request_for

pytestmark = pytest.mark.extra


def case(num_ranks: int, per_second: float, price: float | None = None, machine: str = "", spread: float = 1.0):
    """A case of so many samples per second, that may be `spread` times slower or faster."""
    plan = make_plan(make_request(world_size=1))
    assert plan.prediction is not None
    seconds = plan.prediction.step_seconds
    plan = replace(plan, prediction=replace(plan.prediction, samples_per_second=per_second))
    certainty = Uncertainty(seconds / spread, seconds * spread)
    return ComparedCase(num_ranks, None, plan, "", machine, price, certainty)


@pytest.mark.smoke
def test_the_cheapest_case_reaches_the_target_for_the_least_money():
    cases = [
        case(8, 1e6, 3.0, "fast", spread=2.0),
        case(16, 2.1e6, 3.0, "fast", spread=2.0),
        case(16, 1.1e6, 1.0, "slow", spread=1.05),
        ComparedCase(1, None, None, "too large", "slow", 1.0),
    ]
    assert cheapest(cases, 1e6) is cases[2]
    assert cheapest(cases, 1.05e6, surely=True) is cases[1]
    assert cheapest(cases, 3e6) is None
    assert cases[2].samples_per_money == 3600 * 1.1e6 / 16
    without = [replace(each, price=None) for each in cases]
    assert cheapest(without, 1e6) is without[0], "the fewest ranks"
    assert cases[0].range_per_second == pytest.approx((5e5, 2e6))
    assert efficiency(cases[1], cases) == pytest.approx(2.1 / 2)
    assert efficiency(cases[2], cases) == 1, "of its own machine"


@pytest.mark.parametrize(("target", "per_node"), [(5e5, 8), (3.1e6, 8), (9e6, 8), (33e6, 4), (1.2e7, 6), (2e8, 8)])
def test_the_fewest_ranks_that_reach_a_target_are_found(target, per_node):
    """Where each rank adds a million, slow ends are at 0.8 of it, and two ranks are needed for the memory."""

    def make(num_ranks: int) -> ComparedCase:
        tried.append(num_ranks)
        if num_ranks < 2:
            return ComparedCase(num_ranks, None, None, "too large")
        return case(num_ranks, 1e6 * num_ranks, spread=1.25)

    tried: list[int] = []
    found = cases_to(target, numbers_of_ranks(per_node, 512), make)
    possible = [n for n in range(2, 513) if n <= per_node or n % per_node == 0]
    for surely, speed in ((False, 1e6), (True, 0.8e6)):
        fewest = next((n for n in possible if n * speed >= target), None)
        reached = cheapest(found, target, surely=surely)
        assert (None if reached is None else reached.num_ranks) == fewest
    assert tried.count(max(tried)) == len(tried) / len(set(tried)) == 1, "each once"
    assert len(tried) <= 4 * math.log2(512)
    assert [each.num_ranks for each in found] == sorted(tried)


def test_more_ranks_are_not_tried_where_they_do_not_help():
    tried = []

    def make(num_ranks: int) -> ComparedCase:
        tried.append(num_ranks)
        return case(num_ranks, 1e6 * min(num_ranks, 4))

    assert cheapest(cases_to(1e9, numbers_of_ranks(8, 4096), make), 1e9) is None
    assert tried == [1, 2, 4, 8, 16]


@pytest.mark.smoke
def test_a_case_is_a_plan_with_its_certainty():
    request = request_for()
    found = planned_case(request, MACHINE, price=2.0)
    assert found.plan is not None
    assert found.certainty == uncertainty(request.workload, found.plan.prediction, MACHINE)
    assert (found.num_ranks, found.cost_per_hour) == (4, 8.0)
    refused = planned_case(replace(request, budget=Budget(device_bytes=1000)), MACHINE)
    assert refused.plan is None
    assert "does not fit" in refused.problem
    assert refused.range_per_second == (0.0, 0.0)
