"""Sharding plans with cached tables from TorchRec's own planner, also on a CPU, without a process group."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, ShardingType
from torchrec.distributed.mc_embedding_modules import BaseManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.constants import MIN_CW_DIM
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, SortBy
from torchrec.distributed.planner.proposers import GreedyProposer, GridSearchProposer, UniformProposer
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.types import (
    Enumerator,
    Partitioner,
    PlannerError,
    PlannerErrorType,
    Proposer,
    ShardingOption,
)
from torchrec.distributed.types import CacheAlgorithm, CacheParams, CacheStatistics, ModuleSharder, ShardingPlan
from torchrec.modules.embedding_configs import PoolingType

from embershard.errors import ShardingError
from embershard.frequency import FrequencyProfile
from embershard.frequency.curves import BatchMisses
from embershard.machine import host_memory
from embershard.sharding.sharding_types import SHARDING_TYPES
from embershard.sharding.shards import rows_problem
from embershard.sharding.torchrec.sharders import bags_of, check_groups, has_cache, inner_sharder
from embershard.sharding.torchrec.spec import CACHED_KERNEL, REPLICATED
from embershard.sharding.torchrec.table_arguments import check_row_types
from embershard.units import size

_FUSED = EmbeddingComputeKernel.FUSED.value
_AS_FUSED: dict[str, Any] = {"compute_kernels": [_FUSED], "cache_params": None}
_DENSE = EmbeddingComputeKernel.DENSE.value
_TABLE = ShardingType.TABLE_WISE.value
_MOST_PLACED_SHARDS = 100_000  # by one proposer: a second of a run's start, for hundreds of tables
#: In place of TorchRec's 128 GB per rank: rows may be in files, or made when they are used.
_HOST_BYTES = 2**50
_ONLY_ON_REQUEST = tuple(each.name for each in SHARDING_TYPES.values() if each.tried == "never")
_PREFERENCE = [t.value for t in ShardingType]
_MOST_GRID_PROPOSALS = 500


def plan_sharding(
    model: nn.Module,
    sharders: Sequence[ModuleSharder],
    *,
    world_size: int,
    local_world_size: int,
    device: torch.device | str,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    batch_size: int = 512,
) -> ShardingPlan:
    """Make a TorchRec plan in which the cached sharders' tables are cached. Deterministic: every rank may call it.

    >>> from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    >>> from embershard import CachedEmbeddingBagCollectionSharder as Sharder
    >>> table = EmbeddingBagConfig(name="clicks", embedding_dim=8, num_embeddings=1000, feature_names=["click"])
    >>> model = nn.ModuleDict({"bags": EmbeddingBagCollection([table], device=torch.device("meta"))})
    >>> plan = plan_sharding(model, [Sharder()], world_size=2, local_world_size=2, device="cpu")
    >>> plan.plan["bags"]["clicks"].compute_kernel
    'fused_uvm_caching'

    Args:
        model: not yet sharded; its embedding modules may be on the meta device.
        sharders: the sharders for `DistributedModelParallel`.
        world_size, local_world_size, device: ranks in all and per node, and the training's device: its type matters.
        constraints: per table. A table without `compute_kernels` is cached if its sharder caches; `["fused"]` keeps it
            whole on the device. Data-parallel and grid sharding need one. `cache_params.load_factor`: its share.
        batch_size: per rank, for the planner's cost model.

    Raises:
        ShardingError: constraints, memory, what a cache can number, or FBGEMM on a CPU leave no plan for named tables.
        ConfigError: rows of a type that no cache trains, or too many or unequal buckets of rows of a table of ids.
    """
    if not 1 <= local_world_size <= world_size:
        raise ShardingError(f"world_size={world_size} and local_world_size={local_world_size} do not fit together")
    device_type, tables = torch.device(device).type, shardable_tables(model, sharders)
    _warn_of_memory(tables, device_type, local_world_size / world_size)
    wanted = _constraints(constraints or {}, tables, device_type)
    cached = {t: c for t, c in wanted.items() if CACHED_KERNEL in (c.compute_kernels or ())}
    as_fused = cached if device_type == "cpu" else {}  # TorchRec has no bandwidth of cached tables on a CPU
    planned_as = _by_name({t: replace(c, **_AS_FUSED) if t in as_fused else c for t, c in wanted.items()})
    topology = Topology(world_size, device_type, local_world_size=local_world_size, **_capacities(device_type))
    ours = {(table.path, table.name) for table in cached if has_cache(table.sharder)}
    partitioner = PoolRowsPartitioner(_pool_of(ours, _FUSED if as_fused else CACHED_KERNEL))
    plan = _plan(model, sharders, topology, batch_size, planned_as, tables, partitioner)
    for table, constraint in as_fused.items():
        param = plan.plan[table.path][table.name]  # type: ignore[index]
        param.compute_kernel, param.cache_params = CACHED_KERNEL, constraint.cache_params
    for path, params in plan.plan.items():
        check_groups(model.get_submodule(path), params, device_type)  # type: ignore[arg-type]
    return plan


#: Of the columns that a rank looks up for a sample, beyond the mean of the ranks: whole tables with more are not even.
_MOST_UNEVEN = 1.2


def whole_where_even(columns: Mapping[str, int], world_size: int) -> dict[str, ParameterConstraints]:
    """Return constraints of `plan_sharding` that leave every table whole, if the ranks then look up about as many
    columns; else none.

    On CPU ranks of one machine whole tables train faster than rows over all ranks, which TorchRec's cost model prefers
    there: their ids and pooled rows go by a `Route`, and no partial sums are reduced.

    Args:
        columns: of each table, those that a sample looks up: its dim, for each of its features.

    >>> sorted(whole_where_even({"user": 16, "item": 16}, world_size=2)), whole_where_even({"user": 16}, world_size=2)
    (['item', 'user'], {})
    """
    of_rank = [0] * world_size
    for number in sorted(columns.values(), reverse=True):
        of_rank[of_rank.index(min(of_rank))] += number
    if max(of_rank) * world_size > _MOST_UNEVEN * sum(of_rank):
        return {}
    return {table: ParameterConstraints(sharding_types=[_TABLE]) for table in columns}


def _plan(
    model: nn.Module,
    sharders: Sequence[ModuleSharder],
    topology: Topology,
    batch_size: int,
    constraints: dict[str, ParameterConstraints],
    tables: Sequence[ShardableTable],
    partitioner: PoolRowsPartitioner,
) -> ShardingPlan:
    """Plan with fewer kinds of sharding, so that tables share caches; if that fails, with all that are allowed."""
    sizes = {table.name: (table.weight.shape[0], table.weight.shape[1]) for table in tables}
    fewer = {name: distinct_types(constraint, *sizes[name], topology) for name, constraint in constraints.items()}
    problem: Exception | None = None
    # Tables that are sharded in different ways share no cache, and a cache numbers only so many rows.
    for tried in [fewer] if fewer == constraints else [fewer, constraints]:
        planner = _planner(topology, tried, partitioner, len(tables), batch_size)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # TorchRec's advice about its own storage estimate
                return planner.plan(model, list(sharders))
        except (PlannerError, RuntimeError, ValueError) as error:  # some constraints fail inside the planner
            problem = error
    why = str(problem)
    if partitioner.refused:
        why = (
            f"{partitioner.refused}. Use more ranks, let tables be cut by rows (row_wise), or give them fewer rows "
            "(hash their ids into fewer)"
        )
    what = f"{len(tables)} tables on {topology.world_size} ranks"
    raise ShardingError(f"no sharding plan for {what}: {why}") from problem


def _planner(
    topology: Topology,
    constraints: dict[str, ParameterConstraints],
    partitioner: Partitioner,
    num_tables: int,
    batch_size: int,
) -> EmbeddingShardingPlanner:
    """Set up TorchRec's planner: deterministic, and bounded without a clock."""
    limit = max(8, _MOST_PLACED_SHARDS // (num_tables * topology.world_size))
    greedy = [_AtMost(GreedyProposer(use_depth=depth), limit) for depth in (True, False)]
    return EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        enumerator=OrderedEnumerator(topology, batch_size=batch_size, constraints=constraints),
        proposer=[UniformProposer(), *greedy, GridSearchProposer(max_proposals=_MOST_GRID_PROPOSALS)],
        partitioner=partitioner,
        constraints=constraints,
        stats=NoopEmbeddingStats(),
        debug=False,
    )


def _constraints(
    given: Mapping[str, ParameterConstraints], tables: Sequence[ShardableTable], device_type: str
) -> dict[ShardableTable, ParameterConstraints]:
    known = {table.name for table in tables}
    if unknown := sorted(set(given) - known):
        raise ShardingError(f"constraints name tables {unknown}, which no sharder shards; tables are {sorted(known)}")
    return {table: _constraint(given.get(table.name), table, device_type) for table in tables}


def _pool_of(tables: Collection[tuple[str, str]], kernel: str) -> Callable[[ShardingOption], Hashable | None]:
    """Return the key of the cache that a table shares, as TorchRec groups tables.

    `tables`, by path and name, are cached where they are planned with this compute kernel.
    """

    poolings: dict[str, dict[str, PoolingType]] = {}  # by path and name: found once, and asked for every proposal

    def pool_of(option: ShardingOption) -> Hashable | None:
        if (option.path, option.name) not in tables or option.compute_kernel != kernel:
            return None
        path, module = option.module
        if path not in poolings:
            configs = bags_of(module).embedding_bag_configs() if option.is_pooled else ()
            poolings[path] = {config.name: config.pooling for config in configs}
        return path, option.tensor.dtype, poolings[path].get(option.name)

    return pool_of


def _capacities(device_type: str) -> dict[str, int]:
    """Return the memory of this GPU, in bytes: TorchRec assumes 32 GB, and finds no plan for tables that would fit; and
    host memory that limits nothing."""
    found = {"ddr_cap": _HOST_BYTES}
    if device_type == "cuda" and torch.cuda.is_available():
        found["hbm_cap"] = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return found


def _warn_of_memory(tables: Sequence[ShardableTable], device_type: str, share: float) -> None:
    """Warn if this machine's share of the tables that are written to host memory at once does not fit there."""
    num_bytes = dict.fromkeys((table.name for table in tables), 0)
    for table in tables:
        if inner_sharder(table.sharder).fills_host_memory if has_cache(table.sharder) else device_type == "cpu":
            num_bytes[table.name] += table.weight.numel() * table.weight.element_size()
    needed, memory = round(sum(num_bytes.values()) * share), host_memory()
    if needed > memory.available_bytes:
        largest = max(num_bytes, key=num_bytes.__getitem__)
        warnings.warn(
            f"the tables' weights alone take {size(needed)} on this machine, and {size(memory.available_bytes)} are "
            f"available ({memory.limit}); the largest is {largest!r} with {size(num_bytes[largest])} in all. The "
            'system ends processes that take more. Use CacheConfig(host="mmap"), more machines, tables of '
            "fewer rows, or init_seed=..., with which rows take memory when they are first used",
            stacklevel=3,
        )


@dataclass(frozen=True)
class ShardableTable:
    """A table of one module. Tables of different modules may share a name."""

    path: str
    name: str
    sharder: ModuleSharder
    weight: nn.Parameter = field(compare=False, repr=False)


def shardable_tables(model: nn.Module, sharders: Sequence[ModuleSharder]) -> list[ShardableTable]:
    """Return every table that one of the sharders will shard, in the order of the modules.

    Raises:
        ShardingError: a cached sharder stands inside of another one that it cannot serve.
    """
    for sharder in sharders:
        if isinstance(sharder, BaseManagedCollisionEmbeddingCollectionSharder) and has_cache(sharder._e_sharder):
            raise ShardingError(
                f"{type(sharder).__name__} with {type(sharder._e_sharder).__name__}: zero-collision hashing gives rows "
                "to other ids and resets them on the device, where a cached table has only a part of its rows. Give it "
                "TorchRec's own sharder; or put the tables into a plain collection, with num_embeddings as their "
                "capacity, and give the cached sharder ids={table: IdTable()}"
            )
        inner = inner_sharder(sharder)
        if inner is not sharder and has_cache(sharder) and (mode := inner.mode_of_split_bags) is not None:
            raise ShardingError(
                f"{type(sharder).__name__} with {type(inner).__name__}({mode}): this mode cuts bags into parts before "
                f"feature processors see them, and they would weigh ids by their places in the parts. Leave {mode} out"
            )
    by_type = {sharder.module_type: sharder for sharder in sharders}
    return [
        ShardableTable(path, name, by_type[type(module)], weight)
        for path, module in model.named_modules()
        if type(module) in by_type
        for name, weight in by_type[type(module)].shardable_parameters(module).items()
    ]


def _constraint(given: ParameterConstraints | None, table: ShardableTable, device_type: str) -> ParameterConstraints:
    """Add our defaults to the user's constraint: cached if the sharder caches, sharded rather than replicated."""
    constraint = copy.deepcopy(given) if given is not None else ParameterConstraints()
    replicated, caches = constraint.sharding_types == [REPLICATED], has_cache(table.sharder)
    own_types = inner_sharder(table.sharder).types_of(table.name, table.weight.shape[0]) if caches else None
    if constraint.sharding_types is None:
        types = table.sharder.sharding_types(device_type)
        constraint.sharding_types = [t for t in types if t not in _ONLY_ON_REQUEST]
        if own_types is not None:
            constraint.sharding_types = [t for t in constraint.sharding_types if t in own_types]
    if caches and constraint.compute_kernels is None:
        constraint.compute_kernels = [_DENSE] if replicated else [CACHED_KERNEL]
    if caches and (_FUSED if replicated else CACHED_KERNEL) in (constraint.compute_kernels or ()):
        check_row_types({table.name: table.weight.dtype})
    if CACHED_KERNEL in (constraint.compute_kernels or ()):
        constraint.sharding_types = [kind for kind in constraint.sharding_types if kind != REPLICATED]
        if not constraint.sharding_types:
            raise ShardingError(
                f"table {table.name!r}: sharding type 'data_parallel' with compute kernel {CACHED_KERNEL!r}; copies on "
                f"every rank have no cache. Needed kernel {_DENSE!r} or {_FUSED!r}, or another sharding type"
            )
        if device_type == "cpu" and not caches:
            raise ShardingError(
                f"table {table.name!r}: compute kernel {CACHED_KERNEL!r} on CPU needs one of embershard's cached "
                f"sharders, its sharder is {type(table.sharder).__name__}"
            )
        if device_type != "cpu" and constraint.cache_params is None and caches:
            ratio = inner_sharder(table.sharder).cache.slot_ratio  # TorchRec's cost model wants to know it
            constraint.cache_params = None if ratio is None else CacheParams(load_factor=ratio)
    return constraint


def _by_name(constraints: Mapping[ShardableTable, ParameterConstraints]) -> dict[str, ParameterConstraints]:
    """Merge the constraints of tables that share a name: TorchRec's planner knows tables by name alone."""
    named: dict[str, ParameterConstraints] = {}
    for table, constraint in constraints.items():
        first = named.setdefault(table.name, constraint)
        if first.compute_kernels is None:
            named[table.name] = constraint
        elif constraint.compute_kernels not in (None, first.compute_kernels):
            raise ShardingError(
                f"two tables are named {table.name!r} and want different kernels ({first.compute_kernels} and "
                f"{constraint.compute_kernels}); TorchRec plans by name, so rename one"
            )
        if first.sharding_types != constraint.sharding_types:
            both = [t for t in first.sharding_types or [] if t in (constraint.sharding_types or [])]
            named[table.name] = copy.copy(named[table.name])
            named[table.name].sharding_types = both
    return named


class PoolRowsPartitioner(GreedyPerfPartitioner):
    """Refuses a proposal that gives a cache more rows than it can number; the planner then tries the next.

    Args:
        pool_of: key of the cache that a table's shards share on a rank, besides sharding type and columns; None for a
            table without a cache.

    Attributes:
        refused: reason for the refused proposal that came nearest; empty if none was refused.
    """

    def __init__(self, pool_of: Callable[[ShardingOption], Hashable | None]) -> None:
        super().__init__(sort_by=SortBy.STORAGE)
        self._pool_of = pool_of
        self.refused = ""
        self._least_rows: int | None = None  # in the largest pool of a refused proposal

    def partition(self, proposal: list[ShardingOption], *arguments: Any, **named: Any) -> list[ShardingOption]:
        """Return the proposal with a rank for every shard.

        Raises:
            PlannerError: the proposal does not fit the memory or the caches.
        """
        found = super().partition(proposal, *arguments, **named)
        pools = self._rows_by_pool(found)
        if not pools:
            return found
        (rank, sharding, *_), rows = max(pools.items(), key=lambda pool: pool[1].total())
        problem = rows_problem(rank, sharding, rows)
        if not problem:
            return found
        if self._least_rows is None or rows.total() < self._least_rows:
            self.refused, self._least_rows = problem, rows.total()
        raise PlannerError(problem, PlannerErrorType.PARTITION)

    def _rows_by_pool(self, found: list[ShardingOption]) -> dict[tuple[int, str, int, Hashable], Counter[str]]:
        """Return the rows of each table in each cache, by rank, sharding type, columns, and what `pool_of` says."""
        pools: dict[tuple[int, str, int, Hashable], Counter[str]] = {}
        for option in found:
            part = self._pool_of(option)
            if part is None:
                continue
            for shard in option.shards:
                assert shard.rank is not None, "a placed shard"
                key = (shard.rank, option.sharding_type, shard.size[1], part)
                pools.setdefault(key, Counter())[option.name] += shard.size[0]
        return pools


def distinct_types(
    constraint: ParameterConstraints, rows: int, columns: int, topology: Topology
) -> ParameterConstraints:
    """Return the constraint without sharding types that place a table of such a size as another allowed one does, and
    without those that leave a rank without a row, where others are allowed.

    On one rank, every type holds the table whole. Within a node, `table_row_wise` is `row_wise`, and
    `table_column_wise` is `column_wise`; a table that is too narrow to cut is `table_wise` with either of the latter.

    >>> wanted = ParameterConstraints(sharding_types=["table_wise", "row_wise", "table_row_wise", "column_wise"])
    >>> topology = Topology(world_size=2, compute_device="cpu")
    >>> distinct_types(wanted, 100, 16, topology).sharding_types, distinct_types(wanted, 1, 16, topology).sharding_types
    (['table_wise', 'row_wise'], ['table_wise'])
    """
    same_as: list[tuple[str, str]] = []
    if topology.world_size == 1:
        same_as = [
            (each.name, _TABLE) for each in SHARDING_TYPES.values() if each.name not in (_TABLE, *_ONLY_ON_REQUEST)
        ]
    elif topology.local_world_size == topology.world_size:
        same_as = [(each.name, each.like) for each in SHARDING_TYPES.values() if each.like]
    if columns <= (constraint.min_partition or MIN_CW_DIM):
        same_as += [(each.name, _TABLE) for each in SHARDING_TYPES.values() if each.is_whole_or_columns]
    allowed = constraint.sharding_types or []
    left_out = {name for name, other in same_as if other in allowed}
    fewer = copy.copy(constraint)
    distinct = [name for name in allowed if name not in left_out]
    ranks = topology.world_size, topology.local_world_size
    empty = {name for name, each in SHARDING_TYPES.items() if each.is_too_small(rows, *ranks)}
    fewer.sharding_types = [name for name in distinct if name not in empty] or distinct
    return fewer


class _AtMost(Proposer):
    """Ends another proposer after `limit` proposals: the plan must not depend on the machine's speed."""

    def __init__(self, proposer: Proposer, limit: int) -> None:
        self._proposer, self._left = proposer, limit

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        self._proposer.load(search_space, enumerator)

    def feedback(self, *args: Any, **kwargs: Any) -> None:
        self._proposer.feedback(*args, **kwargs)

    def propose(self) -> list[ShardingOption] | None:
        self._left -= 1
        return self._proposer.propose() if self._left >= 0 else None


class OrderedEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator with the options in one order, the same on all versions. It goes when TorchRec 1.8 does.

    Before 1.9, TorchRec intersects options as sets, so the process's hash seed breaks ties, and ranks that plan for
    themselves would build different models.
    """

    def _filter_sharding_types(self, *args: Any, **kwargs: Any) -> list[str]:
        return sorted(super()._filter_sharding_types(*args, **kwargs), key=_PREFERENCE.index)

    def _filter_compute_kernels(self, *args: Any, **kwargs: Any) -> list[str]:
        return sorted(super()._filter_compute_kernels(*args, **kwargs))


@dataclass(frozen=True)
class ProfileCacheStatistics(CacheStatistics):
    """A profile's statistics of one table, in TorchRec's terms: lookups are the distinct rows of a global batch."""

    misses: BatchMisses

    @property
    def expected_lookups(self) -> float:
        """Distinct rows of a global batch."""
        return self.misses.expected_lookups

    def expected_miss_rate(self, clf: float) -> float:
        """Return the share of a batch's distinct rows that a cache of `clf` times the table misses."""
        return self.misses.expected_miss_rate(clf)

    @property
    def cacheability(self) -> float:
        """Area under the miss curve, from 0 (easy to cache) to 1 (impossible)."""
        return self.misses.cacheability


def cache_params_from(
    profile: FrequencyProfile,
    table: str,
    *,
    global_batch_size: int,
    load_factor: float | None = None,
    algorithm: CacheAlgorithm | None = None,
) -> CacheParams:
    """Return cache parameters with statistics, for `ParameterConstraints(cache_params=...)`.

    Args:
        profile: with statistics.
        table: its name.
        global_batch_size: samples of a step, over all ranks.
        load_factor: slots per row. None: as many slots as a batch has distinct rows, the minimum, from which TorchRec's
            `EmbeddingOffloadScaleupProposer` scales up.
        algorithm: as in `CacheParams`.

    Raises:
        ConfigError: the profile has no statistics of this table.
    """
    misses = profile.cache_statistics(table, global_batch_size)
    if load_factor is None:
        load_factor = min(1.0, max(misses.expected_lookups, 1.0) / max(profile.num_rows(table), 1))
    return CacheParams(algorithm=algorithm, load_factor=load_factor, stats=ProfileCacheStatistics(misses))
