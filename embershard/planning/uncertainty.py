"""How certain a predicted step time is: the uncertainty of a machine's constants, carried through the replay.

Constants are taken to be independent of each other. Placement and cache sizes stay those of the plan: what is asked is
how fast that plan may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from embershard.planning.cost.back_test import CALIBRATED_LARGEST, UNMEASURED
from embershard.planning.cost.rates import StepWork, of_each
from embershard.planning.cost.topology import Assumptions, Topology
from embershard.planning.simulate.step_replay import Pipeline, replay_steps
from embershard.planning.workload import Workload
from embershard.settings.decoding import decode
from embershard.sharding.plan import Plan, Prediction

_HOUR_SECONDS = 3600
_DRAWS = 200
#: Of the draws, that lie between the ends of the interval.
_WITHIN = 0.9
_ALIKE = 1e-3  # of a step: what changes it by less does not matter


@dataclass(frozen=True)
class Constant:
    """An assumption of a machine that its step time depends on, and how far it may be off.

    Ranges are relative to the machine's own value, for machines differ: a step's host thread takes 5.2 ms on one and
    7.1 on another. None comes from a step, measured or published.

    >>> CONSTANTS["network"].range(Assumptions())
    (0.5, 0.97)

    Attributes:
        name: of the field of `Assumptions`.
        low, high: factors of the machine's value; as far as the field may be.
        source: of the range.
    """

    name: str
    low: float
    high: float
    source: str

    def range(self, assumptions: Assumptions) -> tuple[float, float]:
        """Return the least and the greatest value, in the field's own unit."""
        value, (least, most) = float(getattr(assumptions, self.name)), Assumptions.limits(self.name)
        low, high = (min(most, max(least, factor * value)) for factor in (self.low, self.high))
        return float(f"{low:.2g}"), float(f"{high:.2g}")

    def set_to(self, topology: Topology, value: float) -> Topology:
        """Return the machine with another value."""
        return topology.assuming(self.name, value)


_UNKNOWN = "none; as far off as a factor of 2 either way"
_OF_CLOCKS = "base to boost clock of server processors: AMD EPYC 9554, 3.1 to 3.75 GHz; 7742, 2.25 to 3.4"
#: By name. What no step time depends on is not here: `reserve_bytes` is memory. Nor is `jitter`: plans have none.
CONSTANTS: dict[str, Constant] = {
    each.name: each
    for each in (
        Constant("flops", 0.75, 1.09, "Maximum Achievable Matmul FLOPS (Bekman): at most 87 %; below 80, none"),
        Constant("streaming", 0.85, 1.06, "BabelStream: about 90 %; below 85, none"),
        Constant("device_memory", 0.6, 1.4, "none; from rows of one or two sectors to whole pages, with sort and L2"),
        Constant("host_memory", 0.5, 2.0, _UNKNOWN),
        Constant("host_link", 0.7, 1.3, "none; up to what PCIe's headers leave of its peak, 91 %"),
        Constant("node_link", 0.72, 1.36, "none; up to 96 % of the peak, NVIDIA's between nodes"),
        Constant("network", 0.72, 1.38, "none; up to 96 % of the peak, NVIDIA's"),
        Constant("planned_id_bytes", 0.5, 2.0, _UNKNOWN),
        Constant("row_access_bytes", 0.5, 2.0, _UNKNOWN),
        Constant("collective_seconds", 0.5, 2.0, _UNKNOWN),
        Constant("network_collective_seconds", 0.5, 2.0, _UNKNOWN),
        Constant("message_seconds", 0.2, 2.0, "none; from messages sent at once to one after the other"),
        Constant("launch_seconds", 0.65, 1.5, "CUDA Graphs' 2.9 to 3.8 us; 80 to 150 small kernels, not 110"),
        Constant("ranks_per_host_link", 0.5, 1.0, "one or two GPUs behind a PCIe switch, by the node"),
        Constant("step_overhead_seconds", 0.7, 1.5, _OF_CLOCKS),
        Constant("collective_host_seconds", 0.5, 2.0, "none; TorchRec's own step has 26 operations more, not 38"),
        Constant("input_threads", 0.5, 2.0, "a setting of the run"),
    )
}


@dataclass(frozen=True)
class Effect:
    """What one constant does to a step's time, all others as assumed.

    Attributes:
        low, high: values of the constant.
        low_seconds, high_seconds: of a step with each.
    """

    constant: Constant
    low: float
    high: float
    low_seconds: float
    high_seconds: float

    @property
    def seconds(self) -> float:
        """By how much the step's time differs between the two."""
        return abs(self.high_seconds - self.low_seconds)


@dataclass(frozen=True)
class Uncertainty:
    """How certain a step time is, as far as the constants decide; the model itself may be wrong, too.

    Attributes:
        low_seconds, high_seconds: nine in ten draws of all constants lie between them.
        effects: of the constants that matter, the largest first: a tornado. None of a calibrated machine.
    """

    low_seconds: float
    high_seconds: float
    effects: tuple[Effect, ...] = ()


@dataclass(frozen=True)
class PlannedCase:
    """One case: its plan, or the reason why there is none.

    Attributes:
        ratio: share of the rows on the device; None: as the memory allows.
        machine: the kind of it; empty where all cases are on one.
        price: of a rank for an hour, in any currency; None: not given.
        certainty: of the plan's step time.
    """

    num_ranks: int
    ratio: float | None
    plan: Plan | None
    problem: str = ""
    machine: str = ""
    price: float | None = None
    certainty: Uncertainty | None = None

    @property
    def name(self) -> str:
        """The case in words: `2 ranks, ratio 0.05`."""
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        of_it = f" of {self.machine}" if self.machine else ""
        return f"{ranks}{of_it}" if self.ratio is None else f"{ranks}{of_it}, ratio {self.ratio:g}"

    @property
    def sentence(self) -> str:
        """The case, and its speed."""
        if self.prediction is None:
            return f"{self.name}: does not fit"
        speed = f"{self.prediction.samples_per_second:,.0f} samples/s"
        return f"{self.name}: {self.prediction.step_seconds * 1e3:.2f} ms a step, {speed}"

    @property
    def prediction(self) -> Prediction | None:
        """The plan's prediction; None without a plan."""
        return None if self.plan is None else self.plan.prediction

    @property
    def samples_per_second(self) -> float:
        """Of all ranks; 0 without a plan."""
        return 0.0 if self.prediction is None else self.prediction.samples_per_second

    @property
    def range_per_second(self) -> tuple[float, float]:
        """Samples per second at the slow and at the fast end of the interval; without one, as predicted."""
        if self.prediction is None or self.certainty is None:
            return self.samples_per_second, self.samples_per_second
        samples = self.samples_per_second * self.prediction.step_seconds
        return samples / self.certainty.high_seconds, samples / self.certainty.low_seconds

    @property
    def cost_per_hour(self) -> float:
        """Of all ranks; without a price, their number."""
        return self.num_ranks * (1.0 if self.price is None else self.price)

    @property
    def samples_per_money(self) -> float | None:
        """Samples for one unit of the price's currency; None without a price."""
        return None if self.price is None else _HOUR_SECONDS * self.samples_per_second / self.cost_per_hour


def uncertainty(workload: Workload, prediction: Prediction, topology: Topology) -> Uncertainty:
    """Return how certain the step time of a prediction is. Deterministic.

    Each constant is drawn between its ends, evenly on a logarithmic scale, as strata of a Latin hypercube (McKay,
    Beckman and Conover 1979); the interval is from the 5th to the 95th of a hundred, and on a GPU, where no cache was
    measured, its end has many times the part that finds slots. Of a calibrated machine, whose rates are measured, it is
    as wide as the largest error of the back-test on either side.

    Args:
        workload: of the plan.
        prediction: its step is replayed.
        topology: shaped to the plan's ranks and nodes.
    """
    if topology.rates:
        seconds = prediction.step_seconds
        return Uncertainty(seconds / (1 + CALIBRATED_LARGEST), seconds / (1 - CALIBRATED_LARGEST))
    steps = _Steps(workload, prediction)
    effects = []
    for each in CONSTANTS.values():
        ends = each.range(topology.assumptions)
        effects.append(Effect(each, *ends, *(steps.seconds(each.set_to(topology, end)) for end in ends)))
    matter = [each for each in effects if each.seconds > _ALIKE * prediction.step_seconds]
    drawn = [steps.seconds(topology)]
    for values in _hypercube([(each.low, each.high) for each in matter]) if matter else ():
        machine = topology
        for effect, value in zip(matter, values, strict=True):
            machine = effect.constant.set_to(machine, float(value))
        drawn.append(steps.seconds(machine))
    low, high = np.quantile(drawn, [(1 - _WITHIN) / 2, (1 + _WITHIN) / 2])
    if topology.device == "cuda":
        high += (UNMEASURED - 1) * prediction.planning_seconds
    return Uncertainty(float(low), float(high), tuple(sorted(matter, key=lambda each: -each.seconds)))


class _Steps:
    """The step of a plan on other machines of its kind. Of the ranks' work, only that of the dense layers depends on a
    machine's constants: what limits each layer."""

    def __init__(self, workload: Workload, prediction: Prediction) -> None:
        self._workload, self._pipeline = workload, Pipeline.of_run(workload.shape)
        works = [decode(StepWork, rank.work) for rank in prediction.ranks]
        self._distinct = list(dict.fromkeys(works))  # of thousands of ranks, most have no table, and are alike
        number = {work: place for place, work in enumerate(self._distinct)}
        self._number = [number[work] for work in works]

    def seconds(self, topology: Topology) -> float:
        """Return the seconds of a step there."""
        num_ranks, rates = len(self._number), topology.rates_of_ranks(self._workload.shape.world_size)
        dense = {}
        for own in dict.fromkeys(of_each(rates, num_ranks)):
            layers = self._workload.layers_work(own)
            dense[own] = {name: getattr(layers, name) for name in ("dense_flops", "activation_bytes", "launches")}
        kinds = list(zip(self._number, of_each(rates, num_ranks), strict=True))
        works = {kind: replace(self._distinct[kind[0]], **dense[kind[1]]) for kind in dict.fromkeys(kinds)}
        return replay_steps([works[kind] for kind in kinds], rates, self._pipeline).step_seconds


def _hypercube(ranges: Sequence[tuple[float, float]]) -> np.ndarray:
    """Return draws [N, constants]: of each constant, one in each N-th of its range's logarithm."""
    random = np.random.default_rng(0)
    low, high = np.log(np.maximum(ranges, 1e-12)).T
    strata = np.stack([random.permutation(_DRAWS) for _ in ranges], axis=-1)
    return np.exp(low + (high - low) * (strata + random.random(strata.shape)) / _DRAWS)
