"""TorchRec's partitioner, limited to the rows that a cache can number."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, SortBy
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType, ShardingOption

from embershard.sharding.shards import rows_problem


@dataclass
class _Pool:
    """A cache in a proposal, and its rows by table."""

    rank: int
    sharding: str
    rows: dict[str, int] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return sum(self.rows.values())


class PoolRowsPartitioner(GreedyPerfPartitioner):
    """Refuses a proposal that gives a cache more rows than it can number; the planner then tries the next.

    Args:
        pool_of: key of the cache that a table's shards share on a rank, besides sharding type and columns; None for a
            table without a cache.
        sort_by: order in which tables are placed.

    Attributes:
        refused: reason for the refused proposal that came nearest; empty if none was refused.
    """

    def __init__(self, pool_of: Callable[[ShardingOption], Hashable | None], sort_by: SortBy = SortBy.STORAGE) -> None:
        super().__init__(sort_by=sort_by)
        self._pool_of = pool_of
        self.refused = ""
        self._least_rows: int | None = None  # in the largest pool of a refused proposal

    def partition(self, proposal: list[ShardingOption], *arguments: Any, **named: Any) -> list[ShardingOption]:
        """Return the proposal with a rank for every shard.

        Raises:
            PlannerError: the proposal does not fit the memory or the caches.
        """
        found = super().partition(proposal, *arguments, **named)
        largest = max(self._pools(found), key=lambda pool: pool.num_rows, default=None)
        problem = "" if largest is None else rows_problem(largest.rank, largest.sharding, largest.rows)
        if largest is None or not problem:
            return found
        if self._least_rows is None or largest.num_rows < self._least_rows:
            self.refused, self._least_rows = problem, largest.num_rows
        raise PlannerError(problem, PlannerErrorType.PARTITION)

    def _pools(self, found: list[ShardingOption]) -> Iterable[_Pool]:
        pools: dict[tuple[int, str, int, Hashable], _Pool] = {}
        for option in found:
            part = self._pool_of(option)
            if part is None:
                continue
            for shard in option.shards:
                assert shard.rank is not None, "a placed shard"
                key = (shard.rank, option.sharding_type, shard.size[1], part)
                pool = pools.get(key) or pools.setdefault(key, _Pool(shard.rank, option.sharding_type))
                pool.rows[option.name] = pool.rows.get(option.name, 0) + shard.size[0]
        return pools.values()
