"""Whole trainings that publish, killed (SIGKILL, all processes at once) at some moment, and resumed on other ranks with
another cache; then a replica that followed and a new one must equal an export of the last checkpoint, bit for bit.
`python -m tests.faults.published_trainings [--runs N] [--seed S]`.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from embershard.launch.export.serving_model import Model, load, table_names, weights_of
from embershard.launch.export.serving_replica import Replica
from tests.faults.processes import SETTINGS, STEPS, Training, still_alive
from tests.ranks import commands

_LIVES = 4


def _settings(chance: random.Random, folder: Path) -> list[str]:
    """The same training, by another cache."""
    given = [text for text in SETTINGS if not text.startswith(("train.batch_size", "look_ahead"))]
    return [
        *given, "train.global_batch_size=128", "train.batch_size=none", "cache.ratio=0.3",
        f"publish.folder={folder / 'published'}", "publish.every_steps=3", "publish.base_every=4",
        f"cache.policy={chance.choice(['lru', 'lfu', 'lookahead'])}", f"look_ahead.lookahead={chance.choice([0, 8])}",
    ]  # fmt: skip


def try_run(seed: int, folder: Path) -> str:
    """Train with kills; return what is wrong, or nothing."""
    chance, follower = random.Random(seed), None
    for life in range(_LIVES):
        more = ["--nproc", str(chance.choice([1, 2])), *(["--resume"] if life else [])]
        run = Training(folder / "run", *more, settings=_settings(chance, folder))
        if life < _LIVES - 1:
            step = chance.randrange(3, STEPS - 2)
            run.wait_for(lambda step=step, run=run: any(f"step {n}/" in run.text for n in range(step, STEPS + 1)))
            time.sleep(chance.uniform(0, 0.3))
            processes = run.ranks()
            run.process.kill()
            for process in processes:
                process.kill()
            still_alive(processes)
        run.end()
        if follower is None and list((folder / "published").glob("base_*[0-9]")):
            follower = Replica(folder / "published")
        if follower is not None:
            follower.update()
    done = commands.run(["export", str(folder / "run"), "-o", str(folder / "exported"), "--step", "last"], folder)
    if done.returncode:
        return f"run {seed}: {done.stderr[-300:]}"
    trained = load(folder / "exported")
    for who, replica in (("a follower", follower), ("a new replica", Replica(folder / "published"))):
        if replica is None or (different := _differences(trained, replica)):
            return f"run {seed}: {who} differs: {different}"
    return ""


def _differences(trained: Model, replica: Replica) -> list[str]:
    with replica.state() as (model, have):
        pairs = zip(table_names(trained.inputs), model.tables, trained.tables, strict=True)
        found = [name for name, one, other in pairs if not torch.equal(one.stored, other.stored)]
        weights = weights_of(trained.dense)
        found += [name for name, weight in weights_of(model.dense).items() if not torch.equal(weight, weights[name])]
        return [*found, *([] if have.step == STEPS else [have.name])]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.published_trainings", description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    problems = 0
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        with tempfile.TemporaryDirectory() as folder:
            problem = try_run(seed, Path(folder))
        problems += bool(problem)
        print(problem or f"run {seed}: equal", flush=True)
    print(f"{problems} wrong")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
