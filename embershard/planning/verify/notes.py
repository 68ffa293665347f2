"""Sentences that a reader must know before judging a prediction by a measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from embershard.planning.verify.measured import MeasuredRun
from embershard.sharding.plan import Plan, Prediction
from embershard.sharding.shards import shards_of

#: Runs whose number of steps differs from the predicted one by more than this share are told so.
_SAME_STEPS = 0.02
_SHOWN = 5


def notes(plan: Plan, run: MeasuredRun, other_settings: Sequence[str] = (), num_checkpoints: int = 0) -> list[str]:
    """Return the reasons why the plan's prediction and the run may differ.

    Args:
        other_settings: sentences of `Plan.other_settings`.
        num_checkpoints: checkpoints written in the counted steps.
    """
    assert plan.prediction is not None, "it was compared"
    return [
        *_which_plan(plan, run),
        *(f"Another setting: {sentence}." for sentence in other_settings),
        *_which_steps(plan.prediction, run),
        *_which_speed(run),
        *_which_tables(plan, plan.prediction, run),
        *_growths(run),
        *_write_backs(run, num_checkpoints),
    ]


def _which_plan(plan: Plan, run: MeasuredRun) -> Iterator[str]:
    if run.plan_digest is None:
        yield "The run had no plan: tables may have been at other places, in caches of other sizes."
    elif run.plan_digest != plan.digest:
        yield f"The run obeyed another plan ({run.plan_digest}) than this one ({plan.digest})."


def _which_steps(prediction: Prediction, run: MeasuredRun) -> Iterator[str]:
    if run.all_steps != run.steps:
        yield (
            f"The run was resumed at step {run.all_steps - run.steps:,}: counts and step times are of the "
            f"{run.steps:,} steps since, which began with caches as cold as a new run's."
        )
    if prediction.num_steps == 0:
        yield f"The prediction is of the long run; of the run's {run.steps:,} steps the first ones fill the caches."
    elif abs(run.steps - prediction.num_steps) > _SAME_STEPS * prediction.num_steps:
        how_much = "more" if run.steps < prediction.num_steps else "less"
        yield (
            f"The prediction is a mean over {prediction.num_steps:,} steps, the measurement over {run.steps:,}: the "
            f"first steps, which fill the caches, weigh {how_much} in what was measured."
        )


def _which_speed(run: MeasuredRun) -> Iterator[str]:
    if run.step_seconds is not None and not run.is_steady:
        yield (
            f"The run's {run.steps:,} steps are few beside its look-ahead: for the last ones no batch was left to be "
            "read, so they are quicker than those of a long run. Train longer to compare step times."
        )


def _which_tables(plan: Plan, prediction: Prediction, run: MeasuredRun) -> Iterator[str]:
    shards = [s for t in plan.tables if t.kernel == "cached" for s in shards_of(t, plan.ranks_per_node) if s.rows]
    cached = {(shard.table, shard.rank) for shard in shards}
    if not cached:
        yield "No table is cached: all are whole on the device, and only the step time can be compared."
    elif not run.ranks:
        yield (
            "The run had no cache (cache.enabled = false): its tables were whole on the device. Only the step time can "
            "be compared, and it was predicted with caches."
        )
    else:
        measured = {(table, number) for number, rank in run.ranks.items() for table in rank.tables}
        predicted = {(table.table, table.rank) for table in prediction.tables}
        yield from _absent("predicted with a cache but not measured", cached & predicted - measured)
        yield from _absent("measured but not predicted", measured - predicted)
        whole = len({table.table for table in plan.tables if table.kernel != "cached"})
        if whole:
            yield f"{whole} of {len(plan.tables)} tables are whole on the device: nothing is counted for them."


def _absent(what: str, tables: set[tuple[str, int]]) -> Iterator[str]:
    if tables:
        named = [f"{table} on rank {rank}" for table, rank in sorted(tables)]
        more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
        yield f"Tables {what}: {', '.join(named[:_SHOWN])}{more}."


def _growths(run: MeasuredRun) -> Iterator[str]:
    if not run.growths:
        return
    where = [
        f"{name} on rank {number} ({table.growths})"
        for number, rank in sorted(run.ranks.items())
        for name, table in sorted(rank.tables.items())
        if table.growths
    ]
    yield (
        f"Caches grew {run.growths} times, for batches that did not fit; most misses were of "
        f"{', '.join(where[:_SHOWN])}. They end with more slots and bytes than planned; plan with more slots, or look "
        "less far ahead."
    )


def _write_backs(run: MeasuredRun, num_checkpoints: int) -> Iterator[str]:
    if run.ranks and num_checkpoints:
        how_many = "1 checkpoint" if num_checkpoints == 1 else f"{num_checkpoints} checkpoints"
        yield (
            f"Measured write-backs include what {how_many} wrote back from the caches; predicted ones are of evictions "
            "alone."
        )
