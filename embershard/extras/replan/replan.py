"""`replan`: is a new plan worth the rows that move? The old plan under a new profile, and changes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from embershard.errors import ConfigError, ShardingError
from embershard.extras.replan.moves import Moves, moves, with_kept_ranks
from embershard.extras.replan.resume import StorageBytes, storage_bytes, warm_up
from embershard.planning.make_plan import Candidate, PlanSearch, all_sized, complete, sized
from embershard.planning.many_ranks import fastest_candidate
from embershard.planning.predict import predict
from embershard.planning.request import PlanRequest
from embershard.planning.workload import Layout
from embershard.sharding.plan import Plan, Prediction, TablePlacement
from embershard.sharding.sizes import names_in_pool
from embershard.units import size

#: A change gains at least this share of a step: the planner looks for no plan that is nearer to the best.
LEAST_GAIN = 0.005
_AS_FAST = 1e-9  # sums in another order
_MOST_FROM_OLD = 128  # ranks: on more, a search from the old plan takes minutes
_MOST_TRIED = 300  # placements in a sequence of changes: later ones are taken in the order of the first
_LOOKED_AT = 4  # tables that are tried again for each change
_MOST_TOLD = 8  # changes that are predicted in full


@dataclass(frozen=True)
class PlanChange:
    """The old plan, or one that a run may change to.

    Attributes:
        candidate: placement and slots.
        prediction: under the new profile, in full.
        changed: tables with another place, kernel or exchange.
        moves: of rows between ranks.
        storage: bytes that go through the checkpoint; None: the run stays.
        fills: until the caches hold what they hold in the long run; 0: the run stays.
        resume_seconds: of a stop, a save and a resume, or of what a resume takes longer; None: not told.
        warm_up_seconds: of these fills, if nothing hides them; likewise.
        gain_seconds: by which a step is shorter than the old plan's.
    """

    candidate: Candidate
    prediction: Prediction
    changed: tuple[str, ...]
    moves: Moves
    storage: StorageBytes | None = None
    fills: float = 0.0
    resume_seconds: float | None = 0.0
    warm_up_seconds: float = 0.0
    gain_seconds: float = 0.0

    @property
    def seconds(self) -> float | None:
        """What the change takes, in which the run does not train; None: not told."""
        return None if self.resume_seconds is None else self.resume_seconds + self.warm_up_seconds

    @property
    def pays_after(self) -> int | None:
        """Steps until the change has paid what it takes; None: never, or not told."""
        if self.seconds is None or self.gain_seconds <= 0:
            return None
        return math.ceil(self.seconds / self.gain_seconds)

    def total_seconds(self, steps: int) -> float | None:
        """Return the seconds of the change and of so many steps behind it; None: not told."""
        return None if self.seconds is None else self.seconds + steps * self.prediction.step_seconds


@dataclass(frozen=True)
class Replan:
    """Staying, and changes, those that move more bytes and are faster last.

    Attributes:
        old: the old plan, with what it told.
        request: for a plan under the new profile.
        choices: the first is to stay.
        steps: until plans are compared again; None: not known.
        storage_note: which rate tells what a resume takes, or that none does.
    """

    old: Plan
    request: PlanRequest
    choices: tuple[PlanChange, ...]
    steps: int | None
    storage_note: str

    @property
    def best(self) -> PlanChange | None:
        """The choice with the fewest seconds over `steps`; None: seconds, or steps, are not told."""
        if len(self.choices) == 1:
            return self.choices[0]
        totals = [None if self.steps is None else each.total_seconds(self.steps) for each in self.choices]
        told = [total for total in totals if total is not None]
        return self.choices[totals.index(min(told))] if len(told) == len(totals) else None

    def plan(self, choice: PlanChange, progress: Callable[[int, int], None] | None = None) -> Plan:
        """Return the plan of a choice, as `make_plan` makes one."""
        return complete(self.request, choice.candidate, progress)


def replan(
    old: Plan,
    request: PlanRequest,
    *,
    steps: int | None = None,
    storage_bytes_per_second: float | None = None,
    resume_seconds: float | None = None,
    stops_anyway: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Replan:
    """Compare staying with a plan, with changing to the best one that is found, and with changes of fewer tables.

    The best plan is looked for from nothing and from the old placement; its ranks have the numbers with which most rows
    stay. From the old plan to it, table after table is changed, the one first that gains most for each byte that moves.
    Of these plans those are told that are faster than all that move less, and than the old one by `LEAST_GAIN`.

    Args:
        old: that a run trains by.
        request: as for a new plan on the same ranks, with the new profile.
        steps: until plans are compared again; None: those of the request's run.
        storage_bytes_per_second: that a node writes to, and reads from, the folder of checkpoints; None: the
            topology's disk, if it has one.
        resume_seconds: of a stop and a resume, measured; in place of a rate.
        stops_anyway: the run stops and goes on in any case: a change takes what its resume takes longer.
        progress: called with the number of plans predicted, and of all.

    Raises:
        ConfigError, ShardingError: the old plan has other tables, ranks, caches or pins, or does not fit its limits.
    """
    if resume_seconds is not None and (stops_anyway or storage_bytes_per_second is not None):
        raise ConfigError("--resume-seconds takes the place of --storage, and --stops needs a rate: give one of both.")
    stay = _as_planned(old, request)
    prediction = predict(stay.layout, stay.slots, request.rates)
    _check_limits(request, prediction)
    base = PlanChange(stay, prediction, (), _moves(request, stay, stay))
    storage, note = _storage(request, storage_bytes_per_second, resume_seconds)
    cost = partial(_with_cost, request, stay, storage, resume_seconds)
    staying = cost(base) if stops_anyway else base
    told, found = list[PlanChange](), _thinned(_found(request, stay))
    for number, candidate in enumerate(found, 1):
        change = _change(request, base, candidate)
        is_gain = change.gain_seconds >= LEAST_GAIN * base.prediction.step_seconds
        if is_gain and all(change.gain_seconds > each.gain_seconds for each in told):
            told.append(_beyond(cost(change), staying))
        if progress is not None:
            progress(number, len(found))
    steps = request.workload.shape.num_steps if steps is None else steps
    return Replan(old, request, (base, *told), steps, note)


def _change(request: PlanRequest, base: PlanChange, candidate: Candidate) -> PlanChange:
    """Return a change from the old plan, predicted in full, without what it takes."""
    stay, prediction = base.candidate, predict(candidate.layout, candidate.slots, request.rates)
    changed = tuple(new.table for was, new in zip(stay.tables, candidate.tables, strict=True) if was != new)
    gain = base.prediction.step_seconds - prediction.step_seconds
    there = _moves(request, stay, candidate)
    return PlanChange(_told(request, candidate), prediction, changed, there, gain_seconds=gain)


def _with_cost(
    request: PlanRequest, stay: Candidate, storage: float | None, resume_seconds: float | None, choice: PlanChange
) -> PlanChange:
    """Return a choice with what a stop, a resume by it and its caches' fills take."""
    workload, other = request.workload, choice.candidate
    through = storage_bytes(workload.model, stay.tables, other.tables, workload.shape)
    fills, warm_up_seconds = warm_up(other.layout, other.slots, request.rates)
    seconds = resume_seconds if storage is None else through.total / storage
    return replace(choice, storage=through, fills=fills, resume_seconds=seconds, warm_up_seconds=warm_up_seconds)


def _beyond(change: PlanChange, staying: PlanChange) -> PlanChange:
    """Return a change with what it takes more than `staying` does."""
    before, own = staying.resume_seconds, change.resume_seconds
    return replace(
        change,
        resume_seconds=None if own is None or before is None else max(0.0, own - before),
        warm_up_seconds=max(0.0, change.warm_up_seconds - staying.warm_up_seconds),
    )


def _told(request: PlanRequest, candidate: Candidate) -> Candidate:
    """Return a placement that was found by a GPU's own time with what it takes beside the host's."""
    host_seconds = request.host_seconds * request.workload.shape.pieces
    if request.workload.shape.device == "cpu" or not host_seconds:
        return candidate
    quick = predict(candidate.layout, candidate.slots, request.rates, from_counts=True)
    return replace(candidate, quick=quick, bound=candidate.bound and candidate.bound.beside(host_seconds))


def _as_planned(old: Plan, request: PlanRequest) -> Candidate:
    """Return the old plan's placement and slots under the request's data."""
    workload, shape = request.workload, request.workload.shape
    old.check_ranks(shape.world_size, min(shape.ranks_per_node, shape.world_size))
    old.check_model({each.table: (each.rows, each.dim, each.dtype) for each in workload.model.tables})
    if old.device != shape.device:
        raise ConfigError(
            f"the old plan is for {old.device!r} and the topology is of kind {shape.device!r}. Give the run's machine: "
            "--topology."
        )
    placed = {table.table: table for table in old.tables}
    for name, pin in request.pins.items():
        if problem := pin.problem(placed[name]):
            raise ConfigError(f"sharding.pin.{name}: the old plan cannot stay, {problem}. Plan anew, or drop the pin.")
    layout = Layout(workload, [placed[each.table] for each in workload.model.tables])
    slots = {(pool.rank, pool.tables, pool.sharding, pool.dim): pool.slots for pool in old.pools}
    found = {}
    for key, members in layout.pools.items():
        place = (key.rank, names_in_pool(members), key.sharding, key.columns)
        if place not in slots:
            raise ShardingError(
                f"the old plan has no cache of {', '.join(place[1])} ({key.sharding}, {key.columns} columns) on rank "
                f"{key.rank}, which this run's model and settings need. Plan anew: embershard plan."
            )
        found[key] = slots[place]
    return Candidate(layout, found, predict(layout, found, request.rates, from_counts=True))


def _check_limits(request: PlanRequest, prediction: Prediction) -> None:
    """Raise where the old plan takes more memory under the new data than the ranks and nodes may use."""
    budget, again = request.budget, "It cannot stay. Plan anew: embershard plan, or give --set and limits that it fits."
    for rank in prediction.ranks if budget.rank_bytes is not None else ():
        used = rank.cache_device_bytes if budget.device_bytes is None else rank.total_device_bytes
        if used > (limit := (budget.rank_bytes or 0) - budget.less(rank.rank)):
            raise ShardingError(
                f"the old plan does not fit any more: under the new profile rank {rank.rank} needs {size(used)} of its "
                f"device and may use {size(limit)}: {size(used - limit)} are missing. {again}"
            )
    used = prediction.most_host_bytes(request.workload.shape.ranks_per_node)
    if budget.host_bytes is not None and used > budget.host_bytes:
        raise ShardingError(
            f"the old plan does not fit any more: under the new profile a node needs {size(used)} of host memory and "
            f"may use {size(budget.host_bytes)}. {again}"
        )


def _storage(request: PlanRequest, given: float | None, resume_seconds: float | None) -> tuple[float | None, str]:
    """Return the bytes a second of the storage of checkpoints, and a sentence on what a resume's time is told by."""
    machine = request.topology
    pages = 0.0 if machine is None else machine.disk_pages_per_second
    if resume_seconds is not None:
        return None, f"A stop and a resume take {resume_seconds:,.0f} s, as given (--resume-seconds)."
    beside = "Not counted: the start of processes, checksums, and files that are in memory still."
    if given is not None:
        return given, (
            f"A resume's time: a save of all rows, a check of its files, and the read of the new shards, at the "
            f"{size(given)} a second of the storage that were given. {beside}"
        )
    if machine is not None and pages:
        return 4096 * pages, (
            f"A resume's time: a save of all rows, a check of its files, and the read of the new shards, at "
            f"disk_pages_per_second of {machine.name} x 4 KiB, {size(4096 * pages)} a second. Reads in order are "
            f"faster: --storage RATE. {beside}"
        )
    return None, (
        "What a stop and a resume take is not told: the topology has no rate of a disk. Give that of the folder of "
        "checkpoints (--storage 2GiB/s), or what your last resume took (--resume-seconds 300)."
    )


def _moves(request: PlanRequest, stay: Candidate, other: Candidate) -> Moves:
    return moves(request.workload.model, stay.tables, other.tables, request.workload.shape)


def _found(request: PlanRequest, stay: Candidate) -> list[Candidate]:
    """Return changes, by counts alone: each is faster than all that move fewer bytes. On a GPU by its own time: beside
    a slower host all placements are as fast."""
    if request.workload.shape.device == "cuda":
        request = request.without_host
        stay = replace(stay, quick=predict(stay.layout, stay.slots, request.rates, from_counts=True))
    found = all_sized(request, [stay.tables])  # slots alone
    begin, done = found[0] if found else stay, set[tuple[TablePlacement, ...]]()
    for target in _targets(request, stay):
        kept = _with_kept_ranks(request, stay, target)
        if kept.tables not in done:
            found += [*changes_to(request, begin, kept), kept]
        found.append(target)
        done |= {kept.tables, target.tables}
    with_bytes = sorted(
        ((_moves(request, stay, each).total, each.step_seconds, number) for number, each in enumerate(found)),
    )
    faster, least = list[Candidate](), (1.0 - _AS_FAST) * stay.step_seconds
    for _, seconds, number in with_bytes:
        if seconds < least:
            faster.append(found[number])
            least = (1.0 - _AS_FAST) * seconds
    return faster


def _targets(request: PlanRequest, stay: Candidate) -> list[Candidate]:
    """Return the fastest plans that a search from the old one and one from nothing find."""
    from_old, anew, world_size = list[Candidate](), list[Candidate](), request.workload.shape.world_size
    if 1 < world_size <= _MOST_FROM_OLD and request.sharded:
        from_old = PlanSearch(request).again([stay])
    with suppress(ShardingError):  # no plan from nothing fits: the old one does
        anew = [fastest_candidate(request)]
    if anew and anew[0].bound is not None:
        from_old = [replace(each, bound=anew[0].bound) for each in from_old]
    return [min(own, key=lambda each: each.step_seconds) for own in (from_old, anew) if own]


def _with_kept_ranks(request: PlanRequest, stay: Candidate, target: Candidate) -> Candidate:
    """Return a plan with the numbers of ranks with which most rows stay: beside tables over all ranks that is another
    plan, and it may be slower by what is no gain."""
    tables = with_kept_ranks(request.workload.model, stay.tables, target.tables, request.workload.shape)
    other = sized(request, tables)
    if other is None or other.step_seconds > (1.0 + LEAST_GAIN) * target.step_seconds:
        return target
    return replace(other, bound=target.bound)


def changes_to(request: PlanRequest, begin: Candidate, target: Candidate) -> list[Candidate]:
    """Return the plans between two: table after table takes its new place, the one first that gains most for each byte
    that moves; where a table that comes next does not fit, others come before it. All fit.

    After some hundred placements a table's worth is the one that was seen last: others' changes matter less than its
    own.
    """
    wanted = {table.table: table for table in target.tables}
    both, cost = zip(begin.tables, target.tables, strict=True), _moves(request, begin, target).tables
    costs = {new.table: cost.get(new.table, 0) for old, new in both if old != new}
    found, now, tried = list[Candidate](), begin, 0
    worth = dict.fromkeys(costs, math.inf)  # by what was seen last
    while len(worth) > 1:
        best, gain = None, -math.inf
        first = math.inf in worth.values()
        order = sorted(worth, key=lambda name: -worth[name])
        for looked, name in enumerate(order):
            if best is not None and not first and looked >= (_LOOKED_AT if tried < _MOST_TRIED else 1):
                break
            tried += 1
            changed = tuple(wanted[name] if table.table == name else table for table in now.tables)
            fitting = all_sized(request, [changed])
            worth[name] = (now.step_seconds - fitting[0].step_seconds) / max(1, costs[name]) if fitting else -math.inf
            if fitting and worth[name] > gain:
                best, gain, chosen = fitting[0], worth[name], name
        if best is None:
            break
        found.append(best)
        now = best
        del worth[chosen]
    return found


def _thinned(found: Sequence[Candidate]) -> list[Candidate]:
    """Return at most as many plans as are predicted in full, spread evenly, with the first and the last."""
    if len(found) <= _MOST_TOLD:
        return list(found)
    last = _MOST_TOLD - 1
    return [found[round(number * (len(found) - 1) / last)] for number in range(_MOST_TOLD)]
