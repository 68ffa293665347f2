"""Runs that follow a folder, as one rank of a pool of processes: the first rank writes the next file whenever training
waits."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embershard.extras.following import part as following
from embershard.training.checkpoint.resume import resume_run
from embershard.training.config import RunConfig
from embershard.training.reports import Report, WindowReport
from embershard.training.trainer import Trainer
from tests.ranks.planned import here
from tests.ranks.time_order import Trained, make_config


def make_following(folder: Path, lookahead: int, **options: Any) -> RunConfig:
    """Settings of a run that ends when nothing comes, of files in the order of their rows."""
    config = make_config(folder, lookahead, "together")
    given = {"follow": True, "idle_seconds": 0.01, "shuffle": False, **options}
    return replace(config, data=replace(config.data, **given))


@contextlib.contextmanager
def arriving(files: list[Path], folder: Path) -> Iterator[Callable[[], None]]:
    """Let the next of `files` come to `folder` whenever training waits; yields what lets one come at once."""
    left, num_written = list(files), [0]
    folder.mkdir(exist_ok=True)

    def write_next() -> None:
        path = left.pop(0)
        partial = folder / f".{path.name}"
        shutil.copy(path, partial)
        partial.rename(folder / path.name)
        num_written[0] += 1

    inner, inner_goes_on = following.FolderFollower.wait, following.FolderFollower._goes_on

    def wait(self: following.FolderFollower) -> bool:
        if left and self._ranks.is_first:
            write_next()
        return inner(self)

    def goes_on(self: following.FolderFollower) -> bool:
        """On a busy machine, a file may be written and not be found in time."""
        return self.source.num_files < num_written[0] or inner_goes_on(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(following, "_POLL_SECONDS", 0.005)
        patch.setattr(following.FolderFollower, "wait", wait)
        patch.setattr(following.FolderFollower, "_goes_on", goes_on)
        yield write_next


def noting(trainer: Trainer, found: Trained) -> None:
    """Note the samples of each step."""
    step = trainer.step

    def noted(batch: Any) -> Any:
        found.samples.append(np.rint(np.expm1(batch.dense_features[:, 0].double().numpy())).tolist())
        return step(batch)

    trainer.step = noted  # type: ignore[method-assign]


def add_window(found: Trained, report: Report) -> None:
    """Note a window that was evaluated."""
    if isinstance(report, WindowReport):
        values = {name: report.quality[name] for name in ("samples", "auc", "ne", "logloss", "calibration")}
        found.windows.append((report.step, report.window, values))
        found.late += report.late


def train(trainer: Trainer) -> tuple[Trained, list[float]]:
    """Train to the end. Return what trained, and each loss."""
    found, losses = Trained(), list[float]()
    noting(trainer, found)
    for report in trainer.train():
        add_window(found, report)
        if (loss := getattr(report, "loss", None)) is not None:
            losses.append(loss)
    trainer.close()
    return found, losses


def run(
    files: list[Path], folder: Path, run_dir: Path, lookahead: int, resume: int | None = None, most: int | None = None
) -> tuple[Trained, list[float]]:
    """Follow `folder`, to which `files` come; to the end, or so many steps. Return what trained, and each loss."""
    config = make_following(folder, lookahead)
    config = replace(config, train=replace(config.train, max_steps=most, log_every=1))
    with arriving(files, folder):
        trainer = Trainer(config, here(), run_dir / "checkpoints")
        if resume is not None:
            resume_run(trainer, step=resume)
        return train(trainer)


def run_in_turn(folder: Path, lookahead: int) -> tuple[Trained, list[float]]:
    """The same on files that are all there."""
    config = make_config(folder, lookahead)
    config = replace(config, data=replace(config.data, shuffle=False), train=replace(config.train, log_every=1))
    return train(Trainer(config, here(), None))
