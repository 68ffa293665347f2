"""`id_rules`: tables that take any id, their rules, and what is refused before anything starts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embershard.cache import CacheConfig
from embershard.cache.ids.config import IdTable
from embershard.cache.ids.id_map import IdMap
from embershard.data import DataConfig, SyntheticConfig
from embershard.data.config import TableConfig, TableFeature
from embershard.errors import ConfigError
from embershard.frequency.config import ProfileConfig
from embershard.models import ModelConfig
from embershard.pipeline.config import LookAheadConfig
from embershard.settings.decoding import decode, to_toml
from embershard.settings.files import apply_override, load_config
from embershard.sharding.config import ShardingConfig
from embershard.training.checkpoint.identity import Change, changes, identity_of, refusal
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.fit.id_rules import id_rules, refuse_ids
from embershard.training.fit.memory_needs import RanksHere, memory_needs
from embershard.training.fit.model_size import model_size, table_rows

IDS = TableFeature("sparse", num_rows=480, mapping="ids")
AGE = TableFeature("dense")


def config_of(features: dict[str, TableFeature], **parts: Any) -> RunConfig:
    return RunConfig(data=DataConfig("table", "clicks/", table=TableConfig({"age": AGE, **features})), **parts)


def test_rules_are_by_feature():
    rules = {"user": IdTable(admit_after=2), "*": IdTable(eviction="lru")}
    features = {
        "user": IDS,
        "item": IDS,
        "seen": replace(IDS, table="item"),
        "city": TableFeature("sparse", num_rows=9),
    }
    assert id_rules(config_of(features, ids=rules)) == {"t_user": rules["user"], "t_item": rules["*"]}
    assert id_rules(config_of(features)) == {"t_user": IdTable(), "t_item": IdTable()}
    by_second = config_of(features, ids={"seen": IdTable(ttl_steps=5)})
    assert id_rules(by_second)["t_item"].ttl_steps == 5
    assert id_rules(RunConfig()) == {}


def test_generated_data_have_ids():
    config = RunConfig(data=DataConfig(synthetic=SyntheticConfig(id_rows=2400)))
    assert list(id_rules(config)) == ["t_C3", "t_C4", "t_C12", "t_C16", "t_C21", "t_C24"]


@pytest.mark.parametrize(
    ("features", "rules", "message"),
    [
        ({"user": IDS, "city": TableFeature("sparse", num_rows=9)}, {"city": IdTable()}, r"ids.city: .* one of user"),
        ({"user": IDS}, {"usr": IdTable()}, r"ids.usr: got no feature whose table takes any id"),
        ({"a": IDS, "b": replace(IDS, table="a")}, {"a": IdTable(), "b": IdTable()}, r"ids.a and ids.b: both"),
        ({"user": replace(IDS, num_rows=100)}, {}, r"table 't_user': got 100 rows in 24 buckets"),
        ({"user": IDS}, {"user": IdTable(buckets=7)}, r"got 480 rows in 7 buckets"),
    ],
)
def test_rules_that_do_not_fit(features, rules, message):
    with pytest.raises(ConfigError, match=message):
        id_rules(config_of(features, ids=rules))


def test_a_pair_of_target_and_history_is_of_one_kind():
    features = {"item": IDS, "past": replace(IDS, mapping="hash")}
    model = ModelConfig(arch="din", target=("item",), history=("past",))
    with pytest.raises(ConfigError, match=r"'item' and 'past' share table 't_item': got ids of one and rows"):
        id_rules(config_of(features, model=model))
    both = config_of(features | {"past": IDS}, model=model)
    assert list(id_rules(both)) == ["t_item"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"cache": CacheConfig(enabled=False)}, r"cache.enabled: got False, needed True"),
        ({"sharding": ShardingConfig(mode="data_parallel")}, r"sharding.mode: got 'data_parallel'"),
        ({"sharding": ShardingConfig(mode="hot_cold", hot_bytes=99)}, r"sharding.mode: got 'hot_cold'"),
        ({"sharding": ShardingConfig(exchange="rows")}, r"sharding.exchange: got 'rows', needed 'pooled'"),
        ({"train": TrainConfig(init="torchrec")}, r"train.init: got 'torchrec', needed 'counter'"),
        ({"train": TrainConfig(device="cuda")}, r"train.device: got \"cuda\", needed \"cpu\""),
        ({"train": TrainConfig(accumulate=2), "look_ahead": LookAheadConfig(0)}, r"lookahead: got 0, needed 1 or more"),
        ({"profile": ProfileConfig(samples=100)}, r"a profile counts rows"),
        ({"cache": CacheConfig(policy="frequency")}, r"a profile counts rows"),
    ],
)
def test_what_ids_exclude_is_refused_with_the_settings(parts, message):
    config_of({"user": replace(IDS, mapping="hash")}, **parts)
    with pytest.raises(ConfigError, match=message):
        config_of({"user": IDS}, **parts)


def test_rules_without_a_table_of_ids_have_no_effect():
    with pytest.raises(ConfigError, match=r"ids.user has no effect: no table takes any id"):
        RunConfig(ids={"user": IdTable()})


def test_settings_are_read_from_files_and_words(tmp_path: Path):
    path = tmp_path / "run.toml"
    config = RunConfig(data=DataConfig(synthetic=SyntheticConfig(id_rows=2400)), ids={"C3": IdTable(ttl_steps=9)})
    path.write_text(to_toml(config))
    assert load_config(RunConfig, path) == config
    changed = load_config(RunConfig, path, ["ids.C3.admit_after=2", "ids.*.eviction=lru"])
    assert changed.ids == {"C3": IdTable(ttl_steps=9, admit_after=2), "*": IdTable(eviction="lru")}
    with pytest.raises(ConfigError, match=r"ids.C3.halflife: unknown key. Did you mean ids.C3.half_life"):
        load_config(RunConfig, path, ["ids.C3.halflife=2"])


def test_a_resume_compares_the_rules():
    data = DataConfig(synthetic=SyntheticConfig(id_rows=2400))
    saved, now = (identity_of(RunConfig(data=data, ids=ids), 1) for ids in ({}, {"C3": IdTable(half_life=5)}))
    found = changes(saved, now)
    assert found == [Change("ids", "no C3", "C3 = {half_life = 5}")]
    assert "Set back what should not change (the rules of ids), or allow it: --allow-change ids" in refusal(found)


def test_the_memory_of_maps_is_what_maps_take():
    for rules in (IdTable(), IdTable(admit_after=3), IdTable(admit_probability=0.5)):
        buckets = rules.buckets_of("t", 240_000)
        ids = IdMap("t", rules, buckets, seed=1)
        assert ids.num_bytes == pytest.approx(rules.row_bytes * 240_000, rel=0.02)
        saved = sum(part.nbytes for part in ids.tensors().values())
        assert saved == pytest.approx(rules.saved_row_bytes * 240_000, rel=0.02)


def test_the_memory_check_counts_maps():
    features = {"user": replace(IDS, num_rows=24_000), "item": IDS}
    ranks = RanksHere(2, 2, "cpu")
    for rules, per_row in (({}, (28, 28)), ({"user": IdTable(admit_after=2)}, (44, 28))):
        config = config_of(features, ids=rules)
        needs = memory_needs(config, table_rows(config), ranks, None)
        assert needs.host["id_maps"] == per_row[0] * 24_000 + per_row[1] * 480
    hashed = config_of({name: replace(each, mapping="hash") for name, each in features.items()})
    assert "id_maps" not in memory_needs(hashed, table_rows(hashed), ranks, None).host


def test_what_needs_rows_says_how_ids_share_them():
    mapped = {"user": IDS, "city": replace(IDS, mapping="text_ids"), "other": TableFeature("sparse", num_rows=9)}
    with pytest.raises(ConfigError, match=r"a plan places rows, and tables of this run take any id") as refused:
        refuse_ids(config_of(mapped).data, "a plan places rows")
    changes = re.findall(r"--set (\S+)", str(refused.value))
    assert changes == ["data.table.features.user.mapping=hash", "data.table.features.city.mapping=text"]
    with pytest.raises(ConfigError) as refused:
        refuse_ids(DataConfig(synthetic=SyntheticConfig(id_rows=9, id_turnover=2.0)), "a profile counts rows")
    values = {"data": {"synthetic": {"id_rows": 9, "id_turnover": 2.0}}}
    for change in re.findall(r"--set (\S+)", str(refused.value)):
        apply_override(RunConfig, values, change)
    refuse_ids(decode(RunConfig, values).data, "a profile counts rows")


def test_sizes_of_tables_say_which_take_ids():
    features = {"user": replace(IDS, num_rows=24_000), "city": replace(IDS, mapping="hash")}
    config = config_of(features, ids={"user": IdTable(admit_after=2)})
    found = {table.table: table for table in model_size(config, table_rows(config)).tables}
    assert (found["t_user"].buckets, found["t_user"].id_map_bytes) == (24, 44)
    assert (found["t_city"].buckets, found["t_city"].id_map_bytes) == (0, 0)
    assert {found["t_user"].group, found["t_city"].group} == {
        "model.sparse_arch.embedding_bag_collection (sum, ids)",
        "model.sparse_arch.embedding_bag_collection (sum)",
    }
