"""Whether a model fits a budget: the least memory that it needs, or the message that says what would fit."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from embershard.cache.config import MOST_POOL_ROWS
from embershard.cache.statistics import apportion
from embershard.errors import ConfigError, ShardingError
from embershard.planning.cost_arrays import cost_arrays
from embershard.planning.local_search import local_search
from embershard.planning.request import Budget, PlanRequest, cached
from embershard.planning.slots import least_slots
from embershard.planning.workload import Layout
from embershard.sharding import memory_model
from embershard.sharding.pins import TablePin
from embershard.sharding.sharding_types import SHARDING_TYPES
from embershard.sharding.shards import TablePlacement, largest_pool_problem, no_rows_problem
from embershard.sharding.sizes import PlacedShard, TableSize, by_pool
from embershard.units import size

_ROUNDS = 240  # of the search for the least memory
_MOST_RANKS = 1024
_MOST_SHARDS = 200_000  # of a number of ranks that is only tried for a message
_MOST_BALANCED = 400  # of which whole tables are placed for it: under a second
_MOST_SCANNED = 12  # numbers of ranks that are tried one after the other
_MOST_SEARCHED = 3  # of them, for which whole tables are placed
_MOST_RAISED = 4  # times that limits are worked out
_MOST_TRIED = 3  # values of a setting, of which a search may be needed


@dataclass(frozen=True)
class RankNeed:
    """The least bytes that one rank needs.

    Attributes:
        fixed_bytes: device memory for all but caches.
        table_bytes: device memory of caches, by table.
        host_bytes: by table.
        copies: device memory of replicated tables, a part of `fixed_bytes`.
        whole: device memory of tables without a cache, a part of `fixed_bytes`.
        pool_rows: rows of the largest pool.
    """

    rank: int
    fixed_bytes: int
    table_bytes: dict[str, int]
    host_bytes: dict[str, int]
    copies: dict[str, int]
    whole: dict[str, int]
    pool_rows: int

    @property
    def largest(self) -> tuple[str, int, str]:
        """The table that takes most, its bytes, and what they are for."""
        parts = {"a copy of it": self.copies, "all its rows": self.whole}
        parts["slot map, and the rows of one batch"] = self.table_bytes
        everything = [(table, count, purpose) for purpose, part in parts.items() for table, count in part.items()]
        return max(everything, key=lambda item: item[1], default=("none", 0, "nothing"))

    def asked(self, budget: Budget) -> int:
        """Return the least bytes of the budgeted memory: everything, or the caches alone. What the rank may use less
        than others counts as needed."""
        fixed = 0 if budget.cache_bytes is not None else self.fixed_bytes
        return sum(self.table_bytes.values()) + fixed + budget.less(self.rank)


@dataclass(frozen=True)
class LeastNeed:
    """The placement found that needs the least memory on its fullest rank, and the need of every rank."""

    layout: Layout
    ranks: tuple[RankNeed, ...]
    ranks_per_node: int

    @property
    def tables(self) -> tuple[TablePlacement, ...]:
        """Placements of all tables."""
        return tuple(self.layout.tables)

    def fullest(self, budget: Budget) -> RankNeed:
        """Return the rank that needs most of the budgeted memory."""
        return max(self.ranks, key=lambda rank: rank.asked(budget))

    def asked(self, budget: Budget) -> int:
        """Return the bytes that the budget must give each rank; below it nothing fits."""
        return self.fullest(budget).asked(budget)

    def fits_device(self, budget: Budget) -> bool:
        """Return whether the devices can hold the least need."""
        return budget.rank_bytes is None or self.asked(budget) <= budget.rank_bytes

    @property
    def excess_rows(self) -> int:
        """Rows of the largest pool beyond those that a cache can number."""
        return max(0, max(rank.pool_rows for rank in self.ranks) - MOST_POOL_ROWS)

    @property
    def node_bytes(self) -> list[Counter[str]]:
        """Host memory of every node, by table."""
        nodes: list[Counter[str]] = [Counter() for _ in range(-(-len(self.ranks) // self.ranks_per_node))]
        for rank in self.ranks:
            nodes[rank.rank // self.ranks_per_node].update(rank.host_bytes)
        return nodes

    @property
    def host_bytes(self) -> int:
        """Host memory per node below which no cached table fits."""
        return max(node.total() for node in self.node_bytes)

    def check_pools(self, request: PlanRequest) -> None:
        """Raise unless every cache can number its rows.

        Raises:
            ShardingError: the rank, the tables, their rows, how many there may be, and what would fit.
        """
        problem = largest_pool_problem(self.tables, self.ranks_per_node)
        if problem:
            budget = request.budget
            changes = _other_changes(request, is_device_short=budget.rank_bytes is not None)
            free = replace(request, types=None, only={})
            helps = free.allowed != request.allowed and not least_need(free, by_rows=True).excess_rows
            raise ShardingError(
                f"the plan does not fit: {problem}. Give its tables fewer rows (hash their ids into fewer)"
                f"{'; or allow row_wise sharding for them' if helps else ''}{changes}"
            )

    def check_device(self, request: PlanRequest) -> None:
        """Raise unless the devices can hold the least need.

        Raises:
            ShardingError: the table, the missing bytes, and the smallest changes that make it fit.
        """
        budget, limit = request.budget, request.budget.rank_bytes
        if limit is None or self.fits_device(budget):
            return
        rank = self.fullest(budget)
        less = budget.less(rank.rank)
        need, may = rank.asked(budget) - less, limit - less
        table, part, purpose = rank.largest
        change = self._larger_limits(request)
        if budget.cache_bytes is not None:
            change = f"--set cache.device_bytes={need}"
        rest, tables = rank.fixed_bytes - sum(rank.whole.values()), "these tables" if rank.whole else "caches"
        others = f"; all but {tables} takes {_bytes(rest)}" if budget.cache_bytes is None else ""
        raise ShardingError(
            f"the plan does not fit: rank {rank.rank} needs at least {_bytes(need)} of device memory and may use "
            f"{_bytes(may)}: {_bytes(need - may)} are missing. Its largest table is {table!r} with {_bytes(part)} "
            f"({purpose}){others}. Smallest change that fits: {change}"
            f"{_other_changes(request, is_device_short=True)}"
        )

    def _larger_limits(self, request: PlanRequest) -> str:
        """Return the option with limits that fit this placement. Under larger ones less of what the driver takes may
        lie outside of them."""
        need, budget = self, request.budget
        for _ in range(_MOST_RAISED):
            needs = [each.asked(budget) - budget.less(each.rank) for each in need.ranks]
            change = device_memory(budget, needs)
            other = _changed(request, "device_memory", _larger_limits(budget, needs))
            if other is None:
                break
            need, budget = need_of(other, self.tables), other.budget
            if need.fits_device(budget):
                break
        return change

    def check_host(self, request: PlanRequest) -> None:
        """Raise unless the nodes' host memory can hold the rows.

        Raises:
            ShardingError: as `check_device`.
        """
        limit, need = request.budget.host_bytes, self.host_bytes
        if limit is None or need <= limit:
            return
        nodes = self.node_bytes
        number = max(range(len(nodes)), key=lambda node: nodes[node].total())
        table, part = max(nodes[number].items(), key=lambda item: item[1])
        raise ShardingError(
            f"the plan does not fit: node {number} needs {_bytes(need)} of host memory and may use {_bytes(limit)}: "
            f"{_bytes(need - limit)} are missing. Its largest table is {table!r} with {_bytes(part)}. "
            f"Smallest change that fits: --host-memory {need}{_other_changes(request, is_device_short=False)}"
        )


def least_need(request: PlanRequest, *, by_rows: bool = False) -> LeastNeed:
    """Find the placement of cached tables that needs the least device memory on its fullest rank, whatever its speed,
    among those whose caches can number their rows; where there is none, the one that comes nearest.

    `by_rows`: look only at the placement that cuts every table by rows, where that is allowed.
    """
    found = _small_placements(request, by_rows) if request.sharded else [[]]
    needs = [need_of(request, request.placed(each)) for each in found]
    return min(needs, key=lambda need: (need.excess_rows, need.asked(request.budget), need.host_bytes))


def least_needs(request: PlanRequest) -> list[LeastNeed]:
    """Return the least need with caches, and where tables may be whole on the devices, the least with any of both: as
    where a batch looks up most rows, a cache adds its maps to them."""
    needs = [least_need(request)]
    found = _least_memory(request, resident=True) if request.may_mix and request.sharded else None
    return needs if found is None else [*needs, need_of(request, request.placed(found))]


def mixed_need(request: PlanRequest, need: LeastNeed) -> LeastNeed | None:
    """Return the need of the same placement without the caches that take more memory than all rows of their table;
    None where no table may be whole on the devices, or FBGEMM could not train it so."""
    if not request.may_mix:
        return None
    workload = request.workload
    shards_of: dict[str, list[PlacedShard]] = {}
    for shard in need.layout.shards:
        shards_of.setdefault(shard.table.table, []).append(shard)
    tables = []
    for table in need.tables:
        pools = by_pool(shards_of[table.table]).values()
        in_caches = sum(
            memory_model.pool_memory(own, workload.shape).device_bytes(least_slots(workload, own, request.pins))
            for own in pools
        )
        whole = sum(shard.rows * shard.row_bytes for own in pools for shard in own)
        tables.append(table.without_cache if table.kernel == "cached" and whole <= in_caches else table)
    tables = list(request.pinned(tables))
    is_trained = not no_rows_problem(tables, need.ranks_per_node)
    return need_of(request, tuple(tables)) if is_trained else None


def _small_placements(request: PlanRequest, only_by_rows: bool) -> list[Sequence[TablePlacement]]:
    shape, allowed = request.workload.shape, request.allowed
    if shape.world_size == 1:
        alike = [cached(table, request.allowed[table.table][0], [0]) for table in request.sharded]
        if not largest_pool_problem(request.placed(alike), 1):
            return [alike]
        # Tables that are sharded in different ways share no cache, even on one rank.
        return [_least_memory(request) or alike]
    in_blocks = by_rows(request)
    if in_blocks and only_by_rows:
        return in_blocks
    balanced = _least_memory(request)
    if balanced is None and not in_blocks:
        balanced = _least_memory(request, any_rows=True)  # nothing fits: this is for the message
    found = in_blocks if balanced is None else [balanced, *in_blocks]
    if not found:
        raise ShardingError(
            f"no placement of {len(allowed)} tables on {shape.world_size} ranks with the sharding types "
            f"{sorted({name for types in allowed.values() for name in types})}; allow row_wise or table_wise"
        )
    return found


def by_rows(request: PlanRequest) -> list[Sequence[TablePlacement]]:
    """Return the placement that cuts every table by rows; none where a table may not be cut so."""
    if not all("row_wise" in types for types in request.allowed.values()):
        return []
    return [[cached(table, "row_wise", range(request.workload.shape.world_size)) for table in request.sharded]]


def _least_memory(
    request: PlanRequest, *, any_rows: bool = False, resident: bool = False
) -> Sequence[TablePlacement] | None:
    """Return the placement whose fullest rank needs the least, as far as a short search finds it; None where a cache
    could not number its rows.

    Args:
        any_rows: allow such caches.
        resident: tables may be whole on the devices.
    """
    of_a_batch = Budget(device_bytes=1) if request.budget.cache_bytes is None else Budget(cache_bytes=1)
    costs = cost_arrays(replace(request, budget=of_a_batch), resident=resident, cached=True).by_memory
    costs = replace(costs, host_limit=None, most_pool_rows=None if any_rows else costs.most_pool_rows)
    return next((each.tables for each in local_search(costs, _ROUNDS)), None)


def need_of(request: PlanRequest, tables: Sequence[TablePlacement]) -> LeastNeed:
    """Return the least bytes of every rank with this placement."""
    workload = request.workload
    tables = tuple(workload.with_exchange(table) for table in request.pinned(tables))
    layout = Layout(workload, tables)
    ranks = tuple(_rank_need(request, rank, own) for rank, own in enumerate(layout.of_ranks))
    return LeastNeed(layout, ranks, min(workload.shape.ranks_per_node, workload.shape.world_size))


def _rank_need(request: PlanRequest, rank: int, here: Sequence[PlacedShard]) -> RankNeed:
    workload = request.workload
    device: Counter[str] = Counter()
    pool_rows = 0
    pools = by_pool(here)
    for members in pools.values():
        memory = memory_model.pool_memory(members, workload.shape)
        pool_rows = max(pool_rows, memory.rows)
        total = memory.device_bytes(least_slots(workload, members, request.pins))
        parts = apportion(total, [shard.rows for shard in members])
        for shard, part in zip(members, parts, strict=True):
            device[shard.table.table] += part
    host: Counter[str] = Counter()
    cached = [shard for shard in here if shard.kernel == "cached"]
    weights = [sum(memory_model.host_bytes({shard.pool: [shard]}, workload.shape).values()) for shard in cached]
    taken = sum(memory_model.host_bytes(pools, workload.shape).values())
    for shard, part in zip(cached, apportion(taken, weights) if cached else [], strict=True):
        host[shard.table.table] += part
    copies, whole = Counter[str](), Counter[str]()
    for shard in here:
        if shard.kernel != "cached":
            resident = copies if shard.kernel == "replicated" else whole
            resident[shard.table.table] += sum(memory_model.resident_bytes([shard]).values())
    return RankNeed(rank, workload.fixed_bytes(here), device, host, copies, whole, pool_rows)


def _other_changes(request: PlanRequest, *, is_device_short: bool) -> str:
    """Return the advice to use another number of ranks, where one is found, for too little memory of devices or of
    nodes; what so many ranks may use is in their own request."""
    settings = list(_smaller_settings(request)) if is_device_short else []
    found = _more_ranks(request, is_device_short=is_device_short)
    changes = "".join(f"; or {each}" for each in (*settings, *([f"--ranks {found}"] if found else [])))
    hope = ", a smaller train.batch_size may" if request.on_change is None else ""  # else it was tried
    return f"{changes}; more ranks do not help{hope}" if found == 0 else changes


def _smaller_settings(request: PlanRequest) -> Iterator[str]:
    """Yield the single changes of settings with which devices have enough, those first that cost least: maps by hash,
    the longest window of known batches, the fewest pieces of a step, the largest batch; then rows in fp16, which trains
    other bits."""
    shape = request.workload.shape
    doubled = [2**power for power in range(1, shape.batch_size.bit_length())]
    tried: dict[str, Sequence[Any]] = {
        "cache.slot_map": ("hashed",) if shape.slot_map != "hashed" else (),
        "look_ahead.lookahead": range(shape.cache.lookahead - 1, 0, -1),
        "train.accumulate": [pieces for pieces in doubled if pieces > shape.pieces],
        "train.batch_size": [shape.batch_size // part for part in doubled],
        "model.table_dtype": ("fp16",),
    }
    for key, values in tried.items():
        # The less, the smaller the need: the first value of those that fit, with hardly a search.
        least = bisect.bisect_left(values, True, key=lambda value: _fits_by(request, key, value, _quick_needs))
        for value in values[least : least + _MOST_TRIED]:
            if _fits_by(request, key, value, least_needs):
                rounds = " (rounds what is trained)" if key == "model.table_dtype" else ""
                yield f"--set {key}={value}{rounds}"
                break


def _fits_by(request: PlanRequest, key: str, value: Any, needs: Callable[[PlanRequest], Iterable[LeastNeed]]) -> bool:
    """Return whether one of the needs fits with another value of a setting."""
    other = _changed(request, key, value)
    return other is not None and _fits(other.budget, needs(other))


def _quick_needs(request: PlanRequest) -> Iterable[LeastNeed]:
    return list(_needs_by_rows(request)) or _needs_of_whole_tables(request)


def _changed(request: PlanRequest, key: str, value: Any) -> PlanRequest | None:
    """Return the request with another value of a setting; None where changes are not tried, or the run's other settings
    do not allow it."""
    if request.on_change is None:
        return None
    try:
        return request.on_change(key, value)
    except ConfigError:
        return None


def ranks_without_caches(request: PlanRequest) -> int | None:
    """Return the fewest ranks whose devices hold all rows, whatever the ranks of the request; None where none are
    found, or where the budget is one of caches, or one of single ranks."""
    one = _for_ranks(request, 1) if request.may_mix else None
    if one is None:
        return None
    return 1 if _fits(one.budget, resident_needs(one)) else _more_ranks(all_on_devices(one)) or None


def resident_needs(request: PlanRequest) -> Iterator[LeastNeed]:
    """Yield the needs of all rows on the devices, cut by rows, and as a search places them; none where that is out of
    reach."""
    if request.may_be_resident:
        whole = all_on_devices(request)
        yield from itertools.chain(_needs_by_rows(whole), least_needs(whole))


def all_on_devices(request: PlanRequest) -> PlanRequest:
    """Return the request with every table whole on the devices, without a cache; on other numbers of ranks, too."""
    pins = {table.table: TablePin(kernel="device") for table in request.sharded}
    pins |= {name: replace(pin, kernel="device", slots=None) for name, pin in request.pins.items()}
    change = request.on_change
    return replace(
        request,
        pins=pins,
        on_ranks=lambda num_ranks: all_on_devices(request.for_ranks(num_ranks)),
        on_change=None if change is None else lambda key, value: all_on_devices(change(key, value)),
    )


def _more_ranks(request: PlanRequest, *, is_device_short: bool = True) -> int | None:
    """Return the fewest ranks that fit, of a few more ranks; else the fewest whose blocks of rows fit, if each more
    fits, too. None: none are found; 0: what a rank needs beside its tables is too much for its device."""
    world_size, num_tables = request.workload.shape.world_size, len(request.sharded)
    low, searched = world_size, 0
    for num_ranks in range(world_size + 1, world_size + 1 + _MOST_SCANNED):  # whole tables may need more on more
        if num_ranks * num_tables > _MOST_BALANCED:
            break
        other = _for_ranks(request, num_ranks)
        if other is not None and _may_fit(other):
            if _fits(other.budget, _needs_by_rows(other)):
                return num_ranks
            searched += 1
            if searched <= _MOST_SEARCHED and _fits(other.budget, least_needs(other)):
                return num_ranks
        low = num_ranks
    high = max(low, 2 * world_size)
    while high <= _MOST_RANKS and high * num_tables <= _MOST_SHARDS:
        if (other := _for_ranks(request, high)) is None:
            high += 1
            continue
        own = other.budget
        if is_device_short or _may_fit(other):
            needs = list(_needs_by_rows(other)) or _needs_of_whole_tables(other)
            if _fits(own, needs):
                break
            rank = needs[0].fullest(own)
            if is_device_short and rank.fixed_bytes - sum(rank.whole.values()) > (own.device_bytes or math.inf):
                return 0
        low, high = high, 2 * high
    else:
        return None
    between = [other for num_ranks in range(low + 1, high) if (other := _for_ranks(request, num_ranks)) is not None]
    fewest = bisect.bisect_left(between, True, key=lambda each: _fits(each.budget, _needs_by_rows(each)))
    return between[fewest].workload.shape.world_size if fewest < len(between) else high


def _for_ranks(request: PlanRequest, num_ranks: int) -> PlanRequest | None:
    """Return the request for another number of ranks; None where so many do not fill nodes."""
    try:
        return request.for_ranks(num_ranks)
    except ConfigError:
        return None


def _may_fit(request: PlanRequest) -> bool:
    """Return False where the devices are too small: for all tables together, if one had the memory of all, or for a
    table alone; or the nodes for rows that must be in their memory. Then no search for a placement is needed."""
    budget, shape = request.budget, request.workload.shape
    need = _need_in_turn(request, 1)
    if budget.host_bytes is not None and not request.may_mix:
        of_nodes = [node.total() for node in need.node_bytes]
        if sum(of_nodes) > budget.host_bytes * len(of_nodes):
            return False
    if budget.rank_bytes is None:
        return True
    needs = [each for each in (need, mixed_need(request, need)) if each is not None]
    asked = [sum(rank.asked(budget) for rank in each.ranks) for each in needs]
    alone = (min(_asked_alone(request, table)) for table in request.sharded)
    return min(asked) <= budget.rank_bytes * shape.world_size and max(alone, default=0) <= budget.rank_bytes


def _asked_alone(request: PlanRequest, table: TableSize) -> Iterator[int]:
    """Yield what a rank with nothing but the first shard of a table needs, for every way to place the table."""
    shape = request.workload.shape
    kernels = request.kernels(table.table, resident=request.may_mix, cached=True)
    for name, kernel in itertools.product(request.allowed[table.table], kernels):
        kind = SHARDING_TYPES[name]
        columns = max(request.column_cuts(table, name, more=True)[-1])
        rows = -(-table.rows // kind.row_blocks(shape.world_size, min(shape.ranks_per_node, shape.world_size)))
        exchange = request.workload.exchange_of(table.table, name, columns)
        shard = PlacedShard(table, 0, 0, rows, columns, kind.name, kernel, exchange)
        yield _rank_need(request, 0, [shard]).asked(request.budget) - request.budget.less(0)


def _needs_by_rows(request: PlanRequest) -> Iterator[LeastNeed]:
    """Yield the needs of all tables, cut by rows, in caches, partly, and whole on the devices; none where a table may
    not be cut so."""
    for tables in by_rows(request):
        need = need_of(request, request.placed(tables))
        yield need
        if all(table.kernel != "cached" for table in need.tables):
            return  # the others are the same
        if (mixed := mixed_need(request, need)) is not None:
            yield mixed
        whole = request.without_caches(need.tables)
        if request.may_be_resident and not no_rows_problem(whole, need.ranks_per_node):
            yield need_of(request, whole)


def _need_in_turn(request: PlanRequest, num_ranks: int) -> LeastNeed:
    """Return the need of whole tables in caches, one after another on so many of the ranks."""
    tables = [cached(table, "table_wise", [number % num_ranks]) for number, table in enumerate(request.sharded)]
    return need_of(request, request.placed(tables))


def _needs_of_whole_tables(request: PlanRequest) -> list[LeastNeed]:
    """Return the least needs; without a search where none fits, and tables may be whole."""
    if all("table_wise" in types for types in request.allowed.values()) and not _may_fit(request):
        return [_need_in_turn(request, request.workload.shape.world_size)]
    return least_needs(request)


def _fits(budget: Budget, needs: Iterable[LeastNeed]) -> bool:
    """Return whether one of these needs fits."""
    return any(
        not need.excess_rows
        and need.fits_device(budget)
        and (budget.host_bytes is None or need.host_bytes <= budget.host_bytes)
        for need in needs
    )


def _bytes(count: int) -> str:
    """Format like `1.50 GiB (1610612736 bytes)`: the second can be given to an option."""
    return f"{size(count)} ({count} bytes)" if count >= 1024 else f"{count} bytes"


def _larger_limits(budget: Budget, needs: Sequence[int]) -> list[int]:
    if not budget.less_bytes:
        return [max(needs)]
    return [max(pair) for pair in zip(needs, budget.by_rank, strict=True)]


def device_memory(budget: Budget, needs: Sequence[int]) -> str:
    """Return the option that gives the ranks the bytes that they need, [ranks], and none less than it has."""
    return f"--device-memory {','.join(map(str, _larger_limits(budget, needs)))}"
