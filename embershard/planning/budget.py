"""Whether a model fits at all, and what to say when it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from embershard.cache.slot_map import MOST_POOL_ROWS
from embershard.errors import ShardingError
from embershard.planning.cost.rates import Rates
from embershard.planning.request import Budget, PlanRequest
from embershard.planning.search import Placement, place
from embershard.planning.shard_costs import ShardCosts
from embershard.planning.slot_split import fixed_bytes, least_slots
from embershard.planning.workload import Workload, by_pool, by_rank, place_shards
from embershard.sharding import memory_model
from embershard.sharding.shards import TablePlacement, largest_pool_problem
from embershard.sharding.sizes import PlacedShard

_MOST_RANKS = 1024
_MOST_SHARDS = 200_000  # of a number of ranks that is only tried for a message


@dataclass(frozen=True)
class RankNeed:
    """What one rank needs at least, in bytes: ``fixed`` for all but its caches, and by table for those. ``copies`` are
    the replicated tables, which are a part of what is fixed; ``pool_rows`` are the rows of its largest pool."""

    rank: int
    fixed_bytes: int
    table_bytes: dict[str, int]
    host_bytes: dict[str, int]
    copies: dict[str, int]
    pool_rows: int

    @property
    def largest(self) -> tuple[str, int]:
        """The table that takes most, and its bytes."""
        everything = {**self.copies, **self.table_bytes}
        return max(everything.items(), key=lambda item: item[1], default=("none", 0))

    @property
    def what(self) -> str:
        """What those bytes are."""
        return "a copy of it" if self.largest[0] in self.copies else "slot map, and the rows of one batch"

    @property
    def cache_bytes(self) -> int:
        """Least device memory of the rank's caches."""
        return sum(self.table_bytes.values())

    def asked(self, budget: Budget) -> int:
        """Least bytes of what the budget counts: everything, or the caches alone."""
        return self.cache_bytes + (0 if budget.cache_bytes is not None else self.fixed_bytes)


@dataclass(frozen=True)
class LeastNeed:
    """The placement found that needs the least memory on its fullest rank, and what every rank needs in it."""

    tables: tuple[TablePlacement, ...]
    ranks: tuple[RankNeed, ...]
    ranks_per_node: int

    def fullest(self, budget: Budget) -> RankNeed:
        """The rank that needs most of what the budget counts."""
        return max(self.ranks, key=lambda rank: rank.asked(budget))

    def asked(self, budget: Budget) -> int:
        """What the budget must give each rank; below it nothing fits."""
        return self.fullest(budget).asked(budget)

    @property
    def excess_rows(self) -> int:
        """By how many rows the largest pool passes what a cache can number."""
        return max(0, max(rank.pool_rows for rank in self.ranks) - MOST_POOL_ROWS)

    @property
    def host_bytes(self) -> int:
        """Host memory per node below which no cached table fits."""
        return max(sum(sum(r.host_bytes.values()) for r in node) for node in self._nodes())

    def _nodes(self) -> list[tuple[RankNeed, ...]]:
        size = self.ranks_per_node
        return [self.ranks[first : first + size] for first in range(0, len(self.ranks), size)]

    def check_pools(self, request: PlanRequest) -> None:
        """Raises unless every cache can number its rows.

        Raises:
            ShardingError: which rank and tables, how many rows, how many there may be, and what would fit.
        """
        problem = largest_pool_problem(self.tables, self.ranks_per_node)
        if not problem:
            return
        budget = request.budget
        limit = budget.device_bytes if budget.device_bytes is not None else budget.cache_bytes
        changes = _other_changes(request, device=limit, host=budget.host_bytes)
        raise ShardingError(
            f"the plan does not fit: {problem}. Give its tables fewer rows (hash their ids into fewer)"
            f"{_cut_by_rows(request)}{changes}"
        )

    def check_device(self, request: PlanRequest) -> None:
        """Raises unless the devices can hold the least need.

        Raises:
            ShardingError: which table, by how much, and the smallest changes that make it fit.
        """
        budget = request.budget
        limit = budget.device_bytes if budget.device_bytes is not None else budget.cache_bytes
        need = self.asked(budget)
        if limit is None or need <= limit:
            return
        rank = self.fullest(budget)
        table, part = rank.largest
        change = f"--device-memory {need}" if budget.cache_bytes is None else f"--set cache.device_bytes={need}"
        others = f"; all but caches takes {_bytes(rank.fixed_bytes)}" if budget.cache_bytes is None else ""
        raise ShardingError(
            f"the plan does not fit: rank {rank.rank} needs at least {_bytes(need)} of device memory and may use "
            f"{_bytes(limit)}: {_bytes(need - limit)} are missing. Its largest table is {table!r} with {_bytes(part)} "
            f"({rank.what}){others}. Smallest change that fits: {change}"
            f"{_other_changes(request, device=limit)}"
        )

    def check_host(self, request: PlanRequest) -> None:
        """Raises unless the nodes' host memory can hold the rows.

        Raises:
            ShardingError: as :meth:`check_device`.
        """
        limit = request.budget.host_bytes
        if limit is not None and self.host_bytes > limit:
            raise ShardingError(self._host_sentence(request, self.host_bytes, limit))

    def _host_sentence(self, request: PlanRequest, need: int, limit: int) -> str:
        nodes = self._nodes()
        number, node = max(enumerate(nodes), key=lambda item: sum(sum(r.host_bytes.values()) for r in item[1]))
        by_table: dict[str, int] = {}
        for rank in node:
            for table, part in rank.host_bytes.items():
                by_table[table] = by_table.get(table, 0) + part
        table = max(by_table, key=lambda name: by_table[name])
        return (
            f"the plan does not fit: node {number} needs {_bytes(need)} of host memory and may use {_bytes(limit)}: "
            f"{_bytes(need - limit)} are missing. Its largest table is {table!r} with {_bytes(by_table[table])}. "
            f"Smallest change that fits: --host-memory {need}{_other_changes(request, host=limit)}"
        )


def least_need(request: PlanRequest, *, by_rows: bool = False) -> LeastNeed:
    """Looks for the placement that needs the least device memory on its fullest rank, whatever its speed, among those
    whose caches can number their rows; where there is none, for the one that comes nearest. ``by_rows``: only at the
    one that cuts every table by rows, where that is allowed."""
    found = _small_placements(request, by_rows) if request.sharded else [[]]
    needs = [_need(request.workload, tuple(placed(request, each))) for each in found]
    return min(needs, key=lambda need: (need.excess_rows, need.asked(request.budget), need.host_bytes))


def _small_placements(request: PlanRequest, only_by_rows: bool) -> list[Sequence[Placement]]:
    shape = request.workload.shape
    if shape.world_size == 1:
        alike = [Placement(name, types[0], (0,)) for name, types in request.allowed.items()]
        if not largest_pool_problem(placed(request, alike), 1):
            return [alike]
        # Tables that are sharded in different ways share no cache, even on one rank.
        return [_least_memory(request) or alike]
    by_rows = [
        Placement(name, "row_wise", tuple(range(shape.world_size)))
        for name, types in request.allowed.items()
        if "row_wise" in types
    ]
    all_by_rows = len(by_rows) == len(request.allowed)
    if all_by_rows and only_by_rows:
        return [by_rows]
    balanced = _least_memory(request)
    if balanced is None and not all_by_rows:
        balanced = _least_memory(request, any_rows=True)  # nothing fits: this is for the message
    found = [] if balanced is None else [balanced]
    if all_by_rows:
        found.append(by_rows)
    if not found:
        raise ShardingError(
            f"no placement of {len(request.allowed)} tables on {shape.world_size} ranks with the sharding types "
            f"{sorted({t for types in request.allowed.values() for t in types})}; allow row_wise or table_wise"
        )
    return list(found)


def _least_memory(request: PlanRequest, any_rows: bool = False) -> list[Placement] | None:
    """By TorchRec's planner; None where it finds none, with ``any_rows`` even one whose caches cannot number theirs."""
    shape = request.workload.shape
    costs = ShardCosts(request.workload, Rates(), num_slots=1)
    return place(
        request.sharded,
        costs,
        world_size=shape.world_size,
        ranks_per_node=min(shape.ranks_per_node, shape.world_size),
        device_bytes=None,
        host_bytes=None,
        allowed=request.allowed,
        sort_by="device_bytes",
        by_memory=True,
        cached=not any_rows,
    )


def placed(request: PlanRequest, placements: Sequence[Placement]) -> list[TablePlacement]:
    """Placements of all tables of the model, in its order, cached; the replicated ones among them."""
    by_name = {placement.table: placement for placement in placements}
    copies = {table.table: table for table in request.replicated}
    return [
        copies[size.table]
        if size.table in copies
        else TablePlacement(
            size.table,
            size.rows,
            size.dim,
            size.dtype,
            by_name[size.table].sharding,  # type: ignore[arg-type]
            "cached",
            by_name[size.table].ranks,
        )
        for size in request.workload.model.tables
    ]


def _need(workload: Workload, tables: tuple[TablePlacement, ...]) -> LeastNeed:
    shards = place_shards(workload.model, tables, workload.shape)
    here = by_rank(shards, workload.shape.world_size)
    ranks = tuple(_rank_need(workload, rank, own) for rank, own in enumerate(here))
    return LeastNeed(tables, ranks, min(workload.shape.ranks_per_node, workload.shape.world_size))


def _rank_need(workload: Workload, rank: int, here: Sequence[PlacedShard]) -> RankNeed:
    settings = workload.shape.memory
    device: dict[str, int] = {}
    host: dict[str, int] = {}
    pool_rows = 0
    for members in by_pool(here).values():
        memory = memory_model.pool_memory(members, settings)
        pool_rows = max(pool_rows, memory.rows)
        total = memory.device_bytes(least_slots(workload, members))
        rows = max(1, memory.rows)
        left = total
        for shard in members:  # the last one takes what rounding leaves
            part = left if shard is members[-1] else total * shard.rows // rows
            device[shard.table.table] = device.get(shard.table.table, 0) + part
            left -= part
    for shard in here:
        own = sum(memory_model.host_bytes([shard], settings).values())
        if own:
            host[shard.table.table] = host.get(shard.table.table, 0) + own
    copies = {s.table.table: sum(memory_model.resident_bytes([s]).values()) for s in here if s.kernel == "replicated"}
    return RankNeed(rank, fixed_bytes(workload, here), device, host, copies, pool_rows)


def _other_changes(request: PlanRequest, device: int | None = None, host: int | None = None) -> str:
    """Another number of ranks that fits, if there is one."""
    shape, budget = request.workload.shape, request.budget
    ranks = 2 * shape.world_size
    while ranks <= _MOST_RANKS and ranks * len(request.sharded) <= _MOST_SHARDS:
        per_node = ranks if request.most_ranks_per_node is None else min(ranks, request.most_ranks_per_node)
        larger = replace(shape, world_size=ranks, ranks_per_node=per_node)
        other = replace(request, workload=replace(request.workload, shape=larger))
        try:
            need = least_need(other, by_rows=True)
        except ShardingError:  # TorchRec has no names for so many devices of one node
            return ""
        fits = (device is None or need.asked(budget) <= device) and (host is None or need.host_bytes <= host)
        if fits and not need.excess_rows:
            return f"; or --ranks {ranks}"
        if device is not None and budget.cache_bytes is None and need.fullest(budget).fixed_bytes > device:
            return "; more ranks do not help, a smaller train.batch_size may"
        ranks *= 2
    return ""


def _cut_by_rows(request: PlanRequest) -> str:
    """Whether the sharding types that were asked for are what keeps rows together."""
    free = replace(request, types=None, only={})
    if free.allowed == request.allowed or least_need(free, by_rows=True).excess_rows:
        return ""
    return "; or allow row_wise sharding for them"


def _bytes(count: int) -> str:
    """ "1.234 GB (1234567890 bytes)"."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3f} {unit} ({count} bytes)"
    return f"{count} bytes"
