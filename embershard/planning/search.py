"""Placing tables on ranks: TorchRec's planner, with costs that come from the data."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, SortBy
from torchrec.distributed.planner.proposers import GreedyProposer, GridSearchProposer, UniformProposer
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    Enumerator,
    Perf,
    PlannerError,
    PlannerErrorType,
    Proposer,
    Shard,
    ShardEstimator,
    ShardingOption,
    Storage,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from embershard.planning.request import column_block
from embershard.sharding.sizes import PlacedShard, TableSize
from embershard.sharding.torchrec.partitioner import PoolRowsPartitioner
from embershard.sharding.torchrec.sharders import StockEmbeddingBagCollectionSharder
from embershard.sharding.torchrec.torchrec_planner import OrderedEnumerator

_MOST_GRID_PROPOSALS = 500
_MOST_PLACED_SHARDS = 400_000  # by one proposer, over all its proposals: bounds the search without a clock
_EVERYTHING = 2**62
# How TorchRec says that none of its proposals could be placed: for want of memory, or for another reason, such as the
# rows of a cache. Its other errors are about what it was given, and so are mistakes of ours.
_NOTHING_FITS = (PlannerErrorType.INSUFFICIENT_STORAGE, PlannerErrorType.STRICT_CONSTRAINTS)
# TorchRec gives a shard's place as a device of its node, and torch counts devices in a signed byte: "cuda:-128".
_MOST_DEVICES_OF_A_NODE = 128


@dataclass(frozen=True)
class ShardCost:
    """What one shard costs its rank.

    Attributes:
        seconds: of a step, by part: "lookup", "communication", "copies".
        device_bytes, host_bytes: that it needs at least.
    """

    seconds: Mapping[str, float]
    device_bytes: int
    host_bytes: int


#: The cost of every shard of a table that is sharded in one way; their ranks are not known yet (0).
CostOfShards = Callable[[Sequence[PlacedShard]], Sequence[ShardCost]]


@dataclass(frozen=True)
class Placement:
    """Where a table's shards go: TorchRec's sharding type, and a rank per shard in TorchRec's order."""

    table: str
    sharding: str
    ranks: tuple[int, ...]


def place(
    tables: Sequence[TableSize],
    costs: CostOfShards,
    *,
    world_size: int,
    ranks_per_node: int,
    device_bytes: int | None,
    host_bytes: int | None,
    allowed: Mapping[str, Sequence[str]],
    sort_by: Literal["seconds", "device_bytes"] = "seconds",
    by_memory: bool = False,
    cached: bool = True,
) -> list[Placement] | None:
    """A placement of all tables by TorchRec's planner; None where it finds none that fits, or cannot name a device that
    is in it. Deterministic.

    Args:
        tables: of the model.
        costs: what shards cost.
        world_size, ranks_per_node: ranks in all, and on each node.
        device_bytes, host_bytes: what a rank has for its tables; None: as much as it takes.
        allowed: sharding types by table.
        sort_by: which tables are placed first: the slowest or the largest.
        by_memory: look for the placement whose fullest rank needs the least device memory, not for the fastest one.
        cached: no cache may get more rows than it can number.
    """
    model = _tables_module(tables)
    with _quiet():
        sizes = (world_size, ranks_per_node, device_bytes, host_bytes)
        planner = _planner(tables, costs, allowed, *sizes, sort_by, by_memory, cached)
        try:
            plan = planner.plan(model, [StockEmbeddingBagCollectionSharder()])  # type: ignore[list-item]
        except PlannerError as error:
            if error.error_type not in _NOTHING_FITS:
                raise
            return None
        except RuntimeError as error:
            if ranks_per_node <= _MOST_DEVICES_OF_A_NODE or "Invalid device string" not in str(error):
                raise
            return None
    return _placements(plan, tables)


def _planner(
    tables: Sequence[TableSize],
    costs: CostOfShards,
    allowed: Mapping[str, Sequence[str]],
    world_size: int,
    ranks_per_node: int,
    device_bytes: int | None,
    host_bytes: int | None,
    sort_by: str,
    by_memory: bool,
    cached: bool,
) -> EmbeddingShardingPlanner:
    topology = Topology(
        world_size=world_size,
        local_world_size=ranks_per_node,
        compute_device="cuda",  # nothing is run; a CPU would have no device tier to plan
        hbm_cap=_EVERYTHING if device_bytes is None else max(1, device_bytes),  # TorchRec 1.6 takes 0 for "not said"
        ddr_cap=_EVERYTHING if host_bytes is None else max(1, host_bytes),
    )
    by_name = {table.table: table for table in tables}
    constraints = {
        name: ParameterConstraints(
            sharding_types=list(types),
            compute_kernels=[EmbeddingComputeKernel.FUSED.value],
            min_partition=column_block(by_name[name].dim, world_size),
        )
        for name, types in allowed.items()
    }
    limit = max(8, _MOST_PLACED_SHARDS // (len(tables) * world_size))
    order = SortBy.PERF if sort_by == "seconds" else SortBy.STORAGE
    greedy = [_AtMost(GreedyProposer(use_depth=depth), limit) for depth in (True, False)]
    return EmbeddingShardingPlanner(
        topology=topology,
        batch_size=1,
        enumerator=OrderedEnumerator(
            topology, batch_size=1, constraints=constraints, estimator=_Estimator(by_name, costs, by_memory)
        ),
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        proposer=[UniformProposer(), *greedy, GridSearchProposer(max_proposals=_MOST_GRID_PROPOSALS)],
        partitioner=PoolRowsPartitioner(lambda option: by_name[option.name].dtype, order)
        if cached
        else GreedyPerfPartitioner(sort_by=order),
        constraints=constraints,
        stats=NoopEmbeddingStats(),
        debug=False,
    )


class _AtMost(Proposer):
    """Ends another proposer after so many proposals: the same plan on every machine, however fast."""

    def __init__(self, proposer: Proposer, limit: int) -> None:
        self._proposer, self._left = proposer, limit

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        self._proposer.load(search_space, enumerator)

    def feedback(self, *args: Any, **kwargs: Any) -> None:
        self._proposer.feedback(*args, **kwargs)

    def propose(self) -> list[ShardingOption] | None:
        self._left -= 1
        return self._proposer.propose() if self._left >= 0 else None


class _Estimator(ShardEstimator):
    """Gives TorchRec's planner our costs."""

    def __init__(self, tables: Mapping[str, TableSize], costs: CostOfShards, by_memory: bool) -> None:
        self._tables, self._costs, self._by_memory = tables, costs, by_memory

    def estimate(self, sharding_options: list[ShardingOption], sharder_map: Any = None, **_: Any) -> None:
        """Fill in ``perf`` and ``storage`` of every shard."""
        for option in sharding_options:
            shards = [_placed(self._tables[option.name], shard, option.sharding_type) for shard in option.shards]
            for shard, cost in zip(option.shards, self._costs(shards), strict=True):
                shard.storage = Storage(hbm=cost.device_bytes, ddr=cost.host_bytes)
                shard.perf = self._perf(cost)

    def _perf(self, cost: ShardCost) -> Perf:
        if self._by_memory:
            return Perf(float(cost.device_bytes), 0.0, 0.0, 0.0)
        parts = cost.seconds
        return Perf(
            fwd_compute=parts.get("lookup", 0.0),
            fwd_comms=parts.get("communication", 0.0),
            bwd_compute=0.0,
            bwd_comms=0.0,
            prefetch_compute=parts.get("copies", 0.0),
        )


def _placed(table: TableSize, shard: Shard, sharding: str) -> PlacedShard:
    rows, columns = shard.size
    return PlacedShard(table, shard.rank or 0, shard.offset[0], shard.offset[0] + rows, columns, sharding, "cached")


def _tables_module(tables: Sequence[TableSize]) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(
            name=table.table, embedding_dim=table.dim, num_embeddings=table.rows, feature_names=[f"f{number}"]
        )
        for number, table in enumerate(tables)
    ]
    return EmbeddingBagCollection(tables=configs, device=torch.device("meta"))


def _placements(plan: ShardingPlan, tables: Sequence[TableSize]) -> list[Placement]:
    (module_plan,) = plan.plan.values()
    found = []
    for table in tables:
        param = module_plan[table.table]  # type: ignore[index]
        ranks = [shard.placement.rank() for shard in param.sharding_spec.shards]
        found.append(Placement(table.table, param.sharding_type, tuple(ranks)))
    return found


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
