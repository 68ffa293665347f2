"""Rates corrected by one run, so that they predict its step time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from embershard.errors import ShardingError
from embershard.planning.cost.rates import Rates, StepWork
from embershard.planning.cost.topology import Topology
from embershard.planning.simulate.step_replay import Pipeline, replay_steps
from embershard.planning.verify.compare import predicted_for
from embershard.run_result import RunResult
from embershard.settings.decoding import decode
from embershard.sharding.plan import Plan

#: The kinds of work that a run's caches count, each with its counter.
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
        topology: all its rates for `num_ranks` ranks are the old ones times `factor`.
        num_ranks: ranks of the run.
        factor: measured step time over that of the old rates, for the work that was measured.
        measured_seconds: median step of the run.
        before_seconds: the old rates' time for the measured work.
        from_estimate: True where the old rates were an estimate from a datasheet.
    """

    topology: Topology
    num_ranks: int
    factor: float
    measured_seconds: float
    before_seconds: float
    from_estimate: bool


def measured_work(plan: Plan, run: RunResult) -> list[StepWork]:
    """Return every rank's work: the caches' part as the run counted it (nothing where there was no cache), the rest as
    the plan predicts it: between ranks, and of the dense part.

    Raises:
        ShardingError: the plan is for another number of ranks or has no prediction.
    """
    works = []
    for rank in predicted_for(plan, run).ranks:
        caches, steps = run.caches.get(rank.rank), max(1, run.measured_steps)
        counted = {kind: 0.0 if caches is None else getattr(caches, each) / steps for kind, each in _COUNTED.items()}
        works.append(replace(decode(StepWork, rank.work), **counted))
    return works


def recalibrated(topology: Topology, plan: Plan, run: RunResult, *, name: str, run_name: str) -> Recalibration:
    """Multiply all rates for the run's number of ranks by one factor: a single step time cannot tell which of them is
    wrong. The proportions of the rates stay, and so do the preferences of plans for that number of ranks.

    Args:
        topology: its calibrated rates are corrected, or those estimated from its bandwidths.
        plan: the run obeyed it.
        run: that ended.
        name: of the new topology.
        run_name: for the new topology's source.

    Raises:
        ShardingError: plan, run and topology do not belong together, no step was timed, or too few.
    """
    _check(topology, plan, run)
    if not isinstance(topology.rates_of_ranks(plan.world_size), Rates):
        raise ShardingError(
            f"topology {topology.name!r} is of several kinds of machines; one factor corrects one kind."
        )
    assert run.step_seconds is not None, "checked"
    topology = topology.at(plan.settings.get("train.precision", topology.precision))
    shape = topology.shaped(plan.ranks_per_node, plan.world_size // plan.ranks_per_node)
    rates = shape.rates_for(plan.world_size)
    works = measured_work(plan, run)
    before = replay_steps(works, rates, Pipeline.of(plan, topology.cores_per_node)).step_seconds
    if not before:
        raise ShardingError(f"topology {topology.name!r} gives this run no time at all. Use another --topology.")
    factor = run.step_seconds / before
    scaled = rates.scaled(factor)
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    corrected = replace(
        topology,
        name=name,
        source=f"{topology.source}; rates for {ranks} times {factor:.4g} after run {run_name}",
        rates={**topology.rates, plan.world_size: scaled},
    )
    return Recalibration(corrected, plan.world_size, factor, run.step_seconds, before, not topology.rates)


def _check(topology: Topology, plan: Plan, run: RunResult) -> None:
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
            f"the run's {run.measured_steps} steps are few beside its look-ahead: they are quicker than those of a "
            "long run, for which input is always left to be read. Recalibrate with a longer run."
        )
