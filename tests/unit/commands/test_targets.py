"""Regression, weights of samples and several labels, from a file to held-out metrics, scores and an export."""

from __future__ import annotations

import json
import runpy
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from embershard.commands import cli
from embershard.data import Schema, SparseFeature, Target
from embershard.data.config import TableConfig
from embershard.errors import CheckpointError, ConfigError, DataError
from embershard.extras.serving import serving_model
from embershard.launch import launcher
from embershard.models import ModelConfig
from embershard.models.config import FACTORIZED
from embershard.settings.decoding import to_toml
from embershard.training.config import RunConfig
from tests.covering import keep
from tests.unit.commands.conftest import score_here, start_here
from tests.unit.data.targets import FEATURES, ROWS, target_config, write_targets
from tests.unit.test_docs import blocks, commands

pytestmark = pytest.mark.slow

HELD_OUT = 120
PROJECT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_targets(tmp_path_factory.mktemp("targets") / "samples.parquet")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder to work in, where commands that start ranks run the program of one in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "start_ranks", start_here)
    return tmp_path


def train(config: RunConfig, *words: str) -> dict[str, Any]:
    """Train by the command; return result.json."""
    Path("run.toml").write_text(to_toml(config))
    assert cli.main(["train", "--config", "run.toml", "--run-dir", "run", *words]) == 0
    found: dict[str, Any] = json.loads(Path("run/result.json").read_text())
    return found


def scores_and_export(names: list[str]) -> np.ndarray:
    """Predict and export; the module's outputs are the predicted columns, bit for bit. Return the columns."""
    assert cli.main(["predict", "run", "-o", "scores.parquet", "--set", f"train.batch_size={HELD_OUT}"]) == 0
    assert cli.main(["export", "run", "-o", "exported"]) == 0
    model = serving_model.load("exported")
    samples = pq.read_table("samples.parquet", columns=model.columns).to_pylist()
    found = model(*model.encode(samples[-HELD_OUT:])).detach().reshape(HELD_OUT, -1)
    scores = pq.read_table("scores.parquet")
    columns = np.stack([scores[name].to_numpy() for name in names], axis=1)
    assert torch.equal(found, torch.from_numpy(columns))
    return columns


def longer(config: RunConfig) -> RunConfig:
    """Return settings of a run whose scores are those of its last step, like the metrics in result.json."""
    optimizers = {"embedding_optimizer.lr": 0.05, "dense_optimizer.lr": 0.01}
    changed = replace(config, train=replace(config.train, max_steps=None, epochs=2, log_every=20))
    changed = replace(changed, checkpoint=replace(config.checkpoint, keep_best=False))
    for name, value in optimizers.items():
        section = name.partition(".")[0]
        changed = replace(changed, **{section: replace(getattr(changed, section), lr=value)})
    return changed


def test_regression_from_file_to_scores(made, folder, capsys, monkeypatch):
    Path("samples.parquet").symlink_to(made)
    result = train(longer(target_config(Path("samples.parquet"), "regression")))
    labels = pq.read_table(made)["stars"].to_numpy()[-HELD_OUT:]
    assert result["rmse"] < 0.95 * labels.std(), "better than the mean label"
    assert {"auc", "logloss"}.isdisjoint(result)
    said = capsys.readouterr().out
    assert "RMSE" in said
    assert "AUC" not in said
    columns = scores_and_export(["score"])
    assert pq.read_table("scores.parquet").column_names == ["score", "label"]
    samples = pq.read_table(made, columns=list(FEATURES)).to_pylist()[-HELD_OUT:]
    Path("samples.json").write_text(json.dumps(samples))
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr("sys.path", [*sys.path])
        runpy.run_path(str(PROJECT / "examples" / "serve.py"))["main"]("exported", "samples.json")
        patch.delitem(sys.modules, "model")
    assert json.loads(capsys.readouterr().out) == pytest.approx(columns[:, 0].tolist(), rel=1e-6)
    assert np.sqrt(np.mean((columns[:, 0] - labels) ** 2)) == pytest.approx(result["rmse"], rel=1e-5)
    assert result["mae"] == pytest.approx(np.abs(columns[:, 0] - labels).mean(), rel=1e-5)
    assert 1 - result["rmse"] ** 2 / labels.var() == pytest.approx(result["r2"], abs=1e-5)
    capsys.readouterr()
    assert cli.main(["eval", "run"]) == 0
    assert f"{result['rmse']:.6f}" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=r"data.table.task"):
        score_here("run", "-o", "x.parquet", "--set", "data.table.task=binary", "--set", "data.table.label_at_least=4")
    assert cli.main(["report", "run"]) == 0
    assert cli.main(["report", "run", "-o", "page.html"]) == 0
    assert "RMSE" in Path("page.html").read_text()


@pytest.mark.matrix  # several tasks are below, weights in test_compare.py and tests/ranks/test_targets.py
@pytest.mark.parametrize("arch", ["dlrm", "dlrm_dcn", *FACTORIZED])
def test_several_labels_from_file_to_scores(made, folder, arch):
    """With weights, a table of two features, and means of bags."""
    Path("samples.parquet").symlink_to(made)
    config = target_config(Path("samples.parquet"), "several")
    layers = {"dense_arch_layer_sizes": (16,)} if arch not in FACTORIZED else {}
    result = train(longer(replace(config, model=ModelConfig(arch, 16, **layers))))
    assert result["auc/click"] > 0.6
    assert result["auc/buy"] > 0.6
    columns = scores_and_export(["logit/click", "logit/buy"])
    scores, table = pq.read_table("scores.parquet"), pq.read_table(made)
    assert scores["label/buy"].to_pylist() == table["buy"].to_pylist()[-HELD_OUT:]
    weights = table["weight"].to_numpy()[-HELD_OUT:]
    right = (columns[:, 0] > 0) == (table["click"].to_numpy()[-HELD_OUT:] == 1)
    assert result["accuracy/click"] == pytest.approx(np.average(right, weights=weights), rel=1e-6)
    assert result["accuracy/click"] != pytest.approx(right.mean(), rel=1e-6), "the control: weights count"
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert {"auc/click", "auc/buy"} < set(next(line for line in lines if line["kind"] == "train"))


@pytest.mark.matrix
@pytest.mark.parametrize("arch", keep(["shared_bottom"], ["shared_bottom", "mmoe", "ple"]))
def test_several_tasks_from_file_to_scores(made, folder, capsys, arch):
    """A click, a purchase that only clicks have, and a rating of half of the samples."""
    Path("samples.parquet").symlink_to(made)
    model = ModelConfig(arch, 8, (8,), (6, 1), expert_layer_sizes=(8,), funnel=("click", "bought"))
    config = longer(target_config(Path("samples.parquet"), "tasks", model=model))
    config = replace(config, data=replace(config.data, table=replace(config.data.table, label_mean=3.0)))
    result = train(replace(config, train=replace(config.train, epochs=6)))
    table = pq.read_table(made).slice(ROWS - HELD_OUT)
    there = {name: table[name].is_valid().to_numpy() for name in ("click", "bought", "rated")}
    assert 0 < there["bought"].sum() < there["click"].sum() == HELD_OUT
    names = ["score/click", "score/bought", "score/rated"]
    outputs = scores_and_export(["logit/click", "logit/bought", "score/rated"])
    scores = {name: pq.read_table("scores.parquet")[name].to_numpy() for name in names}
    assert (scores["score/bought"] < scores["score/click"]).all()
    stars = table["rated"].to_numpy()[there["rated"]]
    distance = scores["score/rated"][there["rated"]] - stars
    assert np.sqrt(np.mean(distance**2)) == pytest.approx(result["rmse/rated"], rel=1e-5)
    assert result["rmse/rated"] < stars.std()
    right = (outputs[:, 1] > 0)[there["bought"]] == (table["bought"].to_numpy()[there["bought"]] == 1)
    assert right.mean() == pytest.approx(result["accuracy/bought"], rel=1e-6)
    assert {"auc/rated", "rmse/click"}.isdisjoint(result)
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "train"][-1]
    assert result["label_losses"] == {name: last[f"loss/{name}"] for name in there}
    assert serves(Path("exported"), table, scores, names)
    for words in (["eval", "run"], ["report", "run"], ["report", "run", "-o", "page.html"]):
        assert cli.main(words) == 0
    assert f"{result['rmse/rated']:.4f}" in capsys.readouterr().out
    assert cli.main(["data", "validate", "--config", "run.toml"]) == 0
    bags = table.drop_columns(["click", "bought", "rated", "buy", "stars"])
    pq.write_table(bags, "new.parquet", write_page_checksum=True)
    assert cli.main(["predict", "run", "--data", "new.parquet", "-o", "new_scores.parquet"]) == 0


@pytest.mark.matrix
@pytest.mark.parametrize("arch", ["mmoe", "dlrm", *FACTORIZED])
def test_classes_from_file_to_scores(made, folder, capsys, arch):
    """A grade with three classes beside a click and a rating: figures, scores, export, server, page, comparison."""
    Path("samples.parquet").symlink_to(made)
    layers = {} if arch in FACTORIZED else {"dense_arch_layer_sizes": (8,), "over_arch_layer_sizes": (6, 1)}
    layers |= {"expert_layer_sizes": (8,)} if arch == "mmoe" else {}
    config = longer(target_config(Path("samples.parquet"), "classes", model=ModelConfig(arch, 8, **layers)))
    result = train(replace(config, train=replace(config.train, epochs=6)))
    grades = ["grade=0", "grade=2.5", "grade=1"]
    scores_and_export([*(f"logit/{name}" for name in ("click", *grades)), "score/rated"])
    scores, table = pq.read_table("scores.parquet"), pq.read_table(made).slice(ROWS - HELD_OUT)
    there = table["grade"].is_valid().to_numpy()
    assert 0 < there.sum() < HELD_OUT
    shares = np.stack([scores[f"score/{name}"].to_numpy() for name in grades], axis=1)
    assert np.allclose(shares.sum(axis=1), 1, atol=1e-6)
    own = np.searchsorted([0, 1, 2.5], table["grade"].to_numpy()[there])
    own = np.array([0, 2, 1])[own]
    assert result["accuracy/grade"] == pytest.approx((shares[there].argmax(axis=1) == own).mean())
    most = np.bincount(own).max() / len(own)
    assert result["accuracy/grade"] > most + 0.05, "better than always saying the most frequent one"
    entropy = -np.log(shares[there][np.arange(len(own)), own]).mean()
    assert result["logloss/grade"] == pytest.approx(entropy, rel=1e-5)
    assert {"auc/grade=2.5", "auc/click", "rmse/rated"} < set(result)
    assert "auc/grade" not in result
    names = [f"score/{name}" for name in ("click", *grades, "rated")]
    assert serves(Path("exported"), table, {name: scores[name].to_numpy() for name in names}, names)
    assert json.loads(Path("exported/export.json").read_text())["classes"] == {"grade": grades}
    for words in (
        ["report", "run"],
        ["report", "run", "-o", "page.html"],
        ["compare", "scores.parquet", "scores.parquet"],
    ):
        assert cli.main(words) == 0
    assert "accuracy grade" in capsys.readouterr().out
    assert cli.main(["data", "validate", "--config", "run.toml"]) == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert {"loss/click", "loss/grade", "loss/rated"} < set([line for line in lines if line["kind"] == "train"][-1])
    assert set(result["label_losses"]) == {"click", "grade", "rated"}
    with pytest.raises(CheckpointError, match=r"data.table.classes"):
        score_here("run", "--set", "data.table.classes.grade=[0, 1, 2.5]")


def test_a_label_with_classes_is_no_feature():
    target = Target(("click", "stars"), ("binary", "multiclass")).with_classes({"stars": (1, 2)})
    with pytest.raises(ConfigError, match="columns twice: stars"):
        Schema(("stars",), (SparseFeature("user", 9),), target)


@pytest.mark.parametrize(
    "classes",
    [
        {}, {"stars": (1, 2), "click": (0, 1)}, {"stars": (1,)}, {"stars": (1, 1)}, {"stars": (1, float("nan"))},
        {"stars": (1, 1e39)}, {"stars": (1, 1 + 1e-9)},
    ],
)  # fmt: skip
def test_classes_that_do_not_fit_are_refused(classes):
    """Of all labels with classes; numbers that float32 does not tell apart, or does not have."""
    with pytest.raises(ConfigError, match=r"data.table.classes .* needed of each label with .* 2 to 100 numbers"):
        TableConfig(FEATURES, label=("click", "stars"), task=("binary", "multiclass"), classes=classes)


def test_the_example_of_the_page_trains(folder, capsys, project_dir):
    """The commands of docs/own_data.md, for a few steps."""
    (page,) = (
        text for text in blocks((project_dir / "docs" / "own_data.md").read_text(), "bash") if "tasks.py" in text
    )
    make, train_words = [shlex.split(line) for line in commands(page)]
    assert make == ["python", "examples/tasks.py", "clicks.parquet"]
    runpy.run_path(str(project_dir / make[1]))["main"](make[2], rows=4000)
    example = str(project_dir / train_words.pop())
    assert cli.main([*train_words[1:], example, "--run-dir", "run", "--set", "train.max_steps=20", "--nproc", "1"]) == 0
    result = json.loads(Path("run/result.json").read_text())
    assert set(result["label_losses"]) == {"click", "bought", "minutes"}
    assert {"auc/click", "auc/bought", "rmse/minutes"} < set(result)
    assert result["rmse/minutes"] < 4


def serves(exported: Path, table: pa.Table, scores: dict[str, np.ndarray], names: list[str]) -> bool:
    """A server answers the scores of all labels; the logit of a predicted number is none."""
    from embershard.extras.serving.server.prediction_server import Predictor

    predictor = Predictor(exported)
    answer = predictor.predict(table.select(list(FEATURES)).slice(0, 5).to_pylist())
    predictor.close()
    assert answer["labels"] == [name.partition("/")[2] for name in names]
    assert [row[-1] for row in answer["logits"]] == [None] * 5
    expected = np.stack([scores[name][:5] for name in names], axis=1)
    return bool(np.allclose(answer["scores"], expected, rtol=1e-5))


def test_files_without_labels_and_weights_are_scored(made, folder, capsys):
    Path("samples.parquet").symlink_to(made)
    train(target_config(Path("samples.parquet"), "several"))
    pq.write_table(pq.read_table(made).drop_columns(["click", "weight"]), "new.parquet", write_page_checksum=True)
    assert cli.main(["predict", "run", "--data", "new.parquet", "-o", "scores.parquet"]) == 0
    assert pq.read_table("scores.parquet").column_names[-3:] == ["logit/buy", "score/buy", "label/buy"]
    with pytest.raises(DataError, match="no column 'click'"):
        score_here("run", "--data", "new.parquet")
    for labels in ('["buy", "click"]', '["click", "stars"]', '"click"'):  # the outputs keep their names
        with pytest.raises(CheckpointError, match=r'with data.table.label = \["click", "buy"\], and .* cannot score'):
            score_here("run", "--set", f"data.table.label={labels}", "--set", "data.table.label_weights=[]")
        words = ["export", "run", "-o", "x", "--set", f"data.table.label={labels}"]
        assert cli.main([*words, "--set", "data.table.label_weights=[]"]) != 0
        assert "Leave data.table.label as it was" in capsys.readouterr().err


def test_a_sweep_of_regressions_shows_its_error(made, folder):
    Path("samples.parquet").symlink_to(made)
    train(target_config(Path("samples.parquet"), "regression"))
    from embershard.metrics.figures import main_names

    assert main_names([json.loads(Path("run/result.json").read_text())]) == ["rmse"]


@pytest.mark.parametrize("weight", [-1.0, float("nan"), None])
def test_bad_weights_are_named(made, folder, weight):
    table = pq.read_table(made).slice(0, 50)
    weights = table["weight"].to_pylist()
    weights[6] = weight
    table = table.set_column(table.column_names.index("weight"), "weight", pa.array(weights))
    pq.write_table(table, "samples.parquet", write_page_checksum=True)
    config = target_config(Path("samples.parquet"), "weighted")
    from embershard.data import open_source

    shown = "nan" if weight is None else weight
    (found,) = open_source(config.data).parse(0).bad.values()
    assert str(found) == f"samples.parquet:7 weight={shown}: a weight must be a number of at least 0"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": "regression", "label_at_least": 4.0}, 'nothing: with task = "regression"'),
        ({"label_mean": 3.0}, "nothing otherwise"),
        ({"task": "regression", "label": ("a", "b"), "label_mean": 3.0}, '2 numbers with task = "regression"'),
        ({"label": ("a", "a")}, "each once"),
        ({"label": ()}, "the name of a column, or names"),
        ({"label": ("a", "b"), "label_at_least": (1.0,)}, "one number, or 2, one for each label"),
        ({"label_weights": (1.0,)}, "nothing: there is one label"),
        ({"label": ("a", "b"), "label_weights": (1.0, 0.0)}, "2 numbers above 0"),
        ({"weight": ""}, "the name of a column"),
        ({"task": "multiclass"}, "2 to 100 numbers, each once"),
        ({"task": ("binary",)}, "needed one of"),
        ({"label": ("a", "b"), "task": ("binary",)}, "or one each"),
        ({"label": ("a", "b"), "task": ("binary", "regression"), "label_at_least": (1.0, 2.0)}, "each binary label"),
        ({"label": ("a", "b"), "task": ("binary", "regression"), "label_mean": (1.0, 2.0)}, "1 numbers"),
        ({"label_masks": ("a",)}, "nothing: there is one label"),
        ({"label": ("a", "b"), "label_masks": ("", "b")}, "of a label before it"),
        ({"label": ("a", "b"), "label_masks": ("b", "")}, "of a label before it"),
        ({"missing_labels": "masked"}, "there is one label"),
        ({"label": ("a", "b"), "missing_labels": "zero"}, '"masked"'),
    ],
)
def test_settings_without_a_meaning_are_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        TableConfig(**changes)
