"""Which tables can exchange distinct rows, and how the pooling weighs them; training is in `tests/ranks`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard import CachedEmbeddingBagCollectionSharder
from embershard.errors import ConfigError, ShardingError
from embershard.sharding.torchrec.modes.rows_exchange import RowsExchangeMode, RowsInput, RowsShardingInfo
from tests.unit.sharding.plans import small_plan


def info(name: str, columns: tuple[int, ...] = (16,)) -> Any:
    shards = [SimpleNamespace(shard_sizes=[100, count]) for count in columns]
    return SimpleNamespace(
        embedding_config=SimpleNamespace(name=name),
        param_sharding=SimpleNamespace(sharding_spec=SimpleNamespace(shards=shards)),
        param=None,
        fused_params={},
    )


def group_rows(infos: dict[str, list[Any]], rows_tables: str) -> dict[str, list[Any]]:
    tables = [SimpleNamespace(table=name, exchange="rows") for name in rows_tables]
    mode = RowsExchangeMode({"exchange": "pooled", "plan": SimpleNamespace(tables=tables)})
    return mode.group(infos, spec=None, is_sequence=False)


def test_tables_that_exchange_rows_are_grouped_by_type_and_columns():
    infos = {
        "table_wise": [info("a"), info("b"), info("c", (8,)), info("d")],
        "row_wise": [info("e", (16, 16))],
        "data_parallel": [info("f")],
    }
    grouped = group_rows(infos, "bcdef")
    names = {key: [member.embedding_config.name for member in members] for key, members in grouped.items()}
    assert names == {
        "table_wise": ["a"],
        "table_wise, rows of 16": ["b", "d"],
        "table_wise, rows of 8": ["c"],
        "row_wise, rows of 16": ["e"],
        "data_parallel": ["f"],
    }
    are_rows = {key: isinstance(members[0], RowsShardingInfo) for key, members in grouped.items()}
    assert [key for key, is_rows in are_rows.items() if is_rows] == [key for key in names if "rows of" in key]


def test_what_cannot_exchange_rows_is_refused():
    with pytest.raises(ConfigError, match="table 'a': exchange \"rows\" with sharding 'grid_shard'; needed one of"):
        group_rows({"grid_shard": [info("a")]}, "a")
    with pytest.raises(ConfigError, match=r"table 'a': .* needs column shards of equal size, got \[4, 12\]"):
        group_rows({"column_wise": [info("a", (12, 4))]}, "a")


def test_the_sharder_s_setting():
    sharder = CachedEmbeddingBagCollectionSharder(exchange="rows")
    assert sharder.sharding_types("cpu") == [
        "data_parallel", "table_wise", "row_wise", "column_wise", "table_column_wise",
    ]  # fmt: skip
    assert "grid_shard" in CachedEmbeddingBagCollectionSharder().sharding_types("cpu")
    with pytest.raises(ConfigError, match="exchange: got 'auto', needed one of pooled, rows"):
        CachedEmbeddingBagCollectionSharder(exchange="auto")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="exchange='rows' has no effect with a plan"):
        CachedEmbeddingBagCollectionSharder(exchange="rows", plan=small_plan())


class _Sent(nn.Module):
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return features


def test_distinct_ids_of_a_table_are_its_first_feature_s():
    """Two features look into the first table; the second table's bags are averaged."""
    features = KeyedJaggedTensor(
        ["a", "b", "c"],
        torch.tensor([7, 5, 7, 7, 9, 1, 1]),
        lengths=torch.tensor([2, 1, 0, 2, 2, 0], dtype=torch.int32),
    )
    exchange = RowsInput(_Sent(), [2, 1], [False, False, True])
    sent = exchange(features)
    assert (sent.stride(), sent.lengths().tolist(), sent.values().tolist()) == (1, [3, 0, 1], [7, 5, 9, 1])
    bags = exchange.take_context().bags
    rows = torch.tensor([[7.0, 70.0], [5.0, 50.0], [9.0, 90.0], [1.0, 10.0]])
    assert bags.pool(rows).tolist() == [[12.0, 120.0, 0.0, 0.0, 1.0, 10.0], [7.0, 70.0, 16.0, 160.0, 0.0, 0.0]]


def test_features_with_other_numbers_of_samples_are_refused():
    features = KeyedJaggedTensor(
        ["a", "b"], torch.arange(3), lengths=torch.ones(3, dtype=torch.int32), stride_per_key_per_rank=[[1], [2]]
    )
    with pytest.raises(ShardingError, match="features differ in their number of samples"):
        RowsInput(_Sent(), [1, 1], [False, False])(features)
