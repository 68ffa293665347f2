"""Sharding plans with cached tables, from TorchRec's own planner, on CPU too and without a process group."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, ShardingType
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import CacheParams, EmbeddingModuleShardingPlan, ModuleSharder, ShardingPlan

from embershard.errors import ShardingError
from embershard.sharding.torchrec.sharders import _Cached
from embershard.sharding.torchrec.spec import CACHED_KERNEL

_FUSED = EmbeddingComputeKernel.FUSED.value
_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value
_ONLY_ON_REQUEST = (_DATA_PARALLEL, ShardingType.GRID_SHARD.value)
_PREFERENCE = [t.value for t in ShardingType]


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
    """A TorchRec plan in which the cached sharders' tables are cached. Deterministic: every rank may call it.

    Args:
        model: not yet sharded; its embedding modules may be on the meta device.
        sharders: the same that ``DistributedModelParallel`` gets.
        world_size, local_world_size: ranks in all, and per node.
        device: where training runs; its type matters.
        constraints: per table. A table without ``compute_kernels`` is cached when its sharder is a cached
            one; ``compute_kernels=["fused"]`` keeps it whole on the device. Data-parallel and grid are chosen
            only when asked for.
            ``cache_params.load_factor`` sets a table's own share of slots.
        batch_size: per rank, for the planner's cost model.

    Raises:
        ShardingError: a constraint names an unknown table, or no plan fits.
    """
    on_cpu = torch.device(device).type == "cpu"
    owner = _sharder_of_table(model, sharders)
    unknown = sorted(set(constraints or {}) - set(owner))
    if unknown:
        raise ShardingError(
            f"constraints name tables {unknown}, which no sharder shards; tables are {sorted(owner)}"
        )
    wanted = {
        table: _constraint((constraints or {}).get(table), sharder, torch.device(device).type)
        for table, sharder in owner.items()
    }
    cached = {table for table, constraint in wanted.items() if constraint.compute_kernels == [CACHED_KERNEL]}
    topology = Topology(
        world_size=world_size, local_world_size=local_world_size, compute_device=torch.device(device).type
    )
    planned_as = {t: _as_fused(c) if on_cpu and t in cached else c for t, c in wanted.items()}
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        enumerator=_OrderedEnumerator(topology, batch_size=batch_size, constraints=planned_as),
        constraints=planned_as,
        stats=NoopEmbeddingStats(),
        debug=False,
    )
    try:
        plan = planner.plan(model, list(sharders))
    except PlannerError as error:
        raise ShardingError(
            f"no sharding plan for {len(owner)} tables on {world_size} ranks: {error}"
        ) from error
    if (
        on_cpu
    ):  # TorchRec's CPU cost model has no bandwidth for cached tables: planned as fused, then relabelled
        _relabel(plan, cached, wanted)
    return plan


class _OrderedEnumerator(EmbeddingEnumerator):
    """TorchRec intersects options as sets, so ties are broken by the process's hash seed, and ranks that plan
    for themselves would build different models. Here the options come in one order."""

    def _filter_sharding_types(self, *args: Any, **kwargs: Any) -> list[str]:
        return sorted(super()._filter_sharding_types(*args, **kwargs), key=_PREFERENCE.index)

    def _filter_compute_kernels(self, *args: Any, **kwargs: Any) -> list[str]:
        return sorted(super()._filter_compute_kernels(*args, **kwargs))


def _sharder_of_table(model: nn.Module, sharders: Sequence[ModuleSharder]) -> dict[str, ModuleSharder]:
    by_type = {sharder.module_type: sharder for sharder in sharders}
    return {
        table: by_type[type(module)]
        for module in model.modules()
        if type(module) in by_type
        for table in by_type[type(module)].shardable_parameters(module)
    }


def _constraint(
    given: ParameterConstraints | None, sharder: ModuleSharder, device_type: str
) -> ParameterConstraints:
    """The user's constraint with our defaults: cached where the sharder caches, sharded rather than
    replicated."""
    constraint = copy.deepcopy(given) if given is not None else ParameterConstraints()
    types = constraint.sharding_types or sharder.sharding_types(device_type)
    replicated = constraint.sharding_types == [_DATA_PARALLEL]
    if constraint.sharding_types is None:
        constraint.sharding_types = [t for t in types if t not in _ONLY_ON_REQUEST]
    if isinstance(sharder, _Cached) and constraint.compute_kernels is None and not replicated:
        constraint.compute_kernels = [CACHED_KERNEL]
    if constraint.compute_kernels == [CACHED_KERNEL] and constraint.cache_params is None:
        ratio = sharder.cache.ratio if isinstance(sharder, _Cached) else None
        if ratio is not None and device_type != "cpu":
            constraint.cache_params = CacheParams(load_factor=ratio)
    return constraint


def _as_fused(constraint: ParameterConstraints) -> ParameterConstraints:
    fused = copy.deepcopy(constraint)
    fused.compute_kernels = [_FUSED]
    fused.cache_params = None
    return fused


def _relabel(plan: ShardingPlan, cached: set[str], wanted: Mapping[str, ParameterConstraints]) -> None:
    for module_plan in plan.plan.values():
        assert isinstance(module_plan, EmbeddingModuleShardingPlan)
        for table, param in module_plan.items():
            if table in cached:
                param.compute_kernel = CACHED_KERNEL
                param.cache_params = wanted[table].cache_params
