"""A machine's rates, corrected by one run: the step that was measured is the step that they give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from embershard.errors import ShardingError
from embershard.planning.cost.rates import Rates, StepWork, step_time
from embershard.planning.cost.topology import Topology
from embershard.planning.verify.compare import predicted_for
from embershard.planning.verify.measured import MeasuredRun
from embershard.sharding.plan import Plan

#: Of a step's work, what a run's caches count: kind of work -> counter.
_COUNTED = {
    "planned_ids": "lookups",
    "unique_ids": "unique_ids",
    "fills": "fills",
    "write_backs": "write_backs",
    "bytes_to_device": "bytes_to_device",
    "bytes_to_host": "bytes_to_host",
}


@dataclass(frozen=True)
class Recalibration:
    """A corrected topology.

    Attributes:
        topology: with all rates for ``num_ranks`` ranks times ``factor``.
        num_ranks: that ran.
        factor: measured step time over that of the old rates, for the work that was measured.
        measured_seconds: median step of the run.
        before_seconds: what the old rates give for the work that was measured.
        from_estimate: whether the old rates were an estimate from a datasheet.
    """

    topology: Topology
    num_ranks: int
    factor: float
    measured_seconds: float
    before_seconds: float
    from_estimate: bool


def measured_work(plan: Plan, run: MeasuredRun) -> list[StepWork]:
    """Of every rank: the plan's work, with what the caches did replaced by what they counted. Bytes between ranks and
    of the dense part stay as predicted: a run does not count them.

    Raises:
        ShardingError: the plan is for another number of ranks or has no prediction.
    """
    return [
        replace(StepWork.from_dict(rank.work), **_counted(run, rank.rank)) for rank in predicted_for(plan, run).ranks
    ]


def _counted(run: MeasuredRun, rank: int) -> dict[str, float]:
    """Nothing where there was no cache."""
    found = run.rank(rank)
    counts: Mapping[str, float | None] = {} if found is None else found.per_step
    return {kind: counts.get(counter) or 0.0 for kind, counter in _COUNTED.items()}


def recalibrated(
    topology: Topology, plan: Plan, result: Mapping[str, Any], *, name: str, run_name: str
) -> Recalibration:
    """All rates for this number of ranks, times one factor: a single step time cannot tell which of them is wrong.
    Their proportions stay as they were, and so does what plans for that number of ranks prefer, but for ties.

    Args:
        topology: whose rates are corrected; where it has none, those that are estimated from its bandwidths.
        plan: that the run obeyed.
        result: the contents of result.json.
        name: of the new topology.
        run_name: of the run, for the new topology's source.

    Raises:
        ShardingError: plan, run and topology do not belong together, no step was timed, or too few.
    """
    run = MeasuredRun.from_result(result)
    _check(topology, plan, run)
    assert run.step_seconds is not None, "checked"
    shape = topology.shaped(plan.ranks_per_node, plan.world_size // plan.ranks_per_node)
    rates = shape.rates_for(plan.world_size)
    works = measured_work(plan, run)
    before = max(step_time(work, rates, plan.device).seconds for work in works)
    if not before:
        raise ShardingError(f"topology {topology.name!r} gives this run no time at all. Use another --topology.")
    factor = run.step_seconds / before
    scaled = Rates(**{kind: rate * factor for kind, rate in rates.to_dict().items()})
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    corrected = replace(
        topology,
        name=name,
        source=f"{topology.source}; rates for {ranks} times {factor:.4g} after run {run_name}",
        rates={**topology.rates, plan.world_size: scaled},
    )
    return Recalibration(corrected, plan.world_size, factor, run.step_seconds, before, not topology.rates)


def _check(topology: Topology, plan: Plan, run: MeasuredRun) -> None:
    predicted_for(plan, run)
    if run.plan_digest != plan.digest:
        raise ShardingError(
            f"the run {'had no plan' if run.plan_digest is None else 'obeyed another plan'}: its work is not known. "
            "Recalibrate with a run and its own plan (embershard train --plan)."
        )
    for what, device in (("the topology", topology.device), ("the run", run.device)):
        if device != plan.device:
            raise ShardingError(
                f"the plan is for {plan.device!r}, {what} {'is' if what == 'the topology' else 'was'} on {device!r}. "
                "Recalibrate with a run, a plan and a topology of one kind of device."
            )
    if not run.step_seconds:
        raise ShardingError("no step of the run was timed. Train for a few steps.")
    if not run.is_steady:
        raise ShardingError(
            f"the run's {run.steps} steps are few beside its look-ahead: they are quicker than those of a long run, "
            "for which input is always left to be read. Recalibrate with a longer run."
        )
