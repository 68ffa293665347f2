"""What a step of HSTU costs in groups by length, beside an older commit that pads each batch to its longest history.

    python -m benchmarks.length_groups --old 68b5ac56

Both versions train on the same batches of generated music (examples/dlrm_v4), on 1 and 2 ranks, step by step in turn:
while one of them steps, the other one waits. Reported: CPU seconds of a step, of all ranks and their threads (readers,
caches and collectives are in them), as medians, and the median of the ratios new over old.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.common import machine, make_parser, median_ratio, report, settings_of
from benchmarks.step_versions import ROOT, checkout

_RANK = """
import sys, time
from pathlib import Path

import torch

from embershard.distributed import process_group
from embershard.settings.files import load_config
from embershard.training.config import RunConfig
from embershard.training.trainer import Trainer

torch.set_num_threads(1)
with process_group("cpu") as ranks:
    trainer = Trainer(load_config(RunConfig, Path(sys.argv[1]), sys.argv[2:]), ranks)
    reports = trainer.train()
    for _ in sys.stdin:
        loss = next(reports).loss
        print(time.process_time(), loss, flush=True)
"""


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--old", required=True, help="a git revision")
    parser.add_argument("--history", type=int, default=735, help="of each of three kinds a third; 735 give 512 at most")
    parser.add_argument("--events", type=int, default=300, help="of a user, on average (300)")
    parser.add_argument("--scale", type=float, default=5e-4, help="of Yambda's users and items (0.0005)")
    parser.add_argument("--days", type=int, nargs="+", default=[5, 10], help="of the log's 20 (5 10)")
    parser.add_argument("--batch-size", type=int, default=64, help="of a rank (64)")
    parser.add_argument("--steps", type=int, default=12, help="that are measured, after 3 (12)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="(1 2)")
    options = parser.parse_args()
    found = {}
    with checkout(options.old) as old, tempfile.TemporaryDirectory() as folder:
        for day in options.days:
            samples = make_samples(Path(folder), day, options)
            lengths = {"lengths": lengths_of(samples)}
            for ranks in options.ranks:
                name = f"day {day}, ranks {ranks}"
                found[name] = lengths | compare({"old": old, "new": ROOT}, samples, ranks, options)
                print(name, found[name], file=sys.stderr, flush=True)
    report(
        {"benchmark": "length_groups", "settings": settings_of(options), **found, "machine": machine()}, options.output
    )


def make_samples(folder: Path, day: int, options: Any) -> Path:
    """Make the samples of a day of a log, and of the next one."""
    log, samples, examples = folder / "log", folder / f"samples_{day}", ROOT / "examples" / "dlrm_v4"
    if not log.exists():
        words = ["--scale", str(options.scale), "--events", str(options.events), "--days", "20", "-o", str(log)]
        _python(ROOT, str(examples / "yambda_like.py"), *words)
    words = [str(log / "multi_event.parquet"), "--history", str(options.history), "--first-day", str(day)]
    words += ["--days", "2"]  # time order needs two; the steps that are measured are of the first
    _python(ROOT, str(examples / "yambda.py"), *words, "--cross-scale", str(options.scale), "-o", str(samples))
    return samples


def lengths_of(samples: Path) -> list[float]:
    """Return the lengths of a tenth, half and nine tenths of the histories, and of the longest."""
    file = min(samples.glob("*.parquet"))
    events = pc.list_value_length(pq.read_table(file, columns=["hist_item_id"])["hist_item_id"]).to_numpy()
    return [float(each) for each in np.percentile(events, [10, 50, 90, 100])]


def compare(trees: dict[str, Path], samples: Path, ranks: int, options: Any) -> dict[str, Any]:
    """Train with both versions, step by step, each on so many ranks."""
    words = [str(samples / "run.toml"), f"train.batch_size={options.batch_size}", "train.log_every=1"]
    words += ["train.device=cpu"]
    with contextlib.ExitStack() as stack:
        groups = {name: start(stack, tree, ranks, words) for name, tree in trees.items()}
        before = {name: _step(group)[0] for name, group in groups.items()}
        seconds: dict[str, list[float]] = {name: [] for name in trees}
        losses: dict[str, list[float]] = {name: [] for name in trees}
        for index in range(options.steps + 2):
            for name in sorted(groups, reverse=bool(index % 2)):
                spent, loss = _step(groups[name])
                seconds[name].append(spent - before[name])
                losses[name].append(loss)
                before[name] = spent
    of_steps = {name: each[2:] for name, each in seconds.items()}
    return {
        **{f"{name}_cpu_ms": round(statistics.median(each) * 1e3, 1) for name, each in of_steps.items()},
        "new_over_old": median_ratio(of_steps["new"], of_steps["old"]),
        "sum_over_sum": round(sum(of_steps["new"]) / sum(of_steps["old"]), 3),
        "most_loss_difference": max(abs(a / b - 1) for a, b in zip(losses["new"], losses["old"], strict=True)),
    }


def start(stack: contextlib.ExitStack, tree: Path, ranks: int, words: list[str]) -> list[subprocess.Popen[str]]:
    """Start ranks that train a step for every line that each is sent."""
    store = stack.enter_context(tempfile.TemporaryDirectory())
    (Path(store) / "rank.py").write_text(_RANK, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = []
    for rank in range(ranks):
        where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        environment = {**os.environ, **{name: str(value) for name, value in where.items()}}
        environment |= {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": ""}
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(store) / "rank.py"), *words],
            cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        stack.callback(process.wait)
        stack.callback(process.kill)
        group.append(process)
    return group


def _step(group: list[subprocess.Popen[str]]) -> tuple[float, float]:
    """Train a step; return the CPU seconds that all ranks have taken since they started, and the loss."""
    found = steps_of(group)
    return sum(seconds for seconds, _ in found), found[0][1]


def steps_of(group: list[subprocess.Popen[str]]) -> list[tuple[float, float]]:
    """Train a step; return the CPU seconds that each rank has taken since it started, and its loss."""
    for process in group:
        assert process.stdin is not None
        process.stdin.write("step\n")
        process.stdin.flush()
    found = []
    for process in group:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a rank ended with exit status {process.wait()}; its error is shown above")
        seconds, loss = map(float, line.split())
        found.append((seconds, loss))
    return found


def _python(tree: Path, *words: str) -> None:
    subprocess.run([sys.executable, *words], env={**os.environ, "PYTHONPATH": str(tree)}, check=True, stdout=2)


if __name__ == "__main__":
    main()
