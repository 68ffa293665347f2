"""`embershard compare`: scores of two models as people have them, in files and in runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from embershard.commands import score
from embershard.commands.cli import main as embershard
from embershard.commands.score import ScoresFile
from embershard.data import Target
from embershard.errors import ConfigError
from embershard.extras.compare.command import main
from embershard.extras.compare.compared import ComparedModel
from embershard.metrics.config import MetricsConfig
from embershard.metrics.evaluation import value_numbers
from embershard.metrics.predictions import Predicted, judge
from embershard.models.loss import class_logits
from embershard.sweeps.outcomes import Outcome, keep_outcome
from tests.unit.commands.conftest import start_here

pytestmark = pytest.mark.extra


def write(path: Path, seed: int, skill: float, **changed: Any) -> str:
    """Scores of 600 samples of 40 users, whose labels follow them as far as the model has skill."""
    rng = np.random.default_rng(0)
    truth, users = rng.normal(size=600), rng.integers(0, 40, 600)
    labels = (truth + rng.logistic(size=600) > 0).astype(np.float32)
    logit = (skill * truth + np.random.default_rng(seed).normal(size=600)).astype(np.float32)
    columns = {"user_id": users, "logit": logit, "score": 1 / (1 + np.exp(-logit)), "label": labels, **changed}
    pq.write_table(pa.table({name: values for name, values in columns.items() if values is not None}), path)
    return str(path)


@pytest.mark.smoke
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


def test_several_models_are_compared_with_the_first(tmp_path, capsys):
    a, b, c = (write(tmp_path / f"{skill}.parquet", seed, skill) for seed, skill in enumerate((0.5, 0.0, 3.0), 1))
    assert main([a, b, c, "--metrics", "auc"]) == 0
    shown = capsys.readouterr().out
    assert f"A: {a}. B: {b}. 600 samples" in shown
    assert f"A: {a}. C: {c}. 600 samples" in shown
    assert [line.rpartition("│")[0].rpartition("│")[2].strip() for line in shown.splitlines() if "│AUC" in line] == [
        "A",
        "C",
    ]
    assert "p is of each pair alone" in shown
    assert main([a, b, c, "--metrics", "auc", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["comparisons"]
    assert [(each["b"], each["labels"][""][0]["better"]) for each in found] == [(b, "A"), (c, "B")]
    assert main([a, c, "--metrics", "auc", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert {"a": a, "b": c, **alone} == found[1]


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


def test_samples_without_a_label_do_not_count_for_it(tmp_path, capsys):
    def some(path: Path, seed: int) -> tuple[str, str]:
        table = pq.read_table(write(path, seed, 1.0))
        is_there = np.arange(len(table)) % 3 > 0
        label = np.where(is_there, table["label"].to_numpy(), np.nan).astype(np.float32)
        of_place = table.column_names.index("label")
        pq.write_table(table.set_column(of_place, "label", pa.array(label)), path)
        own = path.with_suffix(".own.parquet")
        pq.write_table(table.filter(pa.array(is_there)), own)
        return str(path), str(own)

    files = zip(some(tmp_path / "a.parquet", 1), some(tmp_path / "b.parquet", 2), strict=True)
    found = []
    for pair in files:
        assert main([*pair, "--group", "user_id", "--metrics", "auc,gauc,logloss", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["labels"])
    masked, own = found
    assert masked == own
    with pytest.raises(ConfigError, match="label of row 0 is nan and"):
        main([str(tmp_path / "a.parquet"), write(tmp_path / "c.parquet", 3, 1.0)])


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
def test_runs_score_what_they_hold_out(trained, monkeypatch, capfd):
    monkeypatch.setattr(score.launcher, "start_ranks", start_here)
    assert main([str(trained.run_dir), str(trained.run_dir), "--group", "user", "--json"]) == 0
    shown = capfd.readouterr()
    assert "Scoring" in shown.err, "the standard output is for a program"
    found = json.loads(shown.out)["labels"][""]
    assert [each["metric"] for each in found][-1] == "gauc"
    result = json.loads((trained.run_dir / "result.json").read_text())
    assert found[0]["a"] == pytest.approx(result["auc"], abs=1e-6)
    assert not any(each["better"] for each in found)


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """A sweep of two configurations, each trained with the seeds 1 and 2, the second with seed 3, too; its runs give
    scores without a training. The second one has two labels."""

    def run(number: int, seed: int, skill: float, label: str | list[str]) -> None:
        varied = {"model.arch": "mmoe" if number else "dlrm", "model.over_arch_layer_sizes": [64, 1]}
        name = f"{number}-{seed}"
        varied = {**(varied if number else {"model.arch": "dlrm"}), "train.seed": seed}
        outcome = Outcome(
            name, name, 0, 1, varied, "finished", "", 1.0, "2026-11-25T00:00:00+00:00", 1, group=str(number)
        )
        folder = tmp_path / "sweep" / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(f"[train]\nseed = {seed}\n[data.table]\nlabel = {json.dumps(label)}\n")
        shutil.copy(Path(__file__).parents[1] / "reports" / "result_without_format.json", folder / "result.json")
        keep_outcome(outcome, tmp_path / "sweep")
        source = pq.read_table(write(folder / "scores.parquet", 10 * number + seed, skill))
        if isinstance(label, list):
            names = [f"{each}/liked" if each != "user_id" else each for each in source.column_names]
            source = source.rename_columns(names).append_column("score/stars", source["score"])
        pq.write_table(source, folder / "scores.parquet")

    failed = {"model.arch": "own:build", "train.seed": 1}
    outcome = Outcome("2-1", "2-1", 0, 1, failed, "failed", "", 1.0, "2026-11-25T00:00:00+00:00", 1, group="2")
    keep_outcome(outcome, tmp_path / "sweep")
    for seed in (1, 2):
        run(0, seed, 0.2, "liked")
    for seed in (2, 1, 3):
        run(1, seed, 2.0, ["liked", "stars"])

    def score_held_out(folder: Path, output: Path, keep: list[str], *, trust_code: bool) -> None:
        assert (keep, trust_code) == (["user_id"], False)
        shutil.copy(folder / "scores.parquet", output)

    monkeypatch.setattr(score, "score_held_out", score_held_out)
    return tmp_path / "sweep"


def test_configurations_of_sweeps_are_paired_by_seed(swept, capsys):
    """Figures are the means of the seeds that both have; of the one label that both have, whatever it is named."""
    names = [f"{swept}:model.arch=dlrm", f"{swept}:model.arch=mmoe:model.over_arch_layer_sizes=[64, 1]"]
    options = ["--group", "user_id", "--metrics", "auc,gauc", "--json"]
    assert main([*names, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seeds"] == 2
    assert list(found["labels"]) == ["liked"]
    each = [
        pq.read_table(swept / "runs" / f"{number}-{seed}" / "scores.parquet").rename_columns(
            ["user_id", "logit", "score", "label", "more"][: 5 if number else 4]
        )
        for number in (0, 1)
        for seed in (1, 2)
    ]
    for number, table in enumerate(each):
        pq.write_table(table, swept / f"{number}.parquet")
    alone = []
    for a, b in ((0, 2), (1, 3)):
        main([str(swept / f"{a}.parquet"), str(swept / f"{b}.parquet"), *options])
        alone.append(json.loads(capsys.readouterr().out)["labels"][""])
    for place, both in enumerate(found["labels"]["liked"]):
        for model in "ab":
            assert both[model] == pytest.approx(np.mean([of_seed[place][model] for of_seed in alone]))
        assert both["better"] == "B"
        assert both["low"] < both["b"] - both["a"] < both["high"]
    assert main([*names, "--group", "user_id"]) == 0
    said = capsys.readouterr().out
    assert "Means of 2 seeds." in said
    assert "Not in both, and left out: train.seed=3." in said
    assert main([*reversed(names), *options]) == 0
    back = json.loads(capsys.readouterr().out)["labels"]["liked"]
    assert [each["better"] for each in back] == ["A", "A"]
    assert [each["low"] for each in back] == pytest.approx([-each["high"] for each in found["labels"]["liked"]])


def test_settings_of_a_configuration_are_values(swept):
    """As TOML or as texts; and a configuration is meant that has no other setting than these."""
    shared = {"model.over_arch_layer_sizes=[64,1]", "model.over_arch_layer_sizes=[64, 1]"}
    for setting in (*shared, 'model.arch="mmoe"', "model.arch=mmoe"):
        assert len(ComparedModel.of(f"{swept}:{setting}").sources) == 3
    run = swept / "runs" / "0-9"
    shutil.copytree(swept / "runs" / "0-1", run)
    bare = Outcome(
        "0-9", "0-9", 0, 1, {"train.seed": 9}, "finished", "", 1.0, "2026-11-25T00:00:00+00:00", 1, group="9"
    )
    keep_outcome(bare, swept)
    assert [*ComparedModel.of(str(swept)).sources.values()] == [run]


def test_one_seed_in_common_is_said(swept, capsys):
    assert main([str(swept / "runs" / "0-1"), f"{swept}:model.arch=mmoe", "--group", "user_id"]) == 0
    said = capsys.readouterr().out
    assert "One seed: what another one would change is not known." in said
    assert "left out: train.seed=2; train.seed=3." in said or "left out: train.seed=3; train.seed=2." in said


def test_a_label_with_classes_has_figures_of_its_own(tmp_path, capsys):
    """Accuracy and log loss of the most probable class, against numpy; of the samples that have the label."""
    rng = np.random.default_rng(0)
    own, there = rng.integers(0, 3, 500), rng.random(500) < 0.7
    shares = [rng.dirichlet(np.ones(3) + skill * np.eye(3)[each]) for skill in (0.5, 3.0) for each in own]
    files = []
    for name, scores in zip("ab", np.array(shares).reshape(2, 500, 3), strict=True):
        columns = {}
        for place, each in enumerate(("stars=1", "stars=2", "stars=3")):
            columns[f"logit/{each}"] = np.log(scores[:, place] / (1 - scores[:, place]))
            columns[f"score/{each}"] = scores[:, place]
            columns[f"label/{each}"] = np.where(there, own == place, np.nan)
        columns |= {"score/a=x": rng.random(500), "label/a=x": np.arange(500.0), "label/only": own}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
        files.append(str(tmp_path / f"{name}.parquet"))
    assert main([*files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["labels"]) == ["stars=1", "stars=2", "stars=3", "a=x", "stars"]
    assert found["samples_of"] == {**dict.fromkeys(["stars=1", "stars=2", "stars=3", "stars"], there.sum()), "a=x": 500}
    loss, accuracy = found["labels"]["stars"]
    for model, scores in zip("ab", np.array(shares).reshape(2, 500, 3), strict=True):
        right = scores[np.arange(500), own][there]
        assert loss[model] == pytest.approx(-np.log(right).mean())
        assert accuracy[model] == pytest.approx((scores.argmax(axis=1) == own)[there].mean())
    assert (loss["metric"], accuracy["metric"], loss["better"], accuracy["better"]) == ("logloss", "accuracy", "B", "B")
    assert main([*files, "--metrics", "accuracy"]) == 0
    assert f"stars: {there.sum()} samples have it" in capsys.readouterr().out
    assert main([*files, "--metrics", "calibration", "--json"]) == 0
    assert "stars" not in json.loads(capsys.readouterr().out)["labels"], "it has no such figure"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", r"got 3 configurations, needed one.*\n  \S+:model.arch=dlrm\n  '\S+:model.arch=mmoe:"),
        (":model.arch=din", "got 0 configurations, needed one"),
        ("/runs/1-3", "no seed in common"),
        ("/states:a=1", "is not the folder of a sweep"),
        ("/states", "neither a run nor a sweep"),
        ("/none", "none: no such file or folder"),
        (":model.arch=own:build", "own:build: none of its runs has finished"),
    ],
)
def test_what_of_a_sweep_is_meant(swept, spec, message):
    with pytest.raises(ConfigError, match=message):
        main([f"{swept}:model.arch=dlrm", f"{swept}{spec}", "--group", "user_id"])


def test_an_empty_text_is_no_group_whoever_wrote_the_file(tmp_path, capsys):
    found = []
    for missing in ("", None):
        users = pa.array([missing if n % 3 == 0 else f"u{n % 40}" for n in range(600)], pa.string())
        files = [write(tmp_path / f"{seed}.parquet", seed, 1.0, user_id=users) for seed in (1, 2)]
        assert main([*files, "--group", "user_id", "--metrics", "auc,gauc", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["labels"])
    assert found[0] == found[1]


TARGETS = {
    "click": Target(weight="w"),
    "stars": Target(("stars",), ("regression",), weight="w"),
    "two": Target(("click", "stars"), ("binary", "regression"), weight="w"),
    "classes": Target(("s",), ("multiclass",), weight="w").with_classes({"s": [1, 2, 3]}),
}


@pytest.mark.parametrize("name", TARGETS)
def test_weighted_figures_are_those_of_the_evaluation(tmp_path, capsys, name):
    target, rng = TARGETS[name], torch.Generator().manual_seed(0)
    count, width = 500, len(target.labels)
    outputs = torch.randn(count, width, generator=rng)
    labels = (torch.randn(count, width, generator=rng) + outputs > 0).float()
    if name == "classes":
        labels = torch.eye(width)[torch.randint(width, (count,), generator=rng)]
        outputs = class_logits(target, outputs)
    if name == "two":
        labels[::7, 0] = torch.nan
    weights = torch.randint(0, 5, (count,), generator=rng).float() / 2
    users = [None if n % 11 == 0 else f"u{n % 29}" for n in range(count)]
    each = [outputs, labels] if width > 1 else [outputs[:, 0], labels[:, 0]]
    file = ScoresFile(tmp_path / "a.parquet", target, iter([pa.table({"user": users})]))
    file.add(Predicted(*each, weights))
    file.finish()
    groups = value_numbers([pa.table({"user": users})], ["user"])["user"].numbers
    grouped = name != "stars"
    metrics = MetricsConfig(group="user" if grouped else None)
    own = judge(target, Predicted(*each, weights), metrics, torch.from_numpy(groups))
    words = ["--group", "user"] if grouped else []

    def found(*more: str) -> dict[str, float]:
        assert main([*[str(tmp_path / "a.parquet")] * 2, "--replicates", "9", "--json", *words, *more]) == 0
        labels = json.loads(capsys.readouterr().out)["labels"]
        return {f"{one['metric']}{label and '/' + label}": one["a"] for label, each in labels.items() for one in each}

    figures = found()
    assert len(figures) >= 3
    assert figures == {name: pytest.approx(own[name], abs=2e-6) for name in figures}
    assert found("--weight", "weight") == figures
    assert found("--no-weight") != figures


def test_weights_of_one_model_alone_and_weights_that_differ_are_refused(tmp_path):
    weights = np.arange(600, dtype=np.float32)
    a, b = write(tmp_path / "a.parquet", 1, 1.0, weight=weights), write(tmp_path / "b.parquet", 2, 1.0)
    with pytest.raises(ConfigError, match=r"a\.parquet has weights .*b\.parquet has none.*--no-weight"):
        main([a, b])
    with pytest.raises(ConfigError, match=r"weight of row 0 is 0\.0 and"):
        main([a, write(tmp_path / "c.parquet", 2, 1.0, weight=weights + 1)])
    bad = np.where(weights == 7, np.nan, weights)
    with pytest.raises(ConfigError, match="weight of row 7 is nan: needed a weight"):
        main([write(tmp_path / "d.parquet", 2, 1.0, weight=bad)] * 2)
    assert main([a, b, "--no-weight", "--json"]) == 0
