"""Explains a table's placement by the cost of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from embershard.errors import ShardingError
from embershard.planning.make_plan import best_candidate
from embershard.planning.request import PlanRequest
from embershard.sharding.shards import TablePlacement
from embershard.units import size


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


def _with(request: PlanRequest, table: str, sharding: str) -> Alternative:
    try:
        best = best_candidate(replace(request, only={**request.only, table: [sharding]}))
    except ShardingError as error:
        return Alternative(sharding, problem=str(error))
    ranks = next(placed.ranks for placed in best.tables if placed.table == table)
    return Alternative(sharding, ranks, best.step_seconds, best.quick.most_device_bytes, best.quick.bottleneck)


def sentences(chosen: TablePlacement, found: Sequence[Alternative]) -> list[str]:
    """Explain the chosen placement beside the alternatives, one sentence each."""
    own = next((each for each in found if each.sharding == chosen.sharding and each.step_seconds is not None), None)
    ranks = ", ".join(map(str, chosen.ranks[:8])) + (", ..." if len(chosen.ranks) > 8 else "")
    lines = [f"{chosen.table} ({chosen.rows:,} rows) is {chosen.sharding} on rank {ranks}, {chosen.kernel}."]
    for each in found:
        if each is own:
            continue
        if each.step_seconds is None or own is None or own.step_seconds is None:
            lines.append(f"{each.sharding}: {each.problem or 'not chosen'}")
            continue
        more = each.step_seconds - own.step_seconds
        change = "as much as" if abs(more) < 5e-7 else f"{abs(more) * 1e3:.3f} ms {'more' if more > 0 else 'less'} than"
        lines.append(
            f"{each.sharding}: {each.step_seconds * 1e3:.3f} ms a step, {change} {chosen.sharding}; then "
            f"a step waits for {each.bottleneck}, and the fullest rank needs {size(each.most_device_bytes)}"
        )
    return lines
