"""Many steps, saves, evaluations and restarts of a training: nothing grows.

    python -m tests.faults.endurance [--steps N] [--saves N] [--restarts N] [--scale S]

Half of the steps are trained in short runs, each resumed from the last checkpoint of the one before; the other half in
one long run. With every save there is an evaluation. Looked at: memory, tensors, open files and threads of both
ranks; files of the run's folder and temporary ones; processes that are left.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.faults.processes import Training, still_alive

#: Memory that a rank may gain in the second half of a run: the allocator's and the interpreter's ups and downs.
MOST_GROWTH_BYTES = 16 << 20
#: Tensors that a rank may gain: batches ahead. A save that is kept is some hundred.
MOST_MORE_TENSORS = 100
#: Of the generated data: 26 MiB of rows with their optimizer states, so that kept rows show.
SCALE = 0.012
_SETTINGS = (
    "data.synthetic.num_samples=20000", "data.eval_fraction=0.02",
    "look_ahead.lookahead=8", "train.batch_size=64", "train.epochs=none", "train.device=cpu", "checkpoint.keep_last=2",
)  # fmt: skip


_MOST_MORE = {"memory_bytes": MOST_GROWTH_BYTES, "tensors": MOST_MORE_TENSORS, "open_files": 0, "threads": 0}


@dataclass(frozen=True)
class Usage:
    """What a rank's process has, after a step."""

    step: int
    memory_bytes: int
    tensors: int
    open_files: int
    threads: int


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.endurance", description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--saves", type=int, default=200)
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--scale", type=float, default=SCALE, help="of the tables")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        problems = list(endure(Path(folder) / "run", options.steps, options.saves, options.restarts, options.scale))
    print("\n".join(problems) or "nothing grew")
    return 1 if problems else 0


def endure(folder: Path, steps: int, saves: int, restarts: int, scale: float = SCALE) -> Iterator[str]:
    """Train; yield what grew."""
    short, every = steps // 2 // restarts, steps // saves
    ends = [short * (number + 1) for number in range(restarts)] + [steps]
    temporary, temporary_files, files_of_runs = folder.with_name("temporary"), [], []
    temporary.mkdir()
    tensors = folder.with_name("tensors")
    tensors.mkdir()
    for number, end in enumerate(ends):
        settings = (*_SETTINGS, f"data.synthetic.scale={scale}", f"train.max_steps={end}", f"train.eval_every={every}")
        settings += (f"checkpoint.every_steps={every}", f"train.log_every={every}")
        run = Training(
            folder, *(["--resume"] if number else []), settings=settings, temporary=temporary, tensors=tensors
        )
        ranks: list[psutil.Process] = []
        usages = list(_watch(run, ranks, tensors))
        if run.process.returncode:
            yield f"the run to step {end} ended with {run.process.returncode}: {run.text[-1000:]}"
            return
        if alive := still_alive(ranks):
            yield f"processes {alive} of the run to step {end} live on"
        files_of_runs.append(_kinds_of_files(folder))
        temporary_files.append({path.name for path in temporary.iterdir()})
        _show(end, usages)
    if not usages:
        yield f"the run to step {steps} was never looked at"
    for rank in zip(*usages, strict=True):
        yield from growth([usage for usage in rank if usage.step > ends[-2] + (steps - ends[-2]) // 2])
    if len({str(files) for files in files_of_runs[1:]}) > 1:
        yield f"files of the run: {files_of_runs[1]} after the first restart, {files_of_runs[-1]} at the end"
    if left := sorted(temporary_files[-1] - temporary_files[0]):  # torch keeps a folder
        yield f"temporary files are left: {left[:5]}"


def _watch(run: Training, found: list[psutil.Process], tensors: Path) -> Iterator[list[Usage]]:
    """Yield the usage of every rank from its first step on, and put their processes into `found`."""
    while run.process.poll() is None:
        time.sleep(0.5)
        step = max(map(int, re.findall(r"^step (\d+)/", run.text, re.MULTILINE)), default=0)
        try:
            ranks = run.ranks()
            if len(ranks) < 2 or not step:
                continue
            found[:] = ranks
            yield [_usage(step, rank, tensors) for rank in ranks[:2]]
        except (psutil.Error, OSError):  # it is ending
            continue


def _usage(step: int, rank: psutil.Process, tensors: Path) -> Usage:
    count = int((tensors / str(rank.pid)).read_text())
    return Usage(step, rank.memory_full_info().uss, count, rank.num_fds(), rank.num_threads())


def growth(usages: list[Usage]) -> Iterator[str]:
    """Yield what grew from the first quarter to the last. Threads and files of a save come and go: the least counts."""
    if len(usages) < 40:
        return  # too short a run to say anything
    quarter = len(usages) // 4
    first, last = usages[:quarter], usages[-quarter:]
    for name, most in _MOST_MORE.items():
        extreme = min if most == 0 else max
        before, after = (extreme(getattr(usage, name) for usage in part) for part in (first, last))
        if after - before > most:
            yield f"{name} grew from {before} to {after} between steps {first[0].step} and {last[-1].step}"


def _kinds_of_files(folder: Path) -> dict[str, int]:
    """Count the files of a run, without the events for TensorBoard: one more with every start."""
    names = [path.name for path in folder.rglob("*") if path.is_file() and "tfevents" not in path.name]
    return {name: names.count(name) for name in sorted(set(names))}


def _show(end: int, usages: list[list[Usage]]) -> None:
    if usages:
        print(f"to step {end}: {' | '.join(_line(usage) for usage in usages[-1])}", flush=True)


def _line(usage: Usage) -> str:
    counts = f"{usage.tensors} tensors, {usage.open_files} open files, {usage.threads} threads"
    return f"{usage.memory_bytes >> 20} MiB, {counts}"


if __name__ == "__main__":
    sys.exit(main())
