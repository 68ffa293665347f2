"""Checkpoints that move between modes, as one rank of a pool of processes, and as a script; some minutes.

    python -m tests.ranks.mode_moves [--optimizers rowwise_adagrad adagrad sgd] [--ranks 2 1 4]

A run of every mode on 2, 1 and 4 ranks is saved, and goes on in every mode on as many ranks and on the next number of
ranks; stock TorchRec reads it by torch.distributed.checkpoint alone, and its own save is read so by every mode. Weights
and states of rows must be equal bit for bit wherever they were loaded. The losses of the next steps must be those of
sharded caches that go on from the same checkpoint on two ranks: within `CLOSE`, and equal where these and the mode add
up in the same order. (Hot and cold batches have other samples.)
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from embershard.distributed import CheckpointConfig
from embershard.training.checkpoint.identity import ORDER
from embershard.training.config import RunConfig
from embershard.training.reports import TrainReport
from embershard.training.trainer import Trainer
from tests.ranks import resharding
from tests.ranks.planned import here
from tests.ranks.resharding import BATCH, Layout
from tests.ranks.rounding import loss_rounding
from tests.ranks.test_resharding import tensors_that_differ
from tests.ranks.workers import RankPool

SAVED_AT, STEPS = 6, 9
#: Of losses on other ranks, or of a mode that adds gradients up in another order.
CLOSE = loss_rounding(STEPS - SAVED_AT, BATCH)
MODES = {
    "pooled": Layout(),
    "rows": Layout(exchange="rows"),
    "hot_cold": Layout(mode="hot_cold"),
    "data_parallel": Layout(mode="data_parallel", ratio=0.7),
    "static": Layout(policy="static"),
    "resident": Layout(kernel="device"),
}
#: Modes whose losses are those of sharded caches bit for bit, on as many ranks.
BITWISE = ("pooled", "static", "resident")


def train(mode: str, optimizer: str, folder: Path, name: str) -> None:
    """A run that is saved in ``folder / name``."""
    config = _config(mode, optimizer, folder)
    saves = CheckpointConfig(every_steps=SAVED_AT, at_end=False)
    config = replace(config, train=replace(config.train, max_steps=SAVED_AT), checkpoint=saves)
    _losses(Trainer(config, here(), folder / name))


def go_on(mode: str, optimizer: str, folder: Path, checkpoint: Path, copy: Path) -> list[float]:
    """Load, save what was loaded in ``copy``, and train on: the losses."""
    trainer = Trainer(_config(mode, optimizer, folder), here(), copy)
    trainer.resume(checkpoint, allow_changes={ORDER})
    trainer.save()
    trainer.checkpoints = None
    return _losses(trainer)


def _config(mode: str, optimizer: str, folder: Path) -> RunConfig:
    config = resharding.config_of(replace(MODES[mode], optimizer=optimizer), folder)
    return replace(config, train=replace(config.train, max_steps=STEPS), checkpoint=CheckpointConfig(at_end=False))


def _losses(trainer: Trainer) -> list[float]:
    losses = [report.loss for report in trainer.train() if isinstance(report, TrainReport)]
    trainer.close()
    return losses


def move(pool: RankPool, mode: str, optimizer: str, folder: Path, checkpoint: Path) -> tuple[list[str], list[float]]:
    """Go on from a checkpoint: tensors that are not as saved once they were loaded, and the losses after that."""
    with tempfile.TemporaryDirectory() as copy:
        losses = pool.run(go_on, mode, optimizer, folder, checkpoint, Path(copy))[0]
        return tensors_that_differ(checkpoint, Path(copy, checkpoint.name)), losses


def problem_of(mode: str, found: tuple[list[str], list[float]], expected: list[float], same_ranks: bool) -> str:
    """What is wrong with a move; empty if nothing is. ``expected``: losses of sharded caches on two ranks."""
    different, losses = found
    if different:
        return f"tensors that differ: {different}"
    if len(losses) != len(expected):
        return f"{len(losses)} losses"
    error = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    bound = 0.0 if mode in BITWISE and same_ranks else CLOSE
    return "" if mode == "hot_cold" or error <= bound else f"losses differ by {error:.1e}"


def main() -> int:
    """Move all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", default=["rowwise_adagrad"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 1, 4])
    options = parser.parse_args()
    pools = {ranks: RankPool(ranks, timeout_seconds=600.0) for ranks in {*options.ranks, 2}}
    total = failed = 0
    for optimizer in options.optimizers:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            resharding.write_samples(folder / "samples.parquet")
            for ranks, source in itertools.product(options.ranks, MODES):
                pools[ranks].run(train, source, optimizer, folder, f"{source}_{ranks}")
                checkpoint = folder / f"{source}_{ranks}" / f"step_{SAVED_AT}"
                _, expected = move(pools[2], "pooled", optimizer, folder, checkpoint)
                problems = {}
                for mode, layout in MODES.items():
                    to = folder, checkpoint, folder / f"{mode}_from_{checkpoint.parent.name}"
                    through = pools[2].run(resharding.through_stock, *to, replace(layout, optimizer=optimizer))
                    wrong = next((names for num_compared, names in through if names or not num_compared), [])
                    problems[f"stock, and from there {mode} on 2"] = ", ".join(wrong)
                following = options.ranks[(options.ranks.index(ranks) + 1) % len(options.ranks)]
                for on, mode in itertools.product({ranks, following}, MODES):
                    found = move(pools[on], mode, optimizer, folder, checkpoint)
                    problems[f"{mode} on {on}"] = problem_of(mode, found, expected, on == 2)
                wrong = {where: problem for where, problem in problems.items() if problem}
                total, failed = total + len(problems), failed + len(wrong)
                print(f"{optimizer}, {source} on {ranks}, to {len(problems)} places: {wrong or 'equal'}", flush=True)
    for pool in pools.values():
        pool.close()
    print(f"{failed} of {total} moves failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
