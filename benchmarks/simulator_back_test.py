"""The simulator's step times against those of training that it has not seen, and against published figures.

    embershard plan --calibrate -o benchmarks/results/simulator_machine.toml --ranks 1,2,4   # once; then frozen
    python -m benchmarks.simulator_back_test [--output FILE]
    python -m benchmarks.simulator_back_test --public [--output FILE]

The first form plans and simulates every configuration of `CASES` on 1, 2 and 4 ranks with the committed machine file,
and only then trains them by the same plans: the ranks of all configurations take turns in short segments, and a
configuration's step time is the median of its undisturbed segments, as in a calibration. None of the configurations is
one of the calibration's. Target: median error <= 15 %, largest <= 25 %. Run it on the machine that was calibrated.

`--public` simulates configurations whose throughput others have published: with TorchRec and HugeCTR by plans of ours,
NVIDIA's other programs as these place and exchange tables (benchmarks/public_systems.py). Target: median error <= 15 %,
largest <= 45 %. It also tells ten published times of embedding kernels alone (benchmarks/kernel_points.py) and six
speeds of HSTU's training (benchmarks/hstu_steps.py), which are not in the summary. All constants of those machines come
from datasheets and assumptions (embershard/planning/cost/topology.py), none from a measurement of ours, and none was
fitted to these figures.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import hstu_steps, public_systems
from benchmarks.common import machine, make_parser, report
from benchmarks.kernel_points import HEAD, kernel_points, table_row
from benchmarks.plan_accuracy import profiled
from benchmarks.plan_scale import NUM_SAMPLES, model
from embershard.commands.plan.inputs import budget, make_workload
from embershard.extras.calibrate.calibrate import measure, reference_setting, summarize
from embershard.extras.calibrate.reference_steps import Segment, Segments
from embershard.extras.what_if.simulate_scaling import simulate_plan, simulate_run
from embershard.frequency import FrequencyProfile
from embershard.frequency.assumed import AssumedTable, assumed_statistics
from embershard.models.dense_size import DenseSize
from embershard.planning.cost.back_test import PUBLIC_POINTS, PublicPoint
from embershard.planning.cost.topology import Topology, load_topology
from embershard.planning.make_plan import make_plan
from embershard.planning.request import Budget, PlanRequest
from embershard.planning.workload import Workload
from embershard.settings.decoding import decode
from embershard.sharding.plan import Plan
from embershard.sharding.run_shape import ReplaySettings, RunShape
from embershard.sharding.sizes import ModelSize, TableSize
from embershard.training.config import RunConfig

MACHINE = Path(__file__).parent / "results" / "simulator_machine.toml"
RANKS = (1, 2, 4)
MEDIAN_TARGET, WORST_TARGET = 0.15, 0.25
_BAGS = {"data.synthetic.bag_sizes": [3]}
#: Configurations that are compared: changes of the calibration's base setting, none of which is among its settings.
CASES: dict[str, dict[str, Any]] = {
    "dim 32, batch 768": {
        "model.embedding_dim": 32, "model.dense_arch_layer_sizes": [48, 32], "model.over_arch_layer_sizes": [96, 48, 1],
        "train.batch_size": 768, "cache.ratio": 0.05,
    },
    "dim 96, batch 512, small cache": {
        "model.embedding_dim": 96, "model.dense_arch_layer_sizes": [96, 96], "train.batch_size": 512,
        "cache.ratio": 0.03,
    },
    "dim 24, batch 1536, cross layers": {
        "model.arch": "dlrm_dcn", "model.embedding_dim": 24, "model.dense_arch_layer_sizes": [64, 24],
        "model.over_arch_layer_sizes": [64, 1], "train.batch_size": 1536, "cache.ratio": 0.2,
    },
    "dim 16, batch 1280, bags of 3": {**_BAGS, "train.batch_size": 1280},
    "wide layers, batch 640": {
        "model.dense_arch_layer_sizes": [256, 128, 16], "model.over_arch_layer_sizes": [768, 512, 1],
        "train.batch_size": 640,
    },
    "dim 48, batch 896, by rows": {
        "model.embedding_dim": 48, "model.dense_arch_layer_sizes": [64, 48], "train.batch_size": 896,
        "cache.ratio": 0.3,
    },
    "dim 32, batch 512, bags of 3, distinct rows": {
        **_BAGS, "model.embedding_dim": 32, "model.dense_arch_layer_sizes": [64, 32], "train.batch_size": 512,
        "sharding.exchange": "rows",
    },
}  # fmt: skip
_TYPES = {"dim 48, batch 896, by rows": ["row_wise"]}

PUBLIC_MEDIAN_TARGET, PUBLIC_WORST_TARGET = 0.15, 0.45
_README = "https://github.com/facebookresearch/dlrm torchrec_dlrm/README.MD, Preliminary Training Results (TorchRec)"
SOURCES = {
    "dlrm": f"{_README}, as of August 2022; the log in it is of 7 January 2022",
    "dlrm_dcnv2": f"{_README}, as of 2025",
    "mlperf_dcnv2": "MLPerf Training v3.1, NVIDIA DGX H100, HugeCTR, mixed precision; samples per rank from the names "
    "of the configurations, 1x8x6912 and 16x8x1056, in NVIDIA's DLRM-DCNv2 submission",
    **{name: system.source for name, system in public_systems.SYSTEMS.items()},
}
#: Of a sample, on one core: what `torchrec.datasets.criteo` does in the training process for the README's runs (rows
#: are shuffled and transposed, then copied to pinned memory). 0.16 us on this project's EPYC (2 cores, thread time),
#: 1.36 times that on a node of A100s, as the host's other work (topologies.toml).
_READ_SECONDS = 0.16e-6 * 1.36


@dataclass(frozen=True)
class Assumed:
    """What is assumed of a run beside its machine; each from its source, none fitted.

    Attributes:
        bags: ids are those of MLPerf's bags; False: one per feature.
        table_state_bytes: of a number of a row.
        wire_bytes: of a number between ranks.
        host_seconds: of the host for a step, in place of the machine's, its collectives included.
        read_seconds: of the host's thread for a sample.
        why: the sources.
    """

    bags: bool
    table_state_bytes: int
    wire_bytes: float = 4
    host_seconds: float | None = None
    read_seconds: float = 0.0
    why: str = ""


ASSUMED = {
    "dlrm": Assumed(
        False, 0, read_seconds=_READ_SECONDS,
        why="SGD; data read in the training process, shuffled; TF32, in which torch multiplied by default until 1.12 "
        "(June 2022). On one GPU rows that do not fit it are cached",
    ),
    "dlrm_dcnv2": Assumed(
        False, 4, read_seconds=_READ_SECONDS, why="Adagrad; fp32, as --allow_tf32 is not among the settings; one-hot"
    ),
    "mlperf_dcnv2": Assumed(
        True, 4, 2, 0.0, why="Adagrad; fp16 in layers and between GPUs; CUDA graphs, so no host's thread"
    ),
}  # fmt: skip
#: Published points that lack what a simulation needs, and what that is.
NOT_SIMULATED = {
    "TorchEasyRec#508 (A10, 4M rows x 128: 0.80, 2.63, 5.44 ms)": "the batch size of the sweep is not published",
    "TorchRec EMS (2,855 to 4,673 ms, P90)": "several steps; the dense part is not published",
    "Fused EBC on a V100 (1.9, 6, 62 ms a step of 64 samples)": "a module alone, so small that the host decides, whose "
    "work for a lookup alone is not measured here; rows in UVM come by page faults, which embershard has none of",
    "Pinterest 2026 (1.13x, 1.21x; 2.0x, 3.9x, 7.5x)": "neither the model nor the bytes per step are published: bounds "
    "are in benchmarks/public_groups.py",
    "dlrm#356 (two nodes of 8 A100: 18 it/s became 3)": "as above",
    "Meta 2D (near linear to 4k GPUs)": "no figure",
}
#: Rows of the tables in the dlrm README's runs.
DLRM_ROWS = (
    45833188, 36746, 17245, 7413, 20243, 3, 7114, 1441, 62, 29275261, 1572176, 345138, 10, 2209, 11267, 128, 4, 974, 14,
    48937457, 11316796, 40094537, 452104, 12606, 104, 35,
)  # fmt: skip


def back_test(work: Path) -> dict[str, Any]:
    topology = load_topology(str(MACHINE))
    planned = {(name, ranks): _plan(name, ranks, topology, work) for name in CASES for ranks in RANKS}
    predicted = {case: simulate_plan(plan, topology) for case, plan in planned.items()}
    print("all step times are predicted; training begins", file=sys.stderr, flush=True)
    cases = []
    for ranks in RANKS:
        files = {name: str(work / f"{number} on {ranks}.json") for number, name in enumerate(CASES)}
        for name, file in files.items():
            planned[name, ranks].save(file)
        settings = {name: reference_setting(changes) for name, changes in CASES.items()}
        segments = Segments(settings, num_quiet=4, skip=3, steps=12, seconds=75, plans=files)
        for found in summarize(measure(ranks, segments), ranks >= (machine()["cores"] or 1)):
            cases.append(_case(ranks, found, predicted[found.setting, ranks].step_seconds))
    errors = sorted(abs(case["error"]) for case in cases)
    summary = {"median_error": round(statistics.median(errors), 3), "largest_error": errors[-1]}
    return {
        "machine_file": {"path": MACHINE.name, "sha256": hashlib.sha256(MACHINE.read_bytes()).hexdigest()},
        "cases": cases,
        **summary,
        "meets_targets": summary["median_error"] <= MEDIAN_TARGET and errors[-1] <= WORST_TARGET,
    }


def _plan(name: str, ranks: int, topology: Topology, work: Path) -> Plan:
    config = decode(RunConfig, reference_setting(CASES[name]))
    profile = _profile("bags" if "data.synthetic.bag_sizes" in CASES[name] else "base", work)
    assert profile.statistics is not None, "made by embershard profile"
    workload = make_workload(
        config,
        profile.statistics,
        world_size=ranks,
        ranks_per_node=ranks,
        device="cpu",
        cores_per_node=topology.cores_per_node,
    )
    return make_plan(
        PlanRequest(
            workload,
            topology.rates_for(ranks),
            budget(config, None, None),
            types=_TYPES.get(name) if ranks > 1 else None,
            settings=config.predicted_from("cpu", ranks),
        )
    )


def _profile(data: str, work: Path) -> FrequencyProfile:
    """Profile the samples that the segments read, and some more."""
    file = work / f"{data}.npz"
    if file.exists():
        return FrequencyProfile.load(file)
    config = work / f"{data}.toml"
    bags = "bag_sizes = [3]" if data == "bags" else ""
    generated = f"[data.synthetic]\nnum_samples = 2_000_000\nscale = 0.02\n{bags}\n"
    config.write_text(f'[data]\nkind = "synthetic"\neval_fraction = 0.0\n{generated}')
    return profiled(config, work, file.name, ["--sample", "0.15"])


def _case(ranks: int, found: Segment, predicted_seconds: float) -> dict[str, Any]:
    case = {
        "configuration": found.setting,
        "ranks": ranks,
        "predicted_ms": round(predicted_seconds * 1e3, 2),
        "measured_ms": round(found.step_seconds * 1e3, 2),
        "error": round(predicted_seconds / found.step_seconds - 1, 3),
        "other_programs": round(found.foreign, 2),
    }
    print(case, file=sys.stderr, flush=True)
    return case


def public_points() -> dict[str, Any]:
    planned = [_public(point) for point in PUBLIC_POINTS if point.model in ASSUMED]
    cases = [*planned, *(_of_another(point) for point in public_systems.POINTS)]
    assumed = {name: asdict(each) for name, each in ASSUMED.items()}
    summary = {
        f"{len(group)} points, {name}": _summary(group)
        for name, group in (
            ("all", cases),
            ("TorchRec and HugeCTR", planned),
            ("NVIDIA's others", cases[len(planned) :]),
        )
    }
    kernels = kernel_points()
    print("kernels of one H100, ms; caches of ours stand beside, never measured:", file=sys.stderr)
    print(HEAD, *map(table_row, kernels["cases"]), sep="\n", file=sys.stderr, flush=True)
    sequences = hstu_steps.hstu_steps()
    print("HSTU on 16 H100; ours stands beside, not compared:", file=sys.stderr)
    print(hstu_steps.HEAD, *map(hstu_steps.table_row, sequences["cases"]), sep="\n", file=sys.stderr, flush=True)
    return {
        "summary": summary,
        "sources": SOURCES,
        "assumed": assumed,
        "not_simulated": NOT_SIMULATED,
        "cases": cases,
        "kernels": kernels,
        "hstu_steps": sequences,
    }


def _summary(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    errors = sorted(abs(case["error"]) for case in cases)
    median = round(statistics.median(errors), 3)
    return {
        "median_error": median,
        "largest_error": errors[-1],
        "beyond_the_target": sum(error > PUBLIC_WORST_TARGET for error in errors),
        "meets_targets": median <= PUBLIC_MEDIAN_TARGET and errors[-1] <= PUBLIC_WORST_TARGET,
    }


def _of_another(point: public_systems.Point) -> dict[str, Any]:
    seconds, parts, host_seconds = public_systems.simulated(point)
    samples = load_topology(point.machine).world_size * point.batch_size
    named = PublicPoint(point.system, " ".join(point.model), point.machine, point.batch_size, point.precision,
                        point.reported, round(samples / seconds), max(parts, key=lambda part: parts[part]))  # fmt: skip
    return _compared(named, seconds, parts, host_seconds)


def _public(point: PublicPoint) -> dict[str, Any]:
    topology, assumed = load_topology(point.machine).at(point.precision), ASSUMED[point.model]
    tables, dim, dense = model("criteo_1tb" if point.model == "dlrm" else "mlperf_dcnv2")
    rows = DLRM_ROWS if point.model == "dlrm" else [table.num_rows for table in tables]
    tables = [
        replace(table, num_rows=count, bag_size=table.bag_size if assumed.bags else 1)
        for table, count in zip(tables, rows, strict=True)
    ]
    size = model_size(tables, dim, dense, assumed.table_state_bytes)
    shape = RunShape(
        topology.world_size,
        topology.ranks_per_node,
        point.batch_size,
        "cuda",
        ReplaySettings(lookahead=1, prefetch=1),
        number_bytes=(assumed.wire_bytes, assumed.wire_bytes),
        activation_bytes=2 if point.precision == "bf16" else 4,
    )
    host_seconds = topology.assumptions.step_overhead_seconds if assumed.host_seconds is None else assumed.host_seconds
    host_seconds += assumed.read_seconds * point.batch_size
    assumptions = replace(topology.assumptions, step_overhead_seconds=host_seconds)
    if assumed.host_seconds is not None:
        assumptions = replace(assumptions, collective_host_seconds=0.0)
    topology = replace(topology, assumptions=assumptions)
    workload = Workload(size, assumed_statistics(tables, NUM_SAMPLES), shape)
    limits = Budget(device_bytes=topology.device_memory_bytes, host_bytes=topology.host_memory_bytes)
    found = simulate_run(PlanRequest(workload, topology.rates_for(), limits), topology)
    assert found.parts is not None, found.problem
    told = replace(point, simulated=round(found.samples_per_second), limited_by=found.limit)
    return _compared(told, found.step_seconds, found.parts, topology.rates_for().step_overhead_seconds)


def model_size(tables: Sequence[AssumedTable], dim: int, dense: DenseSize, table_state_bytes: int) -> ModelSize:
    """Return the size of a model of others, with so many bytes of optimizer state for each number of a row."""
    return ModelSize(
        tables=tuple(TableSize(t.table, t.num_rows, dim, state_bytes_per_column=table_state_bytes) for t in tables),
        dense_flops_per_sample=dense.flops_per_sample,
        dense_parameter_bytes=dense.parameter_bytes,
        dense_state_bytes=dense.parameter_bytes,
        activation_bytes_per_sample=dense.activation_bytes_per_sample,
        products=dense.products,
        passes=dense.passes,
    )


def _compared(point: PublicPoint, seconds: float, parts: Mapping[str, float], host_seconds: float) -> dict[str, Any]:
    samples = load_topology(point.machine).world_size * point.batch_size
    case = {
        "system": point.system,
        "model": point.model,
        "machine": point.machine,
        "precision": point.precision,
        "global_batch_size": samples,
        "published_samples_per_second": point.reported,
        "simulated_samples_per_second": point.simulated,
        "error": point.error,
        "published_ms": round(samples / point.reported * 1e3, 2),
        "simulated_ms": round(seconds * 1e3, 2),
        "host_ms": round(host_seconds * 1e3, 2),
        "limited_by": point.limited_by,
        "parts_ms": {part: round(each * 1e3, 2) for part, each in parts.items() if each > 5e-6},
    }
    print(case, file=sys.stderr, flush=True)
    return case


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--public", action="store_true", help="compare with published figures; nothing is trained")
    arguments = parser.parse_args()
    if arguments.public:
        found = public_points()
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = back_test(Path(folder))
    name = "simulator_back_test" + (" --public" if arguments.public else "")
    report({"benchmark": name, "machine": machine(), **found}, arguments.output)


if __name__ == "__main__":
    main()
