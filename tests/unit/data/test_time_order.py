"""Tables in time order: their files, texts and times; bad rows; what is refused, and how it can be helped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embershard.data import BatchStream, DataConfig, ParquetConfig, open_source
from embershard.data.config import TableConfig, TableFeature
from embershard.data.sources.check import check_data
from embershard.data.sources.source import WindowSource
from embershard.data.time_config import TimeConfig
from embershard.errors import ConfigError, DataError
from embershard.sharding.config import ShardingConfig
from embershard.training.config import RunConfig, TrainConfig

HOUR = 3600
FEATURES = {"number": TableFeature("dense"), "user": TableFeature("sparse", mapping="modulo", num_rows=9)}


def write(folder: Path, hours: list[list[Any]], form: str = "parquet") -> str:
    """Write a file for each list; `number` counts the rows of all of them. Of None a row has no time; a text is one."""
    folder.mkdir(exist_ok=True)
    start = 0
    for place, of_file in enumerate(hours):
        times = [hour if hour is None or isinstance(hour, str) else round(hour * HOUR) for hour in of_file]
        numbers = range(start, start + len(times))
        start += len(times)
        if form == "parquet":
            columns = {"label": [0] * len(times), "number": numbers, "user": numbers, "ts": times}
            pq.write_table(pa.table(columns), folder / f"{place}.parquet", row_group_size=4)
            continue
        pairs = zip(numbers, times, strict=True)
        rows = ["label,number,user,ts", *(f"0,{number},1,{'' if time is None else time}" for number, time in pairs)]
        (folder / f"{place}.csv").write_text("\n".join(rows) + "\n")
    return str(folder)


def config_of(path: str | None, *, files: str = "together", **options: Any) -> DataConfig:
    table = TableConfig(FEATURES, files=("*",))
    settings = {"num_workers": 0, "shuffle": False, "chunk_rows": 4, "time": TimeConfig("ts", HOUR, files)}
    return DataConfig("table", path, table=table, **(settings | options))


def numbers_of(config: DataConfig, window: int | None = None) -> list[int]:
    """The `number` of the samples to train on, or of those of a window before they train."""
    source = open_source(config)
    split, of = ("train", source) if window is None else ("eval", WindowSource(source, window))
    place = {"batch_size": 1, "rank": 0, "world_size": 1, "epochs": 1}
    with BatchStream(of, split=split, config=config, **place) as stream:
        return [int(number) for batch in stream for number in batch.dense_features[:, 0]]


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_columns_of_a_window_go_along_with_its_samples(tmp_path, form):
    config = config_of(write(tmp_path, [[2.5, 0.1, 1.0, 0.9, 2.0, None], [0.5, 3.9, 2.2]], form), bad_rows=0.5)
    source, found = open_source(config), []
    for window in range(4):
        columns = pa.concat_tables(WindowSource(source, window).held_out_columns(["number"]))
        found.append([int(number) for number in columns["number"].to_pylist()])
        assert found[-1] == numbers_of(config, window)
    assert sorted(number for window in found for number in window) == list(range(9))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_files_train_window_by_window(tmp_path, form):
    path = write(tmp_path, [[2.5, 0.1, 1.0, 0.9, 2.0, 1.5], [0.5, 3.9, 2.2]], form)
    together = [1, 3, 6, 2, 5, 0, 4, 8, 7]
    assert numbers_of(config_of(path)) == together
    assert [numbers_of(config_of(path), window) for window in range(4)] == [[1, 3, 6], [2, 5], [0, 4, 8], [7]]
    in_turn = config_of(path, files="in_turn")
    assert numbers_of(in_turn) == [1, 3, 2, 5, 0, 4, 6, 8, 7], "6 is of a window that the first file closed"
    windows = open_source(in_turn).held_out.windows
    assert windows.late.tolist() == [0, 0, 1, 0]
    assert [windows.name(window)[11:] for window in range(4)] == ["00:00:00", "01:00:00", "02:00:00", "03:00:00"]
    (said,) = open_source(in_turn).notes[:1]
    assert "4 windows of 3,600 s" in said
    assert "Late samples: 1." in said
    mixed = numbers_of(replace(config_of(path), shuffle=True, seed=5))
    assert [sorted(part) for part in (mixed[:3], mixed[3:5], mixed[5:8])] == [[1, 3, 6], [2, 5], [0, 4, 8]]


def test_files_come_in_turn_in_the_natural_order_of_their_names(tmp_path):
    path = write(tmp_path, [[0.1, 1.0], [1.1, 2.0]])
    (tmp_path / "0.parquet").rename(tmp_path / "part_10.parquet")
    (tmp_path / "1.parquet").rename(tmp_path / "part_9.parquet")
    (tmp_path / "part_1.parquet.tmp").write_text("somebody writes it")
    assert numbers_of(config_of(path, files="in_turn")) == [2, 3, 0, 1], "all rows of the second file are late"
    (tmp_path / "part_1.parquet.tmp").unlink()
    assert numbers_of(config_of(path)) == [0, 1, 2, 3]


def test_texts_and_times_are_times(tmp_path):
    day = ["2024-01-01 23:59:59", "2024-01-02 00:00:00", "2024-01-01T00:00:00"]
    path = write(tmp_path / "csv", [day], "csv")
    config = config_of(path, time=TimeConfig("ts", 24 * HOUR))
    assert numbers_of(config) == [0, 2, 1]
    assert open_source(config).held_out.windows.name(1) == "2024-01-02 00:00:00"
    times = pa.array(np.array(["2024-01-03", "2024-01-01"], "datetime64[ms]"))
    pq.write_table(pa.table({"label": [0, 1], "user": [1, 2], "ts": times}), tmp_path / "a.parquet")
    parquet = ParquetConfig(sparse=("user",), num_rows=(9,))
    config = DataConfig("parquet", str(tmp_path), parquet=parquet, time=TimeConfig("ts", 24 * HOUR))
    assert open_source(config).held_out.windows.part_rows.tolist() == [1, 1]


def test_held_out_files_stay_apart(tmp_path):
    path, held_out = write(tmp_path / "a", [[1, 0, 2]]), write(tmp_path / "b", [[0, 9]])
    config = config_of(path, eval_path=held_out)
    assert numbers_of(config) == [1, 0, 2]
    source = open_source(config)
    assert source.chunks("eval").num_samples == 2
    assert len(source.held_out.windows.numbers) == 3
    assert source.held_out.how == f"all of {held_out}"
    shared = open_source(config, share=lambda _: source.held_out)
    assert shared.held_out is source.held_out, "other ranks make no pass"


def test_a_row_without_a_time_is_bad(tmp_path):
    path = write(tmp_path, [[0, 1, None, 0, 2, None]])
    with pytest.raises(DataError, match=r"0.parquet:3 ts=nothing: needed a time in every row, by data.time.column"):
        open_source(config_of(path))
    with pytest.raises(
        DataError, match=r"data.time: 2 of 6 rows have no ts that can be read; data.bad_rows = 0.1 allows 10"
    ):
        open_source(config_of(path, bad_rows=0.1))
    assert numbers_of(config_of(path, bad_rows=0.5)) == [0, 3, 1, 2, 4, 5], "in the window of the row before"
    texts = write(tmp_path / "texts", [["1", "5000", "soon"]], "csv")
    with pytest.raises(DataError, match=r"0.csv:4 ts='soon': needed a time"):
        open_source(config_of(texts))
    with pytest.raises(DataError, match=r"data.time.column = 'ts': no row has a time there"):
        open_source(config_of(write(tmp_path / "none", [[None, None]], "csv"), bad_rows=0.5))


def test_rows_without_a_time_at_the_start(tmp_path):
    path = write(tmp_path, [[None] * 5 + [1, 0] + [None] * 5])
    assert numbers_of(config_of(path, bad_rows=0.9)) == [6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5]


def test_no_later_sample_takes_a_bad_one_s_place(tmp_path):
    table = {"label": [0, 5, 0, 0, 0, 0, 0, 0], "number": range(8), "user": range(8)}
    times = [0, 1, 1, 1, 0, 1, 2, 2]
    pq.write_table(pa.table({**table, "ts": [HOUR * time for time in times]}), tmp_path / "a.parquet", row_group_size=8)
    config = config_of(str(tmp_path), bad_rows=0.5)
    source, trained = open_source(config), numbers_of(config)
    assert [sorted(part) for part in (trained[:2], trained[6:])] == [[0, 4], [6, 7]]
    assert 1 not in trained
    assert set(trained[2:6]) <= {0, 2, 3, 4, 5}, "of its own window, or of an earlier one"
    assert numbers_of(config, 1) == [2, 3, 5], "left out where it is evaluated"
    assert source.chunks("train").num_samples == 8
    table["label"] = [0, 5, 5, 5, 0, 0, 0, 0]
    times = [0, 0, 0, 1, 2, 2, 2, 2]
    pq.write_table(pa.table({**table, "ts": [HOUR * time for time in times]}), tmp_path / "a.parquet", row_group_size=8)
    assert numbers_of(config)[:4] == [0] * 4, "no other row is good, and of an earlier window"


def test_columns_are_checked_before_training(tmp_path):
    path = write(tmp_path, [[0, 1]])
    with pytest.raises(DataError, match=r"0.parquet: no column 'tss'; did you mean 'ts'\?"):
        check_data(config_of(path, time=TimeConfig("tss", HOUR)))
    with pytest.raises(DataError, match=r"no column 'when'; it has: label, number, user, ts"):
        open_source(config_of(path, time=TimeConfig("when", HOUR)))
    with pytest.raises(DataError, match=r"0.csv: no column 'tss'; did you mean 'ts'\?"):
        check_data(config_of(write(tmp_path / "csv", [[0, 1]], "csv"), time=TimeConfig("tss", HOUR)))
    pq.write_table(pa.table({"label": [0], "number": [0], "user": [0], "ts": [True]}), tmp_path / "0.parquet")
    with pytest.raises(DataError, match="column 'ts' is of type bool; needed a time"):
        check_data(config_of(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time": {"column": "ts"}}, r"data.time.window is not set; needed a number of seconds, at least 1"),
        ({"time": {"column": "ts", "window": 0}}, r"data.time.window = 0; needed a number of seconds, at least 1"),
        ({"time": {"column": "", "window": 9}}, r"data.time.column = ''; needed the name of a column"),
        ({"time": {"window": 60}}, r"data.time.window = 60; needed nothing: .* without data.time.column"),
        ({"time": {"files": "in_turn"}}, r"data.time.files = 'in_turn'; needed nothing"),
        ({"time": {"column": "ts", "window": 9, "files": "all"}}, r"data.time.files = 'all'; needed one of"),
        ({"split": "time", "split_time": "ts"}, r"data.split = \"time\"; needed \"tail\", the default: each window"),
        ({"split": "random"}, r"data.split = \"random\"; needed \"tail\""),
        ({"eval_fraction": 0.2}, r"data.eval_fraction = 0.2; needed 0.1, the default, or 0: .* set data.eval_path"),
        ({"kind": "criteo"}, r"data.kind = \"criteo\"; needed \"table\" or \"parquet\" in time order"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(options, message):
    time = options.get("time", {"column": "ts", "window": 60})
    with pytest.raises(ConfigError, match=message):
        DataConfig(**({"kind": "table", "path": "x"} | options | {"time": TimeConfig(**time)}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": TrainConfig(epochs=2)}, r"train.epochs: got 2, needed 1 in time order"),
        ({"train": TrainConfig(eval_every=5)}, r"train.eval_every has no effect: .* \(data.time.column is set\)"),
        ({"sharding": ShardingConfig(mode="hot_cold", hot_bytes=99)}, r'mode: got "hot_cold" with data.time.column'),
    ],
)
def test_what_contradicts_time_order_is_refused(sections, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig(data=config_of("x"), **sections)


def test_a_model_that_trained_in_time_order_scores_data_without_times():
    config = config_of("x", eval_fraction=1.0)
    assert not config.is_in_time_order
    assert config.held_out_share == 1.0


@pytest.mark.parametrize("years", [(-1198, 5138), (-1, 0), (1, 9)])
def test_windows_have_names_in_all_years_that_times_can_have(tmp_path, years):
    (tmp_path / "in").mkdir()
    times = [np.datetime64(f"{'-' * (year < 0)}{abs(year):04}-03-01", "s").astype(int) for year in years]
    columns = {"label": [0, 0], "number": [0, 1], "user": [0, 1], "ts": pa.array(times).cast(pa.timestamp("s"))}
    pq.write_table(pa.table(columns), tmp_path / "in" / "a.parquet")
    (sentence,) = [note for note in open_source(config_of(str(tmp_path / "in"))).notes if "In time order" in note]
    assert f"from {np.datetime64(int(times[0]), 's')}".replace("T", " ") in sentence
    with pytest.raises(ConfigError, match=r"data\.time\.window = 100000000001; needed at most 100,000,000,000 seconds"):
        TimeConfig("ts", 10**11 + 1)


@pytest.mark.parametrize(("unit", "per_second"), [("ms", 10**3), ("us", 10**6), ("ns", 10**9)])
def test_a_time_before_1970_is_in_the_hour_before(tmp_path, unit, per_second):
    (tmp_path / "in").mkdir()
    ticks = pa.array([-1, 0, -HOUR * per_second - 1, -HOUR * per_second]).cast(pa.timestamp(unit))
    columns = {"label": [0] * 4, "number": range(4), "user": [0] * 4, "ts": ticks}
    pq.write_table(pa.table(columns), tmp_path / "in" / "a.parquet")
    windows = open_source(config_of(str(tmp_path / "in"))).held_out.windows
    assert windows is not None
    assert windows.numbers.tolist() == [-2, -1, 0]
    assert numbers_of(config_of(str(tmp_path / "in"))) == [2, 0, 3, 1]
