"""TorchRec's rules as pure functions: how a table is cut into shards, and which shards share a cache."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from embershard.cache.config import MOST_POOL_ROWS
from embershard.errors import ShardingError
from embershard.sharding.sharding_types import SHARDING_TYPES, Sharding

Dtype = Literal["fp32", "fp16"]
Exchange = Literal["pooled", "rows"]
Kernel = Literal["cached", "device", "replicated"]
#: FBGEMM stores rows as vectors of four numbers.
COLUMN_MULTIPLE = 4
#: Of a block of columns that plans cut, or that is of another width than others: FBGEMM is slow on narrow rows.
LEAST_COLUMNS = 32


@dataclass(frozen=True)
class TablePlacement:
    """Place of one table.

    Attributes:
        rows, dim: size of the whole table.
        group: tables of different groups share no cache: see `groups_of`.
        sharding: TorchRec's sharding type.
        kernel: "cached": host memory behind device slots; "device": whole on the device; "replicated": a copy on every
            rank, which goes with "data_parallel".
        ranks: of the shards, in TorchRec's order; () when replicated.
        exchange: what travels between ranks: "pooled" embeddings, or distinct "rows".
        columns: of each block of columns, in their order, where they differ; (): of all alike.
    """

    table: str
    rows: int
    dim: int
    dtype: Dtype
    sharding: Sharding
    kernel: Kernel
    ranks: tuple[int, ...]
    exchange: Exchange = "pooled"
    group: str = ""
    columns: tuple[int, ...] = ()

    @property
    def described(self) -> dict[str, object]:
        """The fields as they stand in a plan's file: without a group where there is one only, and without columns
        where blocks are alike."""
        return {name: value for name, value in vars(self).items() if value or name not in ("group", "columns")}

    @property
    def without_cache(self) -> TablePlacement:
        """The same place; a cached table is whole on the device."""
        return replace(self, kernel="device") if self.kernel == "cached" else self


@dataclass(frozen=True)
class Shard:
    """The part of a table that one rank holds: `rows` from `first_row`, `columns` from `first_column`."""

    table: str
    rank: int
    rows: int
    columns: int
    first_row: int
    first_column: int


class PoolKey(NamedTuple):
    """Cached shards with equal keys share a cache."""

    rank: int
    sharding: Sharding
    columns: int
    dtype: Dtype
    exchange: Exchange
    group: str


@dataclass(frozen=True)
class PoolPlacement:
    """Cache that some shards of a rank share, as a plan's file has it: `Pool` with slots, and without what follows from
    the tables.

    Attributes:
        tables: names of the tables whose shards share it, sorted.
        dim: columns of the shards.
    """

    rank: int
    tables: tuple[str, ...]
    sharding: Sharding
    dim: int
    slots: int


@dataclass(frozen=True)
class Pool:
    """Shards that will share a cache: a `PoolPlacement` whose slots are not known yet, with the rows that limit them.

    Attributes:
        rank, sharding, dim, tables: as in `PoolPlacement`.
        rows: of all its shards; a pool may have none where a small table is cut by rows.
    """

    rank: int
    sharding: Sharding
    dim: int
    dtype: Dtype
    tables: tuple[str, ...]
    rows: int

    def with_slots(self, slots: int) -> PoolPlacement:
        """Return the pool with so many slots."""
        return PoolPlacement(self.rank, self.tables, self.sharding, self.dim, slots)


def groups_of(places: Mapping[str, tuple[str, str, bool]]) -> dict[str, str]:
    """Return the group of each table: TorchRec gives tables of two modules, or of two poolings, no common kernel; and
    we give none to tables of ids and of rows.

    Args:
        places: by table, the path of its module in the model, its pooling ("" for sequences), and whether it takes any
            id.

    >>> groups_of({"t0": ("bags", "sum", False), "t1": ("bags", "sum", False)})
    {'t0': '', 't1': ''}
    >>> groups_of({"t0": ("bags", "sum", False), "t1": ("bags", "sum", True), "t2": ("sequences", "", False)})
    {'t0': 'bags (sum)', 't1': 'bags (sum, ids)', 't2': 'sequences'}
    """
    if len(set(places.values())) < 2:
        return dict.fromkeys(places, "")
    kinds = {place: ", ".join(filter(None, (place[1], "ids" if place[2] else ""))) for place in places.values()}
    return {table: f"{place[0]} ({kinds[place]})" if kinds[place] else place[0] for table, place in places.items()}


def even_columns(dim: int, count: int) -> tuple[int, ...]:
    """Return the columns of so many blocks, multiples of 4, as even as these can be; the wider ones first.

    >>> even_columns(128, 2), even_columns(100, 2)
    ((64, 64), (52, 48))
    """
    each, wider = divmod(dim // COLUMN_MULTIPLE, count)
    return tuple(COLUMN_MULTIPLE * (each + (block < wider)) for block in range(count))


def columns_problem(columns: Sequence[int], dim: int, count: int | None = None) -> str:
    """Return the problem of blocks of so many columns, `count` of them or any number; empty for sound ones.

    >>> columns_problem((64, 32), dim=100)
    'columns: got [64, 32], 96 in all; needed 100, the columns of the table.'
    """
    got = f"columns: got {list(columns)}"
    if count is not None and len(columns) != count:
        return f"{got}; needed {count}: one width for each block of columns on its ranks."
    if min(columns) < LEAST_COLUMNS or any(each % COLUMN_MULTIPLE for each in columns):
        return f"{got}; needed multiples of {COLUMN_MULTIPLE} from {LEAST_COLUMNS} on: FBGEMM is slow on narrower rows."
    if sum(columns) != dim:
        return f"{got}, {sum(columns)} in all; needed {dim}, the columns of the table."
    return f"{got}, which are equal: ranks alone say that. Leave columns out." if len(set(columns)) == 1 else ""


def shards_of(table: TablePlacement, ranks_per_node: int) -> tuple[Shard, ...]:
    """Return the shards of a table in TorchRec's order; none for a replicated one.

    >>> table = TablePlacement("t0", 100, 16, "fp32", "row_wise", "cached", (0, 1, 2))
    >>> [shard.rows for shard in shards_of(table, ranks_per_node=3)]
    [34, 34, 32]

    Raises:
        ShardingError: the columns cannot be cut into so many shards.
    """
    if table.sharding == "data_parallel":
        return ()
    row_blocks, column_blocks = SHARDING_TYPES[table.sharding].blocks(len(table.ranks), ranks_per_node)
    if table.columns:
        if problem := columns_problem(table.columns, table.dim, column_blocks):
            raise ShardingError(f"table {table.table!r}: {problem}")
    elif table.dim % (column_blocks * COLUMN_MULTIPLE):
        raise ShardingError(
            f"table {table.table!r}: {table.dim} columns cannot be cut into {column_blocks} equal shards of a multiple "
            f"of {COLUMN_MULTIPLE} columns each. Give it fewer ranks, another sharding type, or columns that differ."
        )
    columns = table.columns or (table.dim // column_blocks,) * column_blocks
    first_columns = list(itertools.accumulate(columns, initial=0))
    block = -(-table.rows // row_blocks)  # all row blocks but the last ones are full
    starts = [min(number * block, table.rows) for number in range(row_blocks + 1)]
    return tuple(
        Shard(
            table.table,
            rank,
            rows=starts[number % row_blocks + 1] - starts[number % row_blocks],
            columns=columns[number // row_blocks],
            first_row=starts[number % row_blocks],
            first_column=first_columns[number // row_blocks],
        )
        for number, rank in enumerate(table.ranks)
    )


def pools_of(tables: Iterable[TablePlacement], ranks_per_node: int) -> list[Pool]:
    """Return the pools that TorchRec makes of the cached tables, by rank: one for the cached shards of a rank with the
    same sharding type, number of columns, dtype, exchange and group."""
    found = rows_by_pool(tables, ranks_per_node)
    return [Pool(*key[:4], tables=tuple(sorted(rows)), rows=sum(rows.values())) for key, rows in sorted(found.items())]


def rows_by_pool(tables: Iterable[TablePlacement], ranks_per_node: int) -> dict[PoolKey, dict[str, int]]:
    """Return the rows of each table in each cache."""
    found: dict[PoolKey, dict[str, int]] = {}
    for table in tables:
        for shard in shards_of(table, ranks_per_node) if table.kernel == "cached" else ():
            key = PoolKey(shard.rank, table.sharding, shard.columns, table.dtype, table.exchange, table.group)
            rows = found.setdefault(key, {})
            rows[table.table] = rows.get(table.table, 0) + shard.rows
    return found


def rows_problem(rank: int, sharding: str, rows: Mapping[str, int]) -> str:
    """Return the problem of a pool with so many rows of each table; empty when a cache can number them."""
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
    """Return the problem of the pool with most rows; empty when every cache can number its rows."""
    found = rows_by_pool(tables, ranks_per_node)
    largest = max(sorted(found), key=lambda pool: sum(found[pool].values()), default=None)
    return "" if largest is None else rows_problem(largest[0], largest[1], found[largest])


def no_rows_problem(tables: Iterable[TablePlacement], ranks_per_node: int) -> str:
    """Return the problem of a rank whose shards on the device have no row: see :func:`empty_group_problem`.

    >>> tiny = TablePlacement("t0", 3, 16, "fp32", "row_wise", "device", (0, 1, 2, 3))
    >>> no_rows_problem([tiny], ranks_per_node=4)
    'rank 3 has no row of its row_wise tables on the device: t0 (3 rows on 4 ranks)'
    >>> other = TablePlacement("t1", 4, 16, "fp32", "row_wise", "device", (0, 1, 2, 3))
    >>> no_rows_problem([tiny, other], ranks_per_node=4)
    ''
    """
    cut = []
    for table in tables:
        shards = shards_of(table, ranks_per_node) if table.kernel == "device" else ()
        columns = str(shards[0].columns) if shards and table.exchange == "rows" else ""
        cut.append(((table.sharding, table.dtype, table.group, columns), shards))
    return empty_group_problem(cut)


def empty_group_problem(tables: Iterable[tuple[tuple[str, ...], Sequence[Shard]]]) -> str:
    """Return the problem of a rank on which a group of tables has no row; empty where there is none. On a CPU, FBGEMM
    takes the empty tensor of such a group for one on a GPU, and fails.

    Args:
        tables: of each that is on the device, what FBGEMM groups by (the sharding type first), and all of its shards.
    """
    groups: dict[tuple[int, tuple[str, ...]], dict[str, Sequence[Shard]]] = {}
    rows: Counter[tuple[int, tuple[str, ...]]] = Counter()
    for kind, shards in tables:
        for shard in shards:
            groups.setdefault((shard.rank, kind), {})[shard.table] = shards
            rows[shard.rank, kind] += shard.rows
    for rank, kind in sorted(groups):
        if not rows[rank, kind]:
            named = sorted(groups[rank, kind].items())
            more = f" and {len(named) - 5} more" if len(named) > 5 else ""
            sizes = ", ".join(f"{table} ({_size(shards)})" for table, shards in named[:5])
            return f"rank {rank} has no row of its {kind[0]} tables on the device: {sizes}{more}"
    return ""


def _size(shards: Sequence[Shard]) -> str:
    """Return the rows of a table, and for how many ranks they are cut, in words."""
    by_rows = [shard for shard in shards if shard.first_column == shards[0].first_column]
    rows = sum(shard.rows for shard in by_rows)
    return f"{rows} row{'' if rows == 1 else 's'} on {len(by_rows)} ranks"
