"""How certain step times are, and which machines reach a target."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path

import pytest

from embershard.planning.cost import topology as topologies
from embershard.planning.cost.constants import CONSTANTS
from embershard.planning.cost.topology import Assumptions, load_topology, read_topologies
from embershard.planning.make_plan import make_plan
from embershard.planning.predict import predict
from embershard.planning.request import Budget, PlanRequest
from embershard.planning.what_if import uncertainty as module
from embershard.planning.what_if.cases import PlannedCase, cases_to, cheapest, efficiency, planned_case
from embershard.planning.what_if.uncertainty import Uncertainty, uncertainty
from embershard.planning.workload import Layout
from embershard.sharding.memory_model import planned_slots
from tests.unit.planning.requests import make_request, make_workload

#: Of no step time: a memory, and what plans have none of.
NOT_OF_A_STEP = {"reserve_bytes", "jitter"}
MACHINE = replace(
    load_topology("h100x2x2"),
    assumptions=replace(load_topology("h100").assumptions, step_overhead_seconds=1e-5, collective_host_seconds=1e-6),
)


def request_for(num_ranks: int = 4) -> PlanRequest:
    """Tables of which some are in caches: work of every kind."""
    workload = make_workload((50_000, 9000, 300, 40), world_size=num_ranks, ranks_per_node=2, batch_size=512)
    return make_request(Budget(device_bytes=9_000_000), workload, rates=MACHINE.rates_for(num_ranks))


def test_every_constant_has_a_range_with_its_value_in_it():
    kinds = read_topologies(Path(topologies.__file__).parent / "topologies.toml")
    assert set(CONSTANTS) == {each.name for each in fields(Assumptions)} - NOT_OF_A_STEP
    for constant in CONSTANTS.values():
        assert constant.source
        for machine in kinds.values():
            low, high = constant.range(machine.assumptions)
            assert low <= getattr(machine.assumptions, constant.name) <= high
            assert low < high or constant.name == "ranks_per_host_link", "one link each cannot be fewer"
            for end in (low, high):  # both ends are machines
                assert constant.set_to(machine, end).rates_for(1)


def test_effects_are_what_plans_of_such_machines_tell():
    """Each end of a constant is the step that the same plan has on a machine with that value."""
    request = request_for()
    plan = make_plan(request)
    assert plan.prediction is not None
    assert plan.pools, "there are caches"
    found = uncertainty(request.workload, plan.prediction, MACHINE)
    assert len(found.effects) >= 5
    for effect in found.effects:
        for value, seconds in ((effect.low, effect.low_seconds), (effect.high, effect.high_seconds)):
            rates = effect.constant.set_to(MACHINE, value).rates_for(4)
            layout = Layout(request.workload, plan.tables)
            told = predict(layout, planned_slots(plan.pools, layout.pools), rates)
            assert seconds == pytest.approx(told.step_seconds, rel=1e-9)
    assert [each.seconds for each in found.effects] == sorted((each.seconds for each in found.effects), reverse=True)


def test_the_interval_is_within_the_ends_of_all_constants_and_the_same_every_time():
    request = request_for()
    prediction = make_plan(request).prediction
    assert prediction is not None
    found = uncertainty(request.workload, prediction, MACHINE)
    slow, fast = MACHINE, MACHINE
    for effect in found.effects:
        ends = sorted([(effect.low_seconds, effect.low), (effect.high_seconds, effect.high)])
        fast, slow = (effect.constant.set_to(*pair) for pair in zip((fast, slow), (v for _, v in ends), strict=True))
    steps = module._Steps(request.workload, prediction)
    assert steps.seconds(fast) < found.low_seconds < prediction.step_seconds < found.high_seconds < steps.seconds(slow)
    assert found == uncertainty(request.workload, prediction, MACHINE)


def test_what_is_certain_has_no_interval(monkeypatch):
    """The control: constants without a range leave the step as it is."""
    request = request_for()
    prediction = make_plan(request).prediction
    assert prediction is not None
    exact = {name: replace(each, low=1.0, high=1.0) for name, each in CONSTANTS.items()}
    monkeypatch.setattr(module, "CONSTANTS", exact)
    found = uncertainty(request.workload, prediction, MACHINE)
    assert not found.effects
    assert found.low_seconds == found.high_seconds == pytest.approx(prediction.step_seconds, rel=1e-9)


def test_calibrated_machines_have_the_back_tests_error():
    request = request_for()
    prediction = make_plan(request).prediction
    assert prediction is not None
    calibrated = replace(MACHINE, rates={4: MACHINE.rates_for(4)})
    found = uncertainty(request.workload, prediction, calibrated)
    assert found.low_seconds < prediction.step_seconds < found.high_seconds
    assert not found.effects


def case(num_ranks: int, per_second: float, price: float | None = None, machine: str = "", spread: float = 1.0):
    """A case of so many samples per second, that may be `spread` times slower or faster."""
    plan = make_plan(make_request(world_size=1))
    assert plan.prediction is not None
    seconds = plan.prediction.step_seconds
    plan = replace(plan, prediction=replace(plan.prediction, samples_per_second=per_second))
    certainty = Uncertainty(seconds / spread, seconds * spread)
    return PlannedCase(num_ranks, None, plan, "", machine, price, certainty)


def test_the_cheapest_case_reaches_the_target_for_the_least_money():
    cases = [
        case(8, 1e6, 3.0, "fast", spread=2.0),
        case(16, 2.1e6, 3.0, "fast", spread=2.0),
        case(16, 1.1e6, 1.0, "slow", spread=1.05),
        PlannedCase(1, None, None, "too large", "slow", 1.0),
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

    def make(num_ranks: int) -> PlannedCase:
        tried.append(num_ranks)
        if num_ranks < 2:
            return PlannedCase(num_ranks, None, None, "too large")
        return case(num_ranks, 1e6 * num_ranks, spread=1.25)

    tried: list[int] = []
    found = cases_to(target, per_node, 512, make)
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

    def make(num_ranks: int) -> PlannedCase:
        tried.append(num_ranks)
        return case(num_ranks, 1e6 * min(num_ranks, 4))

    assert cheapest(cases_to(1e9, 8, 4096, make), 1e9) is None
    assert tried == [1, 2, 4, 8, 16]


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


def test_the_page_on_planning_has_every_constants_range():
    text = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()
    default = Assumptions()
    for constant in CONSTANTS.values():
        low, high = constant.range(default)
        assert f"| `{constant.name}` | {getattr(default, constant.name):g} | {low:g} to {high:g} |" in text
