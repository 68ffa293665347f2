"""TorchRec's sharding types as values: what each cuts, which ranks it needs, what its tables can exchange.

>>> SHARDING_TYPES["row_wise"].blocks(num_ranks=4, ranks_per_node=2)
(4, 1)
>>> SHARDING_TYPES["table_row_wise"].ranks_problem((1, 2), world_size=4, ranks_per_node=2)
'ranks: got [1, 2]; table_row_wise needs the 2 ranks of one node in order, for instance (0, 1).'
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from embershard.errors import ConfigError

#: Of tables whose shards are on ranks that a plan chooses.
PlacedSharding = Literal["table_wise", "row_wise", "column_wise", "table_column_wise", "table_row_wise", "grid_shard"]
Sharding = Literal[PlacedSharding, "data_parallel"]
#: Of tables of which every rank has a copy: plans have none unless they are asked for.
COPIES: Sharding = "data_parallel"


@dataclass(frozen=True)
class ShardingType:
    """One of TorchRec's sharding types.

    What travels in a step follows from `rows_over`: ids, and pooled embeddings or distinct rows with their gradients,
    between a shard's rank and all others (`exchanged_bytes` in `embershard/planning/cost/work.py`). Copies exchange
    gradients alone.

    Attributes:
        name: TorchRec's.
        rows_over: ranks that the rows of a table are cut over: "one" has all of them, those of a "node", "all", or
            "copies" of the whole table on every rank.
        cuts_columns: the columns may be cut, too, each block with a rank (or node) of its own.
        on_one_node: all ranks of a table are on one node.
        exchanges_rows: its tables can exchange distinct rows in place of pooled embeddings.
        has_sequences: TorchRec has it for sequences (an `EmbeddingCollection`).
        tried: where plans try it unless types are given: on "any" number of nodes, on several "nodes", "never".
        like: the type that does the same on one node; empty: itself.
    """

    name: Sharding
    rows_over: Literal["one", "node", "all", "copies"] = "one"
    cuts_columns: bool = False
    on_one_node: bool = False
    exchanges_rows: bool = False
    has_sequences: bool = False
    tried: Literal["any", "nodes", "never"] = "never"
    like: str = ""

    @property
    def is_whole_or_columns(self) -> bool:
        """Whether only columns are cut: a table that is too narrow for it is whole on one rank."""
        return self.cuts_columns and self.rows_over == "one"

    def blocks(self, num_ranks: int, ranks_per_node: int) -> tuple[int, int]:
        """Return the numbers of row blocks and column blocks of a table on so many ranks."""
        if self.rows_over == "one":
            return 1, max(1, num_ranks)
        if not self.cuts_columns:
            return num_ranks, 1
        return ranks_per_node, max(1, num_ranks // ranks_per_node)

    def most_column_blocks(self, world_size: int, ranks_per_node: int) -> int:
        """Return the most blocks of columns that are on ranks, or nodes, of their own."""
        if self.on_one_node:
            return min(ranks_per_node, world_size)
        return -(-world_size // ranks_per_node) if self.rows_over == "node" else world_size

    def row_blocks(self, world_size: int, ranks_per_node: int) -> int:
        """Return the number of row blocks of any table, in a run on so many ranks."""
        return {"node": min(ranks_per_node, world_size), "all": world_size}.get(self.rows_over, 1)

    def is_too_small(self, rows: int, world_size: int, ranks_per_node: int) -> bool:
        """Return True if a rank would get no row of a table of so many rows.

        >>> [SHARDING_TYPES["row_wise"].is_too_small(rows, world_size=4, ranks_per_node=4) for rows in (5, 7)]
        [True, False]
        """
        blocks = self.row_blocks(world_size, ranks_per_node)
        return -(-rows // blocks) * (blocks - 1) >= rows

    def ranks_problem(self, ranks: tuple[int, ...], world_size: int, ranks_per_node: int) -> str:
        """Return the problem of these ranks for the shards of one table; empty for sound ones."""
        first = tuple(range(ranks_per_node))
        nodes = [ranks[start : start + ranks_per_node] for start in range(0, len(ranks), ranks_per_node)]
        are_nodes = bool(nodes) and all(
            node[0] % ranks_per_node == 0 and node == tuple(range(node[0], node[0] + ranks_per_node)) for node in nodes
        )
        of_node = f"the {ranks_per_node} ranks of one node in order, for instance"
        if self.rows_over == "copies":
            is_right, needed = ranks == (), "no ranks: every rank has a copy"
        elif self.rows_over == "all":
            is_right, needed = ranks == tuple(range(world_size)), f"all ranks in order, 0 to {world_size - 1}"
        elif self.rows_over == "node" and self.cuts_columns:
            is_right, needed = are_nodes, f"for each column shard {of_node} {first * 2}"
        elif self.rows_over == "node":
            is_right, needed = are_nodes and len(nodes) == 1, f"{of_node} {first}"
        elif not self.cuts_columns:
            is_right, needed = len(ranks) == 1, "one rank"
        elif self.on_one_node:
            is_right = len({rank // ranks_per_node for rank in ranks}) == 1
            needed = f"a rank per column shard, all on one node (of {ranks_per_node} ranks)"
        else:
            is_right, needed = len(ranks) > 0, "a rank per column shard"
        return "" if is_right else f"ranks: got {list(ranks)}; {self.name} needs {needed}."


#: By name, those first that plans try first.
SHARDING_TYPES: dict[str, ShardingType] = {
    each.name: each
    for each in (
        ShardingType("table_wise", exchanges_rows=True, has_sequences=True, tried="any"),
        ShardingType("row_wise", rows_over="all", exchanges_rows=True, has_sequences=True, tried="any"),
        ShardingType("column_wise", cuts_columns=True, exchanges_rows=True, has_sequences=True, tried="any"),
        ShardingType("table_row_wise", rows_over="node", on_one_node=True, tried="nodes", like="row_wise"),
        ShardingType(
            "table_column_wise",
            cuts_columns=True,
            on_one_node=True,
            exchanges_rows=True,
            tried="nodes",
            like="column_wise",
        ),
        ShardingType("grid_shard", rows_over="node", cuts_columns=True, tried="nodes", like="row_wise"),
        ShardingType("data_parallel", rows_over="copies"),
    )
}
#: Types whose tables can exchange distinct rows.
ROWS_TYPES: tuple[Sharding, ...] = tuple(each.name for each in SHARDING_TYPES.values() if each.exchanges_rows)


def sharding_type(name: str) -> ShardingType:
    """Return a sharding type by its name.

    Raises:
        ConfigError: TorchRec has none of this name.
    """
    if name not in SHARDING_TYPES:
        raise ConfigError(f"Unknown sharding type {name!r}; needed one of {', '.join(SHARDING_TYPES)}.")
    return SHARDING_TYPES[name]
