"""What each table exchanges between ranks, by the bytes: pooled embeddings, or distinct rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from embershard.planning.cost import work
from embershard.planning.workload import Workload
from embershard.sharding.shards import ROWS_TYPES, Exchange, TablePlacement, shards_of


def exchange_bytes(workload: Workload, table: str, sharding: str, columns: int, exchange: Exchange) -> float:
    """Return the bytes that all ranks together send in a step for shards of so many columns and all rows of a table:
    ids, embeddings and gradients."""
    shape = workload.shape
    on_a_node = min(shape.ranks_per_node, shape.world_size)
    num_shards = {"row_wise": shape.world_size, "table_row_wise": on_a_node, "grid_shard": on_a_node}.get(sharding, 1)
    of_shard = work.exchanged_bytes(
        sharding,
        batch_size=shape.batch_size,
        world_size=shape.world_size,
        ids_per_sample=workload.lookups_per_sample[table],
        columns=columns,
        rank_share=1 / num_shards,
        ranks_per_node=shape.ranks_per_node,
        distinct_ids=workload.distinct_per_rank(table) if exchange == "rows" else None,
        number_bytes=shape.number_bytes,
    )
    return num_shards * of_shard.in_training


def exchange_of(workload: Workload, table: str, sharding: str, columns: int) -> Exchange:
    """Return what a table exchanges with this sharding type: what the run's setting says; for "auto" what takes fewer
    bytes."""
    wanted = workload.shape.exchange
    if wanted == "pooled" or sharding not in ROWS_TYPES or workload.shape.world_size == 1:
        return "pooled"
    if wanted == "rows":
        return "rows"
    rows = exchange_bytes(workload, table, sharding, columns, "rows")
    return "rows" if rows < exchange_bytes(workload, table, sharding, columns, "pooled") else "pooled"


def with_exchange(workload: Workload, table: TablePlacement) -> TablePlacement:
    """Return the placement with what its table exchanges."""
    shards = shards_of(table, workload.shape.ranks_per_node)
    columns = shards[0].columns if shards else table.dim
    return replace(table, exchange=exchange_of(workload, table.table, table.sharding, columns))


def exchange_notes(workload: Workload, tables: Sequence[TablePlacement]) -> list[str]:
    """Return a sentence on what the tables exchange, and why; none where the setting is "pooled"."""
    shape = workload.shape
    if shape.exchange == "pooled" or shape.world_size == 1:
        return []
    chosen = _megabytes(workload, tables)
    pooled = _megabytes(workload, [replace(table, exchange="pooled") for table in tables])
    rows = _megabytes(
        workload, [replace(table, exchange="rows" if table.sharding in ROWS_TYPES else "pooled") for table in tables]
    )
    num_rows = sum(table.exchange == "rows" for table in tables)
    return [
        f"{num_rows} of {len(tables)} tables exchange distinct rows: a rank sends {chosen:.2f} MB of ids, embeddings "
        f"and gradients a step, on average. With pooled embeddings for all tables it would send {pooled:.2f} MB, with "
        f"distinct rows for all tables {rows:.2f} MB."
    ]


def _megabytes(workload: Workload, tables: Sequence[TablePlacement]) -> float:
    total = 0.0
    for table in tables:
        shards = shards_of(table, workload.shape.ranks_per_node)
        for columns in [shard.columns for shard in shards if shard.first_row == 0]:
            total += exchange_bytes(workload, table.table, table.sharding, columns, table.exchange)
    return total / workload.shape.world_size / 1e6
