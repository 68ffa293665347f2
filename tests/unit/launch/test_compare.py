"""`embershard compare`: scores of two models as people have them, in files and in runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embershard.errors import ConfigError
from embershard.launch import score
from embershard.launch.cli import main as embershard
from embershard.launch.report.compare import main
from tests.unit.launch.conftest import score_here


def write(path: Path, seed: int, skill: float, **changed: Any) -> str:
    """Scores of 600 samples of 40 users, whose labels follow them as far as the model has skill."""
    rng = np.random.default_rng(0)
    truth, users = rng.normal(size=600), rng.integers(0, 40, 600)
    labels = (truth + rng.logistic(size=600) > 0).astype(np.float32)
    logit = (skill * truth + np.random.default_rng(seed).normal(size=600)).astype(np.float32)
    columns = {"user_id": users, "logit": logit, "score": 1 / (1 + np.exp(-logit)), "label": labels, **changed}
    pq.write_table(pa.table({name: values for name, values in columns.items() if values is not None}), path)
    return str(path)


def test_the_better_model_is_named_and_the_same_one_is_not(tmp_path, capsys):
    a, b = write(tmp_path / "a.parquet", 1, 0.2), write(tmp_path / "b.parquet", 2, 2.0)
    assert main([a, b, "--group", "user_id", "--metrics", "auc,gauc,ndcg@3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["samples"] == 600
    assert [(each["metric"], each["better"]) for each in found["labels"][""]] == [
        ("auc", "B"), ("gauc", "B"), ("ndcg@3", "B")
    ]  # fmt: skip
    assert all(each["low"] < each["b"] - each["a"] < each["high"] for each in found["labels"][""])
    assert main([a, a]) == 0
    shown = capsys.readouterr().out
    assert shown.count("no difference") == 5
    assert "600 samples" in shown


def test_several_labels_and_regressions(tmp_path, capsys):
    def several(path: Path, seed: int) -> str:
        rng, labels = np.random.default_rng(seed), np.random.default_rng(0).integers(0, 2, 600).astype(np.float32)
        more = {"logit/buy": rng.normal(size=600), "score/buy": rng.random(600), "label/buy": labels}
        none = {"logit": None, "score": None, "label": None}
        return write(path, seed, 1.0, **none, **more, **{"score/stars": rng.random(600), "label/stars": labels})

    files = several(tmp_path / "a.parquet", 1), several(tmp_path / "b.parquet", 2)
    main([*files, "--json"])
    found = json.loads(capsys.readouterr().out)["labels"]
    assert {label: [each["metric"] for each in of_it] for label, of_it in found.items()} == {
        "buy": ["auc", "ne", "logloss", "accuracy", "calibration"], "stars": ["rmse", "mae", "r2"]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "words", "message"),
    [
        ({"label": np.ones(600, np.float32)}, [], "label of row"),
        ({"label": None}, [], "no column 'label'"),
        ({"user_id": np.arange(600)}, ["--group", "user_id"], "user_id of row"),
        ({"user_id": None}, ["--group", "user_id"], "--keep user_id"),
        ({"user_id": ["x"] * 600}, ["--weight", "user_id"], "needed numbers"),
        ({}, ["--metrics", "gauc"], "--group COLUMN"),
        ({}, ["--metrics", "rmse,f1"], "needed some of"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, changed, words, message):
    files = write(tmp_path / "a.parquet", 1, 1.0), write(tmp_path / "b.parquet", 2, 1.0, **changed)
    with pytest.raises(ConfigError, match=message):
        main([*(files[1:] * 2 if "--weight" in words else files), *words])


def test_other_numbers_of_samples_and_other_files_are_refused(tmp_path, capsys):
    a = write(tmp_path / "a.parquet", 1, 1.0)
    pq.write_table(pq.read_table(a).slice(1), tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match=r"600 samples .*599"):
        main([a, str(tmp_path / "b.parquet")])
    (tmp_path / "c.parquet").write_text("no scores")
    with pytest.raises(ConfigError, match="not a Parquet file"):
        main([a, str(tmp_path / "c.parquet")])
    assert embershard(["compare", a, str(tmp_path / "none.parquet")]) == 2
    assert "none.parquet" in capsys.readouterr().err


@pytest.mark.slow
def test_runs_score_what_they_hold_out(trained, monkeypatch, capsys):
    def here(words: list[str]) -> int:
        return score_here(*words)

    monkeypatch.setattr(score, "predict", here)
    assert main([str(trained.run_dir), str(trained.run_dir), "--group", "user", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.split("\n{", 1)[-1].join(["{", ""]))["labels"][""]
    assert [each["metric"] for each in found][-1] == "gauc"
    result = json.loads((trained.run_dir / "result.json").read_text())
    assert found[0]["a"] == pytest.approx(result["auc"], abs=1e-6)
    assert not any(each["better"] for each in found)
