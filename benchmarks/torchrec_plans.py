"""Plans of TorchRec's planner with our costs: a rival of `planbench` and `planbench_ranks`.

It rates each shard by itself and adds up, so it does not see that each sharding type brings collectives of its own: one
type for all tables is tried, too. Its default proposers, without a limit in time, place the tables of these tasks.
"""

from __future__ import annotations

import itertools
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, SortBy
from torchrec.distributed.planner.proposers import GreedyProposer, GridSearchProposer, UniformProposer
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import Perf, PlannerError, Shard, ShardEstimator, ShardingOption, Storage
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from embershard.planning.budget import least_need
from embershard.planning.cost.rates import step_parts
from embershard.planning.make_plan import sized
from embershard.planning.request import PlanRequest, cached
from embershard.planning.simulate.pool_report import RowRange
from embershard.planning.slots import needed_slots
from embershard.sharding import memory_model
from embershard.sharding.sharding_types import Sharding
from embershard.sharding.shards import LEAST_COLUMNS, TablePlacement
from embershard.sharding.sizes import PlacedShard
from embershard.sharding.torchrec.planner.torchrec_planner import OrderedEnumerator
from embershard.sharding.torchrec.sharders import StockEmbeddingBagCollectionSharder

_MOST_GRID_PROPOSALS = 500


def by_torchrec(request: PlanRequest) -> list[tuple[TablePlacement, ...]]:
    """Return the placements that TorchRec's planner finds for two orders of the tables, with caches and without."""
    budget, shape, model = request.budget, request.workload.shape, request.workload.model
    need = least_need(request)
    least = sized(request, need.tables)
    num_slots = 1 if least is None else sum(least.slots.values())
    dense = model.dense_parameter_bytes + model.dense_state_bytes + shape.reserve_bytes
    kept = dense + round(model.activation_bytes_per_sample * shape.micro_batch_size)  # of a rank, whatever is placed
    assert budget.device_bytes is not None, "the tasks' budgets are for everything"
    found = []
    for resident in (False, True):
        if request.may_be_resident if resident else need.fits_device(budget):
            costs = _Costs(request, num_slots, resident)
            for order, allowed in itertools.product((SortBy.PERF, SortBy.STORAGE), _choices(request)):
                if (placements := _place(request, budget.device_bytes - kept, costs, order, allowed)) is not None:
                    tables = request.placed(placements)
                    found.append(request.without_caches(tables) if resident else tables)
    return found


def _choices(request: PlanRequest) -> list[dict[str, list[str]]]:
    """Return the sharding types that may be used, and one for all tables, where that is allowed."""
    allowed = request.allowed
    one_type: list[dict[str, list[str]]] = [
        {table: [only] for table in allowed}
        for only in ("table_wise", "row_wise")
        if all(only in types for types in allowed.values())
    ]
    return [allowed, *(choice for choice in one_type if choice != allowed)]


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


@_quiet()
def _column_block(dim: int, world_size: int) -> int:
    """Return the fewest columns that are not narrow, a multiple of 4, and cut `dim` evenly, as TorchRec cuts."""
    least = max(LEAST_COLUMNS, dim // world_size)
    return next((size for size in range(least + -least % 4, dim, 4) if dim % size == 0), dim)


def _place(
    request: PlanRequest, num_bytes: int, costs: _Costs, order: SortBy, allowed: Mapping[str, Sequence[str]]
) -> list[TablePlacement] | None:
    """Return the planner's placement of the sharded tables, with so many bytes on each rank; None: it finds none."""
    tables, shape = request.sharded, request.workload.shape
    topology = Topology(
        world_size=shape.world_size,
        local_world_size=min(shape.ranks_per_node, shape.world_size),
        compute_device="cuda",  # nothing is run; a CPU would have no device tier to plan
        hbm_cap=max(1, num_bytes),
        ddr_cap=2**62,
    )
    constraints = {
        table.table: ParameterConstraints(
            sharding_types=list(allowed[table.table]),
            compute_kernels=[EmbeddingComputeKernel.FUSED.value],
            min_partition=_column_block(table.dim, topology.world_size),
        )
        for table in tables
    }
    greedy = [GreedyProposer(use_depth=depth) for depth in (True, False)]
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=1,
        enumerator=OrderedEnumerator(topology, batch_size=1, constraints=constraints, estimator=costs),
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        proposer=[UniformProposer(), *greedy, GridSearchProposer(max_proposals=_MOST_GRID_PROPOSALS)],
        partitioner=GreedyPerfPartitioner(sort_by=order),
        constraints=constraints,
        stats=NoopEmbeddingStats(),
        debug=False,
    )
    configs = [
        EmbeddingBagConfig(
            name=each.table, embedding_dim=each.dim, num_embeddings=each.rows, feature_names=[each.table]
        )
        for each in tables
    ]
    module = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    try:
        plan = planner.plan(module, [StockEmbeddingBagCollectionSharder()])  # type: ignore[list-item]
    except PlannerError:
        return None
    (found,) = plan.plan.values()
    params = [(table, found[table.table]) for table in tables]  # type: ignore[index]
    return [
        cached(table, param.sharding_type, [shard.placement.rank() for shard in param.sharding_spec.shards])
        for table, param in params
    ]


class _Costs(ShardEstimator):
    """Costs of shards while their ranks are not known yet: a table's hit rate is that of a single cache with all ranks'
    slots together, which balanced ranks come close to.

    Args:
        num_slots: slots of all ranks together.
        resident: costs of tables that are whole on the device.
    """

    def __init__(self, request: PlanRequest, num_slots: int, resident: bool) -> None:
        self._workload, self._rates, self._resident = request.workload, request.rates, resident
        self._tables = {table.table: table for table in request.workload.model.tables}
        whole = [PlacedShard(t, 0, 0, t.rows, t.dim, "table_wise", "cached") for t in self._tables.values()]
        reports = self._workload.counted_reports(whole, max(1, num_slots))
        self._reports = dict(zip(self._tables, reports, strict=True))

    def estimate(self, sharding_options: list[ShardingOption], sharder_map: Any = None, **_: Any) -> None:
        """Fill in `perf` and `storage` of every shard."""
        for option in sharding_options:
            for shard in option.shards:
                self._fill_in(option, shard)

    def _fill_in(self, option: ShardingOption, shard: Shard) -> None:
        workload, shape, size = self._workload, self._workload.shape, self._tables[option.name]
        kind, (rows, columns), first = cast(Sharding, option.sharding_type), shard.size, shard.offset[0]
        exchange = workload.exchange_of(size.table, kind, columns)
        own = PlacedShard(size, shard.rank or 0, first, first + rows, columns, kind, "cached", exchange)
        report = self._reports[option.name].part(workload.share_of_lookups(own), rows / size.rows)
        report = workload.as_exchanged(own, replace(report, shard=RowRange.of(own)))
        if self._resident:
            own, report = replace(own, kernel="device"), replace(report, fills=0.0, write_backs=0.0)
            row_bytes = rows * own.row_bytes
        else:
            memory = memory_model.pool_memory([own], shape)
            least = memory_model.slots_for(rows, math.ceil(needed_slots(report.unique_ids)))
            row_bytes = memory.map_bytes + least * memory.slot_bytes  # the maps, and the rows of one batch
        vectors = memory_model.vector_bytes(own, shape.global_batch_size, workload.lookups_per_step(own))
        shard.storage = Storage(hbm=row_bytes + round(vectors), ddr=memory_model.growing_bytes(own, shape))
        parts = step_parts(workload.shard_work(own, report), self._rates)
        sent = sum(parts[name] for name in ("all_to_all", "network", "latency"))
        copies = sum(parts[name] for name in ("planning", "fills", "write_backs"))
        # Forward compute and communication, then backward's; the last is prefetching.
        shard.perf = Perf(parts["embedding"], sent, 0.0, 0.0, prefetch_compute=copies)
