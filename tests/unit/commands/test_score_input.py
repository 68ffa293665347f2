"""What `embershard predict` and `embershard eval` are given is looked at before any rank starts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embershard.commands import cli, score
from embershard.data import DataConfig, TableConfig, TableFeature, open_source
from embershard.launch import launcher
from embershard.settings.decoding import to_toml
from tests.unit.commands.conftest import clicks, config_of_clicks

SAMPLES = clicks(50)
OTHERS = {
    "as_trained.parquet": SAMPLES,
    "unlabelled.parquet": SAMPLES.drop_columns("click"),
    "no_user.parquet": SAMPLES.drop_columns("user"),
    "words.parquet": SAMPLES.set_column(2, "age", pa.array([["old"]] * 50)),
    "wide.parquet": SAMPLES.set_column(1, "items", pa.array([list(range(20))] * 50)),
}


@pytest.fixture
def started(tmp_path, monkeypatch) -> list[int]:
    """A run of which the settings are there, and other data beside it; the numbers of ranks that were started."""
    found: list[int] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "start_ranks", lambda num_ranks, *_, **__: found.append(num_ranks) or 0)
    for name, table in OTHERS.items():
        pq.write_table(table, name)
    Path("run").mkdir()
    Path("run", "config.toml").write_text(to_toml(config_of_clicks(tmp_path / "as_trained.parquet", 3)))
    return found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["predict", "--data", "unlabeled.parquet"], "unlabeled.parquet: no such file or folder"),
        (["predict", "--data", "unlabeled.parquet"], "Did you mean unlabelled.parquet?"),
        (["predict", "--data", "no_user.parquet"], "no_user.parquet: no column 'user'"),
        (["predict", "--data", "words.parquet"], "column 'age' is of type list<element: string>; needed"),
        (
            ["predict", "--data", "wide.parquet", "--set", "data.parquet.max_bag_size=9"],
            "wide.parquet:1 items=20 ids: needed at most 9",
        ),
        (["predict", "--data", "words.parquet", "--set", "data.kind=table"], "data.table"),
        (["eval", "--data", "unlabelled.parquet"], "unlabelled.parquet: no column 'click'"),
        (["eval", "--set", "metrics.group=usr"], "no column 'usr'; did you mean 'user'?"),
    ],
)
def test_wrong_input_ends_in_one_sentence_before_a_rank_starts(words, said, started, capsys):
    command, *rest = words
    output = ["-o", "scores.parquet"] if command == "predict" else []
    assert cli.main([command, "run", *output, *rest]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert started == []


@pytest.mark.parametrize(
    "words",
    [
        ["predict", "-o", "scores.parquet"],
        ["predict", "-o", "scores.parquet", "--data", "unlabelled.parquet"],
        ["predict", "-o", "scores.parquet", "--data", "unlabelled.parquet", "--set", "metrics.group=usr"],
        ["eval"],
    ],
)
def test_right_input_starts_a_rank(words, started):
    command, *rest = words
    assert cli.main([command, "run", *rest]) == 0
    assert started == [1]


class TwoRanks:
    """Each has read other chunks."""

    def all_gather_objects(self, value: Counter[str]) -> list[Counter[str]]:
        return [value, Counter(user=1000)]


def test_ids_that_no_row_is_for_are_told(tmp_path):
    pq.write_table(pa.table({"click": [0, 1], "user": [3, 99]}), tmp_path / "a.parquet")
    features = {"user": TableFeature("sparse", num_rows=11, mapping="modulo")}
    table = TableConfig(features, label="click")
    source = open_source(DataConfig("table", str(tmp_path / "a.parquet"), eval_fraction=0, table=table))
    source.parse(0)
    (said,) = score.beyond_tables(source, TwoRanks())
    assert said.startswith("user: 1,001 ids are beyond its table, and were scored by rows of other ids")
