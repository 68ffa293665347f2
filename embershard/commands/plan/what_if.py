"""Plans for several numbers of ranks, or several cache sizes, at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console

from embershard.errors import ShardingError
from embershard.planning.make_plan import make_plan
from embershard.planning.request import PlanRequest
from embershard.sharding.plan import Plan, Prediction


@dataclass(frozen=True)
class PlannedCase:
    """One case: its plan, or the reason why there is none."""

    num_ranks: int
    ratio: float | None
    plan: Plan | None
    problem: str = ""

    @property
    def name(self) -> str:
        """The case in words: `2 ranks, ratio 0.05`."""
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        return ranks if self.ratio is None else f"{ranks}, ratio {self.ratio:g}"

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


def try_all(
    cases: Sequence[tuple[int, float | None]],
    make_request: Callable[[int, float | None], PlanRequest],
    console: Console,
) -> list[PlannedCase]:
    """Make a plan for every case: a number of ranks, and a share of the rows on the device. Each is told when it is
    done."""
    found = []
    for number, (num_ranks, ratio) in enumerate(cases, start=1):
        what = f"{num_ranks} ranks" + ("" if ratio is None else f", {ratio:g} of the rows on the device")
        with console.status(f"{number} of {len(cases)}: {what}"):
            try:
                found.append(PlannedCase(num_ranks, ratio, make_plan(make_request(num_ranks, ratio))))
            except ShardingError as error:
                found.append(PlannedCase(num_ranks, ratio, None, str(error)))
        console.print(f"Planned {number} of {len(cases)}: {found[-1].sentence}", soft_wrap=True)
        console.file.flush()
    return found


def efficiency(outcome: PlannedCase, outcomes: Sequence[PlannedCase]) -> float | None:
    """Return the samples per second and rank, relative to those of the smallest number of ranks with the same ratio
    that has a plan; None without a plan."""
    per_rank = {
        each.num_ranks: each.prediction.samples_per_second / each.num_ranks
        for each in outcomes
        if each.ratio == outcome.ratio and each.prediction is not None
    }
    own = None if outcome.prediction is None else per_rank.get(outcome.num_ranks)
    return None if own is None else own / per_rank[min(per_rank)]
