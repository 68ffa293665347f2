"""Whatever `data inspect` accepts is read as it was meant: 50 dialects of one table, drawn by a seed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.covering import keep
from tests.unit.data import dialects
from tests.unit.data.dialects import Dialect


@pytest.mark.parametrize("seed", keep(range(0, 50, 5), range(50)))
def test_samples_are_those_of_the_clean_file(tmp_path, seed):
    assert dialects.tried(seed, tmp_path) == ""


@pytest.mark.slow
@pytest.mark.parametrize("seed", keep([100, 105], range(100, 110)))
def test_training_on_a_dialect_is_training_on_the_clean_file(tmp_path, ranks, seed, monkeypatch):
    monkeypatch.setenv("EMBERSHARD_COPIES", str(tmp_path / "copies"))
    assert dialects.tried(seed, tmp_path, ranks) == ""


@pytest.mark.matrix
def test_a_wrong_separator_in_the_settings_is_seen(tmp_path):
    """The negative control: lists that are cut into columns, or not cut, give other samples, or bad rows."""
    dialect = replace(Dialect(), separator=";", list_separator="|")
    path = dialects.write(tmp_path, dialect, dialects.rows_of(dialect))
    _, _, config = dialects.inspected(path)
    features = config.table.features
    planted = features | {"tags": replace(features["tags"], separator=";")}
    wrong = replace(config, table=replace(config.table, features=planted))
    assert not dialects.same(dialects.samples(wrong), dialects.samples(config))
    wrong = replace(config, bad_rows=0.99, table=replace(config.table, separator="|"))
    with pytest.raises(Exception, match="no column"):
        dialects.samples(wrong)


def test_json_lines_are_read_as_the_table(tmp_path):
    rows = dialects.rows_of(Dialect())
    path = dialects.write_json(tmp_path / "a.jsonl", rows, "|")
    code, said, config = dialects.inspected(path)
    assert code == 0, said
    assert dialects.samples(config).num_samples == len(rows)


@pytest.mark.parametrize(
    ("dialect", "said"),
    [
        (Dialect(encoding="latin-1"), "--encoding"),
        (Dialect(header=False), "--columns NAME,...; or --header"),
        (Dialect(separator="~"), "--separator"),
        (Dialect(encoding="utf-16", told=("--encoding", "utf-8")), "--encoding"),
    ],
)
def test_refusals_are_a_sentence_with_a_remedy(tmp_path, dialect, said):
    path = dialects.write(tmp_path, dialect, dialects.rows_of(dialect))
    code, errors, _ = dialects.inspected(path, *dialect.told)
    assert code == 2
    assert errors.count("\n") == 1
    assert said in errors
