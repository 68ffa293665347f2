"""Why a table is where it is: the best plans with another place for it, and what its neighbours cost."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from embershard.errors import ConfigError, ShardingError
from embershard.launch.screen import say
from embershard.planning.exchange import exchange_reason
from embershard.planning.make_plan import best_candidate, sized
from embershard.planning.request import PlanRequest
from embershard.sharding.pins import TablePin
from embershard.sharding.plan import Plan
from embershard.sharding.sharding_types import SHARDING_TYPES
from embershard.sharding.shards import TablePlacement
from embershard.units import size

_MOST_MOVED = 128  # ranks: each is rated on all of them
_MOST_CHANGES = 5  # that are told
_NOTHING_SECONDS = 5e-7


def show_explanations(request: PlanRequest, plan: Plan, tables: Sequence[str], console: Console) -> None:
    """Print why each of these tables is where it is."""
    workload, host_seconds = request.workload, request.host_seconds
    if workload.shape.device == "cuda" and host_seconds:
        host = f"{host_seconds * 1e3:.2f} ms"
        say(console, f"Times here are of the GPUs alone; a step takes at least the {host} of the host's thread.")
    request = own_time(request)
    placements = {placed.table: placed for placed in plan.tables}
    for called in tables:
        name = table_called(called, list(placements))
        chosen = placements[name]
        if chosen.kernel == "replicated":
            parts = [part for part in ([] if plan.prediction is None else plan.prediction.tables) if part.table == name]
            each = f" of {size(max(part.device_bytes for part in parts))}" if parts else ""
            say(
                console,
                f"{name} ({chosen.rows:,} rows) is replicated: each of {plan.world_size} ranks has a copy{each}, since "
                f"--replicate-rows {request.replicate_rows} asks for it. Its lookups send nothing, and its gradients "
                "go to all ranks. With a smaller number it is sharded like the others.",
            )
            continue
        kernels = other_kernels(request, name, chosen)
        say(console, *sentences(chosen, alternatives(request, name, chosen), kernels))
        changes = moved(request, plan.tables, name), beside(request, plan.tables, name)
        say(console, *change_sentences(*changes))
        if workload.shape.world_size > 1 and chosen.sharding != "data_parallel":
            say(console, f"Between ranks, bytes of all ranks in a step: {exchange_reason(workload, chosen)}.")


def table_called(name: str, tables: Sequence[str]) -> str:
    """Return the table with this name, or that of the feature with this name, in capitals or not.

    Raises:
        ConfigError: there is none.

    >>> table_called("C3", ["t_C3", "t_C30"])
    't_C3'
    """
    known = {table.lower().removeprefix("t_"): table for table in tables}
    found = name if name in tables else known.get(name.lower().removeprefix("t_"))
    if found is None:
        near = [known[each] for each in difflib.get_close_matches(name.lower(), known, n=3)]
        some = ", ".join(tables[:8]) + (", ..." if len(tables) > 8 else ".")
        hint = f"Did you mean {' or '.join(near)}?" if near else f"Tables are {some}"
        raise ConfigError(f"no table is called {name!r}. {hint}")
    return found


@dataclass(frozen=True)
class Alternative:
    """The best plan with one table sharded in a given way, all other tables placed anew.

    Attributes:
        sharding, ranks: of the table in that plan.
        step_seconds: from counts alone; None where no such plan fits.
        most_device_bytes: device memory of the fullest rank.
        bottleneck: the part that a step waits for.
        problem: the reason why no such plan fits.
    """

    sharding: str
    ranks: tuple[int, ...] = ()
    step_seconds: float | None = None
    most_device_bytes: int = 0
    bottleneck: str = ""
    problem: str = ""


def alternatives(request: PlanRequest, table: str, chosen: TablePlacement) -> list[Alternative]:
    """Return every allowed way of sharding `table`, the fastest first; the chosen one is among them.

    Raises:
        ShardingError: the model has no such table.
    """
    if table not in request.allowed:
        names = [t.table for t in request.workload.model.tables]
        raise ShardingError(f"no table {table!r} is sharded in this plan; tables are {', '.join(names[:8])}...")
    found = [_with(request, table, sharding) for sharding in request.allowed[table]]
    return sorted(
        found, key=lambda each: (each.step_seconds is None, each.step_seconds, each.sharding != chosen.sharding)
    )


def other_kernels(request: PlanRequest, table: str, chosen: TablePlacement) -> list[Alternative]:
    """Return the best plan with the table's other kernel, in a cache or whole on the device; none where it may have one
    only."""
    names = request.kernels(table, resident=request.may_mix, cached=True)
    pin = request.pins.get(table, TablePin(kernel=chosen.kernel))  # type: ignore[arg-type]  # no copies
    others = [replace(pin, kernel=name) for name in names if name != chosen.kernel]  # type: ignore[arg-type]
    return [_best(replace(request, pins={**request.pins, table: each}), table, each.kernel or "") for each in others]


def _with(request: PlanRequest, table: str, sharding: str) -> Alternative:
    return _best(replace(request, only={**request.only, table: [sharding]}), table, sharding)


def _best(request: PlanRequest, table: str, way: str) -> Alternative:
    try:
        best = best_candidate(replace(request, on_change=None))  # of the run's settings: they know no other way
    except ShardingError as error:
        return Alternative(way, problem=str(error))
    ranks = next(placed.ranks for placed in best.tables if placed.table == table)
    return Alternative(way, ranks, best.step_seconds, best.quick.most_device_bytes, best.quick.bottleneck)


@dataclass(frozen=True)
class StepChange:
    """A step after one change of a plan, all else as it is.

    Attributes:
        what: the change: the ranks that a table moves to, or the table that is away.
        step_seconds: of the devices, from counts alone; None: it does not fit.
        more_seconds: than with the plan.
    """

    what: str
    step_seconds: float | None
    more_seconds: float = 0.0


def moved(request: PlanRequest, tables: Sequence[TablePlacement], table: str) -> list[StepChange]:
    """Return what a step takes with one table on each other rank, or node, and all others where they are: the fastest
    first. None for a table on all ranks, or of several blocks of columns.

    Args:
        tables: the plan's.
    """
    request, shape = replace(own_time(request), pins={}), request.workload.shape
    chosen = next(each for each in tables if each.table == table)
    kind, per_node = SHARDING_TYPES[chosen.sharding], min(shape.ranks_per_node, shape.world_size)
    count = {"one": 1, "node": per_node}.get(kind.rows_over, 0)
    if len(chosen.ranks) != count or shape.world_size > _MOST_MOVED:
        return []
    found = []
    for first in range(0, shape.world_size, count):
        ranks = tuple(range(first, first + count))
        if ranks != chosen.ranks:
            changed = [replace(each, ranks=ranks) if each is chosen else each for each in tables]
            name = f"rank {first}" if count == 1 else f"node {first // count}"
            found.append(_changed(request, tables, changed, name))
    return sorted(found, key=lambda each: (each.step_seconds is None, each.step_seconds))


def beside(request: PlanRequest, tables: Sequence[TablePlacement], table: str) -> list[StepChange]:
    """Return what a step takes without each of the tables that share a rank with one: the ones that matter most first.

    Args:
        tables: the plan's.
    """
    request = replace(own_time(request), pins={})
    ranks = set(next(each.ranks for each in tables if each.table == table))
    others = [each for each in tables if each.table != table and ranks & set(each.ranks)]
    found = [_changed(request, tables, [each for each in tables if each is not other], other.table) for other in others]
    return sorted((each for each in found if each.step_seconds is not None), key=lambda each: each.more_seconds)


def own_time(request: PlanRequest) -> PlanRequest:
    """Return the request without the host's thread of a GPU: beside it, many placements are as fast."""
    return request.without_host if request.workload.shape.device == "cuda" else request


def _changed(
    request: PlanRequest, tables: Sequence[TablePlacement], changed: Sequence[TablePlacement], what: str
) -> StepChange:
    names = {each.table for each in changed}
    model = request.workload.model
    kept = replace(model, tables=tuple(table for table in model.tables if table.table in names))
    other = replace(request, workload=replace(request.workload, model=kept))
    before, after = sized(request, tables), sized(other, changed)
    if before is None or after is None:
        return StepChange(what, None)
    return StepChange(what, after.step_seconds, after.step_seconds - before.step_seconds)


def sentences(chosen: TablePlacement, found: Sequence[Alternative], kernels: Sequence[Alternative] = ()) -> list[str]:
    """Explain the chosen placement beside the alternatives, sharding types and kernels, one sentence each."""
    own = next((each for each in found if each.sharding == chosen.sharding and each.step_seconds is not None), None)
    ranks = ", ".join(map(str, chosen.ranks[:8])) + (", ..." if len(chosen.ranks) > 8 else "")
    lines = [f"{chosen.table} ({chosen.rows:,} rows) is {chosen.sharding} on rank {ranks}, {chosen.kernel}."]
    others = [(each, chosen.sharding) for each in found if each is not own]
    for each, than in [*others, *((each, chosen.kernel) for each in kernels)]:
        if each.step_seconds is None or own is None or own.step_seconds is None:
            lines.append(f"{each.sharding}: {each.problem or 'not chosen'}")
            continue
        lines.append(
            f"{each.sharding}: {each.step_seconds * 1e3:.3f} ms a step, "
            f"{_compared(each.step_seconds - own.step_seconds)} {than}; then "
            f"a step waits for {each.bottleneck}, and the fullest rank needs {size(each.most_device_bytes)}"
        )
    return lines


def change_sentences(moves: Sequence[StepChange], neighbours: Sequence[StepChange]) -> list[str]:
    """Say what a step takes with the table elsewhere, and which of those beside it matter."""
    lines = []
    if moves:
        told = [
            f"{each.what} {_compared(each.more_seconds)} here" if each.step_seconds is not None
            else f"{each.what} does not fit"
            for each in moves[:_MOST_CHANGES]
        ]  # fmt: skip
        lines.append(f"Moved alone, all other tables where they are, a step takes: {'; '.join(told)}.")
    matter = [each for each in neighbours if each.more_seconds < -_NOTHING_SECONDS]
    if matter:
        told = [f"{-each.more_seconds * 1e3:.3f} ms less without {each.what}" for each in matter[:_MOST_CHANGES]]
        lines.append(f"Of {len(neighbours)} tables beside it, these matter most: {'; '.join(told)}.")
    elif neighbours:
        lines.append(f"None of the {len(neighbours)} tables beside it makes the step longer.")
    return lines


def _compared(more_seconds: float) -> str:
    if abs(more_seconds) < _NOTHING_SECONDS:
        return "as much as"
    return f"{abs(more_seconds) * 1e3:.3f} ms {'more' if more_seconds > 0 else 'less'} than"
