"""The modes of training side by side: whole runs, as of `embershard train`, that differ in a few settings.

    python -m benchmarks.modes [--path CRITEO] [--ranks 1 2 4] [--modes resident pooled static] [--minutes 12]

Data: generated clicks whose features are independent, correlated, and correlated with a drifting popularity; and real
clicks in Criteo's format with --path. Modes (docs/modes.md):

    resident        stock TorchRec, all rows on the device, where TorchRec's planner places them
    pooled          look-ahead caches, pooled embeddings between ranks: the default
    rows            the same, each distinct row once per rank and batch between ranks
    auto            per table what moves fewer bytes
    static          the profile's most frequent rows stay, others come for their own batches, without look-ahead
    hot_cold        hot rows on every rank, batches packed by FAE's rule
    data_parallel   all rows of a batch on every rank, as in cDLRM

All modes of a round see the same samples, in turn, in alternating order; each round has another seed and goes over all
data sets and numbers of ranks, in processes that stay. Reported per data set, number of ranks and mode: samples per
second (median of rounds), CPU milliseconds per step (all ranks, with the building of the model and the evaluation),
bytes that a rank sends in a step by kind, fills and fills that a step waited for, and AUC of every round. Modes but
resident, hot_cold and data_parallel train by a plan of `embershard plan`. The table on stderr names, for each mode, the
modes that are more than 5 % faster, and those that send less. A run that fails is a line of the table, and so is one
for which --minutes left no time. The JSON is written after every round.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import machine, make_parser, report, settings_of
from benchmarks.mode_runs import Job, RankServers, RunFailedError
from embershard.commands import cli

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
_NO_TIME = "not run: the time was up"
_FOR_PLANS = ("cache.ratio", "sharding.exchange")
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
    parser.add_argument("--rounds", type=int, default=2, help="with seeds 0, 1, ...")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no run begins after so many")
    parser.add_argument("--run-seconds", type=float, default=300.0, help="a run that takes longer has failed")
    parser.add_argument("--samples", type=int, default=100_000, help="of generated data, held-out ones included")
    parser.add_argument("--global-batch-size", type=int, default=2048, help="a sixteenth for real clicks")
    parser.add_argument("--ratio", type=float, default=0.05, help="of the rows in the caches")
    parser.add_argument("--lookahead", type=int, default=8)
    parser.add_argument("--hot-bytes", type=int, default=1_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rounds = Rounds(options, Path(folder))
        try:
            for turn in range(options.rounds):
                rounds.run(turn)
                result = {"benchmark": "modes", "settings": settings_of(options), "machine": machine()}
                found = {**result, "results": rounds.rows()}
                if options.output:
                    Path(options.output).write_text(json.dumps(found, indent=2) + "\n")
        finally:
            rounds.close()
    print(table(found["results"]), file=sys.stderr, flush=True)
    report(found, options.output)


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


class Rounds:
    """Runs of all data sets, numbers of ranks and modes, and what came of them.

    Args:
        options: of the command.
        folder: for files of the runs.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._config = folder / "run.toml"
        self._config.write_text(_MODEL)
        self._servers = {ranks: RankServers(ranks, folder / f"ranks_{ranks}.log") for ranks in options.ranks}
        self._until = time.monotonic() + 60 * options.minutes
        self._results: dict[tuple[str, int, str], list[dict[str, Any] | str]] = {}

    def run(self, turn: int) -> None:
        """Train all modes once, with seed `turn`."""
        for data, source in sources(self._options).items():
            seeded = {**source, "data.seed": turn, "train.seed": turn}
            profile = self._folder / f"{data}_{turn}.npz"
            for ranks in self._options.ranks:
                for mode in self._options.modes if turn % 2 == 0 else self._options.modes[::-1]:
                    name = f"{data}_{ranks}_{mode}_{turn}"
                    try:
                        found: dict[str, Any] | str = self._train(name, seeded, ranks, mode, profile)
                    except RunFailedError as error:
                        found = f"failed: {error}"
                    self._results.setdefault((data, ranks, mode), []).append(found)
                    print(f"{name}: {found if isinstance(found, str) else 'done'}", file=sys.stderr, flush=True)

    def _train(self, name: str, seeded: dict[str, Any], ranks: int, mode: str, profile: Path) -> dict[str, Any] | str:
        """Return the result of one run."""
        if time.monotonic() > self._until:
            return _NO_TIME
        if not profile.exists():
            self._command(["profile", "--config", str(self._config), *_sets(seeded), "-o", str(profile)])
        options = self._options
        settings = {**seeded, "cache.ratio": options.ratio, **modes(options.hot_bytes)[mode]}
        if mode not in _UNPLANNED:
            plan = self._folder / f"{name}.json"
            arguments = ["--config", str(self._config), *_sets(settings), "--profile", str(profile)]
            self._command(["plan", *arguments, "--ranks", str(ranks), "-o", str(plan)])
            settings = {key: value for key, value in settings.items() if key not in _FOR_PLANS}
            settings["sharding.plan"] = str(plan)
        job = Job(str(self._config), _sets(settings)[1::2], str(self._folder / name))
        return self._servers[ranks].run(job, options.run_seconds)

    def _command(self, arguments: list[str]) -> None:
        """Run a command of `embershard` in this process: a start of Python takes as long as a run."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = cli.main(arguments)
        if code:
            raise RunFailedError(f"embershard {arguments[0]}: {said.getvalue().strip().splitlines()[-1:]}")

    def rows(self) -> list[dict[str, Any]]:
        """Return the figures of all modes so far."""
        found = []
        for data, ranks in dict.fromkeys(key[:2] for key in self._results):
            of_modes = {key[2]: runs for key, runs in self._results.items() if key[:2] == (data, ranks)}
            common = {"data": data, "ranks": ranks}
            found += compared([{**common, "mode": mode, **figures(runs)} for mode, runs in of_modes.items()])
        return found

    def close(self) -> None:
        """End the ranks."""
        for servers in self._servers.values():
            servers.close()


def _sets(settings: dict[str, Any]) -> list[str]:
    values = {name: json.dumps(value) for name, value in settings.items()}
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


def figures(runs: list[dict[str, Any] | str]) -> dict[str, Any]:
    """Return the figures of a mode's rounds, bytes and fills of the first; or why there are none."""
    results = [run for run in runs if isinstance(run, dict)]
    problems = [run for run in runs if isinstance(run, str)]
    if not results:
        return {"problems": problems}
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
        "problems": problems,
    }


_IN_TRAINING = ("ids", "embeddings", "gradients", "dense_all_reduce")


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to the rows of one data set and number of ranks the modes that each loses to.

    >>> rows = [{"mode": m, "samples_per_second": s, "sent_in_training": b} for m, s, b in (("a", 10, 5), ("b", 8, 4))]
    >>> [(row["slower_than"], row["sends_more_than"]) for row in compared(rows)]
    [([], ['b']), (['a'], [])]
    """

    trained = [row for row in rows if "samples_per_second" in row]

    def losing(row: dict[str, Any]) -> dict[str, list[str]]:
        if row not in trained:
            return {}
        faster = [r["mode"] for r in trained if r["samples_per_second"] > _CLOSE * row["samples_per_second"]]
        fewer = [r["mode"] for r in trained if row["sent_in_training"] > _CLOSE * r["sent_in_training"]]
        return {"slower_than": faster, "sends_more_than": fewer}

    return [{**row, **losing(row)} for row in rows]


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows of `compared` as a Markdown table."""
    lines = ["| data | ranks | mode | samples/s | CPU ms | KiB sent | fills (waited for) | AUC | loses to |"]
    lines.append("|---" * 9 + "|")
    for row in rows:
        names = [row["data"], row["ranks"], row["mode"]]
        if "samples_per_second" not in row:
            lines.append("| " + " | ".join(map(str, [*names, *[""] * 5, row["problems"][0]])) + " |")
            continue
        fills = f"{row['fills_per_step']} ({row['critical_path_fills_per_step']})"
        losses = [f"{what}: {', '.join(row[key])}" for key, what in _LOSSES.items() if row[key]]
        auc = f"{statistics.fmean(row['auc']):.4f} (spread {row['auc_spread']:.4f})"
        cells = [*names, row["samples_per_second"], row["cpu_ms_per_step"]]
        cells += [round(row["sent_in_training"] / 1024), fills, auc, "; ".join(losses) or "none"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


_LOSSES = {"slower_than": "speed", "sends_more_than": "bytes"}


if __name__ == "__main__":
    main()
