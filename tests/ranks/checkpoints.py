"""What ranks do together to a checkpoint: one of them fails, or finds damage."""

from __future__ import annotations

import errno
from pathlib import Path
from unittest import mock

import torch

from embershard.distributed import complete_checkpoints, save_checkpoint, verify_checkpoint
from embershard.distributed.checkpoint import digests
from embershard.errors import CheckpointError, FailedSaveError
from tests.ranks.planned import here


def save_with_a_failing_rank(folder: Path, failing: int) -> tuple[str, list[str], list[str]]:
    """Save step 1, then step 2 while a rank's disk is full, then step 3: the error and the folder after 2 and 3."""
    ranks = here()

    def save(step: int) -> None:
        tensors = {f"of_rank_{ranks.rank}": torch.full((1000,), float(step))}
        save_checkpoint(folder, step, tensors, {}, ranks, keep_last=9, run_id="run")

    save(1)
    full = OSError(errno.ENOSPC, "No space left on device")
    patched = mock.patch.object(digests._DigestedFile, "write", side_effect=full)
    with patched if ranks.rank == failing else mock.patch.object(digests, "_unused", create=True):
        try:
            save(2)
            said = "saved"
        except FailedSaveError as error:
            said = str(error)
    after = sorted(path.name for path in folder.iterdir())
    ranks.barrier()
    save(3)
    return said, after, [path.name for path in complete_checkpoints(folder) if verify_checkpoint(path, ranks)]


def verify(checkpoint: Path, blind: int | None = None) -> str:
    """Verify; the `blind` rank finds nothing. What was wrong, or ''."""
    ranks = here()
    patched = mock.patch.object(digests, "_unused", create=True)
    if ranks.rank == blind:
        patched = mock.patch("embershard.distributed.checkpoint.manifest.Manifest.damage", return_value=None)
    with patched:
        try:
            verify_checkpoint(checkpoint, ranks)
        except CheckpointError as error:
            return str(error)
    return ""
