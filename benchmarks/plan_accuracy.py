"""A plan's predictions against the figures of the training run.

    python -m benchmarks.plan_accuracy hit-rates [--path CRITEO] [--output FILE]
    embershard plan --calibrate -o machine.toml --ranks 1,2,4
    python -m benchmarks.plan_accuracy step-time --topology machine.toml [--output FILE]

`hit-rates` profiles three data sets (generated, generated with drift, and a real Criteo file where --path is given),
plans for every policy and several ratios, trains by the plan, and compares per table: hit rate per lookup and per
distinct id, device bytes. Every prediction is made twice: from a trace of all rows, and from a trace of a share of
them. `step-time` compares step times for models and batch sizes that the calibration has not seen, on 1, 2 and 4 ranks.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from benchmarks.common import embershard, machine, make_parser, report
from embershard.cache.config import Scoring
from embershard.commands.plan.inputs import budget, make_workload
from embershard.frequency import FrequencyProfile
from embershard.planning.cost.rates import Rates
from embershard.planning.cost.topology import load_topology
from embershard.planning.make_plan import make_plan
from embershard.planning.predict import predict
from embershard.planning.request import PlanRequest
from embershard.planning.workload import Layout
from embershard.run_result import RunCaches, RunResult
from embershard.settings.files import load_config
from embershard.sharding.memory_model import planned_slots
from embershard.sharding.plan import Plan
from embershard.training.config import RunConfig

RATIOS = (0.005, 0.03, 0.15)
POLICIES = ("lookahead", *get_args(Scoring))
SAMPLED_LOOKUPS = 300_000
_GENERATED = """
[data]
kind = "synthetic"
eval_fraction = 0.02
[data.synthetic]
num_samples = 400_000
scale = 0.1
drift = {drift}
[model]
embedding_dim = 16
dense_arch_layer_sizes = [32, 16]
over_arch_layer_sizes = [32, 1]
[train]
batch_size = 1024
[checkpoint]
at_end = false
"""
_CRITEO = """
[data]
kind = "criteo"
path = {path}
eval_fraction = 0.05
[data.criteo]
num_rows = 20_000
[model]
embedding_dim = 16
dense_arch_layer_sizes = [32, 16]
over_arch_layer_sizes = [32, 1]
[train]
batch_size = 128
epochs = 3
[checkpoint]
at_end = false
"""
#: Models and batch sizes of `step-time`; none of them is among the reference settings of the calibration.
_MODELS = {
    "dim 16, batch 1024": ["model.embedding_dim=16", "model.dense_arch_layer_sizes=[48,16]",
                           "model.over_arch_layer_sizes=[96,48,1]", "train.batch_size=1024", "cache.ratio=0.03"],
    "dim 64, batch 512": ["model.embedding_dim=64", "model.dense_arch_layer_sizes=[96,64]",
                          "model.over_arch_layer_sizes=[256,128,1]", "train.batch_size=512", "cache.ratio=0.02"],
    "dim 32, batch 3072, dcn": ["model.arch=dlrm_dcn", "model.embedding_dim=32", "model.dense_arch_layer_sizes=[64,32]",
                                "model.over_arch_layer_sizes=[64,1]", "train.batch_size=3072", "cache.ratio=0.05"],
    "dim 16, batch 1536, bags of 3": ["model.embedding_dim=16", "data.synthetic.bag_sizes=[3]",
                                      "model.dense_arch_layer_sizes=[64,16]", "model.over_arch_layer_sizes=[64,32,1]",
                                      "train.batch_size=1536", "cache.ratio=0.1"],
}  # fmt: skip
#: Half of the steps have batches left to be read ahead, with the largest global batch too.
_LONG_ENOUGH = ("data.synthetic.num_samples=2_200_000", "train.max_steps=170")


@dataclass(frozen=True)
class Run:
    """A planned run: its config, as file and overrides, and how many ranks."""

    config: Path
    overrides: tuple[str, ...]
    ranks: int

    @property
    def settings(self) -> RunConfig:
        return load_config(RunConfig, self.config, self.overrides)

    def request(self, profile: FrequencyProfile, rates: Rates) -> PlanRequest:
        assert profile.statistics is not None, "made by embershard profile"
        config = self.settings
        workload = make_workload(
            config, profile.statistics, world_size=self.ranks, ranks_per_node=self.ranks, device="cpu"
        )
        settings = config.predicted_from("cpu")
        return PlanRequest(workload, rates, budget(config, None, None), settings=settings)

    def train(self, plan: Plan, folder: Path) -> RunResult:
        plan.save(folder / "plan.json")
        sets = [word for text in self.overrides for word in ("--set", text)]
        command = ["train", "--config", str(self.config), *sets, "--plan", str(folder / "plan.json")]
        embershard([*command, "--nproc", str(self.ranks), "--run-dir", str(folder / "run")])
        return RunResult.read(folder / "run")


def hit_rates(path: str | None, work: Path) -> dict[str, Any]:
    sources = {"generated": _GENERATED.format(drift=0.0), "generated, drift 0.5": _GENERATED.format(drift=0.5)}
    if path is not None:
        sources["criteo sample"] = _CRITEO.format(path=json.dumps(path))
    cases = []
    for source, text in sources.items():
        config = work / "run.toml"
        config.write_text(text)
        limit = ["--max-lookups", str(SAMPLED_LOOKUPS)]
        profiles = [profiled(config, work, "all.npz", []), profiled(config, work, "some.npz", limit)]
        for policy in POLICIES:
            needs = [f"profile.path={work / 'all.npz'}"] if policy == "frequency" else []
            for ratio in RATIOS:
                run = Run(config, (f"cache.policy={policy}", f"cache.ratio={ratio}", *needs), ranks=2)
                found = _compare(run, profiles, work)
                cases.append({"data": source, "policy": policy, "ratio": ratio, **found})
                print(json.dumps(cases[-1]), file=sys.stderr, flush=True)
    return {"cases": cases, "summary": _summary(cases)}


def step_times(topology_file: str, work: Path, rounds: int) -> dict[str, Any]:
    topology = load_topology(topology_file)
    config = work / "run.toml"
    config.write_text(_GENERATED.format(drift=0.0))
    planned: dict[tuple[str, int], tuple[Run, Plan]] = {}
    for name, overrides in _MODELS.items():
        overrides = (*overrides, *_LONG_ENOUGH, "cache.policy=lookahead")
        profile = profiled(config, work, "profile.npz", [w for text in overrides for w in ("--set", text)])
        for ranks in (1, 2, 4):
            run = Run(config, overrides, ranks)
            planned[name, ranks] = run, make_plan(run.request(profile, topology.rates_for(ranks)))
    measured: dict[tuple[str, int], list[float]] = {case: [] for case in planned}
    for _ in range(rounds):
        for case, (run, plan) in planned.items():
            with tempfile.TemporaryDirectory(dir=work) as folder:
                result = run.train(plan, Path(folder))
            assert result.is_steady, "the run is too short for its look-ahead"
            assert result.step_ms.p50 is not None
            measured[case].append(result.step_ms.p50)
            print(json.dumps([*case, measured[case][-1]]), file=sys.stderr, flush=True)
    cases = [_step_time_case(*case, plan, measured[case]) for case, (_, plan) in planned.items()]
    errors = [abs(case["error"]) for case in cases]
    return {"cases": cases, "mean_error": round(statistics.mean(errors), 3), "largest_error": max(errors)}


def _step_time_case(model: str, ranks: int, plan: Plan, measured_ms: Sequence[float]) -> dict[str, Any]:
    assert plan.prediction is not None
    predicted_ms, median_ms = plan.prediction.step_seconds * 1e3, statistics.median(measured_ms)
    return {
        "model": model,
        "ranks": ranks,
        "predicted_ms": round(predicted_ms, 2),
        "measured_ms": round(median_ms, 2),
        "error": round(predicted_ms / median_ms - 1, 3),
        "all_measured_ms": [round(each, 2) for each in measured_ms],
        "bottleneck": plan.prediction.bottleneck,
    }


def _compare(run: Run, profiles: Sequence[FrequencyProfile], work: Path) -> dict[str, Any]:
    requests = [run.request(profile, load_topology("cpu").rates_for(run.ranks)) for profile in profiles]
    plan = make_plan(requests[0])
    layout = Layout(requests[1].workload, plan.tables)
    some = predict(layout, planned_slots(plan.pools, layout.pools), requests[1].rates)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        result = run.train(plan, Path(folder))
    assert plan.prediction is not None
    assert result.cache is not None
    found: dict[str, Any] = {"steps": result.steps, "hit_rate": round(result.cache.hit_rate_lookups or 0.0, 4)}
    for name, prediction in (("all rows", plan.prediction), ("some rows", some)):
        found[name] = _points(prediction, result.cache, result.steps)
    pairs = zip(plan.prediction.ranks, result.cache.ranks, strict=True)
    errors = [
        abs((rank.device_bytes["slots"] + rank.device_bytes["maps"]) / measured.device_bytes - 1)
        for rank, measured in pairs
    ]
    found["device_bytes_error"] = round(max(errors), 5)
    return found


def _points(prediction: Any, cache: RunCaches, steps: int) -> dict[str, Any]:
    """Errors in percentage points of hit rate, over tables and ranks."""
    errors: dict[str, list[tuple[float, str]]] = {"lookups": [], "unique": []}
    for table in prediction.tables:
        measured = cache.ranks[table.rank].tables.get(table.table)
        for kind, own in errors.items():
            rates = [getattr(each, f"hit_rate_{kind}", None) for each in (table, measured)]
            if None not in rates:
                own.append((100 * abs(rates[0] - rates[1]), table.table))
    fills = sum(table.fills for table in prediction.tables) * steps
    return {
        **{kind: round(statistics.mean(error for error, _ in own), 3) for kind, own in errors.items()},
        "worst_unique": [round(max(errors["unique"])[0], 2), max(errors["unique"])[1]],
        "fills": round(fills / max(1, cache.fills), 4),
    }


def _summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("all rows", "some rows"):
        for source in dict.fromkeys(case["data"] for case in cases):
            own = [case[name] for case in cases if case["data"] == source]
            found[f"{source}, trace of {name}"] = {
                "mean_error_lookups_points": round(statistics.mean(c["lookups"] for c in own), 3),
                "mean_error_unique_points": round(statistics.mean(c["unique"] for c in own), 3),
                "largest_mean_error_unique_points": max(c["unique"] for c in own),
                "worst_table_unique": max(c["worst_unique"] for c in own),
            }
    found["largest_device_bytes_error"] = max(case["device_bytes_error"] for case in cases)
    return found


def profiled(config: Path, work: Path, name: str, more: list[str]) -> FrequencyProfile:
    embershard(["profile", "--config", str(config), "-o", str(work / name), *more])
    return FrequencyProfile.load(work / name)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("what", choices=("hit-rates", "step-time"))
    parser.add_argument("--path", help="a Criteo file or folder")
    parser.add_argument("--topology", help="what embershard plan --calibrate wrote")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case of step-time; the median counts")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.what == "hit-rates":
            found = hit_rates(arguments.path, Path(folder))
        elif arguments.topology is None:
            parser.error("step-time needs --topology")
        else:
            found = step_times(arguments.topology, Path(folder), arguments.rounds)
    result = {"benchmark": f"plan_accuracy {arguments.what}", "machine": machine(), **found}
    report(result, arguments.output)


if __name__ == "__main__":
    main()
