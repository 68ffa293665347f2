"""Two ranks agree: on a save that failed on one of them, and on damage that one of them found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import checkpoints
from tests.ranks.workers import RankPool
from tests.unit.distributed.checkpoints import flip_bit

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("failing", [0, 1])
def test_a_save_fails_on_all_ranks_or_on_none(two_ranks: RankPool, tmp_path: Path, failing: int):
    for said, after, valid in two_ranks.run(checkpoints.save_with_a_failing_rank, tmp_path, failing):
        assert said.startswith("step 2 could not be saved")
        assert f"(rank {failing}: No space left on device)" in said
        assert after == ["step_1"]
        assert valid == ["step_1", "step_3"]


def test_damage_in_one_rank_s_share_is_refused_by_all(two_ranks: RankPool, tmp_path: Path):
    two_ranks.run(checkpoints.save_with_a_failing_rank, tmp_path, 1)
    checkpoint = tmp_path / "step_3"
    assert two_ranks.run(checkpoints.verify, checkpoint) == ["", ""]
    flip_bit(checkpoint / "scalars.json", checkpoint)
    first, second = two_ranks.run(checkpoints.verify, checkpoint)
    assert first == second
    assert "scalars.json: its bytes 0 to" in first
    found = [two_ranks.run(checkpoints.verify, checkpoint, blind) for blind in (0, 1)]
    assert sorted(map(any, found)) == [False, True]  # one rank alone has the damaged block in its share
