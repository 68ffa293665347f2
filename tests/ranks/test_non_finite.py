"""Two ranks, of which one has a loss that is not finite: both skip its batch, or both stop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.covering import matrix
from tests.ranks import non_finite
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks
BAD = {2, 7, 12}


@pytest.mark.parametrize(("bad_rank", "cache"), [matrix(0, "resident"), (1, "cached"), (0, "look-ahead")])
def test_both_ranks_skip_the_batch(two_ranks: RankPool, bad_rank: int, cache: str):
    expected = [f"Step {step}: the loss of rank {bad_rank} is nan." for step in (2, 6, 10)]
    for is_equal, different, said in two_ranks.run(non_finite.skip_batches, bad_rank, cache, BAD):
        assert is_equal
        assert different == []
        assert said == expected


def test_a_batch_more_or_less_is_noticed(two_ranks: RankPool):
    for is_equal, different, _ in two_ranks.run(non_finite.skip_batches, 1, "cached", BAD - {7}):
        assert not is_equal
        assert different


def test_both_ranks_stop_and_name_the_batch(two_ranks: RankPool, tmp_path: Path):
    first, second = two_ranks.run(non_finite.stop, tmp_path / "checkpoints", 1)
    assert first == second
    file = tmp_path / "non_finite" / "step_7_rank_1.pt"
    assert first.startswith(f"Step 7: the loss of rank 1 is nan. Its batch is in {file}. ")
    assert first.endswith("step_5.")
    assert torch.load(file, weights_only=True)["rank"] == 1
