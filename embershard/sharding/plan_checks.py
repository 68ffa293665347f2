"""Checks of a plan in itself. Every message names the entry, its value and what is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embershard.errors import ShardingError
from embershard.sharding.shards import (
    COLUMN_MULTIPLE,
    ROWS_TYPES,
    Pool,
    PoolPlacement,
    TablePlacement,
    largest_pool_problem,
    pools_of,
    shards_of,
)

if TYPE_CHECKING:
    from embershard.sharding.plan import Plan

FORMAT = 1  # of a plan's file
MOST_RANKS = 65_536  # checks per rank must end


def check_plan(plan: Plan) -> None:
    """Raise unless tables and pools fit each other and the ranks.

    Raises:
        ShardingError: naming the entry.
    """
    if plan.format != FORMAT:
        raise ShardingError(f"format: got {plan.format}, needed {FORMAT}. Plan again with this version.")
    for name in ("world_size", "ranks_per_node", "batch_size", "device_memory_bytes", "host_memory_bytes"):
        value = getattr(plan, name)
        if value is not None and value < 1:
            raise ShardingError(f"{name}: got {value}, needed at least 1{', or null' if 'memory' in name else ''}.")
    if not plan.tables:
        raise ShardingError("tables: got none, needed the model's. Plan again.")
    if plan.world_size > MOST_RANKS:
        raise ShardingError(f"world_size: got {plan.world_size}, needed at most {MOST_RANKS}.")
    if plan.world_size % plan.ranks_per_node:
        raise ShardingError(
            f"ranks_per_node: got {plan.ranks_per_node}, needed a divisor of world_size {plan.world_size}."
        )
    seen: dict[str, int] = {}
    for number, table in enumerate(plan.tables):
        entry = f"tables[{number}] ({table.table!r})"
        if table.table in seen:
            raise ShardingError(f"{entry}: is the same table as tables[{seen[table.table]}]. Remove one of them.")
        seen[table.table] = number
        if problem := _table_problem(table, plan.world_size, plan.ranks_per_node):
            raise ShardingError(f"{entry}: {problem}")
    _check_pools(plan)


def _table_problem(table: TablePlacement, world_size: int, ranks_per_node: int) -> str:
    """Return the problem of a placement; empty for a sound one."""
    if table.rows < 1:
        return f"rows: got {table.rows}, needed at least 1."
    if table.dim < 1 or table.dim % COLUMN_MULTIPLE:
        return f"dim: got {table.dim}, needed a multiple of {COLUMN_MULTIPLE}."
    if (table.kernel == "replicated") != (table.sharding == "data_parallel"):
        return (
            f'kernel "{table.kernel}" with sharding "{table.sharding}": "replicated" and "data_parallel" go together. '
            "Set both, or neither."
        )
    if table.exchange == "rows" and table.sharding not in ROWS_TYPES:
        return f'exchange "rows" with sharding "{table.sharding}"; needed one of {", ".join(ROWS_TYPES)}, or "pooled".'
    outside = [rank for rank in table.ranks if not 0 <= rank < world_size]
    if outside:
        return f"ranks: got rank {outside[0]}, needed ranks from 0 to {world_size - 1}."
    if problem := _ranks_problem(table, world_size, ranks_per_node):
        return problem
    try:
        shards_of(table, ranks_per_node)
    except ShardingError as error:
        return str(error)
    return ""


def _ranks_problem(table: TablePlacement, world_size: int, ranks_per_node: int) -> str:
    ranks = table.ranks
    first = tuple(range(ranks_per_node))
    blocks = [ranks[start : start + ranks_per_node] for start in range(0, len(ranks), ranks_per_node)]
    needed = {
        "data_parallel": (ranks == (), "no ranks: every rank has a copy"),
        "table_wise": (len(ranks) == 1, "one rank"),
        "row_wise": (_is_a_run(ranks, 0, world_size), f"all ranks in order, 0 to {world_size - 1}"),
        "column_wise": (len(ranks) > 0, "a rank per column shard"),
        "table_column_wise": (
            len({rank // ranks_per_node for rank in ranks}) == 1,
            f"a rank per column shard, all on one node (of {ranks_per_node} ranks)",
        ),
        "table_row_wise": (
            _is_a_node(ranks, ranks_per_node),
            f"the {ranks_per_node} ranks of one node in order, for instance {first}",
        ),
        "grid_shard": (
            bool(blocks) and all(_is_a_node(block, ranks_per_node) for block in blocks),
            f"for each column shard the {ranks_per_node} ranks of one node in order, for instance {first * 2}",
        ),
    }
    is_right, what = needed[table.sharding]
    return "" if is_right else f"ranks: got {list(ranks)}; {table.sharding} needs {what}."


def _is_a_run(ranks: tuple[int, ...], start: int, count: int) -> bool:
    return ranks == tuple(range(start, start + count))


def _is_a_node(ranks: tuple[int, ...], ranks_per_node: int) -> bool:
    return bool(ranks) and ranks[0] % ranks_per_node == 0 and _is_a_run(ranks, ranks[0], ranks_per_node)


def _check_pools(plan: Plan) -> None:
    if problem := largest_pool_problem(plan.tables, plan.ranks_per_node):
        raise ShardingError(f"pools: {problem}. Move tables to other ranks, cut them by rows, or use more ranks.")
    expected = pools_of(plan.tables, plan.ranks_per_node)
    of_table = {(pool.rank, table): pool for pool in expected for table in pool.tables}
    found: dict[tuple[int, tuple[str, ...]], int] = {}
    for number, placed in enumerate(plan.pools):
        entry = f"pools[{number}] (rank {placed.rank}, {placed.sharding}, dim {placed.dim})"
        problem = _pool_problem(placed, of_table)
        key = (placed.rank, placed.tables)
        if not problem and key in found:
            problem = f"is the same pool as pools[{found[key]}]. Remove one of them."
        if problem:
            raise ShardingError(f"{entry}: {problem}")
        found[key] = number
    for pool in expected:
        if (pool.rank, pool.tables) not in found:
            raise ShardingError(
                f"pools: the cached {pool.sharding} shards of {list(pool.tables)} on rank {pool.rank}, of {pool.dim} "
                f"columns each, are in no pool. Add one for them, with 1 to {max(1, pool.rows)} slots."
            )


def _pool_problem(placed: PoolPlacement, of_table: dict[tuple[int, str], Pool]) -> str:
    """Return the problem of a pool; empty for a sound one."""
    if not placed.tables:
        return "tables: got none. Remove the pool."
    pools = []
    for table in placed.tables:
        pool = of_table.get((placed.rank, table))
        if pool is None:
            return f"tables: {table!r} has no cached shard on rank {placed.rank}. Remove it from the pool."
        if (pool.sharding, pool.dim) != (placed.sharding, placed.dim):
            return (
                f"tables: the shard of {table!r} on rank {placed.rank} is {pool.sharding} with {pool.dim} columns. "
                "Say so, or move the table to that pool."
            )
        pools.append(pool)
    pool = pools[0]
    if pool.tables != placed.tables:
        return (
            f"tables: got {list(placed.tables)}, needed {list(pool.tables)}: shards of a rank with the same sharding "
            "type, columns, dtype, exchange and group share one pool."
        )
    if not 1 <= placed.slots <= max(1, pool.rows):
        return f"slots: got {placed.slots}, needed 1 to {max(1, pool.rows)}, the rows of its shards."
    return ""
