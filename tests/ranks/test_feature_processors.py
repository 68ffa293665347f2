"""Feature processors work with the cached sharder inside of TorchRec's sharder for them."""

from __future__ import annotations

import pytest

from tests.ranks import feature_processors
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(("sharding", "pipelined"), [("table_wise", False), ("row_wise", True)])
def test_weights_of_positions_train_as_in_torchrec(two_ranks: RankPool, sharding: str, pipelined: bool) -> None:
    for found in two_ranks.run(feature_processors.cached_and_stock, sharding, 20, pipelined):
        assert found["same losses"]
        assert found["different"] == []
        assert found["weights of positions"] == [feature_processors.MOST_IDS] * 2  # they begin at 1
        assert sum(found["evictions"]) > 0
