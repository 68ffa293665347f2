"""PlanBench in training: are plans as fast as predicted, beside each other?

    embershard plan --calibrate -o machine.toml --ranks 2,4
    python -m benchmarks.planbench_ranks --topology machine.toml [--output FILE]

Tasks of PlanBench's kind, small enough for ranks on one machine: 8 to 16 tables of 10^3 to 10^6 rows and 16 to 128
columns, bags of 1 to 40 ids that follow Zipf's law. Every task is written as Parquet files, profiled and planned: by
us, by TorchRec's planner with our costs, and by PlanBench's rivals, of which the best and the slowest count, both by
prediction. All are predicted before any trains. The plans of a task train in the same ranks, in short segments in turn;
so passing load on the machine meets all of them. Told are the wall time of a step, that time scaled by the share of the
processor time that other programs left, as a calibration scales it, and the processor time of all ranks (medians of the
segments; ratios to our plan: medians over the rounds), and Spearman's correlation of each with the prediction; also
with plans that the noise does not tell apart (Wilcoxon's test of their rounds) in one place.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from scipy.stats import spearmanr, wilcoxon
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from benchmarks.common import machine, make_parser, median_ms, median_ratio, report, settings_of
from benchmarks.planbench import KINDS, RIVALS
from benchmarks.torchrec_plans import by_torchrec
from embershard.commands.plan.inputs import make_workload
from embershard.commands.profile.data_pass import PartReader, PassOptions, profile_data
from embershard.frequency import DataStatistics
from embershard.launch.launcher import start_ranks
from embershard.planning import make_plan
from embershard.planning.budget import least_need
from embershard.planning.cost.topology import Topology, load_topology
from embershard.planning.make_plan import Candidate
from embershard.planning.request import Budget, PlanRequest
from embershard.settings.decoding import decode
from embershard.sharding.plan import Plan
from embershard.training.config import RunConfig

RANKS = (2, 4)
_LOOKUPS = 3_000_000  # of an epoch: all are in the profile's trace
_SHARES = {"roomy": 3.0, "tight": 1.25, "cached": 0.35}  # memory of all ranks over that of all rows
_SKIPPED = 3  # first steps of a segment, behind other plans' steps
_KINDS = ("wall", "scaled", "cpu")
OURS, TORCHREC = "embershard", "TorchRec's planner"


class Towers(nn.Module):
    """Pooled rows of all tables, each of its own width, and a layer over them."""

    def __init__(self, schema: Any, dims: Sequence[int]) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t_{f.name}", num_embeddings=f.num_rows, embedding_dim=dim, feature_names=[f.name])
            for f, dim in zip(schema.sparse, dims, strict=True)
        ]
        self.names = [feature.name for feature in schema.sparse]
        self.tables = EmbeddingBagCollection(tables, device=torch.device("meta"))
        self.over = nn.Sequential(nn.Linear(len(schema.dense) + sum(dims), 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: Any) -> Tensor:
        """Return the logits [B, 1] of a batch."""
        pooled = self.tables(batch.sparse_features).to_dict()
        return self.over(torch.cat([batch.dense_features, *(pooled[name] for name in self.names)], dim=1))  # type: ignore[no-any-return]


def build(schema: Any, options: dict[str, Any]) -> nn.Module:
    """Return the model of a task, for `model.build`."""
    return Towers(schema, options["dims"])


def write_task(seed: int, ranks: int, folder: Path, lookups: int = _LOOKUPS) -> dict[str, Any]:
    """Draw a task, write its data, and return the settings of its run."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(8, 17))
    rows = (10 ** rng.uniform(3, 6, count)).astype(int)
    dims = rng.choice([16, 32, 64, 128], count)
    bags = np.where(rng.random(count) < 0.5, 1, rng.integers(2, 41, count))
    skews = rng.uniform(0.6, 1.2, count)
    samples, names = int(lookups // bags.sum()), [f"f{number}" for number in range(count)]
    columns: dict[str, Any] = {"dense": rng.random(samples), "label": rng.integers(0, 2, samples)}
    for name, num_rows, bag, skew in zip(names, rows, bags, skews, strict=True):
        chances = np.cumsum(np.arange(1, num_rows + 1) ** -skew)
        drawn = np.searchsorted(chances, rng.random(samples * bag) * chances[-1])
        ids = pa.array(rng.permutation(num_rows)[drawn])
        columns[name] = pa.FixedSizeListArray.from_arrays(ids, int(bag)).cast(pa.list_(pa.int64()))
    pq.write_table(pa.table(columns), folder / "samples.parquet")
    return {
        "data": {
            "kind": "parquet", "path": str(folder), "eval_fraction": 0.0,
            "parquet": {"dense": ["dense"], "sparse": names, "num_rows": rows.tolist(), "id_mapping": "none"},
        },
        "model": {"build": "benchmarks.planbench_ranks:build", "options": {"dims": dims.tolist()}},
        "cache": {"policy": "lookahead", "warmup": False},
        "look_ahead": {"lookahead": 8},
        "embedding_optimizer": {"kind": "rowwise_adagrad"},
        "train": {"batch_size": int(rng.choice([4096, 8192])) // ranks**2, "max_steps": 1_000_000, "device": "cpu"},
    }  # fmt: skip


def profiled(config: RunConfig) -> DataStatistics:
    reader = PartReader(config.data, config.model)
    return profile_data(config.data, PassOptions(max_lookups=2 * _LOOKUPS), reader=reader).need_statistics()


def make_request(config: RunConfig, data: DataStatistics, ranks: int, kind: str, topology: Topology) -> PlanRequest:
    """Return the request of a task, with at least the memory that a plan needs."""
    workload = make_workload(
        config, data, world_size=ranks, ranks_per_node=ranks, device="cpu", cores_per_node=topology.cores_per_node
    )
    each = _SHARES[kind] * workload.model.table_bytes / ranks + 1.3 * sum(workload.memory([], {}).device.values())
    settings = config.predicted_from("cpu", ranks)
    request = PlanRequest(workload, topology.rates_for(ranks), Budget(device_bytes=int(each)), settings=settings)
    least = 1.1 * least_need(request).asked(request.budget)
    return replace(request, budget=Budget(device_bytes=int(max(each, least))))


def plans(request: PlanRequest) -> dict[str, tuple[Candidate, Plan]]:
    """Return our plan, that of TorchRec's planner, and the best and the slowest one of the rivals; without those that
    equal one before them."""
    rivals = {name: _fastest(request, rival(request)) for name, rival in RIVALS.items()}
    known = {name: found for name, found in rivals.items() if found is not None}
    order = sorted(known, key=lambda name: known[name].step_seconds)
    torchrec = _fastest(request, by_torchrec(request))
    found: dict[str, Candidate | None] = {OURS: make_plan.best_candidate(request), TORCHREC: torchrec}
    found.update({name: known[name] for name in [*order[:1], *order[-1:]]})
    kept: dict[str, Candidate] = {}
    for name, candidate in found.items():
        same = [each for each in kept.values() if candidate and each.tables == candidate.tables]
        if candidate is not None and not same:
            kept[name] = candidate
    return {name: (candidate, make_plan.complete(request, candidate)) for name, candidate in kept.items()}


def _fastest(request: PlanRequest, placements: Sequence[Any]) -> Candidate | None:
    found = make_plan.all_sized(request, placements)
    return min(found, key=lambda each: each.step_seconds, default=None)


def planned(seed: int, topology: Topology, folder: Path) -> dict[str, Any]:
    """Draw a task, write its data and its plans to a folder, and return what its ranks and its figures need; of a task
    that the folder has, what it has."""
    if (folder / "task.json").exists():
        return dict(json.loads((folder / "task.json").read_text()))
    folder.mkdir(parents=True, exist_ok=True)
    ranks, kind = RANKS[seed % len(RANKS)], KINDS[seed // len(RANKS) % len(KINDS)]
    settings = write_task(seed, ranks, folder)
    config = decode(RunConfig, settings)
    found = plans(make_request(config, profiled(config), ranks, kind, topology))
    for number, (_, plan) in enumerate(found.values()):
        plan.save(folder / f"{number}.json")
    task = {
        "seed": seed, "ranks": ranks, "kind": kind, "settings": settings,
        "plans": [str(folder / f"{number}.json") for number in range(len(found))],
        "from_counts_ms": {name: round(1e3 * candidate.step_seconds, 2) for name, (candidate, _) in found.items()},
        "result": str(folder / "result.json"),
    }  # fmt: skip
    (folder / "task.json").write_text(json.dumps(task))
    return task


def measure(topology: Topology, options: argparse.Namespace, work: Path) -> Iterator[dict[str, Any]]:
    """Plan all tasks, then train them, those of as many ranks in the same ones; yield the figures of each."""
    turns = {"rounds": options.rounds, "skip": _SKIPPED, "steps": options.steps, "seconds": options.seconds}
    tasks = []
    for seed in range(len(RANKS) * options.tasks):
        tasks.append({**planned(seed, topology, work / str(seed)), **turns})
        print(json.dumps({name: tasks[-1][name] for name in ("seed", "from_counts_ms")}), file=sys.stderr, flush=True)
    for ranks in RANKS:
        own = [task for task in tasks if task["ranks"] == ranks]
        left = [task for task in own if not Path(task["result"]).exists()]
        (work / "jobs.json").write_text(json.dumps(left))
        if left and start_ranks(ranks, "benchmarks.planbench_steps", [str(work / "jobs.json")]):
            raise SystemExit(f"tasks on {ranks} ranks failed; the ranks' messages stand above")
        yield from map(figures, own)


def figures(task: dict[str, Any]) -> dict[str, Any]:
    """Return predicted and measured times of each plan of a task."""
    measured = json.loads(Path(task["result"]).read_text())
    found = []
    for each in measured:  # as a calibration does: of ranks that fill the machine, their share of the processor time
        each["scaled_seconds"] = [a * (1 - b) for a, b in zip(each["wall_seconds"], each["foreign"], strict=True)]
    for name, file, own in zip(task["from_counts_ms"], task["plans"], measured, strict=True):
        plan = Plan.load(file)
        assert plan.prediction is not None
        found.append(
            {
                "plan": name,
                "cached_tables": sum(table.kernel == "cached" for table in plan.tables),
                "predicted_ms": round(1e3 * plan.prediction.step_seconds, 2),
                "predicted_from_counts_ms": task["from_counts_ms"][name],
                **{f"{kind}_ms": median_ms(own[f"{kind}_seconds"]) for kind in _KINDS},
                **{
                    f"{kind}_over_ours": median_ratio(own[f"{kind}_seconds"], measured[0][f"{kind}_seconds"])
                    for kind in _KINDS
                },
                "other_programs": round(statistics.median(own["foreign"]), 2),
                "segments": len(own["foreign"]),
                "growths": own["growths"],
            }
        )
    shape = {"tables": len(plan.tables), "batch_size": task["settings"]["train"]["batch_size"]}
    for kind in _KINDS:
        for each, place in zip(found, places([own[f"{kind}_seconds"] for own in measured]), strict=True):
            each[f"{kind}_place"] = place
    apart = {kind: told_apart([each[f"{kind}_seconds"] for each in measured]) for kind in _KINDS}
    return {**{name: task[name] for name in ("seed", "ranks", "kind")}, **shape, "told_apart": apart, "plans": found}


def told_apart(seconds: Sequence[Sequence[float]]) -> bool:
    """Return whether the slowest plan differs from the fastest by more than the noise.

    Args:
        seconds: of each plan, in each round.
    """
    order = sorted(seconds, key=statistics.median)
    return len(order) > 1 and _differ(order[0], order[-1])


def places(seconds: Sequence[Sequence[float]]) -> list[int]:
    """Return the place of each plan, the fastest first: that of the fastest one which the noise does not tell from it.

    Args:
        seconds: of each plan, in each round.

    >>> fast, slow = [1.0, 1.1, 0.9, 1.0, 1.1, 0.9], [2.0, 2.1, 1.9, 2.0, 2.1, 1.9]
    >>> places([slow, fast, fast[::-1]])
    [2, 0, 0]
    """
    order = sorted(range(len(seconds)), key=lambda plan: statistics.median(seconds[plan]))
    found, first = [0] * len(seconds), 0
    for place, plan in enumerate(order):
        if _differ(seconds[order[first]], seconds[plan]):
            first = place
        found[plan] = first
    return found


def _differ(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether two plans differ by more than the noise: Wilcoxon's test of the rounds of both, 5 %."""
    rounds = min(len(first), len(second))
    logs = np.log(first[:rounds]), np.log(second[:rounds])
    return rounds > 1 and bool((logs[0] != logs[1]).any()) and float(wilcoxon(*logs).pvalue) < 0.05


def summary(tasks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return Spearman's correlation of predicted and measured steps, over the plans of all tasks, as a mean over tasks
    with other than equal plans, and over those of them whose rates differ by more than the noise: of these also with
    plans that the noise does not tell apart in one place; how often the faster of two plans was told; and rivals' steps
    over ours."""
    found: dict[str, Any] = {}
    for kind in _KINDS:
        every = [plan for task in tasks for plan in task["plans"]]
        several = [task for task in tasks if len(task["plans"]) > 1]
        within = [_order(task["plans"], f"{kind}_over_ours") for task in several]
        apart = [order for order, task in zip(within, several, strict=True) if task["told_apart"][kind]]
        in_places = [_order(task["plans"], f"{kind}_place") for task in several if task["told_apart"][kind]]
        pairs = [pair for task in tasks for pair in _pairs(task["plans"], f"{kind}_over_ours")]
        found[kind] = {
            "spearman_all_plans": _order(every, f"{kind}_ms"),
            "spearman_mean_of_tasks": round(statistics.mean(within), 3) if within else None,
            "spearman_of_tasks": within,
            "spearman_mean_of_tasks_told_apart": round(statistics.mean(apart), 3) if apart else None,
            "spearman_of_their_places": round(statistics.mean(in_places), 3) if in_places else None,
            "tasks_told_apart": len(apart),
            "pairs_told_right": {
                f"predicted {int(100 * low)} to {int(100 * high)} % apart": [sum(rights), len(rights)]
                for low, high in pairwise((0.0, 0.02, 0.05, 0.1, 0.3, 1e3))
                if (rights := [right for apart, right in pairs if low <= apart < high])
            },
            **{name: _ratio(tasks, index, f"{kind}_over_ours") for name, index in _COMPARED.items()},
        }
    return found


_COMPARED = {"torchrec_over_ours": (TORCHREC,), "best_rival_over_ours": tuple(RIVALS)}


def _ratio(tasks: Sequence[dict[str, Any]], names: Sequence[str], figure: str) -> dict[str, Any]:
    """Return the ratios of the first of these plans in each task; one that equals another is not among them."""
    own = [[plan[figure] for plan in task["plans"] if plan["plan"] in names][:1] for task in tasks]
    ratios = [each for ratio in own for each in ratio]
    return {"tasks": len(ratios), "median": round(statistics.median(ratios), 3) if ratios else None, "all": ratios}


def _order(plans: Sequence[dict[str, Any]], figure: str) -> float:
    return round(float(spearmanr([p["predicted_ms"] for p in plans], [p[figure] for p in plans]).statistic), 3)


def _pairs(plans: Sequence[dict[str, Any]], figure: str) -> list[tuple[float, bool]]:
    """Return for each two plans how far apart they are by prediction, and whether the faster one is faster."""
    ordered = sorted(plans, key=lambda plan: float(plan["predicted_ms"]))
    return [
        (slower["predicted_ms"] / faster["predicted_ms"] - 1, slower[figure] > faster[figure])
        for number, faster in enumerate(ordered)
        for slower in ordered[number + 1 :]
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--topology", required=True, help="what embershard plan --calibrate wrote on this machine")
    parser.add_argument("--tasks", type=int, default=6, help="tasks of each number of ranks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=12, help="segments of every plan (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="counted steps of a segment (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=120, help="of a task, behind which no round begins")
    parser.add_argument("--work", type=Path, help="folder of plans and results: what it has is not done again")
    arguments = parser.parse_args()
    topology = load_topology(arguments.topology)
    settings = {name: value for name, value in settings_of(arguments).items() if name != "work"}
    found = {"benchmark": "planbench_ranks", "machine": machine(), "settings": settings}
    with tempfile.TemporaryDirectory() as folder:
        tasks = list(measure(topology, arguments, arguments.work or Path(folder)))
    report({**found, "source": topology.source, "summary": summary(tasks), "tasks": tasks}, arguments.output)


if __name__ == "__main__":
    main()
