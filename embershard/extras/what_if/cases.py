"""Plans for several machines and numbers of ranks, compared: what each case would reach, cost, and how surely."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from embershard.errors import ShardingError
from embershard.planning.cost.topology import Topology
from embershard.planning.many_ranks import plan_quickly
from embershard.planning.request import PlanRequest
from embershard.planning.uncertainty import PlannedCase, uncertainty

#: Twice the ranks with less gain than this: more of them will not reach a target either.
_LEAST_GAIN = 1.02
_MOST_USELESS = 2


def planned_case(
    request: PlanRequest, topology: Topology, ratio: float | None = None, price: float | None = None, machine: str = ""
) -> PlannedCase:
    """Plan one case, and say how certain its step time is.

    Args:
        request: for its number of ranks.
        topology: shaped to them.
        ratio, price, machine: as in `PlannedCase`.
    """
    num_ranks = request.workload.shape.world_size
    try:
        plan = plan_quickly(request)
    except ShardingError as error:
        return PlannedCase(num_ranks, ratio, None, str(error), machine, price)
    assert plan.prediction is not None, "a new plan has one"
    certainty = uncertainty(request.workload, plan.prediction, topology)
    return PlannedCase(num_ranks, ratio, plan, "", machine, price, certainty)


def efficiency(case: PlannedCase, cases: Sequence[PlannedCase]) -> float | None:
    """Return the samples per second and rank, relative to those of the smallest number of ranks of the same machine,
    with the same ratio, that has a plan; None without a plan."""
    per_rank = {
        each.num_ranks: each.samples_per_second / each.num_ranks
        for each in cases
        if (each.machine, each.ratio) == (case.machine, case.ratio) and each.plan is not None
    }
    own = None if case.plan is None else per_rank.get(case.num_ranks)
    return None if own is None else own / per_rank[min(per_rank)]


def cheapest(cases: Sequence[PlannedCase], target: float, *, surely: bool = False) -> PlannedCase | None:
    """Return the case that reaches so many samples per second for the least money, without prices with the fewest
    ranks; of equal ones the fastest. None: none does.

    Args:
        surely: at the slow end of the interval, too.
    """
    reach = [each for each in cases if each.plan is not None and _speed(each, surely) >= target]
    return min(reach, key=lambda each: (each.cost_per_hour, -each.samples_per_second), default=None)


def _speed(case: PlannedCase, surely: bool) -> float:
    return case.range_per_second[0] if surely else case.samples_per_second


def cases_to(
    target: float, ranks_per_node: int, most_ranks: int, make: Callable[[int], PlannedCase]
) -> list[PlannedCase]:
    """Plan growing numbers of ranks, parts of a node and then whole ones, until a target is reached for sure, or more
    do not help; then those between, for the fewest that reach it. In the order of their ranks.

    Args:
        target: samples per second.
        make: plans a number of ranks.
    """
    found: dict[int, PlannedCase] = {}
    num_ranks, fastest, useless = 1, 0.0, 0
    while num_ranks <= most_ranks and useless < _MOST_USELESS:
        case = found[num_ranks] = make(num_ranks)
        if _speed(case, surely=True) >= target:
            break
        if case.plan is not None:
            useless = useless + 1 if case.samples_per_second < _LEAST_GAIN * fastest else 0
            fastest = max(fastest, case.samples_per_second)
        num_ranks = min(2 * num_ranks, ranks_per_node) if num_ranks < ranks_per_node else 2 * num_ranks
    for surely in (False, True):
        _between(found, ranks_per_node, make, target, surely)
    return [found[each] for each in sorted(found)]


def _between(
    found: dict[int, PlannedCase],
    ranks_per_node: int,
    make: Callable[[int], PlannedCase],
    target: float,
    surely: bool,
) -> None:
    """Halve the gap between the fewest ranks that reach the target and the most that do not."""
    high = min((each for each, case in found.items() if _speed(case, surely) >= target), default=None)
    if high is None:
        return
    low = max((each for each in found if each < high), default=0)
    unit = 1 if high <= ranks_per_node else ranks_per_node
    while high - low > unit:
        middle = low + (high - low) // unit // 2 * unit
        if middle not in found:
            found[middle] = make(middle)
        low, high = (low, middle) if _speed(found[middle], surely) >= target else (middle, high)
