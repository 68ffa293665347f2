"""Placements for numbers of ranks too large to be searched: all tables sharded alike, shards dealt to the ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from embershard.errors import ShardingError
from embershard.planning.budget import placed
from embershard.planning.cost.rates import step_parts
from embershard.planning.make_plan import Candidate, sized
from embershard.planning.predict import resident_report, shard_work
from embershard.planning.request import PlanRequest, column_block
from embershard.planning.search import cached
from embershard.sharding.plan import TablePlacement
from embershard.sharding.sizes import PlacedShard, TableSize

#: More shards than this take minutes: tables are not cut by rows over so many ranks.
_MOST_SHARDS = 30_000


def plain_candidate(request: PlanRequest) -> Candidate:
    """Return the fastest of a few placements that fits, by counts alone: all tables table-wise, by columns, by rows of
    a node, or by rows over all ranks, with and without caches. Takes seconds for thousands of ranks.

    Raises:
        ShardingError: none of them fits.
    """
    found = []
    for kind in ("table_wise", "column_wise", "table_row_wise", "row_wise"):
        tables = _alike(request, kind)
        if tables is not None:
            resident = sized(request, tuple(table.without_cache for table in tables))
            found.append(sized(request, tables) if resident is None else resident)
    fitting = [candidate for candidate in found if candidate is not None]
    if not fitting:
        shape = request.workload.shape
        raise ShardingError(
            f"no plain placement of {len(request.allowed)} tables on {shape.world_size} ranks fits. Give them more "
            "memory (--device-memory, --host-memory), or simulate other numbers of ranks."
        )
    return min(fitting, key=lambda candidate: candidate.step_seconds)


def _alike(request: PlanRequest, kind: str) -> tuple[TablePlacement, ...] | None:
    """Return all tables sharded in one way, the most expensive shards first, each on the rank with the least time so
    far; None where that is not allowed, no other than another way, or too many shards. Tables that cannot be cut by
    columns stay whole."""
    shape, tables = request.workload.shape, request.sharded
    blocks = {table.table: table.dim // column_block(table.dim, shape.world_size) for table in tables}
    if kind == "column_wise":
        kinds = {table.table: kind if blocks[table.table] > 1 else "table_wise" for table in tables}
        if max(blocks.values(), default=1) == 1:
            return None
    else:
        kinds = {table.table: kind for table in tables}
    per_table = {"row_wise": shape.world_size, "table_row_wise": shape.ranks_per_node}.get(kind, 1)
    nodes = shape.world_size // shape.ranks_per_node
    is_allowed = all(kinds[name] in types for name, types in request.allowed.items())
    if not is_allowed or per_table * len(tables) > _MOST_SHARDS or (kind == "table_row_wise" and nodes < 2):
        return None
    if kind == "row_wise":
        return placed(request, [cached(table, kind, range(shape.world_size)) for table in tables])
    local = per_table  # ranks that a shard is cut over, one after the other
    places = [(0.0, number) for number in range(shape.world_size // local)]
    found: dict[str, list[int]] = {table.table: [] for table in tables}
    for seconds, table in sorted(_by_cost(request, kinds, blocks, local), key=lambda pair: (-pair[0], pair[1].table)):
        load, number = heapq.heappop(places)
        found[table.table] += range(number * local, (number + 1) * local)
        heapq.heappush(places, (load + seconds, number))
    return placed(request, [cached(table, kinds[table.table], found[table.table]) for table in tables])


def _by_cost(
    request: PlanRequest, kinds: dict[str, str], blocks: dict[str, int], local: int
) -> Sequence[tuple[float, TableSize]]:
    """Return the seconds of each shard's work in a step, with its table, once per shard."""
    found = []
    for table in request.sharded:
        kind = kinds[table.table]
        count = blocks[table.table] if kind == "column_wise" else 1
        shard = PlacedShard(table, 0, 0, -(-table.rows // local), table.dim // count, kind, "device")
        work = shard_work(request.workload, shard, resident_report(request.workload, shard))
        found += [(sum(step_parts(work, request.rates).values()), table)] * count
    return found
