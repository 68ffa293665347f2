"""`embershard export`: what it writes equals what was trained, and needs no embershard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.commands import cli
from embershard.data import DataConfig, ParquetConfig, Schema, SparseFeature, Target, open_source
from embershard.data.hashing import map_ids
from embershard.data.sources.kinds import serving_inputs
from embershard.distributed.checkpoint.load import load_group
from embershard.errors import ConfigError
from embershard.extras.serving import command as export
from embershard.extras.serving import serving_model, serving_values
from embershard.extras.serving.dense_program import DenseLayers, dense_program
from embershard.extras.serving.write import stored
from embershard.models import ModelConfig, build_model
from embershard.models.config import FACTORIZED
from tests.covering import keep, matrix
from tests.unit.commands.conftest import Trained
from tests.unit.commands.test_score import scores
from tests.unit.test_docs import blocks

pytestmark = [pytest.mark.extra, pytest.mark.slow]  # whole training runs

TABLE = "model.sparse_arch.embedding_bag_collection.embedding_bags.t_{}.weight"
# Runs a program where embershard and what it is made of cannot be imported.
WITHOUT = """
import runpy, sys
sys.modules.update(dict.fromkeys(["embershard", "torchrec", "fbgemm_gpu"]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def exported(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    for dtype in ("fp32", "fp16", "int8", "int4"):
        export.main([str(trained.run_dir), "-o", str(folder / dtype), "--dtype", dtype])
    return folder


def logits(folder: Path, data: Path, batch_size: int = 64) -> torch.Tensor:
    """Logits of raw samples, in batches as `embershard predict` makes them."""
    model = serving_model.load(folder)
    samples = pq.read_table(data, columns=model.columns).to_pylist()
    with torch.no_grad():
        parts = [
            model(*model.encode(samples[start : start + batch_size])) for start in range(0, len(samples), batch_size)
        ]
    return torch.cat(parts)


@pytest.mark.smoke
def test_module_scores_bit_for_bit(trained, exported, tmp_path):
    found = scores(trained, tmp_path / "s.parquet", "--data", str(trained.data))
    expected = torch.from_numpy(found["logit"].to_numpy())
    assert torch.equal(logits(exported / "fp32", trained.data), expected)
    assert not torch.equal(logits(exported / "fp16", trained.data), expected), "rounded tables must be noticed"


@pytest.mark.matrix
def test_it_is_served_without_embershard(trained, exported, tmp_path, project_dir):
    """The example, in a process that cannot import embershard, TorchRec or FBGEMM."""
    samples = pq.read_table(trained.unlabelled).slice(0, 64)
    (tmp_path / "samples.json").write_text(json.dumps(samples.to_pylist()))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = str(project_dir / "examples" / "serve.py")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, program, str(exported / "fp32"), "samples.json"],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = scores(trained, tmp_path / "s.parquet", "--data", str(trained.unlabelled))["score"].to_pylist()[:64]
    assert json.loads(done.stdout) == expected
    blocked = subprocess.run([sys.executable, "-c", WITHOUT, str(project_dir / "embershard" / "__main__.py")],
                             cwd=tmp_path, env=environment, capture_output=True, text=True)  # fmt: skip
    assert "ModuleNotFoundError" in blocked.stderr or "ImportError" in blocked.stderr


@pytest.mark.parametrize(("dtype", "most"), [("fp16", 1e-4), ("int8", 2e-3), ("int4", 3e-2)])
def test_error_is_stated_and_bounded(trained, exported, dtype, most):
    error = json.loads((exported / dtype / "export.json").read_text())["error"]
    assert error["samples"] == 200
    assert 0 < error["score_mean"] <= error["score_max"] < most
    held_out = slice(-200, None)
    distance = logits(exported / dtype, trained.data) - logits(exported / "fp32", trained.data)
    assert error["logit_max"] == pytest.approx(float(distance[held_out].abs().max()), rel=0.05)
    assert abs(error["auc_trained"] - error["auc_exported"]) < 0.01


@given(rows=st.integers(1, 9), dim=st.sampled_from([4, 8, 64]), spread=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
def test_rows_are_rounded_by_half_a_step_at_most(rows, dim, spread, seed):
    table = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)) * spread
    width = table.max(dim=1).values - table.min(dim=1).values
    for dtype, steps, slack in (("int8", 255, 1e-5), ("int4", 15, 1e-2)):
        kept = serving_model.StoredTable(stored(table, dtype), dtype).rows(torch.arange(rows))
        allowed = width / steps / 2 + slack * table.abs().max()
        assert ((kept - table).abs() <= allowed[:, None]).all(), dtype


def test_tables_are_those_of_the_checkpoint(trained, exported, tmp_path):
    export.main([str(trained.run_dir), "-o", str(tmp_path / "tables"), "--format", "parquet"])
    checkpoint = trained.run_dir / "checkpoints" / "step_12"
    weights = load_group(checkpoint, "model")
    for feature, num_rows in (("user", 40), ("items", 70)):
        expected = weights[TABLE.format(feature)]
        assert expected.shape == (num_rows, 8)
        kept = serving_model.read_tensor(exported / "fp32" / "tables" / f"t_{feature}.safetensors")
        assert torch.equal(kept, expected)
        found = pq.read_table(tmp_path / "tables" / "tables" / f"t_{feature}.parquet")
        assert found["row"].to_pylist() == list(range(num_rows))
        assert found["embedding"].to_pylist() == expected.tolist()


def test_a_checkpoint_is_read_as_the_page_shows(trained, tmp_path, monkeypatch, project_dir):
    checkpoints = tmp_path / "runs" / "mine" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "step_500").symlink_to(trained.run_dir / "checkpoints" / "step_12")
    monkeypatch.chdir(tmp_path)
    (block,) = (text for text in blocks((project_dir / "docs" / "serving.md").read_text(), "python") if "dcp" in text)
    shown: dict[str, torch.Tensor] = {}
    exec(block, shown)
    assert torch.equal(
        shown["table"], load_group(trained.run_dir / "checkpoints" / "step_12", "model")[TABLE.format("user")]
    )


def test_module_passes_torch_export(trained, exported):
    model = serving_model.load(exported / "int4")
    inputs = model.encode(pq.read_table(trained.data, columns=model.columns).slice(0, 8).to_pylist())
    with torch.no_grad():
        program = torch.export.export(model, inputs)
        assert torch.equal(program.module()(*inputs), model(*inputs))


@pytest.mark.parametrize("arch", keep(["dlrm_dcn", "deepfm"], ["dlrm", "dlrm_dcn", *FACTORIZED]))
def test_dense_program_equals_its_model(arch):
    schema = Schema(("a", "b"), (SparseFeature("x", 9), SparseFeature("y", 7)))
    config = ModelConfig(arch=arch)
    layers = DenseLayers(build_model(config, schema, torch.device("cpu"))).eval()
    program = dense_program(layers, 2).module()
    for num_samples in (1, 2, 33):
        inputs = torch.randn(num_samples, 2), list(torch.randn(2, num_samples, 16))
        assert torch.equal(program(*inputs), layers(*inputs))


OWN = """
import torch
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig

class Last(nn.Module):
    def __init__(self, options):
        super().__init__()
        table = EmbeddingConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["x", "y"])
        self.sequences = EmbeddingCollection([table], device=torch.device("meta"))
        self.norm, self.over, self.options = nn.BatchNorm1d(4), nn.Linear(4, 1), options

    def forward(self, batch):
        found = self.sequences(batch.sparse_features)
        x, y = found["x"], found["y"].to_padded_dense(2)
        longest = x.lengths().max()
        longest = max(1, int(longest) if "int" in self.options else longest.item())
        outputs = self.over(self.norm(x.to_padded_dense(longest).sum(dim=1) + y.sum(dim=1)))
        return (outputs.mean(), outputs) if "loss" in self.options else outputs

def build(schema, options):
    return Last(options)
"""


def test_an_own_model_is_recorded_around_its_tables(tmp_path):
    """One table for two features, as sequences; a norm with statistics; its own loss; samples without ids."""
    (tmp_path / "own_last.py").write_text(OWN)
    schema = Schema(("a",), (SparseFeature("x", 9), SparseFeature("y", 9)))
    config = ModelConfig(build="own_last:build", folder=str(tmp_path), options={"loss": True})
    layers = DenseLayers(build_model(config, schema, torch.device("cpu"))).eval()
    assert [(table.name, feature) for table, feature in layers.lookups] == [("t", "x"), ("t", "y")]
    layers.model.model.norm.running_mean += 3
    program = dense_program(layers, 1).module()
    rows = torch.randn(9, 4)
    for lengths in ([2, 0, 3], [0], [0, 0], [5]):
        sizes = torch.tensor(lengths)
        ids = torch.randint(9, (int(sizes.sum()),))
        inputs = torch.randn(len(sizes), 1), [rows[ids], sizes, rows[ids], sizes]
        padded = [torch.nn.functional.pad(each, (0, 0, 0, 9))[:9] for each in rows[ids].split(lengths)]
        pooled = torch.stack([each.sum(dim=0) + each[:2].sum(dim=0) for each in padded])
        expected = layers.model.model.over(layers.model.model.norm(pooled)).squeeze(-1)
        assert program(*inputs).tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    line = 1 + OWN[: OWN.index("longest = max")].count("\n")
    fixed = ModelConfig(build="own_last:build", folder=str(tmp_path), options={"int": True})
    said = rf"cannot record this model \(.*/own_last.py, line {line}\): .*[^. ]\. docs/serving.md .*--format parquet"
    with pytest.raises(ConfigError, match=said):
        dense_program(DenseLayers(build_model(fixed, schema, torch.device("cpu"))).eval(), 1)


OWN_LOSS = """
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

class Weighted(nn.Module):
    def __init__(self, num_labels):
        super().__init__()
        table = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["x"])
        self.bags = EmbeddingBagCollection([table], device=torch.device("meta"))
        self.over = nn.Linear(5, num_labels)

    def forward(self, batch):
        found = self.bags(batch.sparse_features).values()
        outputs = self.over(torch.cat([batch.dense_features, found], dim=1))
        if batch.labels.dim() == 1:
            losses = nn.functional.mse_loss(outputs.squeeze(1), batch.labels, reduction="none")
            return (losses * batch.weights).mean(), outputs
        click, buy = (outputs - batch.labels).unbind(1)
        return ((click**2 + buy**2) * batch.weights).mean(), outputs

def build(schema, options):
    return Weighted(len(schema.target.labels))
"""


@pytest.mark.parametrize("labels", [matrix(("click",)), ("click", "buy")])
def test_an_own_loss_may_read_labels_and_weights(tmp_path, labels):
    module = f"own_loss_{len(labels)}"
    (tmp_path / f"{module}.py").write_text(OWN_LOSS)
    schema = Schema(("a",), (SparseFeature("x", 9),), Target(labels, weight="w"))
    config = ModelConfig(build=f"{module}:build", folder=str(tmp_path))
    layers = DenseLayers(build_model(config, schema, torch.device("cpu"))).eval()
    program = dense_program(layers, 1).module()
    for num_samples in (1, 7):
        dense, found = torch.randn(num_samples, 1), torch.randn(num_samples, 4)
        expected = layers.model.model.over(torch.cat([dense, found], dim=1))
        assert torch.equal(program(dense, [found]), expected.squeeze(-1))


@given(
    ids=st.lists(st.integers(-(2**63), 2**64 - 1), max_size=20),
    num_rows=st.integers(1, 10_000),
    mapping=st.sampled_from(["modulo", "hash"]),
)
def test_ids_are_mapped_as_in_training(ids, num_rows, mapping):
    words = np.array([each % 2**64 for each in ids], np.uint64)
    assert (serving_values.map_ids(words, num_rows, mapping) == map_ids(words, num_rows, mapping)).all()


def test_samples_are_encoded_as_in_training(trained, exported):
    columns = ParquetConfig(("age",), ("user", "items"), (40, 70), "click", "hash", dense_transform="log1p")
    source = open_source(DataConfig("parquet", str(trained.data), eval_fraction=0.0, parquet=columns))
    batch = source.read("train", 0, np.arange(128)).to_batch(source.schema)
    model = serving_model.load(exported / "fp32")
    samples = pq.read_table(trained.data, columns=model.columns).slice(0, 128).to_pylist()
    dense, ids, offsets = model.encode(samples)
    assert torch.equal(dense, batch.dense_features)
    for number, key in enumerate(source.schema.keys):
        assert torch.equal(ids[number], batch.sparse_features[key].values())
        assert torch.equal(offsets[number], batch.sparse_features[key].offsets().long())


def test_criteo_ids_are_hexadecimal():
    feature = {"name": "C1", "column": "C1", "num_rows": 100, "mapping": "modulo", "id_base": 16}
    model = serving_model.Model([], torch.nn.Identity(), {"sparse": []})
    rows, _ = model._bags(feature, model._column([{"C1": "68fd1e64"}, {"C1": ""}, {"C1": None}], "C1"))
    assert rows.tolist() == [1 + 0x68FD1E64 % 99, 0, 0]
    with pytest.raises(ValueError, match=r"needed a row in 0..99"):
        model._bags({**feature, "mapping": "none"}, ["ff"])


def test_keys_are_those_of_the_columns(exported):
    """A misspelled key is no missing value."""
    model = serving_model.load(exported / "fp32")
    assert model.columns == ["age", "user", "items"]
    good = {"age": None, "user": 7, "items": [3]}
    model.encode([good])
    for wrong, said in (
        (
            {"age": 1, "usr": 7, "items": []},
            r"sample 1: 'usr' .*, did you mean 'user'\?; 'user' is absent, and a missing",
        ),
        ({**good, "click": 1}, r"'click' is not read by the model, leave it out. Needed the keys age, user, items"),
        ({"age": 1, "user": 7}, r"sample 1: 'items' is absent, and a missing value is None"),
    ):
        with pytest.raises(ValueError, match=said):
            model.encode([good, wrong])
    assert (
        serving_model.Model([], torch.nn.Identity(), serving_inputs(DataConfig("avazu", "x"))).columns[0]
        == "hour_of_day"
    )


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([{"age": 1}, None], r"^sample 1: got None; needed a dict with the keys age$"),
        ([[1]], r"^sample 0: got \[1\]; needed a dict"),
        ({"age": 1}, r"^got one dict; needed a list of dicts, one per sample, so \[sample\] for one$"),
    ],
)
def test_samples_that_are_no_dicts_are_refused(samples, said):
    inputs = {"dense": [{"name": "age", "column": "age", "scale": "none"}], "sparse": []}
    with pytest.raises(ValueError, match=said):
        serving_model.Model([], torch.nn.Identity(), inputs).encode(samples)


def test_values_that_are_not_mapped_are_refused():
    (feature, *_) = serving_inputs(DataConfig("avazu", "x"))["sparse"]
    with pytest.raises(ValueError, match="'avazu' is not mapped here"):
        serving_model.Model([], torch.nn.Identity(), {"sparse": []})._bags(feature, [{"hour_of_day": 3}])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--format", "parquet", "--dtype", "int8"], "--dtype has no effect"),
        (["--samples", "5"], "--samples has no effect"),
        (["--data", "x", "--dtype", "fp32"], "--data has no effect"),
        (["--set", "train.seed=1"], "train.seed has no effect"),
    ],
)
def test_options_without_an_effect_are_errors(trained, tmp_path, words, problem):
    with pytest.raises(ConfigError, match=problem):
        export.main([str(trained.run_dir), "-o", str(tmp_path / "new"), *words])


def test_the_folder_must_be_new(trained, tmp_path, capsys):
    assert cli.main(["export", str(trained.run_dir), "-o", str(tmp_path)]) == 2
    assert "exists; give the name of a new folder" in capsys.readouterr().err
