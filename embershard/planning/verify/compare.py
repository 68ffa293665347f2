"""A plan's prediction beside a run's measurement, per table and per rank, and what a reader must know to judge it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from embershard.cache.file.file_counts import FILE_COUNTS
from embershard.cache.totals import CacheTotals
from embershard.errors import ShardingError
from embershard.planning.cost.rates import StepWork
from embershard.run_result import RunResult
from embershard.settings.decoding import decode
from embershard.sharding.plan import Plan, Prediction, RankPrediction, TablePrediction
from embershard.sharding.shards import shards_of

#: Promises about predictions: mean error of hit rates in points; of device bytes, bytes between ranks and step time the
#: errors as shares. Rows between two averages of groups come from counts of rows, not of samples.
PROMISED_POINTS, PROMISED_DEVICE_BYTES, PROMISED_SENT_BYTES, PROMISED_STEP_TIME = 2.0, 0.02, 0.02, 0.20
PROMISED_SYNC_BYTES = 0.05
_RATES = {"hit_rate_lookups": "lookups", "hit_rate_unique": "unique_ids"}  # each with the count that it is a share of
_COUNTS = ("lookups", "unique_ids", "fills", "write_backs")
#: Kinds of `SentBytes`, each with its names in `StepWork`.
SENT_KINDS = {
    "ids": ("sent_id_bytes", "network_id_bytes"),
    "embeddings": ("sent_embedding_bytes", "network_embedding_bytes"),
    "gradients": ("sent_gradient_bytes", "network_gradient_bytes"),
    "dense_all_reduce": ("all_reduce_bytes",),
    "sync": ("sent_sync_bytes", "network_sync_bytes"),
}


#: Where a run's number of steps differs from the predicted one by more than this share, a note says so.
_SAME_STEPS = 0.02
_SHOWN = 5


@dataclass(frozen=True)
class Pair:
    """A predicted and a measured number; None: not known.

    >>> round(Pair(predicted=1.1, measured=1.0).relative_error, 3)
    0.1
    """

    predicted: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """Predicted minus measured."""
        if self.predicted is None or self.measured is None:
            return None
        return self.predicted - self.measured

    @property
    def relative_error(self) -> float | None:
        """The error as a share of the measured number."""
        error = self.error
        if error is None or self.measured is None:
            return None
        return error / self.measured if self.measured else (0.0 if not error else math.inf)


@dataclass(frozen=True)
class Traffic:
    """Counts of the caches of a table or a rank: shares in 0..1, counts and bytes per step."""

    hit_rate_lookups: Pair
    hit_rate_unique: Pair
    lookups: Pair
    unique_ids: Pair
    fills: Pair
    write_backs: Pair
    bytes_to_device: Pair
    bytes_to_host: Pair

    @property
    def worst_points(self) -> float | None:
        """The larger error of the two hit rates, in percentage points; None where neither was measured."""
        errors = [pair.error for pair in (self.hit_rate_lookups, self.hit_rate_unique)]
        return max((100 * abs(error) for error in errors if error is not None), default=None)


@dataclass(frozen=True)
class PlannedTableComparison:
    """One table on one rank; `device_bytes` are its slots and maps. Without a cache nothing is measured."""

    table: str
    rank: int
    kernel: Literal["cached", "device", "replicated"]
    traffic: Traffic
    device_bytes: Pair
    host_bytes: Pair


@dataclass(frozen=True)
class RankComparison:
    """One rank.

    Attributes:
        traffic, cache_device_bytes, host_bytes: of its caches.
        all_to_all_bytes: on the rank's link in a step; measured are the means over ranks, in `PlanComparison`.
        step_seconds: predicted for this rank; measured is the median of the run, since ranks wait for each other.
    """

    rank: int
    traffic: Traffic
    cache_device_bytes: Pair
    host_bytes: Pair
    all_to_all_bytes: Pair
    step_seconds: Pair


@dataclass(frozen=True)
class PromiseVerdict:
    """A promise: the error, and the largest error promised, both in `unit`; None: not measured."""

    what: str
    error: float | None
    promised: float
    unit: Literal["points", "%"]
    detail: str

    @property
    def kept(self) -> bool | None:
        """None where nothing was measured."""
        return None if self.error is None else self.error <= self.promised


@dataclass(frozen=True)
class PlanComparison:
    """A whole run.

    Attributes:
        predicted_steps, measured_steps: steps that hit rates and counts are means over; 0 predicted: any number.
        step_seconds: the slowest rank's, and the run's median.
        sent_bytes: of a rank in a step, on average, by the kinds of `SentBytes`; "other" is not predicted, and "sync"
            is of groups alone.
        files: with rows in a file, the rows and pages that all ranks together move in a step, by the names of
            `FILE_COUNTS`; else empty.
        tables: of all ranks, the largest error first.
        ranks: in order.
        verdicts: one per promise; the last one is about the step time.
    """

    predicted_steps: int
    measured_steps: int
    step_seconds: Pair
    sent_bytes: Mapping[str, Pair]
    tables: tuple[PlannedTableComparison, ...]
    ranks: tuple[RankComparison, ...]
    verdicts: tuple[PromiseVerdict, ...]
    files: Mapping[str, Pair] = field(default_factory=dict)

    @property
    def is_step_time_off(self) -> bool:
        """True where the step time was measured, and is not as promised."""
        return self.verdicts[-1].kept is False


def compare(plan: Plan, run: RunResult) -> PlanComparison:
    """Compare the plan's prediction with a run's result.

    Raises:
        ShardingError: the plan has no prediction, or is for another number of ranks.
    """
    prediction = predicted_for(plan, run)
    found = [_table(plan, prediction, each, run) for each in prediction.tables]

    def largest_error_first(table: PlannedTableComparison) -> tuple[float, float, str, int]:
        points = table.traffic.worst_points  # unmeasured tables come last; of equal errors, more fills come first
        return math.inf if points is None else -points, -(table.traffic.fills.predicted or 0), table.table, table.rank

    tables = sorted(found, key=largest_error_first)
    ranks = tuple(_rank(each, tables, run) for each in prediction.ranks)
    step_seconds = Pair(prediction.step_seconds, run.step_seconds)
    sent_bytes = _sent_pairs(prediction, run)
    verdicts = (
        _hit_rate_verdict("hit rate per lookup", tables, lambda table: table.traffic.hit_rate_lookups),
        _hit_rate_verdict("hit rate per unique id", tables, lambda table: table.traffic.hit_rate_unique),
        _device_verdict(ranks),
        *_sent_verdicts(sent_bytes),
        _step_verdict(step_seconds, run),
    )
    return PlanComparison(
        predicted_steps=prediction.num_steps,
        measured_steps=run.measured_steps,
        step_seconds=step_seconds,
        sent_bytes=sent_bytes,
        tables=tuple(tables),
        ranks=ranks,
        verdicts=verdicts,
        files=_file_pairs(prediction, run),
    )


def predicted_for(plan: Plan, run: RunResult) -> Prediction:
    """Return the plan's prediction, which must be for as many ranks as ran.

    Raises:
        ShardingError: it is not, or there is none.
    """
    if plan.prediction is None:
        raise ShardingError(
            "the plan has no prediction to compare with: it was edited after it was made, or written by hand. Compare "
            "with another one (--plan FILE): embershard plan writes plans with predictions."
        )
    num_ranks = plan.world_size * int(plan.settings.get("sharding.groups", 1))  # the plan is of one group
    if num_ranks != run.world_size:
        raise ShardingError(
            f"the plan is for {num_ranks} ranks; the run had {run.world_size}. Give a plan for as many."
        )
    return plan.prediction


def _table(plan: Plan, prediction: Prediction, predicted: TablePrediction, run: RunResult) -> PlannedTableComparison:
    placement = next((table for table in plan.tables if table.table == predicted.table), None)
    if placement is None:
        raise ShardingError(
            f"the plan predicts table {predicted.table!r}, which it does not place. Plan again, with embershard plan."
        )
    is_cached = placement.kernel == "cached"
    caches = run.caches.get(predicted.rank) if is_cached else None
    measured = None if caches is None else caches.tables.get(predicted.table)
    row_bytes = predicted.moved_row_bytes if is_cached else 0.0
    if row_bytes is None:
        row_bytes = _row_bytes(plan, prediction, predicted)
    numbers = {name: getattr(predicted, name) for name in (*_RATES, *_COUNTS)}
    numbers |= {"bytes_to_device": predicted.fills * row_bytes, "bytes_to_host": predicted.write_backs * row_bytes}
    return PlannedTableComparison(
        table=predicted.table,
        rank=predicted.rank,
        kernel=placement.kernel,
        traffic=_traffic(numbers, measured, run),
        device_bytes=Pair(predicted.device_bytes, None if measured is None else measured.device_bytes),
        host_bytes=Pair(predicted.host_bytes, None if measured is None else measured.host_bytes),
    )


def _traffic(predicted: Mapping[str, float | None], measured: CacheTotals | None, run: RunResult) -> Traffic:
    def of_step(name: str) -> float | None:
        if measured is None:
            return None
        found: float | None = getattr(measured, name)
        return found if name in _RATES or found is None else found / max(1, run.measured_steps)

    return Traffic(**{name: Pair(number, of_step(name)) for name, number in predicted.items()})


def _row_bytes(plan: Plan, prediction: Prediction, predicted: TablePrediction) -> float:
    """Return the bytes of a row of this table's shards on its rank, optimizer state included, by a plan of an earlier
    version: its host bytes without the scores."""
    rows = {
        placement.table: sum(s.rows for s in shards_of(placement, plan.ranks_per_node) if s.rank == predicted.rank)
        for placement in plan.tables
        if placement.kernel == "cached"
    }
    rank = next((each for each in prediction.ranks if each.rank == predicted.rank), None)
    own = rows.get(predicted.table, 0)
    if rank is None or not own:
        return 0.0
    return (predicted.host_bytes - rank.host_bytes.get("scores", 0) * own / sum(rows.values())) / own


def _rank(predicted: RankPrediction, tables: Sequence[PlannedTableComparison], run: RunResult) -> RankComparison:
    """All cached tables of a rank; what was measured is the rank's own total."""
    measured = run.caches.get(predicted.rank)
    own = [table.traffic for table in tables if table.rank == predicted.rank and table.kernel == "cached"]
    numbers: dict[str, float | None] = {
        name: sum(getattr(traffic, name).predicted or 0.0 for traffic in own)
        for name in (*_COUNTS, "bytes_to_device", "bytes_to_host")
    }
    for rate, count in _RATES.items():
        hits = sum((getattr(t, rate).predicted or 0.0) * (getattr(t, count).predicted or 0.0) for t in own)
        numbers[rate] = hits / total if (total := numbers[count]) else None
    device_bytes = predicted.cache_device_bytes
    return RankComparison(
        rank=predicted.rank,
        traffic=_traffic(numbers, measured, run),
        cache_device_bytes=Pair(device_bytes, None if measured is None else measured.device_bytes),
        host_bytes=Pair(
            predicted.total_host_bytes - sum(predicted.host_bytes.get(name, 0) for name in ("id_maps", "file_maps")),
            None if measured is None else measured.host_bytes,
        ),
        all_to_all_bytes=Pair(decode(StepWork, predicted.work).all_to_all_bytes, None),
        step_seconds=Pair(predicted.step_seconds, run.step_seconds),
    )


def _hit_rate_verdict(
    what: str, tables: Sequence[PlannedTableComparison], rate: Callable[[PlannedTableComparison], Pair]
) -> PromiseVerdict:
    errors = [(100 * abs(error), table) for table in tables if (error := rate(table).error) is not None]
    if not errors:
        return PromiseVerdict(what, None, PROMISED_POINTS, "points", "no cached table was measured")
    largest, worst = max(errors, key=lambda each: each[0])
    weights = [table.traffic.lookups.measured or 0.0 for _, table in errors]
    weighted = sum(e * w for (e, _), w in zip(errors, weights, strict=True)) / (sum(weights) or 1.0)
    detail = f"mean of {len(errors)} tables and ranks, {weighted:.2f} where every lookup counts the same; "
    detail += f"worst {worst.table} on rank {worst.rank} with {largest:.2f}"
    return PromiseVerdict(what, sum(e for e, _ in errors) / len(errors), PROMISED_POINTS, "points", detail)


def _device_verdict(ranks: Sequence[RankComparison]) -> PromiseVerdict:
    errors = [(abs(e), rank) for rank in ranks if (e := rank.cache_device_bytes.relative_error) is not None]
    what, promised = "device bytes", 100 * PROMISED_DEVICE_BYTES
    if not errors:
        return PromiseVerdict(what, None, promised, "%", "no cache was measured")
    largest, worst = max(errors, key=lambda each: each[0])
    return PromiseVerdict(what, 100 * largest, promised, "%", f"of the caches, largest on rank {worst.rank}")


def _sent_pairs(prediction: Prediction, run: RunResult) -> dict[str, Pair]:
    """Return what a rank sends in a step, on average, by kind.

    What some ranks send others receive, so the mean over ranks is that of the predicted links. Without groups, nothing
    is averaged, and that kind is left out.
    """
    sent = run.sent_bytes.over(run.parts) if run.measured_steps else None

    def pair(kind: str, names: Sequence[str]) -> Pair:
        if sent is None:
            return Pair(None, None)
        return Pair(fmean(sum(rank.work.get(n, 0.0) for n in names) for rank in prediction.ranks), getattr(sent, kind))

    pairs = {kind: pair(kind, names) for kind, names in SENT_KINDS.items()}
    if not (pairs["sync"].predicted or pairs["sync"].measured):
        del pairs["sync"]
    return {**pairs, "other": Pair(None, None if sent is None else sent.other)}


def _file_pairs(prediction: Prediction, run: RunResult) -> dict[str, Pair]:
    """Return what all ranks move between file and memory in a step; nothing where no rows are in a file."""
    counted = None if run.look_ahead is None else run.look_ahead.files
    steps = 1 if run.look_ahead is None else max(1, run.look_ahead.steps)
    is_predicted = any(rank.files for rank in prediction.ranks)
    if counted is None and not is_predicted:
        return {}
    return {
        name: Pair(
            sum(rank.files.get(name, 0.0) for rank in prediction.ranks) if is_predicted else None,
            None if counted is None else getattr(counted, name) / steps,
        )
        for name in FILE_COUNTS
    }


def _sent_verdicts(sent_bytes: Mapping[str, Pair]) -> Iterator[PromiseVerdict]:
    kinds = {"bytes between ranks": [kind for kind in sent_bytes if kind != "sync"], "bytes of averages": ["sync"]}
    for (what, own), most in zip(kinds.items(), (PROMISED_SENT_BYTES, PROMISED_SYNC_BYTES), strict=True):
        if found := {kind: sent_bytes[kind] for kind in own if kind in sent_bytes}:
            yield _sent_verdict(what, found, 100 * most)


def _sent_verdict(what: str, sent_bytes: Mapping[str, Pair], promised: float) -> PromiseVerdict:
    errors = {kind: abs(e) for kind, pair in sent_bytes.items() if (e := pair.relative_error) is not None}
    if not errors:
        return PromiseVerdict(what, None, promised, "%", "no step was counted")
    worst = max(errors, key=lambda kind: errors[kind])
    pair = sent_bytes[worst]
    detail = (
        f"{worst}, the worst kind: {pair.predicted:,.0f} predicted, {pair.measured:,.0f} measured, of a rank in a step"
    )
    return PromiseVerdict(what, 100 * errors[worst], promised, "%", detail)


def _step_verdict(step_seconds: Pair, run: RunResult) -> PromiseVerdict:
    error, promised = step_seconds.relative_error, 100 * PROMISED_STEP_TIME
    if error is None or step_seconds.predicted is None or step_seconds.measured is None:
        return PromiseVerdict("step time", None, promised, "%", "no step was timed")
    detail = f"{1e3 * step_seconds.predicted:.2f} ms predicted, {1e3 * step_seconds.measured:.2f} ms measured (median)"
    if run.is_disturbed:
        detail += (
            f"; other programs took {run.other_programs:.0%} of the processor time, so it says little: train again"
        )
        return PromiseVerdict("step time", None, promised, "%", detail)
    return PromiseVerdict("step time", 100 * abs(error), promised, "%", detail)


def notes(plan: Plan, run: RunResult, other_settings: Sequence[str] = (), num_checkpoints: int = 0) -> list[str]:
    """Return the reasons why the plan's prediction and the run may differ; first, how good the plan can be at most.

    Args:
        other_settings: sentences of `Plan.other_settings`.
        num_checkpoints: checkpoints written in the counted steps.
    """
    assert plan.prediction is not None, "it was compared"
    return [
        *([] if plan.bound is None else [f"The plan: {plan.bound.sentence}"]),
        *_which_plan(plan, run),
        *(f"Another setting: {sentence}." for sentence in other_settings),
        *_which_steps(plan.prediction, run),
        *_which_tables(plan, plan.prediction, run),
        *_more_traffic(run, num_checkpoints),
    ]


def _which_plan(plan: Plan, run: RunResult) -> Iterator[str]:
    if run.plan_digest is None:
        yield "The run had no plan: tables may have been at other places, in caches of other sizes."
    elif run.plan_digest != plan.digest:
        yield f"The run obeyed another plan ({run.plan_digest}) than this one ({plan.digest})."


def _which_steps(prediction: Prediction, run: RunResult) -> Iterator[str]:
    if run.resumed_at:
        yield (
            f"The run was resumed at step {run.resumed_at:,}: counts and step times are of the "
            f"{run.measured_steps:,} steps since, which began with caches as cold as a new run's."
        )
    if prediction.num_steps == 0:
        yield (
            f"The prediction is of the long run; of the run's {run.measured_steps:,} steps the first ones fill the "
            "caches."
        )
    elif abs(run.measured_steps - prediction.num_steps) > _SAME_STEPS * prediction.num_steps:
        how_much = "more" if run.measured_steps < prediction.num_steps else "less"
        yield (
            f"The prediction is a mean over {prediction.num_steps:,} steps, the measurement over "
            f"{run.measured_steps:,}: the first steps, which fill the caches, weigh {how_much} in what was measured."
        )
    if run.step_seconds is not None and not run.is_steady:
        yield (
            f"The run's {run.measured_steps:,} steps are few beside its look-ahead: for the last ones no batch was "
            "left to be read, so they are quicker than those of a long run. Train longer to compare step times."
        )


def _which_tables(plan: Plan, prediction: Prediction, run: RunResult) -> Iterator[str]:
    shards = [s for t in plan.tables if t.kernel == "cached" for s in shards_of(t, plan.ranks_per_node) if s.rows]
    cached = {(shard.table, shard.rank) for shard in shards}
    if not cached:
        yield "No table is cached: all are whole on the device, and only the step time can be compared."
    elif not run.caches:
        yield (
            "The run had no cache (cache.enabled = false): its tables were whole on the device. Only the step time can "
            "be compared, and it was predicted with caches."
        )
    else:
        measured = {(table, number) for number, rank in run.caches.items() for table in rank.tables}
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


def _more_traffic(run: RunResult, num_checkpoints: int) -> Iterator[str]:
    if growths := sum(rank.overflow_growths for rank in run.caches.values()):
        where = [
            f"{name} on rank {number} ({table.overflow_growths})"
            for number, rank in sorted(run.caches.items())
            for name, table in sorted(rank.tables.items())
            if table.overflow_growths
        ]
        yield (
            f"Caches grew {growths} times, for batches that did not fit; most misses were of "
            f"{', '.join(where[:_SHOWN])}. They end with more slots and bytes than planned; plan with more slots, or "
            "look less far ahead."
        )
    if run.caches and num_checkpoints:
        how_many = "1 checkpoint" if num_checkpoints == 1 else f"{num_checkpoints} checkpoints"
        yield (
            f"Measured write-backs include what {how_many} wrote back from the caches; predicted ones are of evictions "
            "alone."
        )
