"""Makes a plan: the placement of every table, the size of every cache, and their prediction.

least need      does it fit at all? if not: the table, the tier, and what would make it fit
candidates      TorchRec's planner, with costs from the data, under the budget
slots           the rest of a rank's budget, divided among its pools
prediction      quick for every candidate, from counts; of the best one by replaying the trace
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from embershard.errors import ShardingError
from embershard.planning.budget import LeastNeed, least_need, least_need_without_caches, placed, split_slots
from embershard.planning.exchange import exchange_notes, with_exchange
from embershard.planning.predict import predict
from embershard.planning.request import PlanRequest
from embershard.planning.shard_costs import ShardCosts, cached
from embershard.sharding.plan import Plan, PoolPlacement, Prediction
from embershard.sharding.shards import TablePlacement, no_rows_problem
from embershard.sharding.sizes import by_pool, place_shards
from embershard.units import size

_ORDERS: tuple[Literal["seconds", "device_bytes"], ...] = ("seconds", "device_bytes")
_MANY_TABLES = 200  # with more, one order must do: each costs seconds
_MOSTLY = 0.5  # of the misses: with more first touches, hit rates say little of a cache's size
#: A step that is slower by this share is as fast.
_AS_FAST = 1e-9
_SKEWED = 1.5  # a block with more lookups than this, relative to its share of the rows, gets a note


@dataclass(frozen=True)
class Candidate:
    """A placement with its pools, and its prediction from counts alone."""

    tables: tuple[TablePlacement, ...]
    pools: tuple[PoolPlacement, ...]
    quick: Prediction

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, from counts alone."""
        return self.quick.step_seconds


def make_plan(request: PlanRequest, progress: Callable[[int, int], None] | None = None) -> Plan:
    """Return the best plan found. Deterministic: equal requests give equal plans.

    Raises:
        ShardingError: no placement fits; names the table, the tier (or cache), the missing bytes, and what would fit.
    """
    return complete(request, best_candidate(request), progress)


def best_candidate(request: PlanRequest) -> Candidate:
    """Return the fastest placement that fits, by counts alone; of those that are as fast, the one whose fullest rank
    has the most device memory left.

    Raises:
        ShardingError: as `make_plan`.
    """
    need = least_need(request)
    found = _candidates(request, need)
    if found:
        limit = min(candidate.step_seconds for candidate in found) * (1.0 + _AS_FAST)
        as_fast = [candidate for candidate in found if candidate.step_seconds <= limit]
        return min(as_fast, key=lambda candidate: (candidate.quick.most_device_bytes, candidate.step_seconds))
    whole = least_need_without_caches(request)
    if whole is not None and (candidate := sized(request, whole.tables)) is not None:
        return candidate
    if not need.excess_rows:
        needs = [need] if whole is None else [need, whole]
        min(needs, key=lambda each: each.asked(request.budget)).check_device(request)
    need.check_pools(request)
    need.check_host(request)
    raise ShardingError(_no_room(request, need))


def _no_room(request: PlanRequest, need: LeastNeed) -> str:
    """Return the message where each rank's least need fits, but the requested ratio or the rows of a node do not."""
    budget = request.budget
    larger = sized(replace(request, budget=replace(budget, device_bytes=2**62, host_bytes=None)), need.tables)
    if budget.ratio is None or budget.device_bytes is None or larger is None:
        return f"{len(request.allowed)} tables do not fit the nodes evenly: give --host-memory more, or use more nodes"
    device_bytes = larger.quick.most_device_bytes
    return (
        f"the plan does not fit: a rank with {budget.ratio:g} of its rows on the device needs {size(device_bytes)} and "
        f"may use {size(budget.device_bytes)}: {size(device_bytes - budget.device_bytes)} are missing. Use a smaller "
        f"ratio, or --device-memory {device_bytes}"
    )


def complete(request: PlanRequest, candidate: Candidate, progress: Callable[[int, int], None] | None = None) -> Plan:
    """Return the plan of a candidate, predicted by replaying the trace where it is long enough."""
    shape = request.workload.shape
    exact = predict(request.workload, candidate.tables, candidate.pools, request.rates, progress=progress)
    return Plan(
        world_size=shape.world_size,
        ranks_per_node=min(shape.ranks_per_node, shape.world_size),
        batch_size=shape.batch_size,
        device=shape.device,
        device_memory_bytes=request.budget.device_bytes,
        host_memory_bytes=request.budget.host_bytes,
        settings=dict(request.settings),
        tables=candidate.tables,
        pools=candidate.pools,
        notes=(*request.notes, *_advice(request, candidate, exact)),
        prediction=exact,
        made_from=dict(request.made_from),
    )


def sized(request: PlanRequest, tables: Sequence[TablePlacement]) -> Candidate | None:
    """Size the caches of a placement as the budget allows; None where it allows too little, or where a cache cannot
    number its rows."""
    workload, limit = request.workload, request.budget.host_bytes
    tables = [with_exchange(workload, table) for table in tables]
    shards = place_shards(workload.model, tables, workload.shape)
    pools = split_slots(workload, shards, request.budget)
    if pools is None:
        return None
    quick = predict(workload, tables, pools, request.rates, from_counts=True)
    if limit is not None and quick.most_host_bytes(workload.shape.ranks_per_node) > limit:
        return None
    return Candidate(tuple(tables), tuple(pools), quick)


def _candidates(request: PlanRequest, need: LeastNeed) -> list[Candidate]:
    """Return placements that fit, among them the cached one that needs the least memory. First come those without a
    cache: where all rows fit the devices, nothing need be planned or moved."""
    may_be_cached = need.excess_rows or need.fits_device(request.budget)
    searched = _searched(request, need) if may_be_cached else []
    found = list(dict.fromkeys([*searched, *_round_robin(request), need.tables]))
    tried = [*_searched(request, need, resident=True), *map(_without_caches, found), *(found if may_be_cached else [])]
    if _may_be_resident(request) and (balanced := least_need_without_caches(request)) is not None:
        tried.append(balanced.tables)
    ranks_per_node = min(request.workload.shape.ranks_per_node, request.workload.shape.world_size)
    trained = [tables for tables in dict.fromkeys(tried) if not no_rows_problem(tables, ranks_per_node)]
    candidates = [sized(request, tables) for tables in trained]
    return [candidate for candidate in candidates if candidate is not None]


def _round_robin(request: PlanRequest) -> list[tuple[TablePlacement, ...]]:
    """Place table i on rank i mod W, where that is allowed: a plan must not be slower than this."""
    if not request.allowed or not all("table_wise" in types for types in request.allowed.values()):
        return []
    world_size = request.workload.shape.world_size
    return [placed(request, [cached(t, "table_wise", [n % world_size]) for n, t in enumerate(request.sharded)])]


def _searched(request: PlanRequest, need: LeastNeed, resident: bool = False) -> list[tuple[TablePlacement, ...]]:
    """Return the placements of TorchRec's planner, for two orders of the tables; `resident`: without caches. Every
    sharding type has collectives of its own, which no table's cost shows: so one type for all is tried, too."""
    shape, budget = request.workload.shape, request.budget
    if shape.world_size == 1 or not request.sharded or (resident and not _may_be_resident(request)):
        return []
    from embershard.planning.search import place  # loads TorchRec

    least = None if resident else sized(replace(request, budget=replace(budget, host_bytes=None)), need.tables)
    num_slots = sum(pool.slots for pool in least.pools) if least is not None else 1
    costs = ShardCosts(request.workload, request.rates, num_slots, resident=resident)
    local = min(shape.ranks_per_node, shape.world_size)
    fixed_bytes = _shared(request, min(rank.fixed_bytes for rank in need.ranks))
    found = []
    for order, allowed in _searches(request):
        placements = place(
            request.sharded,
            costs,
            world_size=shape.world_size,
            ranks_per_node=local,
            device_bytes=None if budget.device_bytes is None else budget.device_bytes - fixed_bytes,
            host_bytes=None if budget.host_bytes is None else budget.host_bytes // local,
            allowed=allowed,
            sort_by=order,
            limit_rows=not resident,
        )
        if placements is not None:
            tables = placed(request, placements)
            found.append(_without_caches(tables) if resident else tables)
    return found


def _without_caches(tables: Sequence[TablePlacement]) -> tuple[TablePlacement, ...]:
    return tuple(table.without_cache for table in tables)


def _searches(request: PlanRequest) -> list[tuple[Literal["seconds", "device_bytes"], dict[str, list[str]]]]:
    allowed = request.allowed
    if len(request.sharded) > _MANY_TABLES:
        return [("seconds", allowed)]
    one_type = [
        {table: [only] for table in allowed}
        for only in ("table_wise", "row_wise")
        if all(only in types for types in allowed.values())
    ]
    choices = [choice for choice in [allowed, *one_type] if choice is allowed or choice != allowed]
    return [(order, choice) for choice in choices for order in _ORDERS]


def _may_be_resident(request: PlanRequest) -> bool:
    limit = request.budget.device_bytes
    needed = sum(table.rows * table.row_bytes() for table in request.sharded)
    return limit is not None and needed <= limit * request.workload.shape.world_size


def _shared(request: PlanRequest, fixed_bytes: int) -> int:
    """Return the part of a rank's fixed bytes that no placement changes: the dense model, its activations, and what is
    left free."""
    model, shape = request.workload.model, request.workload.shape
    dense = model.dense_parameter_bytes + model.dense_state_bytes
    activations = round(model.activation_bytes_per_sample * shape.batch_size)
    return min(dense + activations + shape.reserve_bytes, fixed_bytes)


def _advice(request: PlanRequest, candidate: Candidate, exact: Prediction) -> list[str]:
    workload, shape = request.workload, request.workload.shape
    notes = [] if request.topology is None else [request.topology.error_note(exact.bottleneck)]
    if exact.method == "counts" and candidate.pools:
        notes.append(
            "Hit rates are from counts alone, in the long run: the profile's trace has too few batches of "
            f"{shape.global_batch_size:,} samples to be replayed. They hold where the profiled samples come again; the "
            "estimate for new data is beside them."
        )
    shards = place_shards(workload.model, candidate.tables, shape)
    rows = [sum(shard.rows for shard in members) for members in by_pool(shards).values()]
    has_all = sum(pool.slots for pool in candidate.pools) >= sum(rows)
    if exact.first_touch_share > _MOSTLY and not has_all:
        notes.append(
            f"The profile is too short to tell sizes of caches apart: {exact.first_touch_share:.0%} of the misses are "
            f"first touches, of rows that the caches never had before. Fills and times are of {exact.num_steps:,} such "
            "steps. What a size is worth in the long run is an estimate: a power law for rows that were seen rarely or "
            "never. Profile more samples for a better one."
        )
    notes += [
        f"Table {table}: hot rows lie together, its busiest block of rows gets {times:.1f} times its share of lookups. "
        'Scatter them with id_mapping = "hash".'
        for table, times in _skewed_blocks(request, candidate).items()
    ]
    grown = [
        rank.rank
        for rank, planned in zip(exact.ranks, candidate.quick.ranks, strict=True)  # no cache grows in the quick one
        if rank.device_bytes["slots"] > planned.device_bytes["slots"]
    ]
    if grown:
        notes.append(
            f"The caches of ranks {grown[:8]} will grow: one batch needs more rows than they have slots. The "
            "prediction counts that; give them more (--device-memory, a larger cache.ratio), or use a smaller batch."
        )
    notes += exchange_notes(workload, candidate.tables)
    if not candidate.pools:
        notes.append("All rows fit the devices: no table is cached.")
    elif has_all:
        notes.append("Every row has a slot: nothing is ever evicted.")
    return notes


def _skewed_blocks(request: PlanRequest, candidate: Candidate) -> dict[str, float]:
    """Return the tables with a block of rows that is looked up far too often, and how often relative to its rows."""
    worst: dict[str, float] = {}
    for shard in place_shards(request.workload.model, candidate.tables, request.workload.shape):
        part = shard.rows / shard.table.rows
        if 0 < part < 1:
            times = request.workload.share_of_lookups(shard) / part
            worst[shard.table.table] = max(times, worst.get(shard.table.table, 0.0))
    return {table: times for table, times in worst.items() if times > _SKEWED}


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
