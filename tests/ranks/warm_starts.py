"""Runs that begin with a checkpoint, as one rank of a pool of processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from embershard.data import StreamState
from embershard.distributed import CheckpointConfig
from embershard.settings.decoding import to_toml
from embershard.training.checkpoint.identity import ORDER
from embershard.training.trainer import Trainer
from embershard.training.warm.request import WarmStart
from tests.ranks.planned import here
from tests.ranks.resharding import Layout, config_of

SAVED_AT, MORE = 6, 4


def train(layout: Layout, folder: Path) -> None:
    """A run in `folder / "run"` that is saved at its end."""
    config = config_of(replace(layout, steps=SAVED_AT), folder)
    config = replace(config, checkpoint=CheckpointConfig())
    trainer = Trainer(config, here(), folder / "run" / "checkpoints")
    list(trainer.train())
    trainer.close()
    here().from_first(lambda: (folder / "run" / "config.toml").write_text(to_toml(config)))


def go_on(layout: Layout, folder: Path, copy: Path, *, how: str, control: str = "") -> None:
    """Train `MORE` steps on the samples from the first one on, and save at the end.

    Args:
        how: "start": begin with the run; "resume": go on from it, and forget the position in the data.
        control: "states": a start forgets them.
    """
    resumes = how == "resume"
    config = config_of(replace(layout, steps=MORE + SAVED_AT * resumes), folder)
    config = replace(config, checkpoint=CheckpointConfig())
    without = ("optimizer",) if control == "states" else ()
    begin = WarmStart(folder / "run", without=without, keep_steps=True)
    options: dict[str, Any] = {} if resumes else {"start": begin}
    trainer = Trainer(config, here(), copy, **options)
    if resumes:
        trainer.resume(folder / "run" / "checkpoints" / f"step_{SAVED_AT}", allow_changes={ORDER})
        trainer.stream.close()
        trainer.stream = trainer._open_stream(StreamState(seed=config.data.seed))
    list(trainer.train())
    trainer.close()
