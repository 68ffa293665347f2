"""What the user decides of one table's place: the planner decides the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from embershard.errors import ConfigError
from embershard.sharding.sharding_types import SHARDING_TYPES, PlacedSharding, ShardingType
from embershard.sharding.shards import TablePlacement, columns_problem

PinnedKernel = Literal["cached", "device"]


@dataclass(frozen=True)
class TablePin:
    """Place of one table, as far as it is decided.

    >>> TablePin(type="table_wise", ranks=(1,)).types(["table_wise", "row_wise"], world_size=4, ranks_per_node=4)
    ['table_wise']
    """

    type: PlacedSharding | None = None
    """Sharding type."""
    ranks: tuple[int, ...] | None = None
    """Ranks of its shards, in TorchRec's order: one for "table_wise", one for each block of columns for "column_wise",
    all of a node for "table_row_wise"."""
    kernel: PinnedKernel | None = None
    """"cached": its rows are in host memory behind a cache. "device": whole on the device."""
    columns: tuple[int, ...] | None = None
    """Columns of each block, in their order, where blocks are not alike: with two ranks of a "column_wise" table, those
    on the first and on the second one."""
    slots: int | None = None
    """Slots of each cache that has rows of it, those of other tables in it included; at most its rows."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for what cannot be."""
        if self.type is not None and self.type not in get_args(PlacedSharding):
            known = ", ".join(get_args(PlacedSharding))
            raise ConfigError(f"sharding.pin: type: got {self.type!r}, needed one of {known}.")
        if self.kernel is not None and self.kernel not in get_args(PinnedKernel):
            raise ConfigError(f'sharding.pin: kernel: got {self.kernel!r}, needed "cached" or "device".')
        if self.ranks is not None and (not self.ranks or min(self.ranks) < 0 or len(set(self.ranks)) < len(self.ranks)):
            raise ConfigError(f"sharding.pin: ranks: got {list(self.ranks)}, needed ranks of 0 or more, each once.")
        if self.slots is not None and (self.slots < 1 or self.kernel == "device"):
            raise ConfigError(
                f"sharding.pin: slots: got {self.slots} with kernel {self.kernel!r}, needed 1 or more, of a cache."
            )
        if self.columns is not None and (problem := columns_problem(self.columns, sum(self.columns))):
            raise ConfigError(f"sharding.pin: {problem}")
        if all(value is None for value in vars(self).values()):
            raise ConfigError(
                "sharding.pin: got nothing, needed at least one of type, ranks, kernel, columns and slots."
            )

    @property
    def kind(self) -> PinnedKernel | None:
        """The kernel; a table with slots is cached."""
        return "cached" if self.slots is not None else self.kernel

    def types(self, allowed: Sequence[str], world_size: int, ranks_per_node: int) -> list[str]:
        """Return the sharding types that it may have: the pinned one, or those of the `allowed` that ranks and columns
        fit.

        Raises:
            ConfigError: there is none.
        """
        outside = [rank for rank in self.ranks or () if rank >= world_size]
        if outside:
            raise ConfigError(f"ranks: got rank {outside[0]}, needed ranks from 0 to {world_size - 1}.")
        problems = {
            name: self._problem_with(SHARDING_TYPES[name], world_size, min(ranks_per_node, world_size))
            for name in ([self.type] if self.type is not None else allowed)
        }
        fit = [name for name, problem in problems.items() if not problem]
        if not fit:
            raise ConfigError(list(problems.values())[-1 if self.columns else 0])
        return fit

    def _problem_with(self, kind: ShardingType, world_size: int, ranks_per_node: int) -> str:
        """Return why ranks or columns do not fit a sharding type."""
        if self.ranks is not None and (problem := kind.ranks_problem(self.ranks, world_size, ranks_per_node)):
            return problem
        if self.columns is None:
            return ""
        if not kind.cuts_columns:
            return f"columns: got {list(self.columns)}; {kind.name} cuts no columns."
        if self.ranks is not None:
            count = kind.blocks(len(self.ranks), ranks_per_node)[1]
            return columns_problem(self.columns, sum(self.columns), count)
        most = kind.most_column_blocks(world_size, ranks_per_node)
        return f"columns: got {list(self.columns)}; needed at most {most}." if len(self.columns) > most else ""

    def placed(self, table: TablePlacement) -> TablePlacement:
        """Return the placement of a table with the ranks, the kernel and the columns that are pinned."""
        columns = self.columns or table.columns
        return replace(table, ranks=self.ranks or table.ranks, kernel=self.kind or table.kernel, columns=columns)

    def problem(self, table: TablePlacement) -> str:
        """Return how a placement differs from the pin; empty where it does not."""
        pairs = {
            "type": (self.type, table.sharding),
            "ranks": (self.ranks, table.ranks),
            "kernel": (self.kind, table.kernel),
            "columns": (self.columns, table.columns),
        }
        other = [(name, *pair) for name, pair in pairs.items() if pair[0] is not None and pair[0] != pair[1]]
        return "; ".join(f"its {name} is {has!r} and pinned to {pinned!r}" for name, pinned, has in other)
