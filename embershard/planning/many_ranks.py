"""Placements on more ranks than the search can look at one by one: it looks at as many nodes as could be busy.

Tables that are not cut over all ranks take few of many nodes, and the others are alike, without a table. So the search
has a node for each block of columns, and one that stays empty; what it finds is placed on the first nodes, and rated on
all. Tables by rows of all ranks are on the nodes that are looked at with the shards that are the most work.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from embershard.errors import ShardingError
from embershard.planning.cost.rates import step_parts
from embershard.planning.cost_arrays import CostArrays, Option, cost_arrays
from embershard.planning.local_search import local_search
from embershard.planning.make_plan import Candidate, best_candidate, complete, sized
from embershard.planning.request import PlanRequest, cached, column_block
from embershard.sharding.plan import Plan
from embershard.sharding.sharding_types import SHARDING_TYPES, Sharding, ShardingType
from embershard.sharding.shards import TablePlacement
from embershard.sharding.sizes import PlacedShard, TableSize

#: Plans for more ranks are searched on the nodes that could be busy: on all of them that takes minutes.
MOST_SEARCHED_RANKS = 32
#: Plans that somebody may train by are searched on all ranks, too, up to here.
_MOST_FOR_BOTH = 128
#: More nodes are not looked at, however many tables there are.
_MOST_NODES = 128
_ITERATIONS, _MOST_FOUND = 60, 2
#: Types that tables have at first, with others for tables that are too small for them.
_FIRST_TYPES = [
    {"table_wise", "column_wise"},
    {"table_row_wise", "table_wise", "column_wise"},
    {"grid_shard", "column_wise", "table_wise"},
    set(SHARDING_TYPES),
]
#: More shards than this take minutes: tables are not cut by rows over so many ranks.
_MOST_SHARDS = 30_000


def plan_quickly(request: PlanRequest) -> Plan:
    """Return a good plan for any number of ranks, in seconds.

    Raises:
        ShardingError: as `make_plan`.
    """
    return complete(request, fastest_candidate(request))


def plan_with_care(request: PlanRequest, progress: Callable[[int, int], None] | None = None) -> Plan:
    """Return the best plan found for any number of ranks: on many, what both searches find.

    Raises:
        ShardingError: as `make_plan`.
    """
    world_size = request.workload.shape.world_size
    if _is_searched(request):
        return complete(request, best_candidate(request), progress)
    try:
        best = wide_candidate(request)
    except ShardingError:  # the other search finds one, or says what is missing
        return complete(request, best_candidate(request), progress)
    if world_size <= _MOST_FOR_BOTH:
        on_all = best_candidate(request)
        best = on_all if on_all.step_seconds <= best.step_seconds else replace(best, bound=on_all.bound)
    return complete(request, best, progress)


def fastest_candidate(request: PlanRequest) -> Candidate:
    """Return the fastest placement, by counts alone, of the search that takes seconds on so many ranks.

    Raises:
        ShardingError: none fits.
    """
    return best_candidate(request) if _is_searched(request) else wide_candidate(request)


def _is_searched(request: PlanRequest) -> bool:
    """Return True where all ranks are searched: they are few, or not alike."""
    return request.workload.shape.world_size <= MOST_SEARCHED_RANKS or bool(request.budget.less_bytes)


def wide_candidate(request: PlanRequest) -> Candidate:
    """Return the fastest placement on many ranks, by counts alone: of those that a search on fewer nodes finds, and of
    the plain ones. Deterministic.

    Raises:
        ShardingError: none of them fits.
    """
    found = [candidate for tables in _searched(request) if (candidate := sized(request, tables)) is not None]
    return min(found, key=lambda candidate: candidate.step_seconds) if found else plain_candidate(request)


def _searched(request: PlanRequest) -> list[tuple[TablePlacement, ...]]:
    """Return the best placements that the local search finds on the nodes that could be busy; none where none fits."""
    world_size = request.workload.shape.world_size
    if not request.sharded:
        return []
    for is_cached in (False, True) if request.may_mix else (True,):  # a cache only adds work
        whole = cost_arrays(request, resident=not is_cached, cached=is_cached)
        costs = on_first_ranks(whole, min(whole.world_size // whole.ranks_per_node, _busy_nodes(whole)))
        found = local_search(costs, round(request.effort * _ITERATIONS), first_types=_FIRST_TYPES)
        tables = [tuple(_over(table, world_size) for table in each.tables) for each in found]
        if fitting := [each for each in tables if sum(len(t.ranks) for t in each) <= _MOST_SHARDS][:_MOST_FOUND]:
            return [request.placed(each) for each in fitting]
    return []


def _over(table: TablePlacement, num_ranks: int) -> TablePlacement:
    """Return the placement with a table by rows of all ranks on so many."""
    over_all = SHARDING_TYPES[table.sharding].rows_over == "all"
    return replace(table, ranks=tuple(range(num_ranks))) if over_all else table


def _busy_nodes(costs: CostArrays) -> int:
    blocks = [
        max((each.num_shards for each in own if SHARDING_TYPES[each.sharding].rows_over == "node"), default=1)
        for own in costs.options
    ]
    over_all = tuple(range(costs.world_size))
    some = [max(ranks) for ranks in costs.ranks if ranks and ranks != over_all]
    decided = 1 + max(some) // costs.ranks_per_node if some else 0
    return max(decided, min(_MOST_NODES, 1 + sum(-(-count // costs.ranks_per_node) for count in blocks)))


def on_first_ranks(costs: CostArrays, num_nodes: int) -> CostArrays:
    """Return the same costs with so few nodes to place tables on; what they cost is as on all ranks. Of a table over
    all ranks, the shards with most work and shards at even distances are kept."""
    num_ranks = num_nodes * costs.ranks_per_node
    if num_ranks >= costs.world_size:
        return costs

    def kept(option: Option) -> Option:
        if SHARDING_TYPES[option.sharding].rows_over != "all":
            return option
        which: NDArray[np.int64] = np.linspace(0, costs.world_size - 1, num_ranks).astype(np.int64)
        which[0] = int(option.seconds.sum(axis=1).argmax())
        arrays = {name: getattr(option, name)[which] for name in ("seconds", "memory", "host_bytes")}
        return replace(option, **arrays)

    def has_room(option: Option) -> bool:
        return SHARDING_TYPES[option.sharding].rows_over == "all" or option.num_shards <= num_ranks

    over_all = tuple(range(costs.world_size))
    ranks = tuple(tuple(range(num_ranks)) if each == over_all else each for each in costs.ranks)
    options = tuple(tuple(kept(each) for each in own if has_room(each)) for own in costs.options)
    costs = replace(costs, most_pool_rows=None)  # on all ranks, caches have fewer rows
    return replace(costs, options=options, world_size=num_ranks, ranks=ranks, less_bytes=costs.less_bytes[:num_ranks])


def plain_candidate(request: PlanRequest) -> Candidate:
    """Return the fastest of a few placements that fits, by counts alone: all tables table-wise, by columns, by rows of
    a node, or by rows over all ranks, with and without caches. Takes seconds for thousands of ranks.

    Raises:
        ShardingError: none of them fits.
    """
    found = []
    for kind in SHARDING_TYPES.values():
        tables = _alike(request, kind) if kind.is_plain else None
        if tables is not None:
            resident = sized(request, request.without_caches(tables))
            found.append(sized(request, tables) if resident is None else resident)
    fitting = [candidate for candidate in found if candidate is not None]
    if not fitting:
        shape = request.workload.shape
        raise ShardingError(
            f"no plain placement of {len(request.allowed)} tables on {shape.world_size} ranks fits. Give them more "
            "memory (--device-memory, --host-memory), or simulate other numbers of ranks."
        )
    return min(fitting, key=lambda candidate: candidate.step_seconds)


def _alike(request: PlanRequest, kind: ShardingType) -> tuple[TablePlacement, ...] | None:
    """Return all tables sharded in one way, the most expensive shards first, each on the rank with the least time so
    far; None where that is not allowed, no other than another way, or too many shards. Tables that cannot be cut by
    columns stay whole."""
    shape, tables = request.workload.shape, request.sharded
    blocks = {table.table: table.dim // column_block(table.dim, shape.world_size) for table in tables}
    kinds: dict[str, Sharding] = {table.table: kind.name for table in tables}
    if kind.is_whole_or_columns:
        kinds = {name: kind.name if blocks[name] > 1 else "table_wise" for name in kinds}
        if max(blocks.values(), default=1) == 1:
            return None
    per_table = kind.row_blocks(shape.world_size, shape.ranks_per_node)
    is_as_another = bool(kind.like) and shape.world_size < 2 * shape.ranks_per_node
    is_allowed = all(kinds[name] in types for name, types in request.allowed.items())
    if not is_allowed or per_table * len(tables) > _MOST_SHARDS or is_as_another:
        return None
    if kind.rows_over == "all":
        return request.placed([cached(table, kind.name, range(shape.world_size)) for table in tables])
    local = per_table  # ranks that a shard is cut over, one after the other
    places = [(0.0, number) for number in range(shape.world_size // local)]
    found: dict[str, list[int]] = {table.table: [] for table in tables}
    costs: list[tuple[float, TableSize]] = []  # seconds of each shard's work in a step, once per shard
    for table in tables:
        count = blocks[table.table] if SHARDING_TYPES[kinds[table.table]].cuts_columns else 1
        rows, columns = -(-table.rows // local), table.dim // count
        shard = PlacedShard(table, 0, 0, rows, columns, kinds[table.table], "device")
        work = request.workload.shard_work(shard, request.workload.resident_report(shard))
        costs += [(sum(step_parts(work, request.rates).values()), table)] * count
    for seconds, table in sorted(costs, key=lambda pair: (-pair[0], pair[1].table)):
        load, number = heapq.heappop(places)
        found[table.table] += range(number * local, (number + 1) * local)
        heapq.heappush(places, (load + seconds, number))
    return request.placed([cached(table, kinds[table.table], found[table.table]) for table in tables])
