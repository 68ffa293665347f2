"""Simulates training on many numbers of ranks: a plan for each, and its steps replayed event by event.

Plans for few ranks are searched; for more, the best of a few plain placements is taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from embershard.errors import ShardingError
from embershard.planning.budget import placed
from embershard.planning.cost.rates import StepWork, step_parts
from embershard.planning.cost.topology import Topology
from embershard.planning.make_plan import Candidate, best_candidate, sized
from embershard.planning.predict import resident_report, shard_work
from embershard.planning.request import PlanRequest, column_block
from embershard.planning.shard_costs import cached
from embershard.planning.simulate.step_replay import STRAGGLERS, Pipeline, StepReplay, replay_steps
from embershard.settings.decoding import decode
from embershard.sharding.plan import Plan, Prediction, TablePlacement
from embershard.sharding.sharding_types import SHARDING_TYPES, Sharding, ShardingType
from embershard.sharding.sizes import PlacedShard, TableSize

#: Plans for more ranks are not searched: that takes minutes.
MOST_SEARCHED_RANKS = 32
#: More shards than this take minutes: tables are not cut by rows over so many ranks.
_MOST_SHARDS = 30_000


@dataclass(frozen=True)
class SimulatedRun:
    """Training on one number of ranks, simulated: an estimate.

    Attributes:
        num_ranks, global_batch_size: ranks, and samples of a step over all of them.
        step_seconds, samples_per_second: of all ranks together; 0 where no plan fits.
        parts: mean seconds of a step in which a rank's training does that, or waits for it; they add up to the step.
            "stragglers" is waiting for slower ranks.
        limit: the part of the busiest rank that takes most.
        is_searched: the planner searched the placement; False: the best of a few plain ones.
        problem: why there is no plan; empty where there is one.
    """

    num_ranks: int
    global_batch_size: int
    step_seconds: float = 0.0
    samples_per_second: float = 0.0
    parts: dict[str, float] | None = None
    limit: str = ""
    is_searched: bool = True
    problem: str = ""

    def efficiency(self, runs: Sequence[SimulatedRun]) -> float | None:
        """Return the samples per second and rank, relative to those of the fewest ranks with a plan."""
        fitting = [run for run in runs if not run.problem]
        if self.problem:
            return None
        first = min(fitting, key=lambda run: run.num_ranks)
        return self.samples_per_second / self.num_ranks / (first.samples_per_second / first.num_ranks)


def simulate_plan(plan: Plan, topology: Topology) -> StepReplay:
    """Replay steps of a plan on a machine, with its ranks' jitter. An estimate.

    Args:
        plan: has a prediction, from which each rank's work is taken.
        topology: of the plan's kind of device.

    Raises:
        ShardingError: the plan has no prediction.
    """
    if plan.prediction is None:
        raise ShardingError("the plan has no prediction: it was edited. Make it again with embershard plan.")
    shaped = topology.shaped(plan.ranks_per_node, plan.world_size // plan.ranks_per_node)
    return _replay(plan.prediction, shaped, plan.world_size, Pipeline.of(plan, topology.cores_per_node))


def simulate_scaling(
    ranks: Sequence[int],
    make_request: Callable[[int], tuple[PlanRequest, Topology]],
    progress: Callable[[int], None] | None = None,
) -> list[SimulatedRun]:
    """Plan and simulate training on each of these numbers of ranks. Hit rates are from counts alone.

    Args:
        ranks: numbers of ranks.
        make_request: returns the request for so many ranks, and their machine.
        progress: called with each number of ranks before it is planned.
    """
    found = []
    for num_ranks in ranks:
        if progress is not None:
            progress(num_ranks)
        found.append(simulate_run(*make_request(num_ranks)))
    return found


def simulate_run(request: PlanRequest, topology: Topology) -> SimulatedRun:
    """Plan and simulate training as requested, on a machine of so many ranks."""
    shape = request.workload.shape
    num_ranks, samples = shape.world_size, shape.global_batch_size
    is_searched = num_ranks <= MOST_SEARCHED_RANKS
    try:
        candidate = best_candidate(request) if is_searched else plain_candidate(request)
    except ShardingError as error:
        return SimulatedRun(num_ranks, samples, is_searched=is_searched, problem=str(error))
    replayed = _replay(candidate.quick, topology, num_ranks, Pipeline.of_run(shape))
    return SimulatedRun(
        num_ranks=num_ranks,
        global_batch_size=samples,
        step_seconds=replayed.step_seconds,
        samples_per_second=samples / replayed.step_seconds,
        parts={name: seconds for name, seconds in replayed.mean_parts.items() if seconds},
        limit=_limit(replayed),
        is_searched=is_searched,
    )


def _replay(prediction: Prediction, topology: Topology, num_ranks: int, pipeline: Pipeline) -> StepReplay:
    works = [decode(StepWork, rank.work) for rank in prediction.ranks]
    return replay_steps(works, topology.rates_for(num_ranks), pipeline, jitter=topology.jitter_for(num_ranks))


def _limit(replayed: StepReplay) -> str:
    """Return what takes most of the busiest rank's step; "stragglers" where the ranks wait for each other longer."""
    part = replayed.bottleneck(replayed.slowest)
    waiting = replayed.mean_parts[STRAGGLERS]
    return STRAGGLERS if waiting > replayed.parts[part][replayed.slowest] else part


def plain_candidate(request: PlanRequest) -> Candidate:
    """Return the fastest of a few placements that fits, by counts alone: all tables table-wise, by columns, by rows of
    a node, or by rows over all ranks, with and without caches. Takes seconds for thousands of ranks.

    Raises:
        ShardingError: none of them fits.
    """
    found = []
    for kind in SHARDING_TYPES.values():
        tables = _alike(request, kind) if kind.is_plain else None
        if tables is not None:
            resident = sized(request, tuple(table.without_cache for table in tables))
            found.append(sized(request, tables) if resident is None else resident)
    fitting = [candidate for candidate in found if candidate is not None]
    if not fitting:
        shape = request.workload.shape
        raise ShardingError(
            f"no plain placement of {len(request.allowed)} tables on {shape.world_size} ranks fits. Give them more "
            "memory (--device-memory, --host-memory), or simulate other numbers of ranks."
        )
    return min(fitting, key=lambda candidate: candidate.step_seconds)


def _alike(request: PlanRequest, kind: ShardingType) -> tuple[TablePlacement, ...] | None:
    """Return all tables sharded in one way, the most expensive shards first, each on the rank with the least time so
    far; None where that is not allowed, no other than another way, or too many shards. Tables that cannot be cut by
    columns stay whole."""
    shape, tables = request.workload.shape, request.sharded
    blocks = {table.table: table.dim // column_block(table.dim, shape.world_size) for table in tables}
    kinds: dict[str, Sharding] = {table.table: kind.name for table in tables}
    if kind.is_whole_or_columns:
        kinds = {name: kind.name if blocks[name] > 1 else "table_wise" for name in kinds}
        if max(blocks.values(), default=1) == 1:
            return None
    per_table = kind.row_blocks(shape.world_size, shape.ranks_per_node)
    is_as_another = bool(kind.like) and shape.world_size < 2 * shape.ranks_per_node
    is_allowed = all(kinds[name] in types for name, types in request.allowed.items())
    if not is_allowed or per_table * len(tables) > _MOST_SHARDS or is_as_another:
        return None
    if kind.rows_over == "all":
        return placed(request, [cached(table, kind.name, range(shape.world_size)) for table in tables])
    local = per_table  # ranks that a shard is cut over, one after the other
    places = [(0.0, number) for number in range(shape.world_size // local)]
    found: dict[str, list[int]] = {table.table: [] for table in tables}
    costs: list[tuple[float, TableSize]] = []  # seconds of each shard's work in a step, once per shard
    for table in tables:
        count = blocks[table.table] if SHARDING_TYPES[kinds[table.table]].cuts_columns else 1
        rows, columns = -(-table.rows // local), table.dim // count
        shard = PlacedShard(table, 0, 0, rows, columns, kinds[table.table], "device")
        work = shard_work(request.workload, shard, resident_report(request.workload, shard))
        costs += [(sum(step_parts(work, request.rates).values()), table)] * count
    for seconds, table in sorted(costs, key=lambda pair: (-pair[0], pair[1].table)):
        load, number = heapq.heappop(places)
        found[table.table] += range(number * local, (number + 1) * local)
        heapq.heappush(places, (load + seconds, number))
    return placed(request, [cached(table, kinds[table.table], found[table.table]) for table in tables])
