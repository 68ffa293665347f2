"""Hot ids are told from cold ones; training is in `tests/ranks`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard import CachedEmbeddingBagCollectionSharder
from embershard.cache.gpu.key_map import PlacedHashedMap
from embershard.errors import ConfigError
from embershard.extras.hot_cold import mode as hot_cold
from embershard.extras.hot_cold.hot_tables import HotTable
from embershard.extras.hot_cold.mode import HotIds

pytestmark = pytest.mark.extra

CPU = torch.device("cpu")


def table(name: str, num_rows: int, hot: list[int]) -> HotTable:
    return HotTable(name, num_rows, torch.tensor(hot, dtype=torch.int64), ((0, 4),), DataType.FP32, {})


TABLES = [table("a", 6, [1, 4]), table("b", 9, []), table("c", 3, [0, 1, 2])]
FEATURES = {"a1": "a", "a2": "a", "b": "b", "c": "c"}


@given(
    lengths=st.lists(st.integers(0, 3), min_size=8, max_size=8), seed=st.integers(0, 99), weighted=st.booleans(),
    order=st.permutations(sorted(FEATURES)),
)  # fmt: skip
def test_every_id_is_in_its_bag_of_one_part(lengths, seed, weighted, order):
    generator = torch.Generator().manual_seed(seed)
    rows = {found.name: found for found in TABLES}
    per_feature = torch.tensor(lengths).view(4, 2)
    limits = [rows[FEATURES[name]].num_rows for name in order]
    counts = per_feature.sum(dim=1).tolist()
    values = [torch.randint(0, most, (n,), generator=generator) for most, n in zip(limits, counts, strict=True)]
    ids = torch.cat(values)
    weights = torch.arange(len(ids)) + 0.5 if weighted else None
    given_ids = KeyedJaggedTensor(list(order), ids, weights, lengths=torch.tensor(lengths))
    cold, hot = HotIds(TABLES, FEATURES, CPU).split(given_ids)
    all_hot = torch.cat([found.hot for found in TABLES])
    for name in order:
        is_hot = torch.isin(given_ids[name].values(), rows[FEATURES[name]].hot)
        assert torch.equal(cold[name].values(), given_ids[name].values()[~is_hot])
        assert torch.equal(all_hot[hot[name].values()], given_ids[name].values()[is_hot])
        assert torch.equal(cold[name].lengths() + hot[name].lengths(), given_ids[name].lengths())
        bags = torch.repeat_interleave(torch.arange(2), given_ids[name].lengths())
        assert hot[name].lengths().tolist() == torch.bincount(bags[is_hot], minlength=2).tolist()
        if weighted:
            assert torch.equal(cold[name].weights(), given_ids[name].weights()[~is_hot])
            assert torch.equal(hot[name].weights(), given_ids[name].weights()[is_hot])


def test_large_tables_on_a_gpu_have_a_hashed_map(monkeypatch):
    ids = KeyedJaggedTensor(["c", "a1"], torch.tensor([2, 5, 4]), lengths=torch.tensor([1, 2]))
    expected = [part.values().tolist() for part in HotIds(TABLES, FEATURES, CPU).split(ids)]
    monkeypatch.setattr(hot_cold, "map_kind", lambda *_: "hashed")
    hashed = HotIds(TABLES, FEATURES, CPU)
    assert isinstance(hashed._numbers, PlacedHashedMap)
    assert [part.values().tolist() for part in hashed.split(ids)] == expected


@pytest.mark.parametrize("rows", [[3, 3], [-1]])
def test_hot_rows_are_distinct_rows(rows):
    with pytest.raises(ConfigError, match="hot_rows of table 'a'"):
        CachedEmbeddingBagCollectionSharder(hot_rows={"a": torch.tensor(rows)})
