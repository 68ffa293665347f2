"""The cases that a command line asks for, and which of them are planned: all, or those that may be the best."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from embershard.commands.plan.run import MOST_RANKS, Setup
from embershard.errors import ConfigError
from embershard.extras.what_if.batches import StepBatch, asks_for_batches, batches_of
from embershard.extras.what_if.cases import ComparedCase, cases_to, doubling, numbers_of_ranks, planned_case
from embershard.extras.what_if.search import (
    BESIDE,
    DEARER,
    TOO_DEAR,
    Searched,
    most_per_second,
    most_surely,
    or_fastest,
    search_cheapest,
    search_fastest,
)


@dataclass(frozen=True)
class Series:
    """A machine with one ratio and one batch, on numbers of ranks.

    Attributes:
        setup: with this batch in its settings.
        batch: None: no other than that of the settings is asked for.
        numbers: of ranks, that may be planned.
    """

    setup: Setup
    ratio: float | None
    batch: StepBatch | None
    numbers: Sequence[int]

    @property
    def cases(self) -> list[UnplannedCase]:
        """One for each number of ranks."""
        return [UnplannedCase(self, each) for each in self.numbers]

    def up_to(self, cost_per_hour: float) -> Series:
        """Return the series without the ranks that cost more."""
        return replace(self, numbers=[each.num_ranks for each in self.cases if each.cost_per_hour <= cost_per_hour])


@dataclass(frozen=True)
class UnplannedCase:
    """A number of ranks of a series."""

    series: Series
    num_ranks: int

    @property
    def cost_per_hour(self) -> float:
        """Of all ranks, as `PlannedCase` has it."""
        return self.without_plan.cost_per_hour

    @cached_property
    def most_per_second(self) -> float:
        """Samples per second that no plan of it exceeds."""
        return most_per_second(self.series.setup.request(self.num_ranks, self.series.ratio))

    @cached_property
    def most_surely(self) -> float:
        """Those that no plan of it has at the slow end of its interval."""
        train = self.series.setup.config.train
        samples = train.rank_batch_size(self.num_ranks) * self.num_ranks
        return most_surely(self.series.setup.shaped(self.num_ranks), samples, train.accumulate)

    @property
    def without_plan(self) -> ComparedCase:
        """The case, which reaches nothing."""
        setup, series = self.series.setup, self.series
        return ComparedCase(
            self.num_ranks, series.ratio, None, machine=setup.machine, price=setup.price, batch=series.batch
        )

    def planned(self) -> ComparedCase:
        """Plan it."""
        setup, ratio = self.series.setup, self.series.ratio
        request, topology = setup.request(self.num_ranks, ratio), setup.shaped(self.num_ranks)
        return planned_case(request, topology, ratio, setup.price, setup.machine, self.series.batch)


Plan = Callable[[UnplannedCase], ComparedCase]


def series_of(
    setups: Sequence[Setup], ranks: Sequence[int], ratios: Sequence[float | None]
) -> tuple[list[Series], Counter[str]]:
    """Return what the command line asks for, and how many of its cases cannot be, or are not wanted, by the reason.

    Raises:
        ConfigError: none is left.
    """
    arguments, found, left_out = setups[0].arguments, list[Series](), Counter[str]()
    asks, is_free = asks_for_batches(arguments), arguments.target is not None and arguments.ranks is None
    for setup in setups:
        per_node = setup.arguments.ranks_per_node or setup.topology.ranks_per_node
        of_kinds = setup.topology.memory_of_ranks(setup.topology.world_size)  # a mix of them has its own number
        free = [len(of_kinds)] if of_kinds else numbers_of_ranks(per_node, MOST_RANKS)
        numbers = free if is_free else ranks
        pieces = setup.config.train.accumulate
        for ratio in ratios:
            for batch in batches_of(setup) if asks else [None]:
                if batch is None:
                    found.append(Series(setup, ratio, None, numbers))
                    continue
                problems = {each: batch.problem(each, pieces, arguments.most_batch) for each in numbers}
                left_out.update(problem for problem in problems.values() if problem is not None)
                fit = [each for each, problem in problems.items() if problem is None]
                if fit:
                    found.append(Series(batch.given_to(setup), ratio, batch, fit))
    if not found:
        reasons = "; ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise ConfigError(
            f"of {left_out.total()} cases none is left to plan: {reasons}. Give other --ranks, --batches, "
            "--global-batches or --most-batch."
        )
    return found, left_out


def plans_all(arguments: argparse.Namespace) -> bool:
    """Return whether all cases are planned: nothing is looked for, or among the ranks that were given alone."""
    target, is_free = arguments.target, arguments.ranks is None
    return target is None or not (is_free or target.is_money or asks_for_batches(arguments))


def search(series: Sequence[Series], plan: Plan) -> Searched:
    """Plan all cases; with a target and other batches than that of the settings those that may be the best, and for
    money an hour those that may be the fastest."""
    arguments = series[0].setup.arguments
    cases, target, asks = (
        [case for each in series for case in each.cases],
        arguments.target,
        asks_for_batches(arguments),
    )
    if plans_all(arguments):
        return Searched([plan(each) for each in cases])
    if not target.is_money and arguments.ranks is not None:
        return search_cheapest(cases, target.amount, plan)
    if not target.is_money:
        return search_ranks(series, target.amount, plan, is_bounded=asks)
    affordable = [each.up_to(target.amount) for each in series]
    some = affordable
    if arguments.ranks is None:
        some = [replace(each, numbers=doubling(each.numbers)) for each in affordable]
    found = search_fastest((case for each in some for case in each.cases), plan)
    found.left_out += Counter(
        {TOO_DEAR: _count(series) - _count(affordable), BESIDE: _count(affordable) - _count(some)}
    )
    return found


def search_ranks(series: Sequence[Series], target: float, plan: Plan, *, is_bounded: bool) -> Searched:
    """Search the numbers of ranks of each series for the fewest that reach so many samples per second, as predicted and
    for sure, the largest batches first; where none does, for what may be the fastest of those tried.

    Args:
        is_bounded: plan no case whose bound, or whose cost, says that it is useless.
    """
    found, too_slow = Searched(), list[UnplannedCase]()
    for each in sorted(series, key=lambda own: -own.batch.samples if own.batch is not None else 0):
        cases = {case.num_ranks: case for case in each.cases if not is_bounded or found.may_matter(case, target)}
        skipped = set[int]()

        def make(num_ranks: int, cases: dict[int, UnplannedCase] = cases, skipped: set[int] = skipped) -> ComparedCase:
            if is_bounded and cases[num_ranks].most_per_second < target:
                skipped.add(num_ranks)
                return cases[num_ranks].without_plan
            return plan(cases[num_ranks])

        tried = cases_to(target, list(cases), make)
        found.planned += [case for case in tried if case.num_ranks not in skipped]
        too_slow += [cases[num_ranks] for num_ranks in skipped]
        found.left_out[DEARER] += len(each.numbers) - len(cases)
        found.left_out[BESIDE] += len(cases) - len(tried)
    return or_fastest(found, too_slow, target, plan)


def _count(series: Sequence[Series]) -> int:
    return sum(len(each.numbers) for each in series)
