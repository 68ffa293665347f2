"""The modes of training side by side: whole runs of `embershard train` that differ in a few settings.

    python -m benchmarks.modes [--path CRITEO] [--ranks 1 2 4] [--modes resident pooled static] [--rounds 3]

Data: generated clicks whose features are independent, correlated, and correlated with a drifting popularity; and real
clicks in Criteo's format with --path. Modes (docs/modes.md):

    resident        stock TorchRec, all rows on the device, where TorchRec's planner places them
    pooled          look-ahead caches, pooled embeddings between ranks: the default
    rows            the same, each distinct row once per rank and batch between ranks
    auto            per table what moves fewer bytes
    static          the profile's most frequent rows stay, others come for their own batches, without look-ahead
    hot_cold        hot rows on every rank, batches packed by FAE's rule
    data_parallel   all rows of a batch on every rank, as in cDLRM

All modes of a round see the same samples, in turn, in alternating order; each round has another seed. Reported per data
set, number of ranks and mode: samples per second (median of rounds), CPU milliseconds per step (all ranks, with
start-up), bytes that a rank sends in a step by kind, fills and fills that a step waited for, and AUC of every round.
Modes but resident, hot_cold and data_parallel train by a plan of `embershard plan`. The table on stderr names, for each
mode, the modes that are more than 5 % faster, and those that send less.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import embershard, machine, make_parser, report, settings_of

_CLOSE = 1.05
_MODEL = """
[model]
embedding_dim = 16
dense_arch_layer_sizes = [64, 32, 16]
over_arch_layer_sizes = [128, 64, 1]
[embedding_optimizer]
kind = "rowwise_adagrad"
lr = 0.05
[dense_optimizer]
kind = "adam"
lr = 0.002
[checkpoint]
at_end = false
[data]
eval_fraction = 0.1
"""
_GENERATED = {"data.kind": "synthetic", "data.synthetic.scale": 0.01, "train.epochs": 1}
_CORRELATED = {**_GENERATED, "data.synthetic.correlation": 0.65, "data.synthetic.rarity_logit": 0.3}
DATA: dict[str, dict[str, Any]] = {
    "independent": _GENERATED,
    "correlated": _CORRELATED,
    "drifting": {**_CORRELATED, "data.synthetic.drift": 0.2},
}
_REAL = {"data.kind": "criteo", "data.criteo.num_rows": 20_000, "train.epochs": 3}
_UNPLANNED = ("resident", "hot_cold", "data_parallel")


def modes(hot_bytes: int) -> dict[str, dict[str, Any]]:
    """Return the settings of every mode; `hot_bytes` for the hot rows of `hot_cold`."""
    return {
        "resident": {"cache.enabled": False},
        "pooled": {},
        "rows": {"sharding.exchange": "rows"},
        "auto": {"sharding.exchange": "auto"},
        "static": {"cache.policy": "static", "look_ahead.lookahead": 0},
        "hot_cold": {"sharding.mode": "hot_cold", "sharding.hot_bytes": hot_bytes},
        "data_parallel": {"sharding.mode": "data_parallel"},
    }


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--path", help="a file or folder in Criteo's format")
    parser.add_argument("--data", nargs="+", choices=list(DATA), default=list(DATA), help="generated data")
    parser.add_argument("--modes", nargs="+", choices=list(modes(1)), default=list(modes(1)))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3, help="with seeds 0, 1, ...")
    parser.add_argument("--samples", type=int, default=300_000, help="of generated data, held-out ones included")
    parser.add_argument("--global-batch-size", type=int, default=2048, help="a sixteenth for real clicks")
    parser.add_argument("--ratio", type=float, default=0.05, help="of the rows in the caches")
    parser.add_argument("--lookahead", type=int, default=32)
    parser.add_argument("--hot-bytes", type=int, default=1_000_000)
    options = parser.parse_args()
    rows = []
    for data, source in sources(options).items():
        for ranks in options.ranks:
            with tempfile.TemporaryDirectory() as folder:
                found = measure(options, source, ranks, Path(folder))
            rows += compared([{"data": data, "ranks": ranks, "mode": mode, **values} for mode, values in found.items()])
            print(table(rows[-len(found) :]), file=sys.stderr, flush=True)
    report(
        {"benchmark": "modes", "settings": settings_of(options), "machine": machine(), "results": rows}, options.output
    )


def sources(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the settings of every data set."""
    batch = options.global_batch_size
    found = {
        name: {**DATA[name], "data.synthetic.num_samples": options.samples, "train.global_batch_size": batch}
        for name in options.data
    }
    if options.path:
        found["real"] = {**_REAL, "data.path": options.path, "train.global_batch_size": max(1, batch // 16)}
    common = {"look_ahead.lookahead": options.lookahead, "profile.samples": 100_000}
    return {name: {**settings, **common} for name, settings in found.items()}


def measure(options: argparse.Namespace, source: dict[str, Any], ranks: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Run the modes in turn, in every round; return the figures of each."""
    config = folder / "run.toml"
    config.write_text(_MODEL)
    results: dict[str, list[dict[str, Any]]] = {mode: [] for mode in options.modes}
    for turn in range(options.rounds):
        seeded = {**source, "data.seed": turn, "train.seed": turn}
        profile = folder / f"profile_{turn}.npz"
        embershard(["profile", "--config", str(config), *_sets(seeded), "-o", str(profile)])
        for mode in options.modes if turn % 2 == 0 else options.modes[::-1]:
            settings = {**seeded, "cache.ratio": options.ratio, **modes(options.hot_bytes)[mode]}
            if mode not in _UNPLANNED:
                settings = planned(config, settings, ranks, profile, folder / f"{mode}_{turn}.json")
            results[mode].append(train(config, settings, ranks, folder / f"run_{mode}_{turn}"))
    return {mode: figures(found) for mode, found in results.items()}


def planned(config: Path, settings: dict[str, Any], ranks: int, profile: Path, plan: Path) -> dict[str, Any]:
    """Return the settings of training by a plan that is made for `settings`."""
    arguments = ["--config", str(config), *_sets(settings), "--profile", str(profile), "--ranks", str(ranks)]
    embershard(["plan", *arguments, "-o", str(plan)])
    by_plan = {name: value for name, value in settings.items() if name not in ("cache.ratio", "sharding.exchange")}
    return {**by_plan, "sharding.plan": str(plan)}


def train(config: Path, settings: dict[str, Any], ranks: int, folder: Path) -> dict[str, Any]:
    """Return the result of one run, with the CPU seconds of its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = ["train", "--config", str(config), *_sets(settings), "--nproc", str(ranks), "--run-dir", str(folder)]
    embershard(command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    result["cpu_seconds"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return result


def _sets(settings: dict[str, Any]) -> list[str]:
    values = {name: json.dumps(value) for name, value in settings.items()}
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


def figures(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a mode's rounds; bytes and fills of the first."""
    first, steps = results[0], results[0]["measured_steps"]
    cache = first["cache"] or {"fills": 0, "critical_path_fills": 0}
    sent = {kind: round(first["sent_bytes"][kind] / first["world_size"] / steps) for kind in _IN_TRAINING}
    aucs = [result["auc"] for result in results]
    return {
        "samples_per_second": round(statistics.median(result["samples_per_second"] for result in results)),
        "cpu_ms_per_step": round(statistics.median(result["cpu_seconds"] for result in results) / steps * 1e3, 1),
        "sent_bytes_per_step": sent,
        "sent_in_training": sum(sent.values()),
        "fills_per_step": round(cache["fills"] / steps),
        "critical_path_fills_per_step": round(cache["critical_path_fills"] / steps),
        "auc": [round(auc, 4) for auc in aucs],
        "auc_spread": round(max(aucs) - min(aucs), 4),
    }


_IN_TRAINING = ("ids", "embeddings", "gradients", "dense_all_reduce")


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to the rows of one data set and number of ranks the modes that each loses to.

    >>> rows = [{"mode": m, "samples_per_second": s, "sent_in_training": b} for m, s, b in (("a", 10, 5), ("b", 8, 4))]
    >>> [(row["slower_than"], row["sends_more_than"]) for row in compared(rows)]
    [([], ['b']), (['a'], [])]
    """

    def losing(row: dict[str, Any]) -> dict[str, list[str]]:
        faster = [r["mode"] for r in rows if r["samples_per_second"] > _CLOSE * row["samples_per_second"]]
        fewer = [r["mode"] for r in rows if row["sent_in_training"] > _CLOSE * r["sent_in_training"]]
        return {"slower_than": faster, "sends_more_than": fewer}

    return [{**row, **losing(row)} for row in rows]


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows of `compared` as a Markdown table."""
    lines = ["| data | ranks | mode | samples/s | CPU ms | kB sent | fills (waited for) | AUC | loses to |"]
    lines.append("|---" * 9 + "|")
    for row in rows:
        fills = f"{row['fills_per_step']} ({row['critical_path_fills_per_step']})"
        losses = [f"{what}: {', '.join(row[key])}" for key, what in _LOSSES.items() if row[key]]
        auc = f"{statistics.fmean(row['auc']):.4f} (spread {row['auc_spread']:.4f})"
        cells = [row["data"], row["ranks"], row["mode"], row["samples_per_second"], row["cpu_ms_per_step"]]
        cells += [round(row["sent_in_training"] / 1e3), fills, auc, "; ".join(losses) or "none"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


_LOSSES = {"slower_than": "speed", "sends_more_than": "bytes"}


if __name__ == "__main__":
    main()
