"""Places tables on ranks: TorchRec's planner, with costs that come from the data. It takes seconds to import."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, SortBy
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    CustomTopologyData,
    Partitioner,
    Perf,
    PlannerError,
    PlannerErrorType,
    Shard,
    ShardEstimator,
    ShardingOption,
    Storage,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from embershard.planning.request import column_block
from embershard.planning.shard_costs import CostOfShards, cached
from embershard.sharding.sharding_types import Sharding
from embershard.sharding.shards import TablePlacement
from embershard.sharding.sizes import PlacedShard, TableSize
from embershard.sharding.torchrec.planner.torchrec_planner import PoolRowsPartitioner, make_planner
from embershard.sharding.torchrec.sharders import StockEmbeddingBagCollectionSharder

_EVERYTHING = 2**62
_MOST_PLACED_SHARDS = 400_000  # by one proposer: the search is not part of a run's start
# TorchRec's errors when none of its proposals could be placed: for want of memory, or for another reason, such as the
# rows of a cache. Its other errors are about its input, and so are mistakes of ours.
_NOTHING_FITS = (PlannerErrorType.INSUFFICIENT_STORAGE, PlannerErrorType.STRICT_CONSTRAINTS)
# TorchRec gives a shard's place as a device of its node, and torch counts devices in a signed byte: "cuda:-128".
_MOST_DEVICES_OF_A_NODE = 128


def place(
    tables: Sequence[TableSize],
    costs: CostOfShards,
    *,
    world_size: int,
    ranks_per_node: int,
    device_bytes: int | None,
    host_bytes: int | None,
    less_bytes: Sequence[int] = (),
    allowed: Mapping[str, Sequence[str]],
    sort_by: Literal["seconds", "device_bytes"] = "seconds",
    by_memory: bool = False,
    limit_rows: bool = True,
) -> list[TablePlacement] | None:
    """Place all tables by TorchRec's planner. Deterministic.

    Args:
        tables: of the model.
        costs: costs of shards.
        world_size, ranks_per_node: ranks in all, and on each node.
        device_bytes, host_bytes: a rank's memory for its tables; None: not limited.
        less_bytes: how much less than `device_bytes` each rank has; empty: all have as much.
        allowed: sharding types by table.
        sort_by: place the slowest or the largest tables first.
        by_memory: look for the placement whose fullest rank needs the least device memory, not for the fastest one.
        limit_rows: no cache may get more rows than it can number.

    Returns:
        None where TorchRec finds no placement that fits, or cannot name one of the devices.
    """
    by_name = {table.table: table for table in tables}
    order = SortBy.PERF if sort_by == "seconds" else SortBy.STORAGE
    partitioner: Partitioner = GreedyPerfPartitioner(sort_by=order)
    if limit_rows:
        partitioner = PoolRowsPartitioner(lambda each: (by_name[each.name].dtype, by_name[each.name].group), order)
    with _quiet():
        topology = _topology(world_size, ranks_per_node, device_bytes, host_bytes, less_bytes)
        constraints = {name: _constraint(types, by_name[name], world_size) for name, types in allowed.items()}
        planner = make_planner(
            topology,
            constraints,
            partitioner,
            len(by_name),
            batch_size=1,
            most_placed_shards=_MOST_PLACED_SHARDS,
            estimator=_Estimator(by_name, costs, by_memory),
            storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        )
        plan = _planned(planner, tables, ranks_per_node)
    return None if plan is None else _placements(plan, tables)


def _planned(
    planner: EmbeddingShardingPlanner, tables: Sequence[TableSize], ranks_per_node: int
) -> ShardingPlan | None:
    configs = [
        EmbeddingBagConfig(
            name=table.table, embedding_dim=table.dim, num_embeddings=table.rows, feature_names=[f"f{number}"]
        )
        for number, table in enumerate(tables)
    ]
    module = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    try:
        return planner.plan(module, [StockEmbeddingBagCollectionSharder()])  # type: ignore[list-item]
    except PlannerError as error:
        if error.error_type not in _NOTHING_FITS:
            raise
    except RuntimeError as error:
        if ranks_per_node <= _MOST_DEVICES_OF_A_NODE or "Invalid device string" not in str(error):
            raise
    return None


def _constraint(types: Sequence[str], table: TableSize, world_size: int) -> ParameterConstraints:
    return ParameterConstraints(
        sharding_types=list(types),
        compute_kernels=[EmbeddingComputeKernel.FUSED.value],
        min_partition=column_block(table.dim, world_size),
    )


def _topology(
    world_size: int, ranks_per_node: int, device_bytes: int | None, host_bytes: int | None, less_bytes: Sequence[int]
) -> Topology:
    by_rank = {"hbm_cap": [max(1, (device_bytes or 0) - less) for less in less_bytes]}
    return Topology(
        world_size=world_size,
        local_world_size=ranks_per_node,
        compute_device="cuda",  # nothing is run; a CPU would have no device tier to plan
        # TorchRec 1.6 takes 0 for "not said".
        hbm_cap=_EVERYTHING if device_bytes is None else max(1, device_bytes),
        ddr_cap=_EVERYTHING if host_bytes is None else max(1, host_bytes),
        custom_topology_data=CustomTopologyData(by_rank, world_size) if less_bytes else None,
    )


class _Estimator(ShardEstimator):
    def __init__(self, tables: Mapping[str, TableSize], costs: CostOfShards, by_memory: bool) -> None:
        self._tables, self._costs, self._by_memory = tables, costs, by_memory

    def estimate(self, sharding_options: list[ShardingOption], sharder_map: Any = None, **_: Any) -> None:
        """Fill in `perf` and `storage` of every shard."""
        for option in sharding_options:
            shards = [self._placed(option, shard) for shard in option.shards]
            for shard, cost in zip(option.shards, self._costs(shards), strict=True):
                shard.storage = Storage(hbm=cost.device_bytes, ddr=cost.host_bytes)
                lookup, sent, copies = (cost.seconds.get(each, 0.0) for each in ("lookup", "communication", "copies"))
                # Forward compute and communication, then backward's; the last is prefetching.
                perf = Perf(lookup, sent, 0.0, 0.0, prefetch_compute=copies)
                shard.perf = Perf(float(cost.device_bytes), 0.0, 0.0, 0.0) if self._by_memory else perf

    def _placed(self, option: ShardingOption, shard: Shard) -> PlacedShard:
        (rows, columns), first = shard.size, shard.offset[0]
        kind = cast(Sharding, option.sharding_type)
        return PlacedShard(self._tables[option.name], shard.rank or 0, first, first + rows, columns, kind, "cached")


def _placements(plan: ShardingPlan, tables: Sequence[TableSize]) -> list[TablePlacement]:
    (module_plan,) = plan.plan.values()
    params = [(table, module_plan[table.table]) for table in tables]  # type: ignore[index]
    return [
        cached(table, param.sharding_type, [shard.placement.rank() for shard in param.sharding_spec.shards])
        for table, param in params
    ]


@contextmanager
def _quiet() -> Iterator[None]:
    """TorchRec logs every proposal."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
