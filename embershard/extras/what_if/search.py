"""The best of many cases, without planning all of them: each has bounds on its samples per second that cost little.

No placement is faster than a step without any table: its dense layers, its host's thread, the sum of its gradients,
its samples' parsing. So a case whose bound is below what is asked for is not planned, nor one that costs more than a
case that reaches it. What is left out is not the best, whatever its plan (tested against all cases planned).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from embershard.extras.what_if.cases import ComparedCase, cheapest
from embershard.planning.cost.rates import of_each
from embershard.planning.cost.topology import Topology
from embershard.planning.request import PlanRequest
from embershard.planning.simulate.step_replay import Pipeline, replay_steps
from embershard.planning.uncertainty import CONSTANTS

#: Which cases were not planned: "9 ...".
CANNOT = "too slow for it even if tables took no time: dense layers, host or sum of gradients take too long"
SLOWER = "no faster than one that was planned, even if tables took no time"
DEARER = "no cheaper than one that reaches it, nor faster or surer"
TOO_DEAR = "above that price"
BESIDE = "with other numbers of ranks than the search needs: more are taken to reach more, until they do not"
#: On a GPU a replayed step is off by a part in 32 at most, either way.
_OFF = 1 / 16
#: Of an interval's draws, more than a twentieth have a constant beyond this share of its logarithmic range: each has
#: one in each 200th of it, and the interval's slow end is slower than 190 of 201 steps.
_SLOW = 0.94
#: A constant that a step depends on by less is not drawn.
_ALIKE = 1.01


def most_per_second(request: PlanRequest) -> float:
    """Return the samples per second that no plan for this request exceeds: those of a step without its tables."""
    workload, shape = request.workload, request.workload.shape
    layers = [workload.layers_work(own) for own in of_each(request.rates, shape.world_size)]
    of_ranks = [workload.rank_work([], [], 0, own) for own in layers]
    replayed = replay_steps(of_ranks, request.rates, Pipeline.of_run(shape))
    seconds = replayed.step_seconds * (1 - _OFF if shape.device == "cuda" else 1)
    return shape.global_batch_size / seconds if seconds else math.inf


def most_surely(topology: Topology, samples: int, pieces: int) -> float:
    """Return the samples per second that no plan's interval has at its slow end, by the host's thread alone.

    Args:
        topology: shaped to the ranks; of a calibrated one nothing is known.
        samples: of a step of all ranks.
        pieces: micro-batches of each rank, which the thread launches one after the other.
    """
    if topology.rates:
        return math.inf
    assumed, thread = topology.assumptions, CONSTANTS["step_overhead_seconds"]
    low, high = thread.range(assumed)
    collectives = CONSTANTS["collective_host_seconds"]
    slow = thread.set_to(topology, low * (high / low) ** _SLOW if low else high)
    slow = collectives.set_to(slow, collectives.range(assumed)[0])
    seconds = pieces * slow.rates_for(topology.world_size).step_overhead_seconds * (1 - _OFF)
    return _ALIKE * samples / seconds if seconds else math.inf


class BoundedCase(Protocol):
    """A case that may be planned."""

    @property
    def cost_per_hour(self) -> float:
        """Of all ranks."""

    @property
    def most_per_second(self) -> float:
        """Samples per second that no plan of it exceeds."""

    @property
    def most_surely(self) -> float:
        """Those that no plan of it has at the slow end of its interval."""


C = TypeVar("C", bound=BoundedCase)


@dataclass
class Searched:
    """The cases that were planned, and how many were not, by the reason."""

    planned: list[ComparedCase] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def fastest(self) -> float:
        """Samples per second of the fastest that was planned; 0 without any."""
        return max((each.samples_per_second for each in self.planned), default=0.0)

    def beside(self, other: Searched) -> Searched:
        """Return both searches together."""
        return Searched(self.planned + other.planned, self.left_out + other.left_out)

    def may_matter(self, case: BoundedCase, target: float) -> bool:
        """Return whether a case costs so little that it may be the cheapest which reaches so many samples per second,
        as predicted or for sure."""
        found, surest = cheapest(self.planned, target), cheapest(self.planned, target, surely=True)
        if found is None or case.cost_per_hour <= found.cost_per_hour:
            return True
        is_surer = surest is None or case.cost_per_hour <= surest.cost_per_hour
        return is_surer and case.most_surely >= target


def search_cheapest(candidates: Iterable[C], target: float, plan: Callable[[C], ComparedCase]) -> Searched:
    """Plan what may be the cheapest case that reaches so many samples per second, as predicted or for sure; where none
    does, what may be the fastest. From the cheapest on, of equal ones the fastest by their bound first."""
    found, too_slow = Searched(), list[C]()
    for each in sorted(candidates, key=lambda case: (case.cost_per_hour, -case.most_per_second)):
        surest = cheapest(found.planned, target, surely=True)
        at_best = (each.cost_per_hour, -each.most_per_second)
        if each.most_per_second < target:
            too_slow.append(each)
        elif (
            surest is not None and at_best >= (surest.cost_per_hour, -surest.samples_per_second)
        ) or not found.may_matter(each, target):
            found.left_out[DEARER] += 1
        else:
            found.planned.append(plan(each))
    return or_fastest(found, too_slow, target, plan)


def or_fastest(found: Searched, too_slow: Iterable[C], target: float, plan: Callable[[C], ComparedCase]) -> Searched:
    """Return what was found; where none of it reaches so many samples per second, with what may be the fastest of those
    that are too slow for that."""
    if cheapest(found.planned, target) is None:
        return found.beside(search_fastest(too_slow, plan, found.fastest))
    found.left_out[CANNOT] += len(list(too_slow))
    return found


def search_fastest(candidates: Iterable[C], plan: Callable[[C], ComparedCase], fastest: float = 0.0) -> Searched:
    """Plan what may be the fastest case, the fastest by their bound first. `fastest`: samples per second of a case that
    is known."""
    found = Searched()
    for each in sorted(candidates, key=lambda case: (-case.most_per_second, case.cost_per_hour)):
        if each.most_per_second < fastest:
            found.left_out[SLOWER] += 1
            continue
        found.planned.append(plan(each))
        fastest = max(fastest, found.planned[-1].samples_per_second)
    return found
