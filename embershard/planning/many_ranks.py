"""Placements on more ranks than the search can look at one by one: it looks at as many nodes as could be busy.

Tables that are not cut over all ranks take few of many nodes, and the others are alike, without a table. So the search
has a node for each block of columns, and one that stays empty; what it finds is placed on the first nodes, and rated on
all. Tables by rows of all ranks are on the nodes that are looked at with the shards that are the most work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from embershard.errors import ShardingError
from embershard.planning.budget import by_rows
from embershard.planning.cost.rates import Rates
from embershard.planning.cost_arrays import CostArrays, Option, cost_arrays
from embershard.planning.local_search import local_search
from embershard.planning.make_plan import Candidate, best_candidate, complete, simple_placements, sized
from embershard.planning.request import PlanRequest
from embershard.sharding.plan import Plan
from embershard.sharding.sharding_types import SHARDING_TYPES
from embershard.sharding.shards import TablePlacement

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
    are_alike = isinstance(request.rates, Rates) and not request.budget.less_bytes
    return request.workload.shape.world_size <= MOST_SEARCHED_RANKS or not are_alike


def wide_candidate(request: PlanRequest) -> Candidate:
    """Return the fastest placement on many ranks, by counts alone, of those that a search on fewer nodes finds; of
    simple ones where none of these fits. Deterministic.

    Raises:
        ShardingError: none of them fits.
    """
    for tried in (_searched, _simple):
        found = [candidate for tables in tried(request) if (candidate := sized(request, tables)) is not None]
        if found:
            return min(found, key=lambda candidate: candidate.step_seconds)
    raise ShardingError(
        f"no plain placement of {len(request.allowed)} tables on {request.workload.shape.world_size} ranks fits. Give "
        "them more memory (--device-memory, --host-memory), or simulate other numbers of ranks."
    )


def _simple(request: PlanRequest) -> list[tuple[TablePlacement, ...]]:
    """Return whole tables in simple orders, and all tables by rows of all ranks; with caches and without."""
    found = simple_placements(request)
    if request.workload.shape.world_size * len(request.sharded) <= _MOST_SHARDS:
        for tables in map(request.placed, by_rows(request)):
            found += [request.without_caches(tables), tables]
    return found


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
        if SHARDING_TYPES[option.sharding].rows_over not in ("all", "copies"):
            return option
        which: NDArray[np.int64] = np.linspace(0, costs.world_size - 1, num_ranks).astype(np.int64)
        which[0] = int(option.seconds.sum(axis=1).argmax())
        arrays = {name: getattr(option, name)[which] for name in ("seconds", "memory", "host_bytes")}
        return replace(option, **arrays)

    def has_room(option: Option) -> bool:
        return SHARDING_TYPES[option.sharding].rows_over in ("all", "copies") or option.num_shards <= num_ranks

    over_all = tuple(range(costs.world_size))
    ranks = tuple(tuple(range(num_ranks)) if each == over_all else each for each in costs.ranks)
    options = tuple(tuple(kept(each) for each in own if has_room(each)) for own in costs.options)
    costs = replace(costs, most_pool_rows=None)  # on all ranks, caches have fewer rows
    of_ranks = {name: getattr(costs, name)[:num_ranks] for name in ("less_bytes", "slowdown")}
    return replace(costs, options=options, world_size=num_ranks, ranks=ranks, **of_ranks)
