"""What the training thread does in a step, exactly, and less than in stock TorchRec's. A change of these numbers is one
of the host's time: write the new ones here."""

from __future__ import annotations

import sys

import pytest

from tests.ranks import step_counts
from tests.ranks.step_counts import STEPS
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks


def per_step(counts: dict[str, int], frames: float) -> dict[str, float]:
    """What one step does; its frames of Python as they were counted, where another version has others."""
    found = {name: count / STEPS for name, count in counts.items()}
    return found if sys.version_info[:3] == (3, 11, 7) else {**found, "frames": frames}


def test_a_step_of_one_rank(one_rank: RankPool) -> None:
    (ours,), (stock,) = one_rank.run(step_counts.ours), one_rank.run(step_counts.stock)
    frames = 7691 / STEPS
    assert per_step(ours, frames) == {"operations": 252, "frames": frames, "reads": 2}
    assert ours["operations"] < stock["operations"]
    assert stock["reads"] / STEPS == 9


def test_a_step_of_two_ranks(two_ranks: RankPool) -> None:
    found, (stock, _) = two_ranks.run(step_counts.ours), two_ranks.run(step_counts.stock)
    frames = 8143 / STEPS
    for ours in found:
        assert per_step(ours, frames) == {
            "operations": 295,
            "alltoall_base_": 3,  # ids, rows and their gradients
            "allreduce_": 2,  # the agreement on the next batch, and the dense gradients
            "frames": frames,
            "reads": 2,
        }
        assert all(ours[name] < stock[name] for name in ("operations", "alltoall_base_", "frames", "reads"))
    assert stock["reads"] / STEPS == 10


def test_a_further_read_is_counted(two_ranks: RankPool) -> None:
    for ours, more in zip(two_ranks.run(step_counts.ours), two_ranks.run(step_counts.ours, True), strict=True):
        assert more["reads"] == ours["reads"] + STEPS
        assert more["operations"] > ours["operations"]
