"""Two ranks keep the same checkpoint and end in the same step, by the figures of the first one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import best_model
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks


def test_ranks_decide_alike(two_ranks: RankPool, tmp_path: Path):
    first, second = two_ranks.run(best_model.train, tmp_path)
    assert first == second
    whole, resumed = first
    assert whole == (8, True, 4, True, ["step_4", "step_8"])
    assert resumed == (8, False, 4, True, ["step_4", "step_8"])
