"""Runs with tables of ids: exports, publications, replicas and servers say of any id what the run says."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from embershard.cache import CacheConfig
from embershard.cache.ids.config import IdTable
from embershard.cache.ids.id_map import IdMap, mixed
from embershard.commands import cli
from embershard.commands.data import command as data_command
from embershard.commands.data import start_ids
from embershard.data import DataConfig
from embershard.data.config import TableConfig, TableFeature
from embershard.distributed import CheckpointConfig, PublishConfig, complete_checkpoints
from embershard.distributed.changed_rows import NO_ID
from embershard.distributed.checkpoint.load import load_group
from embershard.distributed.publish import published
from embershard.errors import CheckpointError, ConfigError
from embershard.extras.publications import command as publish
from embershard.extras.publications import write
from embershard.extras.serving import command as export
from embershard.extras.serving import serving_model
from embershard.extras.serving.server.prediction_server import Predictor
from embershard.extras.serving.serving_replica import Replica
from embershard.launch.arguments import NEWEST
from embershard.models import ModelConfig
from embershard.pipeline.config import LookAheadConfig
from embershard.settings.decoding import to_toml
from embershard.settings.files import load_config
from embershard.training.config import RunConfig, TrainConfig
from tests.covering import keep
from tests.unit.commands.conftest import score_here, train_here

pytestmark = pytest.mark.slow  # whole training runs

STATE = "model.sparse_arch.embedding_bag_collection.embedding_bags.t_{0}.weight.t_{0}.momentum1"
RULES = IdTable(buckets=6, reserve=0.4)
NUM_SAMPLES, NUM_HELD_OUT = 2000, 200


def clicks(num_samples: int, seed: int) -> pa.Table:
    """Users of all 64 bits, items by name in bags; some are popular, all go one day, and some values are missing."""
    random = np.random.default_rng(seed)
    days = np.arange(num_samples) // 12
    users = ((random.zipf(1.3, num_samples) % 60 + days).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(
        np.int64
    )
    bags = [[f"item {(random.zipf(1.3) % 50) + day}" for _ in range(random.integers(0, 4))] for day in days]
    missing = random.random((2, num_samples)) < 0.05
    ages = random.gamma(2.0, 15.0, num_samples).astype(np.float32)
    return pa.table(
        {
            "user": pa.array(users, mask=missing[0]),
            "items": pa.array([None if gone else bag for gone, bag in zip(missing[1], bags, strict=True)]),
            "age": pa.array(ages),
            "click": pa.array((random.random(num_samples) < 1 / (1 + ages / 30)).astype(np.int8)),
        }
    )


def config_of(path: Path, max_steps: int, **mappings: str) -> RunConfig:
    features = {"age": TableFeature("dense", scale="log1p")}
    for name, num_rows in (("user", 96), ("items", 120)):
        mapping = mappings.get(name, "ids" if name == "user" else "text_ids")
        features[name] = TableFeature("sparse", num_rows=num_rows, mapping=mapping)  # type: ignore[arg-type]
    has_ids = any(feature.takes_ids for feature in features.values())
    return RunConfig(
        data=DataConfig(
            "table", str(path), eval_fraction=NUM_HELD_OUT / NUM_SAMPLES, num_workers=0, shuffle=False,
            table=TableConfig(features, label="click"),
        ),
        model=ModelConfig(embedding_dim=8, dense_arch_layer_sizes=(16, 8), over_arch_layer_sizes=(16, 1)),
        cache=CacheConfig(ratio=0.9, policy="lookahead"),
        look_ahead=LookAheadConfig(4),
        train=TrainConfig(batch_size=32, max_steps=max_steps, init="counter"),
        checkpoint=CheckpointConfig(every_steps=10, keep_last=9),
        ids={"user": RULES, "items": dataclasses.replace(RULES, unadmitted="zero", admit_after=2)} if has_ids else {},
    )  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 45 steps that publishes, and one that goes on from its step 20 to 50; the folder of the second."""
    folder = tmp_path_factory.mktemp("id_runs")
    pq.write_table(clicks(NUM_SAMPLES, 0), folder / "clicks.parquet")
    pq.write_table(clicks(300, 1).drop_columns("click"), folder / "new.parquet")
    config = config_of(folder / "clicks.parquet", 45)
    config = dataclasses.replace(
        config, publish=PublishConfig(str(folder / "published"), every_steps=3, base_every=4, keep_bases=99)
    )
    train_here(config, folder / "first")
    shutil.copytree(folder / "first", folder / "run")  # this process has the lock of the other
    for step in (30, 40, 45):
        shutil.rmtree(folder / "run" / "checkpoints" / f"step_{step}")
    train_here(
        dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=50)),
        folder / "run",
        resume=NEWEST,
    )
    return folder / "run"


def predicted(run_dir: Path, data: Path, output: Path) -> torch.Tensor:
    score_here(str(run_dir), "--data", str(data), "-o", str(output), "--step", "last")
    return torch.from_numpy(pq.read_table(output)["logit"].to_numpy())


def logits(model: Any, data: Path) -> torch.Tensor:
    samples = pq.read_table(data, columns=model.columns).to_pylist()
    with torch.no_grad():
        parts = [model(*model.encode(samples[start : start + 32])) for start in range(0, len(samples), 32)]
    return torch.cat(parts)


@pytest.mark.parametrize("name", keep(["new.parquet"], ["clicks.parquet", "new.parquet"]))
def test_exports_score_bit_for_bit(run_dir, tmp_path, name):
    """Of ids that have a row, that had one, and that never came."""
    data = run_dir.parent / name
    export.main([str(run_dir), "-o", str(tmp_path / "exported"), "--step", "last"])
    model = serving_model.load(tmp_path / "exported")
    found = logits(model, data)
    assert torch.equal(found, predicted(run_dir, data, tmp_path / "scores.parquet"))
    (places,) = [places for places in model.places if len(places.ids) and places._rows_of_bucket == 16]
    places.rows = places.rows.roll(1)
    assert not torch.equal(logits(model, data), found), "other rows must be noticed"


@pytest.fixture(scope="module")
def exported(run_dir: Path) -> Path:
    export.main([str(run_dir), "-o", str(run_dir.parent / "exported"), "--step", "last"])
    return run_dir.parent / "exported"


def state_of(model: Any) -> dict[str, torch.Tensor]:
    """Every row of every table, and which id has which."""
    return {name: value for name, value in model.state_dict().items() if not name.startswith("dense.")}


def test_replicas_have_what_an_export_has(run_dir, exported, tmp_path):
    """One that took all deltas, over a resume that took steps back, and one that began with a base made of deltas."""
    shutil.copytree(run_dir.parent / "published", tmp_path / "deltas", ignore=shutil.ignore_patterns("base_[1-9]*"))
    expected = state_of(serving_model.load(exported))
    assert len([name for name in expected if name.startswith("places.")]) == 4
    for folder in (run_dir.parent / "published", tmp_path / "deltas"):
        bases = [path.name for _, path in published.published(folder, "base")]
        assert (len(bases) == 1) == (folder.name == "deltas"), bases
        replica = Replica(folder)
        assert replica.have.step == 50
        with replica.state() as (model, _):
            found = state_of(model)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def changes(folder: Path, table: str) -> list[tuple[int, int, int]]:
    """Rows of all deltas that changed hands: row, old and new id."""
    found = []
    for _, path in published.published(folder, "delta"):
        delta = published.read_publication(path)
        files = published.read_files(path, delta)
        for part in delta.parts:
            if part.table == table and (changed := part.changed(files[part.file])) is not None:
                found += zip(changed.rows.tolist(), changed.old.tolist(), changed.new.tolist(), strict=True)
    return found


def test_rows_of_ids_that_went_are_not_served_for_them(run_dir):
    """Their rows have others by now; they answer as ids that never came."""
    folder = run_dir.parent / "published"
    found = changes(folder, "t_user")
    had = {old: row for row, old, _ in found if old != NO_ID}
    replica = Replica(folder)
    with replica.state() as (model, _):
        places = model.places[serving_model.table_names(model.inputs).index("t_user")]
        gone = torch.tensor(sorted(had.keys() - set(places.ids.tolist())))
        assert len([x for x in gone.tolist() if had[x] in places.rows.tolist()]) > 20
        assert (places(gone) % 16 == 0).all()
        assert len(set(places.rows.tolist())) == len(places.rows)


def test_publications_are_verified_with_their_ids(run_dir, tmp_path, capsys):
    shutil.copytree(run_dir.parent / "published", tmp_path / "p")
    assert cli.main(["publish", "verify", str(tmp_path / "p")]) == 0
    for base in (tmp_path / "p").glob("base_[1-9]*"):
        shutil.rmtree(base)
    for _, path in reversed(published.published(tmp_path / "p", "delta")):
        delta = published.read_publication(path)
        (name,) = {part.file for part in delta.parts}
        tensors = published.read_files(path, delta)[name]
        place = next(part.place for part in delta.parts if part.table == "t_user")
        stays = tensors[f"{place}.new"] != NO_ID
        if not stays.all():
            break
        shutil.rmtree(path)  # no row is left empty in it
    for kind in ("changed", "old", "new"):  # the ids that went are left out, and all checksums are right
        tensors[f"{place}.{kind}"] = tensors[f"{place}.{kind}"][stays]
    files = {**delta.files, name: write._write_tensors(path / name, tensors)}
    (path / published.MANIFEST).write_text(dataclasses.replace(delta, files=files).text())
    capsys.readouterr()
    assert cli.main(["publish", "verify", str(tmp_path / "p")]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("INVALID") == 1
    assert f"{path}: table t_user: " in said
    with pytest.raises(published.OtherChainError, match="table t_user"):
        Replica(tmp_path / "p")
    with pytest.raises(CheckpointError, match=r"table t_user.*Nothing was written"):
        publish.main(["base", str(tmp_path / "p")])


def test_publications_are_served(run_dir, exported):
    predictor = Predictor(run_dir.parent / "published")
    samples = pq.read_table(run_dir.parent / "new.parquet").slice(0, 20).to_pylist()
    model = serving_model.load(exported)
    with torch.no_grad():
        expected = model(*model.encode(samples)).tolist()
    answer = predictor.predict(samples)
    assert (answer["step"], answer["logits"]) == (50, expected)
    with pytest.raises(ValueError, match="-9223372036854775808: needed another integer of 64 bits"):
        predictor.predict([{**samples[0], "user": -(2**63)}])
    predictor.close()


def test_rounded_tables_state_their_error(run_dir, exported, tmp_path):
    export.main([str(run_dir), "-o", str(tmp_path / "int8"), "--dtype", "int8", "--step", "last"])
    error = json.loads((tmp_path / "int8" / "export.json").read_text())["error"]
    data = run_dir.parent / "clicks.parquet"
    distance = (logits(serving_model.load(tmp_path / "int8"), data) - logits(serving_model.load(exported), data)).abs()
    assert error["logit_max"] == pytest.approx(float(distance[-NUM_HELD_OUT:].max()), rel=1e-3)
    assert 0 < error["score_max"] < 1e-2


def test_tables_as_parquet_have_the_ids(run_dir, exported, tmp_path):
    export.main([str(run_dir), "-o", str(tmp_path / "tables"), "--format", "parquet", "--step", "last"])
    for name, num_shared in (("t_user", 6), ("t_items", 0)):
        found = pq.read_table(tmp_path / "tables" / "tables" / f"{name}.parquet").to_pydict()
        pairs = [(x, row) for x, row in zip(found["id"], found["row"], strict=True) if x is not None]
        ids = serving_model.read_tensors(exported / "tables" / f"{name}.ids.safetensors")
        assert sorted(pairs) == list(zip(ids["ids"].tolist(), ids["rows"].tolist(), strict=True))
        assert len(found["row"]) == len(pairs) + num_shared
        rows = serving_model.read_tensor(exported / "tables" / f"{name}.safetensors")
        assert found["embedding"] == rows[found["row"]].tolist()


def test_an_export_passes_torch_export(run_dir, exported):
    model = serving_model.load(exported)
    inputs = model.encode(pq.read_table(run_dir.parent / "new.parquet").slice(0, 8).to_pylist())
    with torch.no_grad():
        assert torch.equal(torch.export.export(model, inputs).module()(*inputs), model(*inputs))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with hashed rows, and one with ids that starts from it: `hashed` and `ids`."""
    folder = tmp_path_factory.mktemp("converted")
    pq.write_table(clicks(NUM_SAMPLES, 0), folder / "clicks.parquet")
    train_here(config_of(folder / "clicks.parquet", 30, user="hash", items="text"), folder / "hashed")
    config = config_of(folder / "clicks.parquet", 40)
    features = {**config.data.table.features}
    for name, num_rows in (("user", 600), ("items", 480)):
        features[name] = dataclasses.replace(features[name], num_rows=num_rows)
    data = dataclasses.replace(config.data, table=TableConfig(features, label="click"))
    (folder / "ids.toml").write_text(to_toml(dataclasses.replace(config, data=data)))
    return folder


@pytest.mark.matrix
def test_ids_start_with_what_their_hashed_rows_learned(converted, tmp_path, capsys):
    """Known ids score as before, bit for bit; then the run goes on with ids of its own."""
    given = ["data", "ids", str(converted / "hashed"), "--config", str(converted / "ids.toml")]
    assert cli.main([*given, "-o", str(tmp_path / "ids"), "--step", "last"]) == 0
    said = capsys.readouterr().out
    assert "ids have a row" in said
    samples = pq.read_table(converted / "clicks.parquet").slice(0, NUM_SAMPLES - NUM_HELD_OUT)
    pq.write_table(samples, tmp_path / "known.parquet")
    before = predicted(converted / "hashed", tmp_path / "known.parquet", tmp_path / "before.parquet")
    assert torch.equal(predicted(tmp_path / "ids", tmp_path / "known.parquet", tmp_path / "after.parquet"), before)
    states = [load_group(path, "embedding_optimizer") for path in (last(converted / "hashed"), last(tmp_path / "ids"))]
    for name in ("user", "items"):
        hashed, own = (state[STATE.format(name)] for state in states)
        assert set(own[own > 0].tolist()) == set(hashed[hashed > 0].tolist())
    config = load_config(RunConfig, converted / "ids.toml")
    train_here(config, tmp_path / "ids", resume=NEWEST)
    assert not torch.equal(predicted(tmp_path / "ids", tmp_path / "known.parquet", tmp_path / "later.parquet"), before)


def last(run_dir: Path) -> Path:
    return complete_checkpoints(run_dir / "checkpoints")[-1]


def test_what_cannot_start_ids_is_refused(converted, tmp_path):
    given = ["ids", str(converted / "hashed"), "-o", str(tmp_path / "ids")]
    with pytest.raises(ConfigError, match="what are the new run's settings"):
        data_command.main(given)
    with pytest.raises(ConfigError, match="the new run has no table of ids"):
        data_command.main([*given, "--config", str(converted / "hashed" / "config.toml")])
    other = ["--set", "data.table.features.items.mapping=ids"]
    with pytest.raises(ConfigError, match="'items' has the mapping 'ids' and had 'text'; needed hash or modulo"):
        data_command.main([*given, "--config", str(converted / "ids.toml"), *other])
    with pytest.raises(ConfigError, match="holds a run already"):
        data_command.main([*given[:2], "-o", str(converted / "hashed"), "--config", str(converted / "ids.toml")])
    assert not (tmp_path / "ids").exists()


def test_the_most_frequent_ids_of_a_bucket_get_its_rows():
    rules, ids = IdTable(buckets=2, reserve=0.4), np.arange(-50, 50) * 2**50
    counts = np.arange(100) % 37 + 1
    records, rows, given = start_ids._records("t", 40, rules, ids, counts)
    assert len(rows) == len(set(rows.tolist())) == 2 * (20 - 1 - 8)
    assert set(records[rows, 0].tolist()) == set(mixed(given).tolist())
    table = IdMap("t", rules, rules.buckets_of("t", 40), 1)
    table.load({"records": records.numpy(), "candidates": np.empty((0, 2), np.int64)})
    found = table.find(mixed(ids))
    assert dict(zip(given.tolist(), rows.tolist(), strict=True)) == {
        int(x): int(row) for x, row in zip(ids, found, strict=True) if row % 20
    }
    for bucket in (0, 20):
        own = found // 20 * 20 == bucket
        assert counts[own & (found % 20 > 0)].min() >= counts[own & (found % 20 == 0)].max()
    assert table.resolve(mixed(np.array([7]))).rows[0] % 20  # there is room for new ones
