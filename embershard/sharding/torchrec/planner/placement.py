"""Conversion of plans to and from TorchRec's, and the check that a model was built as planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.batched_embedding_kernel import (
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
)
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding_plan import placement as placed_on
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
)
from torchrec.modules.embedding_modules import EmbeddingCollection

from embershard.errors import ShardingError
from embershard.sharding.plan import Plan
from embershard.sharding.shards import PoolPlacement, Shard, TablePlacement, groups_of, no_rows_problem, shards_of
from embershard.sharding.torchrec.compat import lookups_of
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings
from embershard.sharding.torchrec.lookups import CachedEmbedding, CachedEmbeddingBag
from embershard.sharding.torchrec.planner.torchrec_planner import shardable_tables
from embershard.sharding.torchrec.sharders import has_cache, inner_sharder
from embershard.sharding.torchrec.spec import CACHED_KERNEL, REPLICATED, REPLICATED_KERNEL

#: Rows, columns and dtype of a table.
TableShape = tuple[int, int, str]

_FUSED = EmbeddingComputeKernel.FUSED.value
_KERNELS = {"cached": CACHED_KERNEL, "device": _FUSED, "replicated": EmbeddingComputeKernel.DENSE.value}
_OUR_KERNELS = {kernel: ours for ours, kernel in _KERNELS.items()}
_DTYPES = {torch.float32: "fp32", torch.float16: "fp16"}
_BUILT_KERNELS: list[tuple[tuple[type, ...], str]] = [
    ((CachedEmbeddingBag, CachedEmbedding), "cached"),  # first: these derive from the fused ones
    ((BatchedFusedEmbeddingBag, BatchedFusedEmbedding), "device"),
]


def model_tables(model: nn.Module, sharders: Sequence[ModuleSharder]) -> dict[str, TableShape]:
    """Return the shape of every table of a model that is not sharded yet.

    Raises:
        ShardingError: two tables share a name, or one has a dtype that plans do not know.
    """
    shapes: dict[str, TableShape] = {}
    for table in shardable_tables(model, sharders):
        weight = table.weight
        if table.name in shapes:
            raise ShardingError(f"two tables are named {table.name!r}; a plan knows tables by name, so rename one")
        if weight.dtype not in _DTYPES:
            known = ", ".join(str(dtype) for dtype in _DTYPES)
            raise ShardingError(f"table {table.name!r} is of {weight.dtype}; plans are for tables of {known}")
        shapes[table.name] = (weight.shape[0], weight.shape[1], _DTYPES[weight.dtype])
    return shapes


def model_groups(model: nn.Module, sharders: Sequence[ModuleSharder]) -> dict[str, str]:
    """Return the group of every table of a model that is not sharded yet: see `groups_of`."""
    poolings: dict[str, dict[str, str]] = {}
    for path, module in model.named_modules():
        if hasattr(module, "embedding_bag_configs"):
            poolings[path] = {config.name: config.pooling.value.lower() for config in module.embedding_bag_configs()}
    tables = shardable_tables(model, sharders)
    return groups_of(
        {
            table.name: (
                table.path,
                poolings.get(table.path, {}).get(table.name, "")
                + (inner_sharder(table.sharder).cache.group_suffix(table.name) if has_cache(table.sharder) else ""),
                _own_types(table.name, table.weight.shape[0], table.sharder) is not None,
            )
            for table in tables
        }
    )


def _own_types(table: str, num_rows: int, sharder: ModuleSharder) -> Sequence[str] | None:
    """Return the sharding types that a mode of the sharder asks of a table; None: no mode does."""
    return inner_sharder(sharder).types_of(table, num_rows) if has_cache(sharder) else None


def torchrec_plan(
    plan: Plan, model: nn.Module, sharders: Sequence[ModuleSharder], device: torch.device | str, *, cached: bool = True
) -> ShardingPlan:
    """Convert a plan to what `DistributedModelParallel` takes.

    Args:
        plan: the plan.
        model: not yet sharded; its embedding modules may be on the meta device.
        sharders: the sharders for `DistributedModelParallel`, made with this plan.
        device: of the training; its type matters.
        cached: False keeps cached tables whole on the device, at the same places, for comparisons.

    Raises:
        ShardingError: the plan is for other tables, or the sharders cannot obey it.
    """
    plan.check_model(model_tables(model, sharders))
    device_type = torch.device(device).type
    on_device = plan.tables if cached else [table.without_cache for table in plan.tables]
    if device_type == "cpu" and (problem := no_rows_problem(on_device, plan.ranks_per_node)):
        raise ShardingError(
            f"{problem}, and FBGEMM cannot train that on a CPU. Place these table_wise in the plan, or train them with "
            'a cache (kernel "cached", cache.enabled = true)'
        )
    by_name, groups = {table.table: table for table in plan.tables}, model_groups(model, sharders)
    for placed in plan.tables:
        if cached and placed.group != groups[placed.table]:
            raise ShardingError(
                f"table {placed.table!r}: the plan has it in the group {placed.group!r}, and the model in "
                f"{groups[placed.table]!r}: tables of two modules, of two poolings, or of ids and of rows share no "
                "cache. Plan again with this run's config and data"
            )
    modules: dict[str, Any] = {}
    for table in shardable_tables(model, sharders):
        placement = by_name[table.name]
        _check_sharder(placement, table.sharder, device_type, cached)
        kernel = _KERNELS[placement.kernel] if cached or placement.kernel != "cached" else _FUSED
        if placement.kernel == "replicated" and REPLICATED_KERNEL in table.sharder.compute_kernels(
            placement.sharding, device_type
        ):
            kernel = REPLICATED_KERNEL  # trained as the sharded tables are; else by the dense optimizer
        module = modules.setdefault(table.path, EmbeddingModuleShardingPlan())
        module[table.name] = _parameter_sharding(placement, kernel, plan, device_type)
    return ShardingPlan(modules)


def placements_of(
    plan: ShardingPlan, tables: Mapping[str, TableShape], groups: Mapping[str, str]
) -> tuple[TablePlacement, ...]:
    """Convert a TorchRec plan of tables of these shapes and groups, by name.

    Raises:
        ShardingError: a compute kernel that plans do not know.
    """
    placements = []
    for module in plan.plan.values():
        for name, param in module.items():  # type: ignore[attr-defined]
            if param.compute_kernel not in _OUR_KERNELS:
                raise ShardingError(f"table {name!r}: plans do not know the compute kernel {param.compute_kernel!r}")
            shards = [] if param.sharding_spec is None else param.sharding_spec.shards
            ranks = tuple(shard.placement.rank() for shard in shards)
            is_replicated = param.sharding_type == REPLICATED
            kernel: Any = "replicated" if is_replicated else _OUR_KERNELS[param.compute_kernel]
            rows, dim, dtype = tables[name]
            widths = tuple({shard.shard_offsets[1]: shard.shard_sizes[1] for shard in shards}.values())
            own: Any = (ranks, "pooled", groups[name], widths if len(set(widths)) > 1 else ())
            placement: Any = (name, rows, dim, dtype, param.sharding_type, kernel, *own)
            placements.append(TablePlacement(*placement))
    return tuple(sorted(placements, key=lambda placement: placement.table))


def check_built(model: nn.Module, plan: Plan, rank: int, *, cached: bool = True) -> None:
    """Check that this rank holds the plan's shards, kernels and pools, with the planned slots in every pool.

    Args:
        model: sharded by the plan.
        plan: the plan.
        rank: of the calling process.
        cached: as given to `torchrec_plan`.

    Raises:
        ShardingError: naming what was planned and not built, and what was built and not planned.
    """
    planned_parts, (parts, pools) = Counter[_BuiltShard](), _built(model, rank)
    for table in plan.tables:
        kernel = (table if cached else table.without_cache).kernel
        here = [shard for shard in shards_of(table, plan.ranks_per_node) if shard.rank == rank]
        if table.kernel == "replicated":
            here = [Shard(table.table, rank, table.rows, table.dim, 0, 0)]
        planned_parts.update(_BuiltShard(shard, table.sharding, kernel) for shard in here)
    sides: list[tuple[str, Counter[Any], Counter[Any]]] = [
        ("shard", planned_parts, Counter(parts)),
        ("pool", Counter(pool for pool in plan.pools if cached and pool.rank == rank), Counter(pools)),
    ]
    for what, planned, built in sides:
        missing, extra = sorted(planned - built, key=repr), sorted(built - planned, key=repr)
        if missing or extra:
            raise ShardingError(
                f"rank {rank} is not built as planned; {what}s planned and not built: {missing or 'none'}; built and "
                f"not planned: {extra or 'none'}. Report this: a plan that was accepted must be obeyed."
            )


def built_pools(model: nn.Module, rank: int) -> list[PoolPlacement]:
    """Return the caches of this rank of a sharded model, with their slots."""
    return _built(model, rank)[1]


@dataclass(frozen=True)
class _BuiltShard:
    shard: Shard
    sharding: str
    kernel: str


def _built(model: nn.Module, rank: int) -> tuple[list[_BuiltShard], list[PoolPlacement]]:
    parts, pools = [], []
    for sharding, kernel in _kernels(model):
        tables = kernel.config.embedding_tables
        kind = next((name for types, name in _BUILT_KERNELS if isinstance(kernel, types)), type(kernel).__name__)
        if sharding == REPLICATED:
            kind = "replicated"
        for table, (rows, columns, *_) in zip(tables, kernel.emb_module.embedding_specs, strict=True):
            offsets = table.local_metadata.shard_offsets if table.local_metadata else (0, 0)
            parts.append(_BuiltShard(Shard(table.name, rank, rows, columns, *offsets), sharding, kind))
        if isinstance(kernel.emb_module, CachedTableBatchedEmbeddings):
            names: Any = tuple(sorted({table.name for table in tables}))
            slots = kernel.emb_module.cache.num_slots
            pools.append(PoolPlacement(rank, names, sharding, tables[0].local_cols, slots))
    return parts, pools


def _kernels(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield sharding type and kernel of every group of tables on this rank."""
    for module in model.modules():
        if isinstance(module, (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)):
            for sharding, lookup in zip(module._sharding_types, lookups_of(module), strict=True):
                for kernel in lookup._emb_modules:
                    yield sharding, kernel


def _check_sharder(placement: TablePlacement, sharder: ModuleSharder, device_type: str, cached: bool) -> None:
    known = sharder.sharding_types(device_type)
    if placement.sharding not in known:
        raise ShardingError(
            f"table {placement.table!r}: {type(sharder).__name__} has no sharding {placement.sharding!r}, only "
            f"{', '.join(known)}"
        )
    if placement.columns and issubclass(sharder.module_type, EmbeddingCollection):
        raise ShardingError(
            f"table {placement.table!r}: columns: got {list(placement.columns)}; TorchRec cuts sequences into "
            "equal blocks only. Leave columns out of the plan, or place the table otherwise"
        )
    if cached and placement.kernel == "cached" and not has_cache(sharder):
        raise ShardingError(
            f"table {placement.table!r} is cached in the plan, which needs one of embershard's cached sharders; its "
            f"sharder is {type(sharder).__name__}"
        )
    place = placement.sharding, placement.kernel, placement.exchange
    types = _own_types(placement.table, placement.rows, sharder)
    if types is not None and place not in [(kind, "cached", "pooled") for kind in types]:
        raise ShardingError(
            f"table {placement.table!r}: the plan has it {', '.join(place)}; needed {' or '.join(types)}, cached, "
            "pooled, by the sharder's arguments. Plan again with this run's config and data"
        )


def _parameter_sharding(placement: TablePlacement, kernel: str, plan: Plan, device_type: str) -> ParameterSharding:
    if placement.kernel == "replicated":
        return ParameterSharding(placement.sharding, kernel, ranks=list(range(plan.world_size)))
    shards = [
        ShardMetadata(
            shard_offsets=[shard.first_row, shard.first_column],
            shard_sizes=[shard.rows, shard.columns],
            placement=placed_on(device_type, shard.rank, plan.ranks_per_node),
        )
        for shard in shards_of(placement, plan.ranks_per_node)
    ]
    spec = EnumerableShardingSpec(shards)
    return ParameterSharding(placement.sharding, kernel, ranks=list(placement.ranks), sharding_spec=spec)
