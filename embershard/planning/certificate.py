"""How far a plan can be from the best one under its cost model, what its steps wait for, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from embershard.planning.bound import Bound
from embershard.planning.cost.rates import Rates, StepWork
from embershard.planning.simulate.step_replay import Pipeline, replay_steps
from embershard.sharding.plan import PlanBound, Prediction
from embershard.sharding.run_shape import RunShape

#: What a machine has -> the rates that it decides.
_RESOURCES = {
    "arithmetic of the dense layers": ("seconds_per_flop",),
    "memory of the device": ("seconds_per_activation_byte", "seconds_per_update_byte", "seconds_per_embedding_byte"),
    "planning of caches": ("seconds_per_planned_id", "seconds_per_unique_id", "seconds_per_row_id"),
    "link to the host's memory": (
        "seconds_per_fill", "seconds_per_write_back", "seconds_per_byte_to_device", "seconds_per_byte_to_host",
    ),
    "link between ranks": ("seconds_per_all_to_all_byte", "seconds_per_all_reduce_byte"),
    "latency of collectives": ("seconds_per_collective",),
    "overhead of a step": ("step_overhead_seconds",),
}  # fmt: skip
_GAIN = 0.05
_HALVINGS = 6
_MOST_RANKS = 256  # replays of more take seconds


def certificate(quick: Prediction, bound: Bound, rates: Rates, shape: RunShape) -> PlanBound:
    """Return the bound of a plan with this prediction, from counts alone."""
    slowest = max(quick.ranks, key=lambda rank: rank.step_seconds)
    works = [StepWork(**rank.work) for rank in quick.ranks]
    return PlanBound(
        step_seconds=quick.step_seconds,
        least_seconds=bound.step_seconds,
        fixed_seconds=bound.fixed_seconds,
        rank=slowest.rank,
        stage=quick.bottleneck,
        change=_smallest_change(works, rates, Pipeline.of_run(shape)) if len(works) <= _MOST_RANKS else "",
    )


def _smallest_change(works: Sequence[StepWork], rates: Rates, pipeline: Pipeline) -> str:
    """Return the resource that need be faster by the least for a step that is shorter by `_GAIN`, and by how much."""

    def helps(names: Sequence[str], share: float) -> bool:
        faster = replace(rates, **{name: share * getattr(rates, name) for name in names})
        return replay_steps(works, faster, pipeline).step_seconds <= wanted

    wanted = (1 - _GAIN) * replay_steps(works, rates, pipeline).step_seconds
    most, best = 0.0, ""
    for resource, names in _RESOURCES.items():
        low, high = 0.0, 1.0
        if not helps(names, max(low, most)):  # not at all, or only if it is faster than what is known to help
            continue
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if helps(names, middle) else (low, middle)
        if low > most or not best:
            most, best = low, resource
    if not best:
        return ""
    return f"{best}: {1 / most:.2g} times as fast" if most else f"{best}: none at all"
