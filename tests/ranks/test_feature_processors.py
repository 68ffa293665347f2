"""Feature processors work with the cached sharder inside of TorchRec's sharder for them."""

from __future__ import annotations

import pytest

from tests.ranks import feature_processors
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("ranks", "sharding", "pipelined"),
    [("one_rank", "table_wise", True), ("two_ranks", "table_wise", False), ("two_ranks", "row_wise", True)],
)
def test_weights_of_positions_train_as_in_torchrec(
    request: pytest.FixtureRequest, ranks: str, sharding: str, pipelined: bool
) -> None:
    pool: RankPool = request.getfixturevalue(ranks)
    for found in pool.run(feature_processors.cached_and_stock, sharding, 20, pipelined):
        assert found["same losses"]
        assert found["different"] == []
        assert found["weights of positions"] == [feature_processors.MOST_IDS] * 2  # they begin at 1
        assert sum(found["evictions"]) > 0


@pytest.mark.parametrize("weights_train", [False, True])
@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_weights_of_ids_have_the_gradients_of_torchrec(
    request: pytest.FixtureRequest, ranks: str, weights_train: bool
) -> None:
    """Several ranks exchange weights without their gradients: TorchRec has none there, either."""
    pool: RankPool = request.getfixturevalue(ranks)
    for found in pool.run(feature_processors.weight_gradients, 6, weights_train):
        assert found["different"] == []
        assert found["compared"] == 4
        assert found["gradients"] == found["stock has them"] == [weights_train and ranks == "one_rank"] * 6


def test_modes_that_cut_bags_refuse_them(two_ranks: RankPool) -> None:
    for said in two_ranks.run(feature_processors.refusals):
        plans = [text for text in said if text.startswith("ShardingError: FeatureProcessed")]
        assert [text.rpartition("Leave ")[2] for text in plans] == [
            'exchange="rows" out',
            "hot_rows out",
            'mode="data_parallel" out',
        ]
        others = [text for text in said if text not in plans]
        assert [text.partition(": ")[0] for text in others] == ["ConfigError"] * 3
        assert "exchange of distinct rows: the tables of ['viewed', 'bought'] are weighted" in others[0]
        assert "hot rows on every rank: the tables of ['viewed', 'bought'] are weighted" in others[1]
