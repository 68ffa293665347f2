"""Two ranks, of which one has a loss that is not finite: both skip its batch, or both stop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embershard.errors import NotFiniteError
from tests.covering import matrix
from tests.ranks.planned import here
from tests.ranks.workers import RankPool
from tests.unit.training.poisoned import config_of, losses, run

pytestmark = pytest.mark.ranks


def skip_batches(bad_rank: int, cache: str, left_out: set[int]) -> tuple[bool, list[str], list[str]]:
    """Train while `bad_rank` has a poisoned batch, and without these batches: are the losses equal, which tensors
    differ, and what this rank said of the skipped batches."""
    ranks = here()
    config, bad = config_of(cache, batch_size=50), {2, 7, 12}
    reports, state, _ = run(config, ranks, poisoned=bad if ranks.rank == bad_rank else ())
    without, expected, _ = run(config, ranks, left_out=left_out)
    different = [name for name, values in state.items() if not torch.equal(values, expected[name])]
    return losses(reports) == losses(without), different, [r.reason for r in reports if hasattr(r, "reason")]


def stop(folder: Path, bad_rank: int) -> str:
    """Train until `bad_rank` has a poisoned batch; return the error."""
    ranks = here()
    try:
        run(config_of("cached", "stop", batch_size=50), ranks, folder, poisoned={7} if ranks.rank == bad_rank else ())
    except NotFiniteError as error:
        return str(error)
    return ""


BAD = {2, 7, 12}


@pytest.mark.parametrize(("bad_rank", "cache"), [matrix(0, "resident"), matrix(1, "cached"), (0, "look-ahead")])
def test_both_ranks_skip_the_batch(two_ranks: RankPool, bad_rank: int, cache: str):
    expected = [f"Step {step}: the loss of rank {bad_rank} is nan." for step in (2, 6, 10)]
    for is_equal, different, said in two_ranks.run(skip_batches, bad_rank, cache, BAD):
        assert is_equal
        assert different == []
        assert said == expected


@pytest.mark.matrix
def test_a_batch_more_or_less_is_noticed(two_ranks: RankPool):
    for is_equal, different, _ in two_ranks.run(skip_batches, 1, "cached", BAD - {7}):
        assert not is_equal
        assert different


def test_both_ranks_stop_and_name_the_batch(two_ranks: RankPool, tmp_path: Path):
    first, second = two_ranks.run(stop, tmp_path / "checkpoints", 1)
    assert first == second
    file = tmp_path / "non_finite" / "step_7_rank_1.pt"
    assert first.startswith(f"Step 7: the loss of rank 1 is nan. Its batch is in {file}. ")
    assert first.endswith("step_5.")
    assert torch.load(file, weights_only=True)["rank"] == 1
