"""Rates from measurements: fitted to measured steps, or corrected by one run so that they predict its step time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from embershard.errors import ConfigError, ShardingError
from embershard.planning.cost.rates import TERMS, Rates, StepWork, step_parts
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


Floats = NDArray[np.float64]
#: Weight of the difference of two steps, beside one step.
_PAIR_WEIGHT = 3.0
#: Weight of an expected rate beside one step: twice the rate counts as much as an error of so much of its seconds.
_EXPECTED_WEIGHT = 0.1
#: Kinds of work that cannot be told apart by running a few settings get one rate.
_TIED = (
    ("fills", "write_backs"),
    ("bytes_to_device", "bytes_to_host"),
    ("sent_id_bytes", "sent_embedding_bytes", "sent_gradient_bytes", "all_reduce_bytes"),
)


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


@dataclass(frozen=True)
class Fit:
    """Rates, and of each measured step time the error: predicted / measured - 1."""

    rates: Rates
    errors: tuple[float, ...]


def fit_rates(
    measured: Sequence[tuple[StepWork, float]],
    pairs: Sequence[tuple[int, int]] = (),
    expected: Mapping[str, float] | None = None,
) -> Fit:
    """Fit rates to pairs of a step's work and its seconds on a CPU, where the parts add up: least squares of the
    relative errors. Work that no step did gets the expected rate, or 0.

    Args:
        pairs: numbers of two steps that are alike but for a little work. What is wrong in both, since work is not all
            that decides, cancels in their difference: it counts as much as several steps.
        expected: rates by name, which those found should be near: kinds of work that come together in all steps are
            told apart by them.

    >>> round(fit_rates([(StepWork(fills=1), 0.5), (StepWork(fills=2), 0.75)]).rates.step_overhead_seconds, 6)
    0.25

    Raises:
        ConfigError: nothing was measured, or a time is not positive.
    """
    if not measured or min(seconds for _, seconds in measured) <= 0:
        raise ConfigError(f"got {len(measured)} measured steps, needed at least one, each with a time above 0")
    tied = {name for names in _TIED for name in names} | {"more_pieces"}  # a step's overhead is that of each piece
    groups = [*_TIED, *((name,) for name, _, _ in TERMS if name not in tied)]
    columns = [[sum(getattr(work, name) for name in names) for work, _ in measured] for names in groups]
    seconds = np.array([value for _, value in measured])
    amounts = np.column_stack([*columns, [1 + work.more_pieces for work, _ in measured]])
    a, b = np.array(pairs, np.int64).reshape(-1, 2).T
    weight = _PAIR_WEIGHT / (seconds[a] + seconds[b]) * 2
    matrix = np.concatenate([amounts / seconds[:, None], (amounts[b] - amounts[a]) * weight[:, None]])
    target = np.concatenate([np.ones(len(measured)), (seconds[b] - seconds[a]) * weight])
    rate_of = {amount: rate for amount, rate, _ in TERMS}
    near = [(n, rate) for n, names in enumerate(groups) if (rate := (expected or {}).get(rate_of[names[0]], 0.0)) > 0]
    prior = np.zeros((len(near), len(groups) + 1))
    for row, (column, rate) in enumerate(near):
        prior[row, column] = _EXPECTED_WEIGHT / rate
    matrix, target = np.concatenate([matrix, prior]), np.concatenate([target, np.full(len(near), _EXPECTED_WEIGHT)])
    found = nonnegative_least_squares(matrix, target)
    values = {rate_of[name]: float(found[i]) for i, names in enumerate(groups) for name in names}
    rates = Rates(**values, step_overhead_seconds=float(found[-1]))
    return Fit(rates, tuple(sum(step_parts(work, rates).values()) / value - 1 for work, value in measured))


def nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """Return the x >= 0 that minimizes `|matrix x - target|`, for `matrix` [M, N] and `target` [M]; 0 for columns of
    zeros. Columns are scaled first, because kinds of work differ by ten orders of magnitude and `nnls` has one
    tolerance for all of them."""
    from scipy.optimize import nnls  # it loads slowly, and few commands correct rates

    norms = np.linalg.norm(matrix, axis=0)
    norms[norms == 0] = 1.0
    solution, _ = nnls(matrix / norms, target, maxiter=100 * matrix.shape[1])
    return solution / norms
