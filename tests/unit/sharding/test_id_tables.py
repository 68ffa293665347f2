"""Tables of ids: what the sharders refuse, and what they do with features before the all-to-all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.planner import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard import (
    CachedEmbeddingBagCollectionSharder,
    CachedEmbeddingCollectionSharder,
    FrequencyProfile,
    IdTable,
    plan_sharding,
)
from embershard.cache.config import CachePolicy
from embershard.cache.homes.memory import MemoryRows
from embershard.cache.homes.shape import PoolShape
from embershard.cache.ids.id_map import IdMap, mixed
from embershard.cache.row_cache import RowCache
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.errors import CacheError, ConfigError, IdOutOfRangeError
from embershard.sharding.torchrec.feature_keys import FeatureIds
from embershard.sharding.torchrec.ids.id_shardings import group_ids, mixed_ids
from embershard.sharding.torchrec.ids.id_tables import PoolIdMaps
from embershard.sharding.torchrec.modules import check_any_ids, check_bounds
from embershard.sharding.torchrec.spec import RAW_IDS_KEY
from tests.oracle.id_dictionary import mix
from tests.unit.cache.rows.test_initial_weights import weights_of_id

IDS = {"users": IdTable()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "ids without init_seed"),
        ({"init_seed": 1, "exchange": "rows"}, 'ids with exchange="rows"'),
        ({"init_seed": 1, "mode": "data_parallel"}, 'ids with mode="data_parallel"'),
        ({"init_seed": 1, "hot_rows": {"users": torch.tensor([1])}}, "ids with hot_rows"),
        ({"init_seed": 1, "profile": FrequencyProfile.count([], {"users": 9})}, "ids with a profile"),
        ({"init_seed": 1, "ids": {"users": 1000}}, "ids of table 'users': got 1000, needed an IdTable"),
    ],
)
def test_what_excludes_ids(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CachedEmbeddingBagCollectionSharder(**{"ids": IDS, **arguments})


def test_sequences_need_a_seed_too() -> None:
    with pytest.raises(ConfigError, match="ids without init_seed"):
        CachedEmbeddingCollectionSharder(ids=IDS)


def test_a_plan_places_them_whole_or_by_rows() -> None:
    """A table of rows may be cut in any way; the planner would cut this one by columns."""
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=64, num_embeddings=240, feature_names=[name]) for name in "ab"
    ]
    model = torch.nn.ModuleDict({"bags": EmbeddingBagCollection(tables, device=torch.device("meta"))})
    sharder = CachedEmbeddingBagCollectionSharder(init_seed=1, ids={"a": IdTable()})
    by_columns = {"b": ParameterConstraints(sharding_types=["column_wise"])}
    plan = plan_sharding(model, [sharder], world_size=2, local_world_size=2, device="cpu", constraints=by_columns)
    assert plan.plan["bags"]["a"].sharding_type in ("table_wise", "row_wise")  # type: ignore[index]


def test_a_plan_refuses_more_rows_than_such_a_table_can_have() -> None:
    """Each of two ranks could number its half of a table of rows."""
    tables = [EmbeddingBagConfig(name="a", embedding_dim=8, num_embeddings=240 * 2**24, feature_names=["a"])]
    model = torch.nn.ModuleDict({"bags": EmbeddingBagCollection(tables, device=torch.device("meta"))})
    sharder = CachedEmbeddingBagCollectionSharder(init_seed=1, ids={"a": IdTable()})
    with pytest.raises(ConfigError, match=r"table 'a': got 4026531840 rows in 240 buckets.*to 2147483647"):
        plan_sharding(model, [sharder], world_size=2, local_world_size=2, device="cpu")


FEATURES = KeyedJaggedTensor(
    ["user", "item"], torch.tensor([2**63 - 1, -7, 3], dtype=torch.int64), lengths=torch.tensor([1, 1, 0, 1])
)


def test_any_id_passes_and_rows_are_checked_as_ever() -> None:
    check_bounds(FEATURES, {"item": ("items", 4)})
    check_any_ids(FEATURES, {"user": "users"})
    with pytest.raises(IdOutOfRangeError, match="table 'items', feature 'item': id 3 at position 0"):
        check_bounds(FEATURES, {"item": ("items", 3)})
    reserved = KeyedJaggedTensor(["item", "user"], torch.tensor([1, 5, -(2**63)]), lengths=torch.tensor([1, 2]))
    with pytest.raises(
        IdOutOfRangeError, match=r"table 'users', feature 'user': id -9223372036854775808 at position 1"
    ):
        check_any_ids(reserved, {"user": "users"})
    check_any_ids(reserved, {"item": "items"})


def test_ids_are_mixed_in_a_copy_of_their_features() -> None:
    before = FEATURES.values().clone()
    found = mixed_ids(FEATURES)
    assert found.values().tolist() == [mix(2**63 - 1), mix(-7), mix(3)]
    assert found["user"].values().tolist() == [mix(2**63 - 1), mix(-7)]
    assert torch.equal(FEATURES.values(), before)
    narrow = KeyedJaggedTensor(["user"], torch.tensor([4], dtype=torch.int32), lengths=torch.tensor([1]))
    assert mixed_ids(narrow).values().tolist() == [mix(4)]


@pytest.mark.parametrize("place", ["table_wise", "row_wise"])
def test_whole_tables_share_the_exchange_of_the_others(place: str) -> None:
    """In one group by sharding type, and not in one pool. Row-wise ones have an exchange that takes buckets."""
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=240 * 8, feature_names=[name])
        for name in ("pages", "users")
    ]
    bags = EmbeddingBagCollection(tables, device=torch.device("meta"))
    sharder = CachedEmbeddingBagCollectionSharder(init_seed=1, ids=IDS)
    places = {name: ParameterConstraints(sharding_types=[place]) for name in ("pages", "users")}
    plan = plan_sharding(
        torch.nn.ModuleDict({"bags": bags}),
        [sharder],
        world_size=2,
        local_world_size=2,
        device="cpu",
        constraints=places,
    )
    params: Any = plan.plan["bags"]
    infos = [
        EmbeddingShardingInfo(table, params[table.name], bags.embedding_bags[table.name].weight) for table in tables
    ]
    grouped = group_ids({place: infos}, IDS)
    names = {kind: [info.embedding_config.name for info in group] for kind, group in grouped.items()}
    if place == "table_wise":
        assert names == {place: ["pages", "users"]}
        assert [RAW_IDS_KEY in (info.fused_params or {}) for info in grouped[place]] == [False, True]
    else:
        assert names == {place: ["pages"], "row_wise, ids": ["users"]}


def test_a_pool_mixes_raw_ids_and_no_others() -> None:
    numbers = np.array([7, -5, 7, 2**62])
    found = []
    for are_raw in (True, False):
        maps, _ = make_maps(quarantine=4, are_raw=are_raw)
        batch = FeatureIds(torch.from_numpy(numbers if are_raw else mixed(numbers)), torch.tensor([0, 4]))
        ticket = maps.prepare(batch, True, maps.know(batch)[0], False)
        assert ticket is not None
        maps.begin(ticket)
        found.append((maps.find(batch).tolist(), maps.maps[0].owners(np.arange(1, 4)).tolist()))
    assert found[0] == found[1]
    assert sorted(found[0][1]) == [-5, 7, 2**62]


def make_maps(quarantine: int, look_ahead: bool = False, are_raw: bool = False) -> tuple[PoolIdMaps, RowCache]:
    """A pool of one table: a bucket of 8 rows, of which evictions keep 4 free."""
    rules = IdTable(buckets=1, quarantine=quarantine, reserve=0.5)
    host = MemoryRows(PoolShape([8], 4, initial=[ShardWeights("users", 1, 4, -1.0, 1.0)]))
    policy = CachePolicy("lru", by_next_use=look_ahead)
    cache = RowCache(["users"], host, lambda count: [torch.zeros(count + 1, 4)], 8, [0], policy, torch.device("cpu"))
    ids_map = IdMap("users", rules, rules.buckets_of("users", 8), 1)
    return PoolIdMaps([ids_map], [0], [0], cache, are_raw), cache


def ids(*numbers: int) -> FeatureIds:
    return FeatureIds(torch.from_numpy(mixed(np.array(numbers, np.int64))), torch.tensor([0, len(numbers)]))


def test_a_row_is_not_given_away_before_the_batch_that_took_it_has_begun() -> None:
    """A pipeline waits; TorchRec's prefetch, which cannot, gets an error that names the setting."""
    maps, _ = make_maps(quarantine=1)
    batches = [ids(1, 2), ids(3, 4), ids(5, 6), ids(7, 8), ids(9, 10)]
    known = [maps.know(batch)[0] for batch in batches]
    assert [each.evicted_in for each in known][-1] > 1
    late = next(number for number, each in enumerate(known) if each.evicted_in > 1)
    tickets = [maps.prepare(batches[n], True, known[n], True) for n in range(1)]
    maps.begin(tickets[0])
    assert maps.prepare(batches[late], False, known[late], True) is None
    with pytest.raises(CacheError, match="Give IdTable a longer quarantine: at least one more than"):
        maps.prepare(batches[late], False, known[late], False)


def test_a_part_of_an_update_that_has_begun_waits_for_no_later_one() -> None:
    """Nor do ids of later updates, which are known, get their rows before them."""
    maps, _ = make_maps(quarantine=1)
    parts = maps.know(ids(1, 2), ids(2, 1))
    later = [maps.know(ids(*numbers))[0] for numbers in ((3, 4), (5, 6), (7, 8), (9, 10))]
    for part, batch in zip(parts, (ids(1, 2), ids(2, 1)), strict=True):
        ticket = maps.prepare(batch, True, part, False)
        assert ticket is not None
        assert maps.begin(ticket) is False
    assert maps.maps[0].committed == 1
    assert not any(each.has_begun for each in later)


def test_a_batch_that_was_taken_back_cannot_train() -> None:
    maps, cache = make_maps(quarantine=4)
    batch = ids(1, 2)
    ticket = maps.prepare(batch, True, None, False)
    assert ticket is not None
    cache.cancel(forwarded=False)
    maps.forget()
    with pytest.raises(CacheError, match="the ids of this batch were taken back since it was prepared"):
        maps.begin(ticket)
    again = maps.prepare(batch, True, None, False)
    assert again is not None
    assert maps.begin(again) is False
    assert maps.maps[0].counts.admitted == 2


def test_rows_of_a_batch_that_is_passed_over_begin_anew() -> None:
    """Known, and only evaluated: the next batch finds its ids in rows with their own weights."""
    maps, cache = make_maps(quarantine=4, look_ahead=True)
    passed = maps.know(ids(1, 2))[0]
    assert passed.births is not None
    maps.skip(ids(1, 2), passed)
    ticket = maps.prepare(ids(2), True, None, False)
    assert ticket is not None
    maps.begin(ticket)
    expected = torch.stack([weights_of_id(ShardWeights("users", 1, 4, -1.0, 1.0), mix(number)) for number in (1, 2)])
    assert torch.equal(cache.read(maps.find(ids(1, 2))), expected)
