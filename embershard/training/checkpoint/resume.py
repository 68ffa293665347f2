"""Which checkpoint a run goes on from: the newest valid one, or the one asked for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from embershard.distributed import set_aside
from embershard.distributed.checkpoint.best import BEST
from embershard.distributed.checkpoint.folder import checkpoints_for
from embershard.distributed.checkpoint.load import newest_valid
from embershard.errors import CheckpointError, InvalidCheckpointError
from embershard.training.checkpoint.saved_run import SettingsComparison
from embershard.training.trainer import Trainer


@dataclass(frozen=True)
class Resumed:
    """What a run was resumed from.

    Attributes:
        checkpoint: None when there was none, and the run starts at its beginning.
        is_verified: False for a checkpoint without a manifest.
        skipped: why newer checkpoints were not used, as sentences without a full stop.
        set_aside: new names of the checkpoints after it.
        comparison: of its settings with those of the run that goes on; None without a checkpoint.
    """

    checkpoint: Path | None = None
    is_verified: bool = True
    skipped: tuple[str, ...] = ()
    set_aside: tuple[str, ...] = ()
    comparison: SettingsComparison | None = None


def resume_run(
    trainer: Trainer,
    *,
    step: int | None = None,
    allow_unverified: bool = False,
    allow_changes: Collection[str] = (),
) -> Resumed:
    """Resume from the newest valid checkpoint, or from that of `step`. All ranks call it, and agree.

    Checkpoints after that one are renamed: the run saves under their names again.

    Args:
        step: only this one; an invalid one is an error then.
        allow_unverified: also take checkpoints without a manifest.
        allow_changes: settings that may have other values than in the checkpoint.

    Raises:
        InvalidCheckpointError: no checkpoint is valid, or that of `step` is not.
        CheckpointError: there is none of `step`, or the one to use is of another model or run.
    """
    folder, ranks = trainer.checkpoints, trainer.ranks
    if folder is None:
        raise CheckpointError("This run has no folder for checkpoints; make the trainer with one.")
    candidates = ranks.from_first(lambda: checkpoints_for(folder, step))
    resume = partial(trainer.resume, allow_unverified=allow_unverified, allow_changes=allow_changes)
    used, skipped = newest_valid(candidates, resume)
    if used is not None:
        checkpoint, (is_verified, comparison) = used
        after = ranks.from_first(lambda: set_aside(folder, trainer.steps))
        return Resumed(checkpoint, is_verified, tuple(skipped), tuple(after), comparison)
    if skipped:
        which = "the only one" if len(skipped) == 1 else f"none of {len(skipped)}"
        asked = "" if step is None else ", and only it was asked for (--resume alone takes the newest valid one)"
        raise InvalidCheckpointError(
            f"No valid checkpoint to resume from, {which}: {'; '.join(skipped)}{asked}. Start again with another "
            "--run-dir. A checkpoint without a manifest, as earlier versions wrote, is used with --unverified."
        )
    ranks.from_first(lambda: (folder / BEST).unlink(missing_ok=True))  # its checkpoint is gone
    for part in trainer.parts:
        part.start_again()
    return Resumed()
