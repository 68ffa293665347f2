"""Which batch, on how many ranks: the best of all cases is found, though few of them are planned."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

from embershard.extras.what_if import grid
from embershard.extras.what_if.batches import StepBatch
from embershard.extras.what_if.cases import ComparedCase, cheapest, efficiency, numbers_of_ranks, planned_case
from embershard.extras.what_if.grid import Series
from embershard.extras.what_if.search import (
    CANNOT,
    DEARER,
    SLOWER,
    most_per_second,
    most_surely,
    search_cheapest,
    search_fastest,
)
from embershard.planning.cost.topology import load_topology
from embershard.planning.many_ranks import plan_quickly
from embershard.planning.request import Budget, PlanRequest
from embershard.planning.uncertainty import Uncertainty
from embershard.sharding.plan import Plan
from embershard.training.config import TrainConfig
from tests.covering import matrix
from tests.unit.planning.requests import make_request, make_workload
from tests.unit.sharding.plans import small_plan

pytestmark = pytest.mark.extra


@dataclass(frozen=True)
class Fake:
    """A case of which all is known: what it costs, may reach, and reaches, as predicted and at the slow end."""

    cost_per_hour: float
    most_per_second: float
    most_surely: float
    per_second: float
    slow_per_second: float
    plan: Plan | None

    def planned(self) -> ComparedCase:
        """Its plan, with these speeds."""
        if self.plan is None:
            return ComparedCase(1, None, None, "too large", price=self.cost_per_hour)
        assert self.plan.prediction is not None
        prediction = replace(self.plan.prediction, step_seconds=0.01, samples_per_second=self.per_second)
        certainty = Uncertainty(0.01, 0.01 * self.per_second / self.slow_per_second)
        plan = replace(self.plan, prediction=prediction)
        return ComparedCase(1, None, plan, price=self.cost_per_hour, certainty=certainty)


def fakes(seed: int, slack: float = 1.0) -> list[Fake]:
    """Costs and speeds without any order; of some equal costs. Bounds are above the speeds, or with `slack` below 1
    some of them are not."""
    rng = np.random.default_rng(seed)
    plan, found = small_plan(), []
    for _ in range(int(rng.integers(1, 25))):
        speed = float(rng.uniform(1, 100))
        fits = rng.random() < 0.85
        most, slow = speed * slack * rng.uniform(1, 1.5), speed * rng.uniform(0.5, 1)
        surely = slow * slack * rng.uniform(1, 1.5)
        found.append(Fake(float(rng.integers(1, 9)), most, surely, speed, slow, plan if fits else None))
    return found


def worth(case: ComparedCase | None) -> tuple[float, float] | None:
    return None if case is None else (case.cost_per_hour, case.samples_per_second)


def fastest(cases: list[ComparedCase]) -> float:
    return max((each.samples_per_second for each in cases), default=0.0)


def missed(seed: int, slack: float = 1.0) -> tuple[int, int]:
    """Return how many answers about the cases of a seed differ from those with all of them planned, and how many cases
    were left out."""
    cases, wrong, left_out = fakes(seed, slack), 0, 0
    everything = [each.planned() for each in cases]
    for target in (10.0, 40.0, 60.0, 80.0, 95.0, 200.0):
        found = search_cheapest(cases, target, Fake.planned)
        for surely in (False, True):
            best = cheapest(everything, target, surely=surely)
            wrong += worth(cheapest(found.planned, target, surely=surely)) != worth(best)
        wrong += cheapest(everything, target) is None and fastest(found.planned) != fastest(everything)
        assert len(found.planned) + found.left_out.total() == len(cases)
        assert set(found.left_out) <= {CANNOT, DEARER, SLOWER}
        left_out += found.left_out.total()
    found = search_fastest(cases, Fake.planned)
    return wrong + (fastest(found.planned) != fastest(everything)), left_out + found.left_out.total()


@pytest.mark.smoke
def test_no_best_case_is_missed_and_many_cases_are_not_planned():
    results = [missed(seed) for seed in range(300)]
    assert sum(wrong for wrong, _ in results) == 0
    assert sum(left_out for _, left_out in results) > 300 * 7 * 12 / 3, "a third of all cases"


def test_a_bound_below_what_a_case_reaches_would_miss_some():
    assert sum(missed(seed, slack=0.7)[0] for seed in range(60)) > 20


BATCHES, RANKS = (8, 64, 512), (1, 3)


def real_case(seed: int, num_ranks: int, batch_size: int) -> PlanRequest:
    """Small tables, on GPUs without the host's overhead or on a CPU, whole or cached."""
    rng = np.random.default_rng(seed)
    rows = tuple(int(each) for each in 10 ** rng.uniform(2, 4.3, 4))
    name = ("h100x8", "a10x4", "cpu")[seed % 3]
    workload = make_workload(
        rows,
        world_size=num_ranks,
        ranks_per_node=8,
        batch_size=batch_size,
        device="cpu" if name == "cpu" else "cuda",
        accumulate=1 + seed % 2,
        cores_per_node=2 if name == "cpu" else None,
    )
    machine = load_topology(name)
    rates = machine.rates_for(num_ranks)
    if seed % 4:
        rates = replace(rates, step_overhead_seconds=rates.step_overhead_seconds / 100)
    budget = Budget(ratio=0.3) if name == "cpu" else Budget(device_bytes=int(rng.choice([6e6, 2e7])))
    return make_request(budget, workload, rates=rates, effort=0.01)


@dataclass(frozen=True)
class Real:
    """A case of the planner's."""

    request: PlanRequest
    make: Callable[[PlanRequest], ComparedCase]

    @property
    def cost_per_hour(self) -> float:
        """As many as ranks."""
        return float(self.request.workload.shape.world_size)

    @property
    def most_per_second(self) -> float:
        """The bound."""
        return most_per_second(self.request)

    @property
    def most_surely(self) -> float:
        """Not bounded: the machine's rates are others than its constants say."""
        return math.inf

    def planned(self) -> ComparedCase:
        """Its plan."""
        return self.make(self.request)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 5, *(matrix(seed) for seed in (2, 3, 4, *range(6, 15)))])
def test_the_search_finds_what_the_whole_grid_has(seed):
    """Of plans by the planner itself: no plan is faster than its bound, and none that is left out is the best."""
    made: dict[int, ComparedCase] = {}

    def make(request: PlanRequest) -> ComparedCase:
        if id(request) not in made:
            plan = plan_quickly(request)
            assert plan.prediction is not None
            seconds = plan.prediction.step_seconds
            certainty = Uncertainty(0.9 * seconds, 1.2 * seconds)
            made[id(request)] = ComparedCase(plan.world_size, None, plan, certainty=certainty)
        return made[id(request)]

    cases = [Real(real_case(seed, ranks, batch), make) for ranks in RANKS for batch in BATCHES]
    everything = [each.planned() for each in cases]
    for case, planned in zip(cases, everything, strict=True):
        assert planned.samples_per_second <= case.most_per_second
    best = fastest(everything)
    assert best > 0
    left_out = 0
    for target in (0.1 * best, 0.4 * best, 0.9 * best, 1.1 * best):
        found = search_cheapest(cases, target, Real.planned)
        for surely in (False, True):
            assert worth(cheapest(found.planned, target, surely=surely)) == worth(
                cheapest(everything, target, surely=surely)
            )
        left_out += found.left_out.total()
    assert fastest(search_fastest(cases, Real.planned).planned) == best
    assert left_out


@pytest.mark.slow
@pytest.mark.parametrize(("pieces", "num_ranks"), [(1, 1), matrix(4, 2), matrix(1, 4)])
def test_no_interval_is_faster_at_its_slow_end_than_its_bound(pieces, num_ranks):
    """Where the host's thread limits the step: the bound is near, and above it."""
    machine = load_topology("h100x2x2").shaped(min(2, num_ranks), max(1, num_ranks // 2))
    workload = make_workload((900, 40), world_size=num_ranks, ranks_per_node=2, batch_size=64, accumulate=pieces)
    case = planned_case(make_request(workload=workload, rates=machine.rates_for(num_ranks)), machine)
    assert case.prediction is not None
    assert case.prediction.bottleneck == "overhead"
    most = most_surely(machine, 64 * num_ranks, pieces)
    assert case.range_per_second[0] <= most < 1.25 * case.range_per_second[0]
    assert most_surely(replace(machine, rates={1: machine.rates_for(1)}), 64, 1) == math.inf, "a calibrated machine"


@pytest.mark.smoke
def test_batches_are_of_a_rank_or_of_all_and_efficiency_is_among_the_same():
    weak, strong = StepBatch(1024), StepBatch(65_536, is_global=True)
    assert (str(weak), weak.scaling, str(strong), strong.scaling) == (
        "1,024 samples each", "weak", "65,536 samples together", "strong",
    )  # fmt: skip
    assert weak.overrides(TrainConfig()) == ["train.batch_size=1024"]
    assert weak.overrides(TrainConfig(global_batch_size=64)) == [
        "train.global_batch_size=none", "train.batch_size=1024",
    ]  # fmt: skip
    assert strong.overrides(TrainConfig(batch_size=64)) == ["train.batch_size=none", "train.global_batch_size=65536"]
    assert [StepBatch.of(each) for each in (TrainConfig(), TrainConfig(global_batch_size=64))] == [
        StepBatch(1024), StepBatch(64, is_global=True),
    ]  # fmt: skip
    assert weak.problem(64, 1, most=65_536) is None
    assert weak.problem(65, 1, most=65_536) == "with more than 65,536 samples a step (--most-batch)"
    assert strong.problem(6, 1, most=None) == "whose ranks cannot share 65,536 samples evenly"
    assert "train.accumulate = 2048" in (weak.problem(1, 2048, most=None) or "")
    plan = small_plan()

    def case(num_ranks: int, batch: StepBatch, per_second: float) -> ComparedCase:
        assert plan.prediction is not None
        made = replace(plan, prediction=replace(plan.prediction, samples_per_second=per_second))
        return ComparedCase(num_ranks, None, made, batch=batch)

    cases = [case(1, weak, 100), case(4, weak, 300), case(2, strong, 500), case(4, strong, 800)]
    assert [efficiency(each, cases) for each in cases] == [1, 0.75, 1, 0.8]
    assert cases[1].name == "4 ranks, 1,024 samples each"


@dataclass(frozen=True)
class FakeSetup:
    """A machine and a batch whose bound on so many ranks is known."""

    price: float
    bound: Callable[[int], float]
    machine: str = ""

    def request(self, num_ranks: int, ratio: float | None) -> float:
        """The bound, in place of a request of which it would be."""
        return self.bound(num_ranks)

    def shaped(self, num_ranks: int) -> float:
        """The bound, in place of a machine."""
        return self.bound(num_ranks)

    @property
    def config(self) -> SimpleNamespace:
        """Of batches that the bound knows."""
        return SimpleNamespace(train=TrainConfig(batch_size=1))


def test_the_ranks_of_every_batch_are_searched_for_the_cheapest(monkeypatch):
    """Where more ranks reach more, the search over all numbers of ranks names what the whole grid has."""
    monkeypatch.setattr(grid, "most_per_second", lambda bound: bound)
    monkeypatch.setattr(grid, "most_surely", lambda bound, *_: 0.8 * bound)
    rng, numbers, plan = np.random.default_rng(0), numbers_of_ranks(8, 128), small_plan()
    assert plan.prediction is not None
    planned = in_all = 0
    for _ in range(60):
        speeds = {batch: float(rng.uniform(0.5, 2)) * batch**0.3 for batch in (1, 8, 64)}
        power, least, price = float(rng.uniform(0.7, 1)), int(rng.integers(1, 5)), float(rng.choice([1.0, 3.5]))

        def case(num_ranks: int, batch: StepBatch, given=(speeds, power, least, price)) -> ComparedCase:
            speeds, power, least, price = given
            if num_ranks < least:
                return ComparedCase(num_ranks, None, None, "too large", price=price, batch=batch)
            speed = speeds[batch.samples] * num_ranks**power
            prediction = replace(plan.prediction, step_seconds=1.0, samples_per_second=speed)
            made, certainty = replace(plan, prediction=prediction), Uncertainty(0.9, 1.25)
            return ComparedCase(num_ranks, None, made, price=price, certainty=certainty, batch=batch)

        series = [
            Series(FakeSetup(price, lambda n, s=speed, p=power: 1.1 * s * n**p), None, StepBatch(batch), numbers)
            for batch, speed in speeds.items()
        ]
        everything = [case(number, each.batch) for each in series for number in numbers]
        for target in (1.0, 5.0, 40.0, 200.0, 1e6):
            found = grid.search_ranks(
                series, target, lambda each: case(each.num_ranks, each.series.batch), is_bounded=True
            )
            for surely in (False, True):
                assert worth(cheapest(found.planned, target, surely=surely)) == worth(
                    cheapest(everything, target, surely=surely)
                )
            assert len(found.planned) + found.left_out.total() == len(everything)
            planned, in_all = planned + len(found.planned), in_all + len(everything)
    assert planned < in_all / 8
