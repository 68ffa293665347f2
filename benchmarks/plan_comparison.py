"""The planner's plan against simpler plans on skewed tables, by training with each of them.

    python -m benchmarks.plan_comparison [--topology machine.toml] [--ranks 2] [--rounds 3] [--output FILE]

Generated clicks; every other table has bags of 24 ids, the others one id, so that tables differ in rows, in skew and in
lookups. All plans have the same device budget per rank, little more than round robin needs:

    chosen                  the planner's placement and slots
    chosen, uniform ratio   its placement; slots are the same share of every rank's rows, as large as the budget allows
    round robin             table i on rank i mod W; slots as many as the budget allows
    round robin, uniform    the same with a uniform share

Training runs are interleaved; figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import machine, make_parser, report
from benchmarks.plan_accuracy import Run, profiled
from embershard.planning.budget import least_need
from embershard.planning.cost.topology import load_topology
from embershard.planning.make_plan import Candidate, best_candidate, complete, sized
from embershard.planning.request import Budget, PlanRequest
from embershard.planning.slots import split_slots
from embershard.sharding import memory_model
from embershard.sharding.plan import Plan, TablePlacement

_CONFIG = f"""
[data]
kind = "synthetic"
eval_fraction = 0.02
[data.synthetic]
num_samples = 60_000
scale = 0.1
bag_sizes = {[24, 1] * 13}
[model]
embedding_dim = 32
dense_arch_layer_sizes = [64, 32]
over_arch_layer_sizes = [64, 1]
[look_ahead]
lookahead = 8
[train]
batch_size = 256
[checkpoint]
at_end = false
"""


def round_robin(request: PlanRequest) -> list[TablePlacement]:
    """Place table i on rank i mod W."""
    world_size = request.workload.shape.world_size
    return [
        TablePlacement(size.table, size.rows, size.dim, size.dtype, "table_wise", "cached", (number % world_size,))
        for number, size in enumerate(request.workload.model.tables)
    ]


def uniform(request: PlanRequest, chosen: Candidate) -> Candidate:
    """Give every pool the same share of its rows: the largest for which every rank has room."""
    workload, layout, shares = request.workload, chosen.layout, []
    for here, pools in zip(layout.of_ranks, layout.pools_of_ranks, strict=True):
        assert request.budget.device_bytes is not None
        left = request.budget.device_bytes - workload.fixed_bytes(here)
        memories = [memory_model.pool_memory(members, workload.shape) for members in pools.values()]
        slot_bytes = sum(memory.rows * memory.slot_bytes for memory in memories)
        shares.append((left - sum(memory.device_bytes(0) for memory in memories)) / slot_bytes)
    found = split_slots(layout, Budget(ratio=min(1.0, *shares)))
    assert found is not None, "a ratio always fits"
    return replace(chosen, slots=found)


def plans(request: PlanRequest) -> dict[str, Plan]:
    chosen = best_candidate(request)
    plain = sized(request, round_robin(request))
    if plain is None:
        raise SystemExit("round robin does not fit this budget: give --slack more")
    variants = {
        "chosen": chosen,
        "chosen, uniform ratio": uniform(request, chosen),
        "round robin": plain,
        "round robin, uniform ratio": uniform(request, plain),
    }
    return {name: complete(request, candidate) for name, candidate in variants.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--topology", default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slack", type=float, default=1.05, help="budget over the least one that round robin needs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = _compare(arguments, Path(folder))
    report({"benchmark": "plan_comparison", "machine": machine(), **found}, arguments.output)


def _compare(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    config = work / "run.toml"
    config.write_text(_CONFIG)
    run = Run(config, (f"train.max_steps={arguments.steps}",), arguments.ranks)
    rates = load_topology(arguments.topology).rates_for(arguments.ranks)
    request = run.request(profiled(config, work, "profile.npz", []), rates)
    request = replace(request, budget=Budget(device_bytes=_budget(request, arguments.slack)))
    made = plans(request)
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in made}
    for turn in range(arguments.rounds):
        for name in list(made) if turn % 2 == 0 else list(made)[::-1]:
            with tempfile.TemporaryDirectory(dir=work) as folder:
                result = run.train(made[name], Path(folder))
            measured[name].append(result)
            print(json.dumps({"plan": name, "step_ms": result["step_ms"]["p50"]}), file=sys.stderr, flush=True)
    base = statistics.median(result["step_ms"]["p50"] for result in measured["chosen"])
    return {
        "device_bytes_per_rank": request.budget.device_bytes,
        "plans": {name: _figures(made[name], results, base) for name, results in measured.items()},
    }


def _figures(plan: Plan, results: list[dict[str, Any]], base_ms: float) -> dict[str, Any]:
    assert plan.prediction is not None
    step_ms = statistics.median(result["step_ms"]["p50"] for result in results)
    return {
        "step_ms": round(step_ms, 2),
        "over_chosen": round(step_ms / base_ms, 3),
        "predicted_ms": round(plan.prediction.step_seconds * 1e3, 2),
        "fills_per_step": round(results[0]["cache"]["fills"] / results[0]["steps"]),
        "predicted_fills_per_step": round(sum(table.fills for table in plan.prediction.tables)),
        "hit_rate_lookups": round(results[0]["cache"]["hit_rate_lookups"], 4),
        "lookups_by_rank": [rank["lookups"] // results[0]["steps"] for rank in results[0]["cache"]["ranks"]],
        "slots_by_rank": [rank["slots"] for rank in results[0]["cache"]["ranks"]],
    }


def _budget(request: PlanRequest, slack: float) -> int:
    """Return a budget of bytes in which round robin has room for its batches, too."""
    tables = round_robin(request)
    unlimited = replace(request, budget=Budget(device_bytes=2**50))
    need = least_need(unlimited).asked(unlimited.budget)
    budget = need
    while sized(replace(request, budget=Budget(device_bytes=budget)), tables) is None:
        budget = int(budget * 1.05)
    return int(budget * slack)


if __name__ == "__main__":
    main()
