"""Two ranks agree: on a save that failed on one of them, and on damage that one of them found."""

from __future__ import annotations

import errno
from pathlib import Path
from unittest import mock

import pytest
import torch

from embershard.distributed import complete_checkpoints, save_checkpoint, verify_checkpoint
from embershard.distributed.checkpoint import digests
from embershard.errors import CheckpointError, FailedSaveError
from tests.covering import keep
from tests.ranks.planned import here
from tests.ranks.workers import RankPool
from tests.unit.distributed.checkpoints import flip_bit

pytestmark = pytest.mark.ranks


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


@pytest.mark.parametrize("failing", keep([1], [0, 1]))
def test_a_save_fails_on_all_ranks_or_on_none(two_ranks: RankPool, tmp_path: Path, failing: int):
    for said, after, valid in two_ranks.run(save_with_a_failing_rank, tmp_path, failing):
        assert said.startswith("step 2 could not be saved")
        assert f"(rank {failing}: No space left on device)" in said
        assert after == ["step_1"]
        assert valid == ["step_1", "step_3"]


def test_damage_in_one_rank_s_share_is_refused_by_all(two_ranks: RankPool, tmp_path: Path):
    two_ranks.run(save_with_a_failing_rank, tmp_path, 1)
    checkpoint = tmp_path / "step_3"
    assert two_ranks.run(verify, checkpoint) == ["", ""]
    flip_bit(checkpoint / "scalars.json", checkpoint)
    first, second = two_ranks.run(verify, checkpoint)
    assert first == second
    assert "scalars.json: its bytes 0 to" in first
    found = [two_ranks.run(verify, checkpoint, blind) for blind in (0, 1)]
    assert sorted(map(any, found)) == [False, True]  # one rank alone has the damaged block in its share
