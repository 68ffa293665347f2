"""Start of a training run: seconds and peak memory until the first step is trained, for tables of several sizes.

    python -m benchmarks.start_up

One rank of `embershard train` (its trainer, without the launcher) on generated clicks of Criteo's shape, dim 16, with
the quickstart's model and a cache with look-ahead. Each case is a process of its own, measured from its start:

    lazily     initial weights from a counter, made when a row of their page is first touched (the default)
    at_once    the same weights, all made before the first step
    torchrec   TorchRec's own weights

Cases whose rows do not fit the free memory are skipped. `peak_gb` is resident memory, of which Python and its
libraries take 0.6 GB. `step_ms` has all steps, the first one with the reading of the batches known ahead.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import machine, make_parser, report, settings_of

MODES = ("lazily", "at_once", "torchrec")
_CRITEO_ROWS = 33_762_577
_DIM = 16
_ROW_BYTES = 4 * _DIM + 4
_ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 34_000_000, 340_000_000])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--ratio", type=float, default=0.015)
    parser.add_argument("--slot-map", choices=("array", "hashed"), default="array")
    parser.add_argument("--steps", type=int, default=50, help="steps in all")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each case, in turn")
    parser.add_argument("--run", metavar="JSON", help=argparse.SUPPRESS)  # a case, in its own process
    options = parser.parse_args()
    if options.run is not None:
        print(json.dumps(run(json.loads(options.run))))
        return
    cases = []
    for _ in range(options.rounds):
        for rows in options.rows:
            for mode in options.modes:
                cases.append(measure(options, rows, mode))
                print(json.dumps(cases[-1]), file=sys.stderr, flush=True)
    settings = {name: value for name, value in settings_of(options).items() if name != "run"}
    report({"benchmark": "start_up", "settings": settings, "cases": cases, "machine": machine()}, options.output)


def measure(options: argparse.Namespace, rows: int, mode: str) -> dict[str, Any]:
    """Run a case in a process of its own."""
    needed_gb = rows * _ROW_BYTES / 1e9
    free_gb = psutil.virtual_memory().available / 1e9
    if mode != "lazily" and needed_gb > free_gb - 2:
        return {"rows": rows, "mode": mode, "skipped": f"the rows take {needed_gb:.1f} GB, {free_gb:.1f} GB are free"}
    case = {
        "rows": rows,
        "mode": mode,
        "batch_size": options.batch_size,
        "ratio": options.ratio,
        "slot_map": options.slot_map,
        "steps": options.steps,
        "started": time.time(),
    }
    command = [sys.executable, "-m", "benchmarks.start_up", "--run", json.dumps(case)]
    done = subprocess.run(command, cwd=_ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return {"rows": rows, "mode": mode, **json.loads(done.stdout.splitlines()[-1])}


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Train a case in this process; return seconds since its start, resident memory and steps."""
    from embershard import flush
    from embershard.distributed import process_group
    from embershard.launch.screen import silence_libraries
    from embershard.training.trainer import Trainer

    found: dict[str, Any] = {}

    def note(phase: str) -> None:
        found[f"{phase}_seconds"] = round(time.time() - case["started"], 2)
        found[f"{phase}_peak_gb"] = round(_peak_bytes() / 1e9, 3)

    silence_libraries()
    note("imports")
    with process_group("cpu") as ranks:
        trainer = Trainer(_config(case), ranks)
        if case["mode"] == "at_once":
            flush(trainer.model)
        note("built")
        train_step = trainer.step

        def step(batch: Any) -> None:
            train_step(batch)
            if trainer.steps == 1:
                note("first_step")

        trainer.step = step  # type: ignore[method-assign]
        for each in trainer.train():
            found["loss"] = each.loss  # type: ignore[union-attr]
        note("last_step")
        trainer.close()
    found["step_ms"] = [round(seconds * 1e3, 1) for seconds in trainer.step_seconds]
    return found


def _config(case: dict[str, Any]) -> Any:
    from embershard.settings.decoding import decode
    from embershard.training.config import RunConfig

    scale, steps = case["rows"] / _CRITEO_ROWS, case["steps"]
    values = {
        "data": {"kind": "synthetic", "synthetic": {"num_samples": 10_000_000, "scale": scale}, "eval_fraction": 0.0},
        "model": {
            "embedding_dim": _DIM,
            "dense_arch_layer_sizes": [64, 32, _DIM],
            "over_arch_layer_sizes": [128, 64, 1],
        },
        "cache": {"ratio": case["ratio"], "slot_map": case["slot_map"]},
        "look_ahead": {"lookahead": 64},
        "embedding_optimizer": {"kind": "rowwise_adagrad", "lr": 0.05},
        "train": {
            "batch_size": case["batch_size"],
            "max_steps": steps,
            "log_every": steps,
            "device": "cpu",
            "init": "torchrec" if case["mode"] == "torchrec" else "counter",
        },
    }
    return decode(RunConfig, values)


def _peak_bytes() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
