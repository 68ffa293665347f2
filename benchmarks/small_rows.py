"""Held-out quality of small rows in the host tier beside fp32 rows (decision 0099).

    python -m benchmarks.small_rows run.toml [--set NAME=VALUE ...] [--seeds 5]

A run is trained with each type of host rows, and for each seed (of the initial weights, of rounding and of the data's
order). Reported per type: the held-out AUC of each seed, its difference to that of fp32 with the same seed, and the
mean of the differences with a 95 % interval by Student's t. A type is "fp16", or "int8" with the share of full rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from benchmarks.common import machine, make_parser, report
from embershard import RunConfig, Trainer, process_group
from embershard.distributed import Ranks
from embershard.frequency.config import ProfileConfig
from embershard.settings.files import load_config
from embershard.sharding.torchrec import cache_stats
from embershard.training.reports import EvalReport

TYPES = ("fp32", "int8:0.01", "int8:0", "fp16", "int8:0.003", "int8:0.03")


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("config", help="settings of the run")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--types", nargs="+", default=list(TYPES))
    options = parser.parse_args()
    config = load_config(RunConfig, Path(options.config), options.set)
    with process_group("cpu") as ranks:
        found = measure(config, ranks, options)
    report({"benchmark": "small_rows", **found, "machine": machine()}, options.output)


def measure(config: RunConfig, ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of every type."""
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in options.types}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for kind in options.types:
            runs[kind].append(train(with_type(config, kind, seed), ranks))
            print(json.dumps({"seed": seed, "type": kind, **runs[kind][-1]}), flush=True)
    base = [run["auc"] for run in runs[options.types[0]]]
    return {
        kind: {"runs": found, **interval([run["auc"] - other for run, other in zip(found, base, strict=True)])}
        for kind, found in runs.items()
    }


def with_type(config: RunConfig, kind: str, seed: int) -> RunConfig:
    """Return the run with another type of host rows. Every one counts the same profile, which also warms caches up."""
    host_dtype, _, share = kind.partition(":")
    full_rows = float(share) if share else None
    cache = replace(config.cache, host_dtype=host_dtype, full_rows=full_rows)  # type: ignore[arg-type]
    profile = config.profile if config.profile.samples else ProfileConfig(samples=200_000)
    return replace(
        config,
        cache=cache,
        profile=profile,
        train=replace(config.train, seed=seed),
        data=replace(config.data, seed=seed),
    )


def train(config: RunConfig, ranks: Ranks) -> dict[str, Any]:
    """Train one run; return its held-out AUC and what its caches did."""
    started, cpu = time.perf_counter(), time.process_time()
    trainer = Trainer(config, ranks)
    quality = [each.quality for each in trainer.train() if isinstance(each, EvalReport)][-1]
    stats = cache_stats(trainer.model)
    trainer.close()
    return {
        "auc": quality["auc"],
        "ne": quality.get("ne"),
        "steps": trainer.steps,
        "fills": sum(table.fills for table in stats),
        "write_backs": sum(table.write_backs for table in stats),
        "host_bytes": sum(table.host_bytes for table in stats),
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


def interval(differences: list[float]) -> dict[str, Any]:
    """Return mean and 95 % interval of paired differences; no interval of one seed."""
    found: dict[str, Any] = {"mean_difference": statistics.fmean(differences)}
    if len(differences) > 1:
        error = statistics.stdev(differences) / len(differences) ** 0.5
        found["interval_95"] = error * float(student.ppf(0.975, len(differences) - 1))
    return found


if __name__ == "__main__":
    main()
