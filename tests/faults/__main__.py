"""Every fault, or a sample of them: `python -m tests.faults [--points N] [--seed S] [--training N] [--modes N]
[--sigint N] [--kills N]`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from tests.faults import leaving, model_level
from tests.faults.cache_level import SETTINGS, Tally, chosen, try_points
from tests.faults.interrupts import interrupted_runs
from tests.faults.processes import Fault, Training, try_fault
from tests.ranks.workers import RankPool


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--points", type=int, help="of the cache by itself; all by default")
    parser.add_argument("--training", type=int, default=300, help="points in the training of a model")
    parser.add_argument("--modes", type=int, default=0, help="points in every mode: one rank raises, or all do")
    parser.add_argument("--sigint", type=int, default=0, help="real interrupts of a training")
    parser.add_argument("--kills", type=int, default=0, help="processes of a training that are killed or stopped")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", nargs="*", help="only these of the cache by itself, by number")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = list(SETTINGS)
    if arguments.settings is not None:
        names = [names[int(number)] for number in arguments.settings]
    problems: list[str] = []
    if names and arguments.points != 0:
        problems += _one_cache(names, arguments.points, arguments.seed)
    if arguments.training:
        problems += _training(arguments.training, arguments.seed)
    if arguments.modes:
        problems += _modes(arguments.modes, arguments.seed)
    if arguments.sigint:
        problems += _interrupts(arguments.sigint, arguments.seed)
    if arguments.kills:
        problems += _kills(arguments.kills, arguments.seed)
    print(f"{len(problems)} wrong")
    return 1 if problems else 0


def _one_cache(names: list[str], count: int | None, seed: int) -> list[str]:
    problems = []
    for name in names:
        share = None if count is None else -(-count // len(names))
        started = time.perf_counter()
        tally = try_points(chosen(share, seed, [name]))
        _show(f"one cache, {name}", tally, time.perf_counter() - started)
        problems += tally.problems
    return problems


def _training(count: int, seed: int) -> list[str]:
    problems, share = [], -(-count // len(model_level.TRAININGS))
    for training in model_level.TRAININGS.values():
        pool = RankPool(training.world_size, timeout_seconds=900.0)
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            tally = model_level.try_sample(pool, training, share, seed, folder)
        pool.close()
        _show(f"training, {training.name}", tally, time.perf_counter() - started)
        problems += tally.problems
    return problems


def _modes(count: int, seed: int) -> list[str]:
    """Half of the points have one fault, in all threads; the other half one on every rank, in one step."""
    problems: list[str] = []
    for mode in model_level.NAMES_OF_MODES:
        pool, tally, started = RankPool(2, timeout_seconds=3000.0), Tally(), time.perf_counter()
        for worker in ("inline", "worker"):
            training = model_level.MODES[f"{mode}, {worker}"]
            with tempfile.TemporaryDirectory() as folder:
                tally.join("one rank", model_level.try_sample(pool, training, -(-count // 4), seed, folder))
            with tempfile.TemporaryDirectory() as folder:
                tally.join("all ranks", leaving.try_sample(pool, training, -(-count // 4), seed, folder))
        pool.close()
        _show(f"mode {mode}", tally, time.perf_counter() - started)
        problems += tally.problems
    return problems


def _interrupts(count: int, seed: int) -> list[str]:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    tally, started = Tally(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder, 'store')}", rank=0, world_size=1)
        for kind, ended in interrupted_runs(count, seed):
            tally.add(kind, ended.kind, f"{ended.where}: {ended.problem}" if ended.problem else "")
        dist.destroy_process_group()
    _show("SIGINT", tally, time.perf_counter() - started)
    return tally.problems


def _kills(count: int, seed: int) -> list[str]:
    tally, started = Tally(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        whole = Training(Path(folder, "whole"))
        if code := whole.end():
            return [f"a training without a fault ended with exit code {code}: {whole.text[-1000:]}"]
        for number in range(seed, seed + count):
            fault = Fault.of(number)
            problem = try_fault(fault, whole, Path(folder, str(number)))
            tally.add(fault.kind, "wrong" if problem else "equal", f"{fault}: {problem}" if problem else "")
    _show("processes of a training", tally, time.perf_counter() - started)
    return tally.problems


def _show(title: str, tally: Tally, seconds: float) -> None:
    totals = tally.totals
    print(f"{title}: {totals.total()} points in {seconds:.0f} s: {_counts(totals)}")
    for name, ended in sorted(tally.ended.items()):
        print(f"    {name}: {_counts(ended)}")
    for problem in tally.problems:
        print(f"    WRONG: {problem}")
    sys.stdout.flush()


def _counts(ended: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(ended.items()))


if __name__ == "__main__":
    sys.exit(main())
