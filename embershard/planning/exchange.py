"""What each table exchanges between ranks, by the bytes: pooled embeddings, or distinct rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from embershard.planning.cost import work
from embershard.planning.request import Workload
from embershard.sharding.sharding_types import sharding_type
from embershard.sharding.shards import Exchange, TablePlacement, shards_of
from embershard.units import size

#: Tables that a plan's notes give reasons for.
_MOST_REASONS = 6


def exchange_bytes(workload: Workload, table: str, sharding: str, columns: int, exchange: Exchange) -> float:
    """Return the bytes that all ranks together send in a step for shards of so many columns and all rows of a table:
    ids, embeddings and gradients."""
    shape = workload.shape
    num_shards = sharding_type(sharding).row_blocks(shape.world_size, shape.ranks_per_node)
    of_shard = work.exchanged_bytes(
        sharding,
        batch_size=shape.batch_size,
        world_size=shape.world_size,
        ids_per_sample=workload.lookups_per_sample[table],
        columns=columns,
        rank_share=1 / num_shards,
        distinct_ids=workload.distinct_per_rank(table) if exchange == "rows" else None,
        number_bytes=shape.number_bytes,
        num_features=workload.num_features[table],
    )
    return num_shards * of_shard.in_all.in_training


def exchange_of(workload: Workload, table: str, sharding: str, columns: int) -> Exchange:
    """Return what a table exchanges with this sharding type: what the run's setting says; for "auto" what takes fewer
    bytes."""
    wanted = workload.shape.exchange
    if wanted == "pooled" or not sharding_type(sharding).exchanges_rows or workload.shape.world_size == 1:
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
    """Return sentences on what the tables exchange, and why; none where the setting is "pooled"."""
    shape = workload.shape
    if shape.exchange == "pooled" or shape.world_size == 1:
        return []
    sent = [_sent(workload, table) for table in tables]
    own, pooled, rows = (size(sum(values) / shape.world_size) for values in zip(*sent, strict=True))
    num_rows = sum(table.exchange == "rows" for table in tables)
    notes = [
        f"{num_rows} of {len(tables)} tables exchange distinct rows: a rank sends {own} of ids, embeddings "
        f"and gradients a step, on average. With pooled embeddings for all tables it would send {pooled}, with "
        f"distinct rows for all tables {rows}."
    ]
    if shape.exchange == "auto":
        most = sorted(zip(sent, tables, strict=True), key=lambda pair: -abs(pair[0][1] - pair[0][2]))[:_MOST_REASONS]
        reasons = "; ".join(exchange_reason(workload, table) for _, table in most if table.sharding != "data_parallel")
        notes.append(
            f"Each table exchanges what takes fewer bytes. Bytes of all ranks in a step, the largest gains: {reasons}."
        )
    return notes


def exchange_reason(workload: Workload, table: TablePlacement) -> str:
    """Return what a table exchanges, and the bytes of both exchanges."""
    _, pooled, rows = _sent(workload, table)
    if not sharding_type(table.sharding).exchanges_rows:
        return f"{table.table} pooled embeddings, {size(pooled)} ({table.sharding} tables cannot exchange rows)"
    if table.exchange == "rows":
        return f"{table.table} distinct rows, {size(rows)} (pooled: {size(pooled)})"
    return f"{table.table} pooled embeddings, {size(pooled)} (rows: {size(rows)})"


def _sent(workload: Workload, table: TablePlacement) -> tuple[float, float, float]:
    """Return the bytes that all ranks together send in a step for a table: as it is, with pooled embeddings, and with
    distinct rows where its sharding type can."""
    pooled = rows = 0.0
    for shard in shards_of(table, workload.shape.ranks_per_node):
        if shard.first_row == 0:
            arguments = (workload, table.table, table.sharding, shard.columns)
            pooled += exchange_bytes(*arguments, "pooled")
            can = sharding_type(table.sharding).exchanges_rows
            rows += exchange_bytes(*arguments, "rows" if can else "pooled")
    return rows if table.exchange == "rows" else pooled, pooled, rows
