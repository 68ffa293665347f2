"""CPU seconds until a command answers, or begins its work: `python -m benchmarks.command_start`

Each command runs in a process of its own, `--rounds` times in turn; the figure is the least CPU time of user and
system, which other programs on the machine disturb less than the time on the clock. Commands that read a run or a file
get a small one, made first. Targets: 0.5 s for help, the version and wrong usage, 1 s for what needs no torch (1.5 s
for report), 3 s for --dry-run and a plan, which take torch and Numba, and no TorchRec: `import torchrec` is measured
beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from embershard.settings.decoding import to_toml
from embershard.training.config import RunConfig

#: Command line, and most CPU seconds.
CASES = (
    ("--help", 0.5),
    ("--version", 0.5),
    ("trian", 0.5),
    ("train --confg x", 0.5),
    ("train nowhere.toml", 0.5),
    ("train --help", 0.5),
    ("plan --help", 0.5),
    ("verify --help", 0.5),
    ("predict --help", 0.5),
    ("export --help", 0.5),
    ("report --help", 0.5),
    ("settings", 1.0),
    ("train quickstart.toml --dry-run", 3.0),
    ("report run", 1.5),
    ("ckpt ls run", 1.0),
    ("data validate data.parquet --config parquet.toml", 1.0),
    ("profile show nowhere.npz", 3.0),
    ("plan quickstart.toml --profile nowhere.npz", 3.0),
    ("plan parquet.toml --profile profile.npz --ranks 1", 3.0),
    ("plan parquet.toml --profile profile.npz --ranks 2", 3.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="also write the JSON to this file")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each command (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _make_files(folder)
        seconds: dict[str, list[float]] = {command: [] for command, _ in CASES}
        imports: dict[str, list[float]] = {"embershard": [], "torch": [], "torchrec": []}
        for _ in range(options.rounds):
            for module, found in imports.items():
                found.append(_cpu_seconds([sys.executable, "-c", f"import {module}"], folder))
            for command in seconds:
                words = [sys.executable, "-m", "embershard", *command.split()]
                seconds[command].append(_cpu_seconds(words, folder))
    from benchmarks.common import machine  # loads torch: behind what is measured

    cases: dict[str, Any] = {f"import {module}": {"cpu_seconds": min(found)} for module, found in imports.items()}
    cases["import embershard"]["target_seconds"] = 0.5
    cases |= {f"embershard {c}": {"cpu_seconds": min(seconds[c]), "target_seconds": most} for c, most in CASES}
    report = {
        "benchmark": "command_start",
        "settings": {"rounds": options.rounds},
        "cases": cases,
        "machine": machine(),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.output:
        Path(options.output).write_text(text + "\n")


def _cpu_seconds(words: list[str], folder: Path) -> float:
    """Return the CPU time of a process and its children."""
    root = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, cwd=folder, env=environment, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2)


def _make_files(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"label": [0, 1] * 50, "user": list(range(100)), "x": [0.5] * 100}
    pq.write_table(pa.table(columns), folder / "data.parquet")
    (folder / "parquet.toml").write_text(
        '[data]\nkind = "parquet"\npath = "data.parquet"\n'
        '[data.parquet]\nsparse = ["user"]\nnum_rows = [100]\ndense = ["x"]\n'
    )
    words = ["-m", "embershard", "profile", "--config", "parquet.toml", "-o", "profile.npz"]
    subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, check=True)
    run = folder / "run"
    (run / "checkpoints" / "step_5").mkdir(parents=True)
    (run / "config.toml").write_text(to_toml(RunConfig()))
    (run / "metrics.jsonl").touch()
    (run / "result.json").write_text(json.dumps(_result()))


def _result() -> dict[str, Any]:
    numbers = dict.fromkeys(("auc", "ne", "logloss", "accuracy", "calibration", "loss"), 0.5)
    sent = dict.fromkeys(("ids", "embeddings", "gradients", "dense_all_reduce", "other"), 0.0)
    speed = {"samples_per_second": 1e3, "step_ms": {"p50": 1.0, "p95": 1.0}, "is_steady": True}
    run = {"steps": 5, "measured_steps": 5, "samples": 5, "world_size": 1, "device": "cpu", "eval_samples": 1}
    empty = {"cache": None, "look_ahead": None, "hot_cold": None, "plan": None, "bad_rows": None, "skipped_batches": 0}
    return {**numbers, **speed, **run, **empty, "sent_bytes": {**sent, "ranks": []}, "changes": [], "versions": {}}


if __name__ == "__main__":
    main()
