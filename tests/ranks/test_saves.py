"""Two ranks save while they train: the state of the step; a failure of one is that of all, in the same step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.covering import matrix
from tests.ranks import saves
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("lookahead", [matrix(0), 16])
def test_the_state_of_its_step(two_ranks: RankPool, tmp_path: Path, lookahead: int):
    found = two_ranks.run(saves.compare, tmp_path, lookahead)
    assert [different for different, _, _ in found] == [[], []]
    assert sum(aside for _, aside, _ in found) > 0
    reported = {step for _, _, step in found}
    assert len(reported) == 1
    assert min(step or 0 for step in reported) > saves.EVERY


@pytest.mark.matrix
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_reported_in_the_same_step(two_ranks: RankPool, tmp_path: Path, failing: int):
    first, second = two_ranks.run(saves.fail, tmp_path, failing, "continue")
    assert first == second
    failed, said, left = first
    assert [step for step, _ in failed] == [6]
    assert (said.partition(" could")[0], left) == ("12: step 12", [])  # at the end it is an error
    first, second = two_ranks.run(saves.fail, tmp_path, failing, "stop")
    assert first == second
    assert f"(rank {failing}: No space left on device)" in first[1]
