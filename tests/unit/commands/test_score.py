"""`embershard predict` and `embershard eval` on one rank, in this process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embershard.commands import cli, score
from embershard.data import DataConfig
from embershard.distributed import complete_checkpoints, step_of
from embershard.distributed.checkpoint.best import BestEvaluation
from embershard.errors import CheckpointError, ConfigError, DataError
from embershard.launch import launcher
from embershard.metrics.ranking import by_group, weighted_mean
from tests.unit.commands.conftest import NUM_HELD_OUT, NUM_ROWS, Trained, score_here
from tests.unit.distributed.checkpoints import flip_bit

pytestmark = pytest.mark.slow  # whole training runs


def scores(trained: Trained, output: Path, *words: str) -> pa.Table:
    score_here(str(trained.run_dir), "-o", str(output), *words)
    return pq.read_table(output)


def test_eval_shows_what_training_measured(trained, capsys):
    score_here(str(trained.run_dir))
    shown = dict(line.strip("│ ").split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│"))
    result = json.loads((trained.run_dir / "result.json").read_text())
    wanted = {"split": "tail", "how": "the last 20% of every file", "samples": NUM_HELD_OUT, "all_samples": NUM_ROWS}
    assert result["held_out"] == wanted
    for name in ("auc", "ne", "logloss", "accuracy", "calibration"):
        assert shown[next(key for key in shown if key.strip() == name)].strip() == f"{result[name]:.6f}"


def test_scores_are_in_the_order_of_the_samples(trained, tmp_path):
    data = ["--data", str(trained.data)]
    found = scores(trained, tmp_path / "all.parquet", *data)
    assert found.column_names == ["logit", "score", "label"]
    assert found["label"].to_pylist() == pq.read_table(trained.data)["click"].to_pylist()
    assert len(found) == NUM_ROWS
    held_out = scores(trained, tmp_path / "held_out.parquet")
    assert held_out["label"].to_pylist() == found["label"].to_pylist()[-NUM_HELD_OUT:]
    assert held_out["logit"].to_numpy() == pytest.approx(found["logit"].to_numpy()[-NUM_HELD_OUT:], abs=1e-6)
    alone = tmp_path / "one.parquet"  # a sample's score is its own: the last one, without the others
    pq.write_table(pq.read_table(trained.data).slice(NUM_ROWS - 1), alone)
    single = scores(trained, tmp_path / "single.parquet", "--data", str(alone))
    assert single["logit"].to_numpy() == pytest.approx(found["logit"].to_numpy()[-1:], abs=1e-6)


def test_without_labels(trained, tmp_path):
    found = scores(trained, tmp_path / "new.parquet", "--data", str(trained.unlabelled))
    assert found.column_names == ["logit", "score"]
    assert len(found) == 300
    with pytest.raises(DataError, match="no column 'click'"):
        score_here(str(trained.run_dir), "--data", str(trained.unlabelled))


def test_kept_columns_are_those_of_the_scored_samples(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(score, "_GROUP_ROWS", 70)  # several groups, which do not end where chunks do
    data = pq.read_table(trained.data)
    found = scores(trained, tmp_path / "held_out.parquet", "--keep", "items,user")
    assert found.column_names == ["items", "user", "logit", "score", "label"]
    assert (
        found.select(["items", "user"]).to_pydict()
        == data.slice(NUM_ROWS - NUM_HELD_OUT).select(["items", "user"]).to_pydict()
    )
    assert found["logit"].equals(scores(trained, tmp_path / "without.parquet")["logit"])


def test_columns_that_cannot_be_kept_are_refused(trained, tmp_path):
    run, output = str(trained.run_dir), ["-o", str(tmp_path / "no.parquet")]
    with pytest.raises(DataError, match="no column 'usr'; did you mean 'user'"):
        score_here(run, *output, "--keep", "user,usr")
    with pytest.raises(ConfigError, match="label: scores have a column of that name"):
        score_here(run, *output, "--keep", "label")
    with pytest.raises(ConfigError, match='C1: needed data of kind "table" or "parquet"'):
        score.check_kept(DataConfig(), ["C1"])
    assert not list(tmp_path.glob("no.parquet*"))


@pytest.mark.parametrize(
    ("keep", "said"), [("user,usr", "no column 'usr'; did you mean"), ("label", "label: scores have")]
)
@pytest.mark.parametrize("command", ["predict", "compare"])
def test_columns_that_cannot_be_kept_are_refused_before_a_rank_starts(
    command, keep, said, trained, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(launcher, "start_ranks", None)
    run, column = str(trained.run_dir), keep.rpartition(",")[2]
    words = {
        "predict": ["predict", run, "-o", str(tmp_path / "no.parquet"), "--keep", keep],
        "compare": ["compare", run, run, "--group", column],
    }
    assert cli.main(words[command]) == 2
    assert said in capsys.readouterr().err
    assert cli.main(["compare", run, run, "--metrics", "auc,gauc"]) == 2
    assert "--group COLUMN" in capsys.readouterr().err


def test_what_cannot_be_scored_is_refused(trained, tmp_path):
    run, output = str(trained.run_dir), ["-o", str(tmp_path / "no.parquet")]
    with pytest.raises(CheckpointError, match=r'id_mapping = "hash", and "modulo" was asked for'):
        score_here(run, *output, "--set", "data.parquet.id_mapping=modulo")
    with pytest.raises(CheckpointError, match="over_arch_layer_sizes"):
        score_here(run, *output, "--set", "model.over_arch_layer_sizes=8,1")
    with pytest.raises(ConfigError, match=r"embedding_optimizer.lr has no effect"):
        score_here(run, *output, "--set", "embedding_optimizer.lr=1")
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; there is step_12"):
        score_here(run, *output, "--step", "7")
    other = tmp_path / "other.parquet"
    pq.write_table(pq.read_table(trained.data).drop_columns("user"), other)
    with pytest.raises(DataError, match="no column 'user'"):
        score_here(run, *output, "--data", str(other))
    assert not list(tmp_path.glob("no.parquet*"))
    with pytest.raises(ConfigError, match="is not overwritten"):
        score.predict([run, "-o", str(other)])
    with pytest.raises(ConfigError, match=r"has no config.toml"):
        score.predict([str(tmp_path), *output])


def test_hanging_ranks_are_ended_as_in_training(trained, monkeypatch):
    started = []
    monkeypatch.setattr(launcher, "start_ranks", lambda *given, **more: started.append(more) or 0)
    for words, seconds in ([], 50), (["--hang-seconds", "7"], 7), (["--hang-seconds", "0"], None):
        assert score.evaluate([str(trained.run_dir), *words]) == 0
        del started[-1]["job"]
        assert started[-1] == {"hang_seconds": seconds, "stacks": trained.run_dir / "stacks.txt"}


def test_a_failure_leaves_no_file(trained, tmp_path, monkeypatch):
    monkeypatch.setattr("embershard.commands.score._GROUP_ROWS", 100)
    good = pq.read_table(trained.data)
    bad = good.set_column(3, "click", pa.array([*good["click"].to_pylist()[:-1], 7], pa.int8()))
    pq.write_table(bad, tmp_path / "bad.parquet", row_group_size=200)
    with pytest.raises(DataError, match=r"parquet:1000 click=7.0"):
        score_here(str(trained.run_dir), "-o", str(tmp_path / "s.parquet"), "--data", str(tmp_path / "bad.parquet"))
    assert [path.name for path in tmp_path.iterdir()] == ["bad.parquet"]


def test_the_newest_valid_checkpoint_is_used(trained, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained.run_dir, run)
    newest = complete_checkpoints(run / "checkpoints")[-1]
    damaged = newest.with_name("step_99")
    shutil.copytree(newest, damaged)
    flip_bit(damaged / "__0_0.distcp", damaged)
    score_here(str(run), "-o", str(tmp_path / "s.parquet"))
    assert "Not used: " in (out := capsys.readouterr().out)
    assert f"by {newest}" in out.replace("\n", "")


def test_the_best_checkpoint_is_used_unless_told_otherwise(trained, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained.run_dir, run)
    newest = complete_checkpoints(run / "checkpoints")[-1]
    best = BestEvaluation(step_of(newest) or 0, "auc", 0.75)
    best.write(run / "checkpoints")
    for number, words in enumerate(([], ["--step", "last"])):
        score_here(str(run), "-o", str(tmp_path / f"{number}.parquet"), *words)
        out = " ".join(capsys.readouterr().out.split())
        assert (f"{newest}, the best evaluation's (auc 0.75 at step {best.step}" in out) == (not words)
    shutil.rmtree(newest)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        score_here(str(run), "-o", str(tmp_path / "none.parquet"))


def test_eval_by_user_and_slice_equals_the_scores(trained, tmp_path, capsys):
    """As a program reads it, of a run that was trained without such figures."""
    found = scores(trained, tmp_path / "scores.parquet", "--keep", "user")
    metrics = ["--set", "metrics.group=user", "--set", 'metrics.slices=["user"]', "--set", "metrics.most_slices=2"]
    names = ["--set", 'metrics.names=["auc", "gauc", "precision@2"]']
    capsys.readouterr()
    score_here(str(trained.run_dir), *metrics, *names, "--format", "json")
    told = json.loads(capsys.readouterr().out)
    users = found["user"].combine_chunks().dictionary_encode()
    codes = users.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    columns = found["score"].to_numpy(), found["label"].to_numpy(), codes
    wanted = by_group(*(each[codes >= 0] for each in columns), places=[2])
    assert told["gauc"] == pytest.approx(weighted_mean(wanted.auc, wanted.weight), rel=1e-9)
    assert told["precision@2"] == pytest.approx(wanted.precision[0].mean(), rel=1e-9)
    counts = np.sort(np.unique(codes, return_counts=True)[1])[::-1]
    slices = told["slices"]["user"]
    assert [each["samples"] for each in slices.values()] == [*counts[:2], counts[2:].sum()]
    assert told["samples"] == NUM_HELD_OUT
    top = next(iter(slices))
    rows = (codes == -1) if top == "(missing)" else np.array(found["user"].cast(pa.string()).to_pylist()) == top
    assert slices[top]["auc"] == pytest.approx(
        by_group(*(each[rows] for each in columns[:2]), np.zeros(rows.sum())).auc[0]
    )
    score_here(str(trained.run_dir), *metrics, "--format", "csv")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("column,value,samples,")
    assert [line.split(",")[0] for line in lines[1:]] == ["", "user", "user", "user"]
    score_here(str(trained.run_dir), *metrics)
    assert "Held-out samples by user" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"metrics.group, metrics.slices: .*no column 'usr'.* Or leave them out"):
        score_here(str(trained.run_dir), "--set", "metrics.group=usr")
