"""Plans for several numbers of ranks, or several cache sizes, at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from embershard.errors import ShardingError
from embershard.planning.planner import make_plan
from embershard.sharding.plan import Plan


@dataclass(frozen=True)
class Outcome:
    """One case: its plan, or why there is none."""

    num_ranks: int
    ratio: float | None
    plan: Plan | None
    problem: str = ""

    @property
    def samples_per_second(self) -> float | None:
        """Predicted, over all ranks."""
        if self.plan is None or self.plan.prediction is None:
            return None
        return self.plan.prediction.samples_per_second

    @property
    def bottleneck(self) -> str:
        """What a step waits for; empty without a plan."""
        return "" if self.plan is None or self.plan.prediction is None else self.plan.prediction.bottleneck


def try_all(cases: Sequence[tuple[int, float | None, Callable[[], Any]]], console: Console) -> list[Outcome]:
    """A plan for every case: number of ranks, ratio, and what makes its request."""
    found = []
    for number, (num_ranks, ratio, request) in enumerate(cases, start=1):
        what = f"{num_ranks} ranks" + ("" if ratio is None else f", {ratio:g} of the rows on the device")
        with console.status(f"{number} of {len(cases)}: {what}"):
            try:
                found.append(Outcome(num_ranks, ratio, make_plan(request())))
            except ShardingError as error:
                found.append(Outcome(num_ranks, ratio, None, str(error)))
    return found


def efficiency(outcome: Outcome, outcomes: Sequence[Outcome]) -> float | None:
    """Samples per second and rank, against the smallest number of ranks with the same ratio that has a plan."""
    same = [each for each in outcomes if each.ratio == outcome.ratio and each.samples_per_second is not None]
    if not same or outcome.samples_per_second is None:
        return None
    base = min(same, key=lambda each: each.num_ranks)
    assert base.samples_per_second is not None
    return outcome.samples_per_second / outcome.num_ranks / (base.samples_per_second / base.num_ranks)
