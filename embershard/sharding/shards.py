"""How a table is cut into shards, and which shards share a cache: TorchRec's rules as pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from embershard.cache.slot_map import MOST_POOL_ROWS
from embershard.errors import ShardingError

Sharding = Literal[
    "table_wise", "row_wise", "column_wise", "table_column_wise", "table_row_wise", "grid_shard", "data_parallel"
]
#: FBGEMM stores rows as vectors of four numbers.
COLUMN_MULTIPLE = 4


@dataclass(frozen=True)
class TablePlacement:
    """Where one table is.

    Attributes:
        table: its name.
        rows, dim: its whole size.
        dtype: of its weights.
        sharding: how it is cut, in TorchRec's words.
        kernel: "cached": host memory behind device slots; "device": whole on the device; "replicated": a copy on every
            rank, which goes with "data_parallel".
        ranks: of its shards, in TorchRec's order of shards; () when replicated.
    """

    table: str
    rows: int
    dim: int
    dtype: Literal["fp32", "fp16"]
    sharding: Sharding
    kernel: Literal["cached", "device", "replicated"]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """The part of a table that one rank holds: ``rows`` from ``first_row``, ``columns`` from ``first_column``."""

    table: str
    rank: int
    rows: int
    columns: int
    first_row: int
    first_column: int


@dataclass(frozen=True)
class PoolPlacement:
    """The cache that some shards of a rank share.

    Attributes:
        rank: that holds it.
        tables: names of the tables whose shards share it, sorted.
        sharding: of these tables.
        dim: columns of the shards.
        slots: rows that fit on the device.
    """

    rank: int
    tables: tuple[str, ...]
    sharding: Sharding
    dim: int
    slots: int


@dataclass(frozen=True)
class Pool:
    """Shards that will share a cache, before anybody has said how large it is.

    Attributes:
        rank, sharding, dim, tables: as `PoolPlacement`.
        dtype: of the tables.
        rows: of all its shards together; a pool may have none where a small table is cut by rows.
    """

    rank: int
    sharding: Sharding
    dim: int
    dtype: Literal["fp32", "fp16"]
    tables: tuple[str, ...]
    rows: int

    def with_slots(self, slots: int) -> PoolPlacement:
        """The pool of this size."""
        return PoolPlacement(self.rank, self.tables, self.sharding, self.dim, slots)


def shards_of(table: TablePlacement, ranks_per_node: int) -> tuple[Shard, ...]:
    """The shards of a table, in TorchRec's order; none when it is replicated.

    Raises:
        ShardingError: the columns cannot be cut into so many shards.
    """
    if table.sharding == "data_parallel":
        return ()
    row_blocks, column_blocks = _blocks(table, ranks_per_node)
    if table.dim % (column_blocks * COLUMN_MULTIPLE):
        raise ShardingError(
            f"table {table.table!r}: {table.dim} columns cannot be cut into {column_blocks} equal shards of a multiple "
            f"of {COLUMN_MULTIPLE} columns each. Give it fewer ranks, or another sharding type."
        )
    columns = table.dim // column_blocks
    block = -(-table.rows // row_blocks)  # all row blocks but the last ones are full
    starts = [min(number * block, table.rows) for number in range(row_blocks + 1)]
    return tuple(
        Shard(
            table.table,
            rank,
            rows=starts[number % row_blocks + 1] - starts[number % row_blocks],
            columns=columns,
            first_row=starts[number % row_blocks],
            first_column=number // row_blocks * columns,
        )
        for number, rank in enumerate(table.ranks)
    )


def _blocks(table: TablePlacement, ranks_per_node: int) -> tuple[int, int]:
    """Into how many blocks of rows and of columns a table is cut."""
    if table.sharding in ("row_wise", "table_row_wise"):
        return len(table.ranks), 1
    if table.sharding == "grid_shard":
        return ranks_per_node, max(1, len(table.ranks) // ranks_per_node)
    return 1, max(1, len(table.ranks))


def pools_of(tables: Iterable[TablePlacement], ranks_per_node: int) -> list[Pool]:
    """The pools that TorchRec will make of the cached tables, by rank: cached shards of one rank share a pool when they
    have the same sharding type, number of columns and dtype."""
    names: dict[tuple[int, Sharding, int, Literal["fp32", "fp16"]], set[str]] = {}
    rows: dict[tuple[int, Sharding, int, Literal["fp32", "fp16"]], int] = {}
    for table in tables:
        if table.kernel != "cached":
            continue
        for shard in shards_of(table, ranks_per_node):
            key = (shard.rank, table.sharding, shard.columns, table.dtype)
            names.setdefault(key, set()).add(table.table)
            rows[key] = rows.get(key, 0) + shard.rows
    return [Pool(*key, tables=tuple(sorted(names[key])), rows=rows[key]) for key in sorted(names)]


def rows_problem(rank: int, sharding: str, rows: Mapping[str, int]) -> str:
    """What is wrong with a pool that holds so many rows of each table; empty when a cache can number them."""
    total = sum(rows.values())
    if total <= MOST_POOL_ROWS:
        return ""
    largest = sorted(rows.items(), key=lambda item: -item[1])
    tables = ", ".join(f"{table!r} ({count})" for table, count in largest[:3])
    more = f" and {len(largest) - 3} more tables" if len(largest) > 3 else ""
    return (
        f"the {sharding} cache of rank {rank} would have {total} rows, of {tables}{more}, and a cache can number "
        f"{MOST_POOL_ROWS}"
    )


def largest_pool_problem(tables: Sequence[TablePlacement], ranks_per_node: int) -> str:
    """What is wrong with the pool that has most rows; empty when every cache can number its own."""
    largest = max(pools_of(tables, ranks_per_node), key=lambda pool: pool.rows, default=None)
    if largest is None or largest.rows <= MOST_POOL_ROWS:
        return ""
    rows = dict.fromkeys(largest.tables, 0)
    for table in tables:
        if table.table in rows:
            rows[table.table] += sum(s.rows for s in shards_of(table, ranks_per_node) if s.rank == largest.rank)
    return rows_problem(largest.rank, largest.sharding, rows)
