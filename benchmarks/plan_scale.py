"""Plans for models far larger than this machine: seconds and memory of planning, and the plans' predictions.

    python -m benchmarks.plan_scale [--output FILE]

Table sizes are published ones (docs/planning.md names the sources); frequencies are assumed (Zipf, exponent 1, like
Criteo Kaggle's large tables), so the hit rates are of that assumption. No GPU is needed, and none was used: speeds are
datasheet estimates.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np

from benchmarks.common import machine, make_parser, report
from embershard.frequency.assumed import AssumedTable, assumed_statistics
from embershard.models.dense_size import DenseSize
from embershard.planning.cost.topology import load_topology
from embershard.planning.make_plan import make_plan
from embershard.planning.request import Budget, PlanRequest
from embershard.planning.workload import Workload
from embershard.sharding.run_shape import ReplaySettings, RunShape
from embershard.sharding.sizes import ModelSize, TableSize

CRITEO_1TB = (
    227605432, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 130229467, 3067956, 405282, 10, 2209, 11938, 155, 4, 976,
    14, 292775614, 40790948, 187188510, 590152, 12973, 108, 36,
)  # fmt: skip
MLPERF_BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
MLPERF_ROWS = 40_000_000  # ids modulo this
NUM_SAMPLES = 4_195_197_692
CASES = {
    "criteo_1tb on 8 x 80 GB": ("criteo_1tb", "h100x8", None, 16_384),
    "criteo_1tb on 1 x 141 GB": ("criteo_1tb", "h200x1", 10**12, 16_384),
    "mlperf_dcnv2 on 8 x 80 GB": ("mlperf_dcnv2", "h100x8", None, 8_192),
    "mlperf_dcnv2 on 1 x 141 GB": ("mlperf_dcnv2", "h200x1", 10**12, 8_192),
    "800 tables on 8 x 80 GB": ("meta_like", "h100x8", None, 2_048),
    "800 tables on 16 x 8 x 80 GB": ("meta_like", "h100x8x16", None, 512),
}


def model(name: str) -> tuple[list[AssumedTable], int, DenseSize]:
    """Return a model's tables, dim and dense part."""
    if name == "meta_like":
        generator = np.random.default_rng(0)
        rows = np.clip(generator.lognormal(12.5, 2.0, 800), 10, 4e8).astype(int)
        bags = np.clip(generator.lognormal(2.0, 1.2, 800), 1, 200).astype(int)
        tables = [AssumedTable(f"t{n}", int(r), 1.0, int(b)) for n, (r, b) in enumerate(zip(rows, bags, strict=True))]
        return tables, 128, DenseSize("dlrm", 1000, 800, 128, (512, 128), (1024, 512, 1))
    capped = name == "mlperf_dcnv2"
    bags_of = MLPERF_BAGS if capped else (1,) * len(CRITEO_1TB)
    tables = [
        AssumedTable(f"t_C{n + 1}", min(rows, MLPERF_ROWS) if capped else rows, 1.0, bag)
        for n, (rows, bag) in enumerate(zip(CRITEO_1TB, bags_of, strict=True))
    ]
    if capped:
        dense = DenseSize("dlrm_dcn", 13, 26, 128, (512, 256, 128), (1024, 1024, 512, 256, 1), 3, 512)
    else:
        dense = DenseSize("dlrm", 13, 26, 128, (512, 256, 128), (1024, 1024, 512, 256, 1))
    return tables, 128, dense


def plan(case: str) -> dict[str, Any]:
    name, topology_name, host_bytes, batch_size = CASES[case]
    started = time.perf_counter()
    tables, dim, dense = model(name)
    topology = load_topology(topology_name)
    size = ModelSize(
        tables=tuple(TableSize(t.table, t.num_rows, dim, "fp32", state_bytes=4) for t in tables),
        dense_flops_per_sample=dense.flops_per_sample,
        dense_parameter_bytes=dense.parameter_bytes,
        dense_state_bytes=3 * dense.parameter_bytes,
        activation_bytes_per_sample=dense.activation_bytes_per_sample,
    )
    shape = RunShape(topology.world_size, topology.ranks_per_node, batch_size, "cuda", ReplaySettings())
    request = PlanRequest(
        workload=Workload(size, assumed_statistics(tables, NUM_SAMPLES), shape),
        rates=topology.rates_for(),
        budget=Budget(device_bytes=topology.device_memory_bytes, host_bytes=host_bytes or topology.host_memory_bytes),
    )
    made = make_plan(request)
    seconds = time.perf_counter() - started
    prediction = made.prediction
    assert prediction is not None
    types: dict[str, int] = {}
    for table in made.tables:
        types[f"{table.sharding} {table.kernel}"] = types.get(f"{table.sharding} {table.kernel}", 0) + 1
    lookups = sum(t.lookups for t in prediction.tables)
    device = [sum(rank.device_bytes.values()) for rank in prediction.ranks]
    return {
        "tables": len(made.tables),
        "rows": size.num_rows,
        "table_gigabytes": round(size.table_bytes / 1e9, 1),
        "plan_seconds": round(seconds, 2),
        "plan_memory_gigabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "placements": types,
        "slots": [sum(p.slots for p in made.pools if p.rank == r) for r in range(min(8, made.world_size))],
        "device_gigabytes_min_max": [round(min(device) / 1e9, 3), round(max(device) / 1e9, 3)],
        "budget_gigabytes": (topology.device_memory_bytes or 0) / 1e9,
        "host_gigabytes_per_node": round(
            sum(sum(r.host_bytes.values()) for r in prediction.ranks) / topology.num_nodes / 1e9, 1
        ),
        "hit_rate_lookups": round(sum(t.lookups * (t.hit_rate_lookups or 0) for t in prediction.tables) / lookups, 4),
        "fills_per_step_and_rank": round(sum(t.fills for t in prediction.tables) / made.world_size),
        "estimated_step_ms": round(prediction.step_seconds * 1e3, 2),
        "estimated_samples_per_second": round(prediction.samples_per_second),
        "bottleneck": prediction.bottleneck,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--case", choices=CASES, help="only this one, in this process")
    arguments = parser.parse_args()
    if arguments.case is not None:
        print(json.dumps(plan(arguments.case)))
        return
    results = {}
    for case in CASES:  # a process each, so that memory is its own
        command = [sys.executable, "-m", "benchmarks.plan_scale", "--case", case]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        results[case] = json.loads(output.splitlines()[-1])
    report({"benchmark": "plan_scale", "machine": machine(), "results": results}, arguments.output)


if __name__ == "__main__":
    main()
