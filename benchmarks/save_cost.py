"""Cost of checkpoints: steps beside a save, its memory, and its seconds beside torch.distributed.checkpoint's.

    python -m benchmarks.save_cost

One rank of `embershard train` (its trainer, without the launcher) on generated clicks of Criteo's shape, with the
quickstart's model, and a cache with look-ahead over rows that all have their initial weights. Two parts:

    beside    training with a checkpoint every few steps, written while training goes on. Steps while a save runs, and
              the others, by turns in one run. `growth_mb` is resident memory above that before training: its peak, and
              the largest seen every 20 steps before the first save and while one runs, of which `tier_mb` are pages of
              the host tier that were first written to (both count towards the peak)
    alone     without training, by turns: `ours` (with checksums), and `dcp.save` with synced files

Files are synced, so the seconds are those of the disk. `wait_ms` is the time per save in which training stood still.
`cpu_seconds` are of the whole process.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import shutil
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common import make_parser, report
from benchmarks.one_rank import add_run_options, measured, run_config

if TYPE_CHECKING:
    from embershard.training.config import RunConfig

_WARMUP_STEPS = 20


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    add_run_options(parser)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--every", type=int, default=300, help="steps from save to save")
    parser.add_argument("--rounds", type=int, default=3, help="of the saves without training")
    options = parser.parse_args()
    report(measured("save_cost", options, run), options.output)


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure both parts in this process."""
    from embershard import flush
    from embershard.distributed import process_group
    from embershard.launch.screen import silence_libraries
    from embershard.training.trainer import Trainer

    silence_libraries()
    with process_group("cpu") as ranks:
        trainer = Trainer(_config(options), ranks, folder / "beside")
        flush(trainer.model)
        found = {"beside": beside(trainer), "alone": alone(trainer, folder / "alone", options.rounds)}
        trainer.close()
    return found


def beside(trainer: Any) -> dict[str, Any]:
    """Train with saves; return the steps beside them and the others, and what a save took."""
    from embershard.sharding.torchrec import cached_embeddings
    from embershard.training.reports import SaveReport

    tier = [rows for pool in cached_embeddings(trainer.model) for rows in pool.host.parts]
    before, tier_before = _resident_bytes("VmRSS"), sum(map(_resident_part, tier))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    reports, busy, growth = [], set[int](), [(0, 0, 0)]
    for each in trainer.train():
        if isinstance(each, SaveReport):
            reports.append(each)
            busy |= set(range(each.step + 1, trainer.steps + 1))
        else:
            tier_growth = sum(map(_resident_part, tier)) - tier_before
            growth.append((trainer.steps, _resident_bytes("VmRSS") - before, tier_growth))
    steps: dict[str, list[float]] = {"beside": [], "outside": []}
    for step, seconds in enumerate(trainer.step_seconds, start=1):
        if step > _WARMUP_STEPS:
            steps["beside" if step in busy else "outside"].append(seconds * 1e3)
    median = {name: statistics.median(values) for name, values in steps.items()}
    mean = {name: statistics.mean(values) for name, values in steps.items()}
    return {
        "step_ms": {name: _quantiles(values) for name, values in steps.items()},
        "num_steps": {name: len(values) for name, values in steps.items()},
        "median_ratio": round(median["beside"] / median["outside"], 3),
        "mean_ratio": round(mean["beside"] / mean["outside"], 3),
        "save_seconds": [round(each.seconds, 2) for each in reports],
        "wait_ms": [round(each.stall_seconds * 1e3, 1) for each in reports],
        "growth_mb": {
            "peak": round((_resident_bytes("VmHWM") - before) / 1e6),
            "before_saves": _largest_mb(each for each in growth if each[0] <= reports[0].step),
            "beside": _largest_mb(each for each in growth if each[0] in busy),
        },
    }


def alone(trainer: Any, folder: Path, rounds: int) -> dict[str, Any]:
    """Save by turns with both; return seconds, seconds of CPU, and GB per second."""
    import torch.distributed.checkpoint as dcp

    ranks = trainer.ranks

    def ours(path: Path) -> None:
        trainer.prepare_save(path).write(ranks)

    def theirs(path: Path) -> None:
        tensors = {
            "model": trainer.model.state_dict(),
            "embedding_optimizer": trainer.model.fused_optimizer.state_dict()["state"],
            "dense_optimizer": trainer.optimizers.dense.state_dict()["state"],
        }
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path, sync_files=True))

    variants: dict[str, Callable[[Path], None]] = {"ours": ours, "dcp.save": theirs}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    num_bytes = 0
    for turn in range(rounds):
        for name in list(variants) if turn % 2 == 0 else list(variants)[::-1]:
            path = folder / f"{name}_{turn}"
            started, cpu_started = time.perf_counter(), time.process_time()
            variants[name](path)
            times[name].append((time.perf_counter() - started, time.process_time() - cpu_started))
            num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            shutil.rmtree(path)
    seconds = {name: statistics.median(wall for wall, _ in found) for name, found in times.items()}
    return {
        "gigabytes": round(num_bytes / 1e9, 3),
        "seconds": {name: [round(wall, 2) for wall, _ in found] for name, found in times.items()},
        "cpu_seconds": {name: [round(cpu, 2) for _, cpu in found] for name, found in times.items()},
        "gb_per_second": {name: round(num_bytes / 1e9 / median, 3) for name, median in seconds.items()},
        "ratio": round(seconds["ours"] / seconds["dcp.save"], 2),
    }


def _quantiles(values: list[float]) -> dict[str, float]:
    values = sorted(values)
    return {f"p{q}": round(values[min(len(values) - 1, len(values) * q // 100)], 1) for q in (50, 95, 99)}


def _config(options: argparse.Namespace) -> RunConfig:
    return run_config(
        options,
        {"max_steps": options.every * (options.saves + 1), "log_every": 20},
        checkpoint={"every_steps": options.every, "keep_last": 1, "at_end": False},
    )


def _largest_mb(growth: Iterable[tuple[int, int, int]]) -> dict[str, int]:
    """Of (step, bytes, bytes of the tier): the largest bytes, those of the tier, and the largest of the rest."""
    found = list(growth)
    _, total, tier = max(found, key=lambda each: each[1])
    rest = max(num_bytes - tier_bytes for _, num_bytes, tier_bytes in found)
    return {"mb": round(total / 1e6), "tier_mb": round(tier / 1e6), "rest_mb": round(rest / 1e6)}


def _resident_part(tensor: Any) -> int:
    """Return the bytes of a large tensor that are in memory."""
    page = mmap.PAGESIZE
    start = tensor.data_ptr() // page * page
    flags = (ctypes.c_ubyte * -(-(tensor.data_ptr() + tensor.nbytes - start) // page))()
    if ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(flags) * page), flags):
        raise OSError("mincore failed")
    return np.count_nonzero(np.frombuffer(flags, np.uint8) & 1) * page


def _resident_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()
