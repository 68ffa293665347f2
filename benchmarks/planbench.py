"""PlanBench: plans of seeded tasks, ours and simple rivals', over the bound: `python -m benchmarks.planbench -o FILE`

A task is drawn from its seed (`TASKS_VERSION` names the generator): 10 to 60 tables of 4 to 128 columns, 4 to 16 ranks
of an H100 machine, and memory that is roomy, tight, or too little for all rows. All plans are sized and rated by the
same costs, from counts alone, so a gap is one under this cost model, over the bound that the plan tells, for all
planners of a task. Seconds are of the processor: other programs disturb them less. A rival without a plan is told:
medians of pairs are over the tasks that both have a plan for. `--resume` goes on where a run of the same costs stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common import machine
from benchmarks.torchrec_plans import by_torchrec
from embershard.cache.config import CachePolicy
from embershard.errors import ShardingError
from embershard.frequency.assumed import AssumedTable, assumed_statistics
from embershard.planning import make_plan
from embershard.planning.budget import least_need
from embershard.planning.cost.topology import load_topology
from embershard.planning.cost_arrays import cost_arrays
from embershard.planning.request import Budget, PlanRequest, cached
from embershard.planning.workload import Workload
from embershard.sharding.run_shape import ReplaySettings, RunShape
from embershard.sharding.shards import TablePlacement
from embershard.sharding.sizes import ModelSize, TableSize
from embershard.whole_file import whole_file

if TYPE_CHECKING:
    from embershard.planning.bound import Bound

#: Of the generator: another one draws other tasks from the same seeds.
TASKS_VERSION = 1
KINDS = ("roomy", "tight", "cached")
_RANDOM, _SIZED = 1000, 10  # placements, of which the best counts; the caches of so many are sized


def task(seed: int) -> tuple[str, PlanRequest]:
    """Return the kind of a task, and its request."""
    rng, kind = np.random.default_rng(seed), KINDS[seed % len(KINDS)]
    count, world_size = int(rng.integers(10, 61)), int(rng.choice([4, 8, 16]))
    rows, dims = (10 ** rng.uniform(3, 7.3, count)).astype(int), rng.choice([4, 8, 16, 32, 64, 128], count)
    bags = np.where(rng.random(count) < 0.5, 1, rng.integers(2, 40, count))
    skews = rng.uniform(0.6, 1.2, count)
    batch_size = int(rng.choice([2048, 8192]))
    tables = tuple(TableSize(f"t{n}", int(rows[n]), int(dims[n]), state_bytes=4) for n in range(count))
    assumed = [AssumedTable(f"t{n}", int(rows[n]), float(skews[n]), int(bags[n])) for n in range(count)]
    model = ModelSize(tables, 2e6, 8_000_000, 16_000_000, 20000.0)
    replay = ReplaySettings(CachePolicy("lfu"), 16 if kind == "cached" else 0)
    shape = RunShape(world_size, 8, batch_size, "cuda", replay, None)
    workload = Workload(model, assumed_statistics(assumed, 100_000_000), shape)
    without_tables = sum(workload.memory([], {}).device.values())
    share = {"roomy": 3.0, "tight": 1.25, "cached": 0.35}[kind]
    each = share * model.table_bytes / world_size + 1.3 * without_tables + (2**30 if kind == "cached" else 2**28)
    # Of GPUs alone: beside a slower host, all plans of a small task are as fast.
    rates = replace(load_topology("h100x8x4").rates_for(world_size), step_overhead_seconds=0.0)
    return kind, PlanRequest(workload, rates, Budget(device_bytes=int(each)))


def _by_torchrec(request: PlanRequest) -> Placements:
    """Return the placements of TorchRec's planner with our costs, and those that need little memory."""
    tables = least_need(request).tables
    return [tables, tuple(table.without_cache for table in tables), *by_torchrec(request)]


Placements = Sequence[tuple[TablePlacement, ...]]


def _whole(request: PlanRequest, ranks: Sequence[int]) -> Placements:
    """Return the tables on these ranks, all without caches, and all with."""
    tables = [cached(table, "table_wise", [rank]) for table, rank in zip(request.sharded, ranks, strict=True)]
    found = request.placed(tables)
    return [tuple(table.without_cache for table in found), found]


def _greedy(weight: Callable[[PlanRequest, TableSize], float]) -> Callable[[PlanRequest], Placements]:
    """Return a rival that places the heaviest table first, each on the rank with the least weight."""

    def place(request: PlanRequest) -> Placements:
        weights = [weight(request, table) for table in request.sharded]
        load, ranks = [0.0] * request.workload.shape.world_size, [0] * len(weights)
        for number in sorted(range(len(weights)), key=lambda number: -weights[number]):
            ranks[number] = min(range(len(load)), key=load.__getitem__)
            load[ranks[number]] += weights[number]
        return _whole(request, ranks)

    return place


def _lookups(request: PlanRequest, table: TableSize) -> float:
    return request.workload.lookups_per_sample[table.table]


def _round_robin(request: PlanRequest) -> Placements:
    return _whole(request, [n % request.workload.shape.world_size for n in range(len(request.sharded))])


def _random(request: PlanRequest) -> Placements:
    """Return the best of many random placements, as the costs of the search tell, without caches and with."""
    found: list[tuple[TablePlacement, ...]] = []
    for resident in (True, False):
        costs, rng = cost_arrays(request, resident=resident, cached=not resident), np.random.default_rng(0)
        own = [next(each for each in options if each.sharding == "table_wise") for options in costs.options]
        drawn = rng.integers(0, costs.world_size, (_RANDOM, len(own)))
        here = (drawn[:, :, None] == np.arange(costs.world_size)).astype(float)  # [placements, tables, ranks]
        totals = costs.base_seconds + np.einsum("ptr,ts->prs", here, np.concatenate([o.seconds for o in own]))
        memory = costs.base_memory + np.einsum("ptr,tc->prc", here, np.concatenate([o.memory for o in own]))
        seconds = costs.formula.seconds(costs.formula.slowest(totals), 1)
        seconds[costs.device_bytes(memory).max(axis=1) > (costs.device_limit or np.inf)] = np.inf
        for number in np.argsort(seconds, kind="stable")[:_SIZED]:
            found.append(_whole(request, drawn[number].tolist())[0 if resident else 1])
    return found


RIVALS: dict[str, Callable[[PlanRequest], Placements]] = {
    "size greedy": _greedy(lambda request, table: float(table.rows * table.row_bytes())),
    "lookup greedy": _greedy(_lookups),
    "dim greedy": _greedy(lambda request, table: float(table.dim)),
    "cost greedy": _greedy(lambda request, table: _lookups(request, table) * table.row_bytes()),
    "round robin": _round_robin,
    f"best of {_RANDOM} random": _random,
}


def _fastest(candidates: Sequence[make_plan.Candidate]) -> float | None:
    return min((each.step_seconds for each in candidates), default=None)


def measure(seed: int) -> dict[str, Any]:
    """Return the step of every plan of a task, the bound, and seconds of the processor: of the bound those of the first
    one, which is made tighter with the plan."""
    kind, request = task(seed)
    seconds: dict[str, float] = {}
    steps: dict[str, float | None] = {}
    told: list[Bound | None] = []

    def plan() -> float:
        best = make_plan.best_candidate(request)
        told.append(best.bound)
        return best.step_seconds

    def timed(name: str, plan: Callable[[], float | None]) -> None:
        start = time.process_time()
        try:
            steps[name] = plan()
        except ShardingError:
            steps[name] = None
        seconds[name] = round(time.process_time() - start, 2)

    timed("embershard", plan)
    timed("TorchRec's planner", lambda: _fastest(make_plan.all_sized(request, _by_torchrec(request))))
    for name, rival in RIVALS.items():
        timed(name, lambda rival=rival: _fastest(make_plan.all_sized(request, rival(request))))  # type: ignore[misc]
    start = time.process_time()
    first = make_plan.PlanSearch(request).bound()
    seconds["bound"] = round(time.process_time() - start, 2)
    bound = told[0] if told else first
    shape = {"tables": len(request.sharded), "ranks": request.workload.shape.world_size}
    known = {} if bound is None else {"bound": bound.step_seconds, "without_tables": bound.fixed_seconds}
    known |= {} if first is None else {"first_bound": first.step_seconds}
    return {"seed": seed, "kind": kind, **shape, "steps": steps, **known, "cpu_seconds": seconds}


def summary(tasks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each planner: its gaps in percent of the whole step and of what depends on the tables (median, 90th
    percentile, most), tasks without a plan, and the median by which its steps are longer than ours."""
    found = []
    for name in tasks[0]["steps"]:
        pairs = [(task["steps"][name], task) for task in tasks if task["steps"][name] and "bound" in task]
        gaps = [100 * (step / task["bound"] - 1) for step, task in pairs]
        parts = [100 * (step - task["bound"]) / (task["bound"] - task["without_tables"]) for step, task in pairs]
        both = [100 * (step / task["steps"]["embershard"] - 1) for step, task in pairs if task["steps"]["embershard"]]
        found.append(
            {
                "planner": name,
                "gap_percent": _spread(gaps),
                "gap_of_tables_percent": _spread(parts),
                "longer_than_embershard_percent": _spread(both),
                "shorter_than_embershard": sum(each < -0.01 for each in both),
                "without_a_plan": sum(not task["steps"][name] for task in tasks),
                "median_cpu_seconds": statistics.median(task["cpu_seconds"][name] for task in tasks),
            }
        )
    return found


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    ninth = ordered[max(0, math.ceil(0.9 * len(ordered)) - 1)]
    found = {"least": ordered[0], "median": statistics.median(ordered), "p90": ninth, "most": ordered[-1]}
    return {name: round(value, 2) for name, value in found.items()}


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the gap of every planner over its time: medians, and a line to the 90th percentile."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for row in rows:
        gap, seconds = row["gap_percent"], max(0.01, row["median_cpu_seconds"])
        (line,) = axes.plot([seconds, seconds], [gap["median"], gap["p90"]], linewidth=1)
        label = row["planner"] + (f" (no plan: {row['without_a_plan']})" if row["without_a_plan"] else "")
        axes.plot([seconds], [gap["median"]], "o", color=line.get_color(), label=label)
    axes.set(xscale="log", yscale="log", xlabel="seconds of the processor, median", ylabel="over the bound, percent")
    axes.set_title("Steps of plans over what no plan can be faster than: median, and to the 90th percentile")
    figure.legend(fontsize="small", loc="outside right upper")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="seed of the first task (default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=100, help="number of tasks (default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="where the JSON goes; written after each task")
    parser.add_argument("--resume", action="store_true", help="keep the tasks that the JSON has, and run the others")
    parser.add_argument("--png", type=Path, help="where the picture goes; with --tasks 0 of what the JSON has")
    options = parser.parse_args()
    tasks: list[dict[str, Any]] = []
    if not options.tasks or (options.resume and options.output.exists()):
        tasks = json.loads(options.output.read_text())["tasks"]
    seeds = range(options.first, options.first + options.tasks)
    for seed in sorted(set(seeds) - {each["seed"] for each in tasks}):
        tasks.append(measure(seed))
        report = {"benchmark": "planbench", "tasks_version": TASKS_VERSION, "summary": summary(tasks)}
        report |= {"tasks": tasks, "machine": machine()}
        with whole_file(options.output) as partial:
            partial.write_text(json.dumps(report) + "\n")
        print(json.dumps(tasks[-1]), flush=True)
    print(json.dumps(summary(tasks), indent=1))
    if options.png is not None:
        draw(summary(tasks), options.png)


if __name__ == "__main__":
    main()
