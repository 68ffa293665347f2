"""What each table exchanges between ranks, by the bytes: pooled embeddings, or distinct rows."""

from __future__ import annotations

from collections.abc import Sequence

from embershard.planning.workload import Workload
from embershard.sharding.sharding_types import sharding_type
from embershard.sharding.shards import TablePlacement, shards_of
from embershard.units import size

#: Tables that a plan's notes give reasons for.
_MOST_REASONS = 6


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
    if not sharding_type(table.sharding).exchanges_rows or table.columns:
        kind = f"{table.sharding} tables" + (" of other columns on each rank" if table.columns else "")
        return f"{table.table} pooled embeddings, {size(pooled)} ({kind} cannot exchange rows)"
    if table.exchange == "rows":
        return f"{table.table} distinct rows, {size(rows)} (pooled: {size(pooled)})"
    return f"{table.table} pooled embeddings, {size(pooled)} (rows: {size(rows)})"


def _sent(workload: Workload, table: TablePlacement) -> tuple[float, float, float]:
    """Return the bytes that all ranks together send in a step for a table: as it is, with pooled embeddings, and with
    distinct rows where its sharding type can."""
    pooled = rows = 0.0
    for shard in shards_of(table, workload.shape.ranks_per_node):
        if shard.first_row == 0:
            arguments = (table.table, table.sharding, shard.columns)
            pooled += workload.exchange_bytes(*arguments, "pooled")
            can = sharding_type(table.sharding).exchanges_rows and not table.columns
            rows += workload.exchange_bytes(*arguments, "rows" if can else "pooled")
    return rows if table.exchange == "rows" else pooled, pooled, rows
