"""Plans for several machines and numbers of ranks, compared: what each case would reach, cost, and how surely."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from embershard.errors import ShardingError
from embershard.extras.what_if.batches import StepBatch
from embershard.planning.cost.topology import Topology
from embershard.planning.many_ranks import plan_quickly
from embershard.planning.request import PlanRequest
from embershard.planning.uncertainty import PlannedCase, uncertainty

#: Twice the ranks with less gain than this: more of them will not reach a target either.
_LEAST_GAIN = 1.02
_MOST_USELESS = 2


@dataclass(frozen=True)
class ComparedCase(PlannedCase):
    """A case beside others, which may have other batches. `batch`: its own; None: all have the same."""

    batch: StepBatch | None = None

    @property
    def name(self) -> str:
        """The case in words: `2 ranks, 1,024 samples each`."""
        return super().name if self.batch is None else f"{super().name}, {self.batch}"


def planned_case(
    request: PlanRequest,
    topology: Topology,
    ratio: float | None = None,
    price: float | None = None,
    machine: str = "",
    batch: StepBatch | None = None,
) -> ComparedCase:
    """Plan one case, and say how certain its step time is.

    Args:
        request: for its number of ranks, and its batch.
        topology: shaped to them.
        ratio, price, machine, batch: as in `ComparedCase`.
    """
    num_ranks = request.workload.shape.world_size
    try:
        plan = plan_quickly(request)
    except ShardingError as error:
        return ComparedCase(num_ranks, ratio, None, str(error), machine, price, batch=batch)
    assert plan.prediction is not None, "a new plan has one"
    certainty = uncertainty(request.workload, plan.prediction, topology)
    return ComparedCase(num_ranks, ratio, plan, "", machine, price, certainty, batch)


def efficiency(case: ComparedCase, cases: Sequence[ComparedCase]) -> float | None:
    """Return the samples per second and rank, relative to those of the smallest number of ranks of the same machine
    that has a plan, with the same ratio and the same batch: as many samples a rank, or as many together. None without a
    plan."""
    alike = (case.machine, case.ratio, case.batch)
    per_rank = {
        each.num_ranks: each.samples_per_second / each.num_ranks
        for each in cases
        if (each.machine, each.ratio, each.batch) == alike and each.plan is not None
    }
    own = None if case.plan is None else per_rank.get(case.num_ranks)
    return None if own is None else own / per_rank[min(per_rank)]


def cheapest(cases: Sequence[ComparedCase], target: float, *, surely: bool = False) -> ComparedCase | None:
    """Return the case that reaches so many samples per second for the least money, without prices with the fewest
    ranks; of equal ones the fastest. None: none does.

    Args:
        surely: at the slow end of the interval, too.
    """
    reach = [each for each in cases if each.plan is not None and _speed(each, surely) >= target]
    return min(reach, key=lambda each: (each.cost_per_hour, -each.samples_per_second), default=None)


def _speed(case: ComparedCase, surely: bool) -> float:
    return min(case.samples_per_second, case.range_per_second[0]) if surely else case.samples_per_second


def numbers_of_ranks(ranks_per_node: int, most: int) -> list[int]:
    """Return the numbers of ranks that are parts of a node, or whole nodes.

    >>> numbers_of_ranks(4, most=14)
    [1, 2, 3, 4, 8, 12]
    """
    return [*range(1, min(ranks_per_node, most) + 1), *range(2 * ranks_per_node, most + 1, ranks_per_node)]


def doubling(numbers: Sequence[int]) -> list[int]:
    """Return some of these ascending numbers: the first, each that is twice the one before or more, and the last.

    >>> doubling(range(1, 12))
    [1, 2, 4, 8, 11]
    """
    found: list[int] = []
    for each in numbers:
        if not found or each >= 2 * found[-1] or each == numbers[-1]:
            found.append(each)
    return found


def cases_to(target: float, numbers: Sequence[int], make: Callable[[int], ComparedCase]) -> list[ComparedCase]:
    """Plan growing numbers of ranks until a target is reached for sure, or more do not help; then those between, for
    the fewest that reach it. In the order of their ranks.

    Args:
        target: samples per second.
        numbers: of ranks, ascending.
        make: plans a number of ranks.
    """
    found: dict[int, ComparedCase] = {}
    fastest, useless = 0.0, 0
    for num_ranks in doubling(numbers):
        case = found[num_ranks] = make(num_ranks)
        if _speed(case, surely=True) >= target:
            break
        if case.plan is not None:
            useless = useless + 1 if case.samples_per_second < _LEAST_GAIN * fastest else 0
            fastest = max(fastest, case.samples_per_second)
        if useless == _MOST_USELESS:
            break
    for surely in (False, True):
        _between(found, numbers, make, target, surely)
    return [found[each] for each in sorted(found)]


def _between(
    found: dict[int, ComparedCase],
    numbers: Sequence[int],
    make: Callable[[int], ComparedCase],
    target: float,
    surely: bool,
) -> None:
    """Halve the gap between the fewest ranks that reach the target and the most that do not."""
    reach = [each for each, case in found.items() if _speed(case, surely) >= target]
    if not reach:
        return
    high = numbers.index(min(reach))
    low = max((numbers.index(each) for each in found if each < numbers[high]), default=-1)
    while high - low > 1:
        middle = (low + high) // 2
        if numbers[middle] not in found:
            found[numbers[middle]] = make(numbers[middle])
        low, high = (low, middle) if _speed(found[numbers[middle]], surely) >= target else (middle, high)
