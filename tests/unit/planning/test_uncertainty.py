"""How certain step times are."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from embershard.planning import uncertainty as module
from embershard.planning.cost import topology as topologies
from embershard.planning.cost.back_test import UNMEASURED
from embershard.planning.cost.topology import Assumptions, load_topology, read_topologies
from embershard.planning.make_plan import make_plan
from embershard.planning.predict import predict
from embershard.planning.request import Budget, PlanRequest
from embershard.planning.uncertainty import CONSTANTS, uncertainty
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


@pytest.mark.matrix
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


@pytest.mark.slow
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
    slowest = steps.seconds(slow) + (UNMEASURED - 1) * prediction.planning_seconds
    assert steps.seconds(fast) < found.low_seconds < prediction.step_seconds < found.high_seconds < slowest
    assert found == uncertainty(request.workload, prediction, MACHINE)


@pytest.mark.slow
def test_what_is_certain_has_no_interval(monkeypatch):
    """The control: constants without a range leave the step as it is; what no GPU has measured is ten times as long."""
    request = request_for()
    prediction = make_plan(request).prediction
    assert prediction is not None
    exact = {name: replace(each, low=1.0, high=1.0) for name, each in CONSTANTS.items()}
    monkeypatch.setattr(module, "CONSTANTS", exact)
    found = uncertainty(request.workload, prediction, MACHINE)
    assert not found.effects
    assert found.low_seconds == pytest.approx(prediction.step_seconds, rel=1e-9)
    slots = max(rank.seconds["planning"] for rank in prediction.ranks)
    assert slots > 0
    assert found.high_seconds == pytest.approx(prediction.step_seconds + 9 * slots, rel=1e-9)
    on_cpu = uncertainty(request.workload, prediction, replace(MACHINE, device="cpu"))
    assert on_cpu.low_seconds == on_cpu.high_seconds, "caches were measured on CPUs"
    without = make_plan(make_request(Budget(device_bytes=10**10), request.workload, rates=request.rates)).prediction
    assert without is not None
    found = uncertainty(request.workload, without, MACHINE)
    assert found.low_seconds == found.high_seconds, "there is no cache"


@pytest.mark.slow
def test_calibrated_machines_have_the_back_tests_error():
    request = request_for()
    prediction = make_plan(request).prediction
    assert prediction is not None
    calibrated = replace(MACHINE, rates={4: MACHINE.rates_for(4)})
    found = uncertainty(request.workload, prediction, calibrated)
    assert found.low_seconds < prediction.step_seconds < found.high_seconds
    assert not found.effects


def test_the_page_on_planning_has_every_constants_range():
    text = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()
    default = Assumptions()
    for constant in CONSTANTS.values():
        low, high = constant.range(default)
        assert f"| `{constant.name}` | {getattr(default, constant.name):g} | {low:g} to {high:g} |" in text
