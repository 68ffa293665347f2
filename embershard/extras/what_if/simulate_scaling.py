"""Simulates training on many numbers of ranks: a plan for each, and its steps replayed event by event.

Plans for few ranks are those of `embershard plan`; for more, the search looks at the nodes that could be busy.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from embershard.errors import ShardingError, naming_file
from embershard.launch.screen import make_table, say
from embershard.planning.cost.rates import StepWork
from embershard.planning.cost.topology import Topology
from embershard.planning.many_ranks import MOST_SEARCHED_RANKS, fastest_candidate
from embershard.planning.request import PlanRequest
from embershard.planning.simulate.step_replay import STRAGGLERS, Pipeline, StepReplay, replay_steps
from embershard.planning.uncertainty import uncertainty
from embershard.settings.decoding import decode
from embershard.sharding.plan import Plan, Prediction

_Case = TypeVar("_Case")
_MOST_PARTS = 4
_TEXTS = ("where a step's time goes", "lost to")
_LEAST_LOSS = 0.01  # of a simulated step, that is shown


@dataclass(frozen=True)
class SimulatedRun:
    """Training on one number of ranks, simulated: an estimate.

    Attributes:
        num_ranks, global_batch_size: ranks, and samples of a step over all of them.
        step_seconds, samples_per_second: of all ranks together; 0 where no plan fits.
        parts: mean seconds of a step in which a rank's training does that, or waits for it; they add up to the step.
            "stragglers" is waiting for slower ranks.
        limit: the part of the busiest rank that takes most.
        is_searched: the planner searched the placement on all ranks; False: on the nodes that could be busy.
        problem: why there is no plan; empty where there is one.
        groups: of the ranks, which are replicas of each other.
        low_seconds, high_seconds: of a step; the constants of the machine leave it between them, nine times in ten.
    """

    num_ranks: int
    global_batch_size: int
    step_seconds: float = 0.0
    samples_per_second: float = 0.0
    parts: dict[str, float] | None = None
    limit: str = ""
    is_searched: bool = True
    problem: str = ""
    low_seconds: float = 0.0
    high_seconds: float = 0.0
    groups: int = 1

    def efficiency(self, runs: Sequence[SimulatedRun]) -> float | None:
        """Return the samples per second and rank, relative to those of the fewest ranks with a plan."""
        if self.problem:
            return None
        first = _fewest(runs)
        return self.samples_per_second / self.num_ranks / (first.samples_per_second / first.num_ranks)

    def losses(self, runs: Sequence[SimulatedRun]) -> dict[str, float]:
        """Return what the efficiency is lost to, by part of a step: shares of this step, the largest first, which add
        up to 1 less the efficiency where ranks have as many samples as with the fewest ranks. Below 0 are parts that
        take less."""
        if self.problem:
            return {}
        first = _fewest(runs)
        size = self.global_batch_size / self.num_ranks / (first.global_batch_size / first.num_ranks)
        before, now = first.parts or {}, self.parts or {}
        lost = {part: now.get(part, 0.0) - size * before.get(part, 0.0) for part in {**now, **before}}
        shares = {part: seconds / self.step_seconds for part, seconds in lost.items()}
        return dict(sorted(shares.items(), key=lambda pair: -pair[1]))


def _fewest(runs: Sequence[SimulatedRun]) -> SimulatedRun:
    return min((run for run in runs if not run.problem), key=lambda run: run.num_ranks)


def simulate_plan(plan: Plan, topology: Topology) -> StepReplay:
    """Replay steps of a plan on a machine, with its ranks' jitter. An estimate.

    Args:
        plan: has a prediction, from which each rank's work is taken.
        topology: of the plan's kind of device.

    Raises:
        ShardingError: the plan has no prediction.
    """
    if plan.prediction is None:
        raise ShardingError("the plan has no prediction: it was edited. Make it again with embershard plan.")
    shaped = topology.shaped(plan.ranks_per_node, plan.world_size // plan.ranks_per_node)
    return _replay(plan.prediction, shaped, plan.world_size, Pipeline.of(plan, topology.cores_per_node))


def simulate_scaling(
    cases: Sequence[_Case],
    make_request: Callable[[_Case], tuple[PlanRequest, Topology]],
    progress: Callable[[SimulatedRun], None] | None = None,
) -> list[SimulatedRun]:
    """Plan and simulate training on each of these numbers of ranks. Hit rates are from counts alone.

    Args:
        cases: numbers of ranks, with what else `make_request` asks for.
        make_request: returns the request for a case, and its machine.
        progress: called with each run when it is simulated.
    """
    found = []
    for case in cases:
        found.append(simulate_run(*make_request(case)))
        if progress is not None:
            progress(found[-1])
    return found


def simulate_run(request: PlanRequest, topology: Topology) -> SimulatedRun:
    """Plan and simulate training as requested, on a machine of so many ranks."""
    shape = request.workload.shape
    num_ranks, samples = shape.all_ranks, shape.groups * shape.global_batch_size
    is_searched = num_ranks <= MOST_SEARCHED_RANKS
    try:
        candidate = fastest_candidate(request)
    except ShardingError as error:
        return SimulatedRun(num_ranks, samples, is_searched=is_searched, problem=str(error), groups=shape.groups)
    replayed = _replay(candidate.quick, topology, shape.world_size, Pipeline.of_run(shape))
    certainty = uncertainty(request.workload, candidate.quick, topology)
    longer = replayed.step_seconds / candidate.quick.step_seconds  # by the ranks' jitter
    return SimulatedRun(
        num_ranks=num_ranks,
        global_batch_size=samples,
        step_seconds=replayed.step_seconds,
        samples_per_second=samples / replayed.step_seconds,
        low_seconds=longer * certainty.low_seconds,
        high_seconds=longer * certainty.high_seconds,
        parts={name: seconds for name, seconds in replayed.mean_parts.items() if seconds},
        limit=_limit(replayed),
        is_searched=is_searched,
        groups=shape.groups,
    )


def _replay(prediction: Prediction, topology: Topology, num_ranks: int, pipeline: Pipeline) -> StepReplay:
    works = [decode(StepWork, rank.work) for rank in prediction.ranks]
    return replay_steps(works, topology.rates_of_ranks(num_ranks), pipeline, jitter=topology.jitter_for(num_ranks))


def _limit(replayed: StepReplay) -> str:
    """Return what takes most of the busiest rank's step; "stragglers" where the ranks wait for each other longer."""
    part = replayed.bottleneck(replayed.slowest)
    waiting = replayed.mean_parts[STRAGGLERS]
    return STRAGGLERS if waiting > replayed.parts[part][replayed.slowest] else part


def show_simulation(runs: Sequence[SimulatedRun], topology: Topology, console: Console) -> None:
    """Print one line per number of ranks, and the reservations."""
    has_groups = any(run.groups > 1 for run in runs)
    table = make_table(
        "Simulated training (estimate)",
        (),
        (
            *("ranks", *(("groups",) if has_groups else ()), "batch", "samples/s", "efficiency", "step ms"),
            *("from", "to", "limited by", *_TEXTS),
        ),
    )
    for run in runs:
        groups = (str(run.groups),) if has_groups else ()
        case, share = (str(run.num_ranks), *groups, f"{run.global_batch_size:,}"), run.efficiency(runs)
        if share is None or run.parts is None:
            table.add_row(*case, "does not fit")
            continue
        largest = sorted(run.parts.items(), key=lambda part: -part[1])[:_MOST_PARTS]
        parts = ", ".join(f"{name} {seconds / run.step_seconds:.0%}" for name, seconds in largest)
        losses = run.losses(runs) if share < 1 - _LEAST_LOSS else {}
        lost = ", ".join(f"{name} {lost:.0%}" for name, lost in losses.items() if abs(lost) >= _LEAST_LOSS)
        seconds = (run.step_seconds, run.low_seconds, run.high_seconds)
        speed = (f"{run.samples_per_second:,.0f}", f"{share:.0%}", *(f"{1e3 * each:.2f}" for each in seconds))
        table.add_row(*case, *speed, run.limit, parts, lost)
    console.print(table)
    limits = dict.fromkeys(run.limit for run in runs if not run.problem)
    notes = [topology.note(runs[-1].num_ranks), *map(topology.error_note, limits)]
    if any(not run.is_searched for run in runs):
        notes.append(
            f"Beyond {MOST_SEARCHED_RANKS} ranks placements are searched on as many nodes as tables could be on."
        )
    notes.append("Hit rates are from the profile's counts, in the long run. docs/planning.md has the errors.")
    problems = [f"{run.num_ranks} ranks: {run.problem}" for run in runs if run.problem]
    say(console, *problems, *(f"Note: {note}" for note in notes if note is not None))


def write_simulation(runs: Sequence[SimulatedRun], topology: Topology, path: Path) -> None:
    """Write the simulated runs as JSON."""
    values = {
        "what": "embershard plan --simulate: an estimate",
        "topology": topology.name,
        "source": topology.source,
        "precision": topology.precision,
        "runs": [
            {**dataclasses.asdict(run), "efficiency": run.efficiency(runs), "losses": run.losses(runs)} for run in runs
        ],
    }
    with naming_file(path):
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
