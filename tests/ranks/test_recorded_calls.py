"""Several ranks whose dense part is recorded and repeated without Python train the bits of stock TorchRec."""

from __future__ import annotations

from pathlib import Path

import pytest

from embershard.training.config import RunConfig
from tests.covering import matrix
from tests.ranks.test_dense_call import beside_stock
from tests.ranks.workers import RankPool
from tests.unit.training.dense_models import config_of, samples_in
from tests.unit.training.recorded import calls_recorded

pytestmark = [pytest.mark.ranks, pytest.mark.extra]


def recorded_beside_stock(config: RunConfig) -> tuple[bool, str, int, int]:
    with calls_recorded():
        return beside_stock(config)


@pytest.mark.smoke
@pytest.mark.parametrize("ranks", [2, matrix(4)])
def test_the_bits_of_recorded_calls_are_stocks(ranks: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """One that Python computes, one that warms up, and the recorded one."""
    pool: RankPool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks])
    config = config_of("dlrm, adam", samples_in(tmp_path))
    for is_equal, verdict, computed, trainings in pool.run(recorded_beside_stock, config):
        assert is_equal, verdict
        assert computed == 3 * trainings
