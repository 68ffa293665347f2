"""examples/dlrm_v4/yambda_like.py and yambda.py: from a generated log to samples that train day by day."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yambda
import yambda_like
from yambda import CROSSES, HISTORY, SPARSE, TARGET

from embershard.commands import cli
from embershard.data import BatchStream, open_source, schema_of
from embershard.models import model_tables
from embershard.settings.files import load_config
from embershard.training.config import RunConfig
from embershard.training.fit.model_size import table_rows

pytestmark = pytest.mark.extra

EXAMPLE = Path(__file__).parents[4] / "examples" / "dlrm_v4.toml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("yambda")
    log, samples = str(folder / "log"), str(folder / "samples")
    assert yambda_like.main(["--scale", "0.0001", "--events", "30", "--days", "4", "-o", log]) == 0
    options = ["--history", "12", "--cross-scale", "0.0001", "-o", samples]
    assert yambda.main([f"{log}/multi_event.parquet", *options]) == 0
    return folder


def test_samples_train_day_by_day(folder):
    config = load_config(RunConfig, folder / "samples" / "run.toml")
    days = []
    source = open_source(config.data)
    with BatchStream(
        source, batch_size=50, rank=0, world_size=1, split="train", epochs=1, config=config.data
    ) as stream:
        for batch in stream:
            features = batch.sparse_features.to_dict()
            days += (features["time"].values() // 86_400).tolist()
            assert features["hist_item_id"].lengths().equal(features["hist_time"].lengths())
    assert days == sorted(days)
    assert set(days) == {0, 1, 2, 3}


def test_a_run_trains_and_every_day_but_the_first_is_evaluated_before(folder, one_rank_here):
    run = ["--config", str(folder / "samples" / "run.toml"), "--run-dir", str(folder / "run")]
    more = ["--set", "train.batch_size=200", "--set", "cache.ratio=0.5", "--set", "train.device=cpu"]
    assert cli.main(["train", *run, *more]) == 0
    lines = [line for line in (folder / "run" / "metrics.jsonl").read_text().splitlines() if '"window"' in line]
    assert [f'"window": {number}, ' in line and '"late": 0' in line for number, line in enumerate(lines, 1)] == [
        True
    ] * 3


def test_what_is_there_is_not_overwritten(folder, capsys):
    assert yambda_like.main(["-o", str(folder / "log")]) == 2
    assert yambda.main([str(folder / "log" / "multi_event.parquet"), "-o", str(folder / "samples")]) == 2
    assert "exists; give the name of a new folder" in capsys.readouterr().err


def test_a_log_that_is_none_leaves_nothing_behind(folder, tmp_path, capsys):
    pq.write_table(pa.table({"uid": [1]}), tmp_path / "listens.parquet")
    options = ["--metadata", str(folder / "log"), "-o", str(tmp_path / "samples")]
    assert yambda.main([str(tmp_path / "listens.parquet"), *options]) == 2
    assert "has no column 'timestamp'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["listens.parquet"]


def test_the_example_has_the_references_tables():
    config = load_config(RunConfig, EXAMPLE)
    rows = table_rows(config)
    assert config.data.parquet.sparse == SPARSE
    assert (config.model.target, config.model.history) == (TARGET, HISTORY)
    assert rows.pop("t_hist_action") == 8, "of ours: the reference has these numbers among its dense layers"
    assert {f"t_{name}": number for name, (_, number) in CROSSES.items()}.items() <= rows.items()
    assert len(rows) == 11
    assert sum(rows.values()) == 293_051_712
    tables = model_tables(config.model, schema_of(config.data))
    assert sum(table.num_rows * table.dim * 4 for table in tables) == 600_169_922_560
