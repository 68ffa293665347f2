"""Folders that grow: the order of their samples, whatever arrives when; files that change, vanish, or have no rows."""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.data import BatchStream, DataConfig, ParquetConfig, StreamState, open_source
from embershard.data.config import TableConfig, TableFeature
from embershard.data.sources.check import check_data
from embershard.data.sources.input_file import next_file
from embershard.data.time_config import TimeConfig
from embershard.errors import CheckpointError, ConfigError, DataError
from embershard.extras.following.followed import FollowedSource
from tests.covering import examples

pytestmark = pytest.mark.extra

HOUR = 3600
FEATURES = {"number": TableFeature("dense"), "user": TableFeature("sparse", mapping="modulo", num_rows=9)}
Rows = list[tuple[int, float]]  # number and hour


def config_of(folder: Path, **options: Any) -> DataConfig:
    table = TableConfig(FEATURES, files=("*.csv", "*.parquet"))
    settings = {"num_workers": 0, "shuffle": False, "chunk_rows": 4, "time": TimeConfig("ts", HOUR), "follow": True}
    return DataConfig("table", str(folder), table=table, **(settings | options))


def write(path: Path, rows: Rows) -> Path:
    """A file of samples, under its name when it is complete."""
    columns = {name: [number for number, _ in rows] for name in ("number", "user")}
    columns |= {"label": [0] * len(rows), "ts": [round(hour * HOUR) for _, hour in rows]}
    partial = path.with_name(f"{path.name}.partial")
    if path.suffix == ".parquet":
        table = pa.table({name: pa.array(cells, pa.int64()) for name, cells in columns.items()})
        pq.write_table(table, partial, row_group_size=4)
    else:
        lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
        partial.write_text("\n".join(lines) + "\n")
    partial.rename(path)
    return path


def take(*sources: FollowedSource) -> bool:
    """Offer the next file to the sources of all ranks, if there is one."""
    path, _ = sources[0].find_next({})
    if path is None:
        return False
    found = sources[0].examine(path, has_begun=False)
    if found.problem is not None:
        raise found.problem
    assert found.file is not None
    assert found.held_out is not None
    for source in sources:
        source.offer(found.file, found.held_out)
    return True


def streams_of(sources: list[FollowedSource], config: DataConfig, size: int, start: int = 0) -> list[BatchStream]:
    place = {"split": "train", "epochs": None, "config": config, "state": StreamState(0, start, config.seed)}
    return [
        BatchStream(source, batch_size=size, rank=rank, world_size=len(sources), **place)
        for rank, source in enumerate(sources)
    ]


def numbers_of(streams: list[BatchStream]) -> list[int]:
    """The samples of the batches that are whole by now."""
    of_ranks = [[batch.dense_features[:, 0].long().tolist() for batch in stream] for stream in streams]
    return list(itertools.chain(*(itertools.chain(*parts) for parts in zip(*of_ranks, strict=True))))


def all_of(config: DataConfig) -> list[int]:
    """The samples of all files that are there."""
    source = FollowedSource(config, [])
    while take(source):
        pass
    (stream,) = streams_of([source], config, 1)
    with stream:
        return numbers_of([stream])


hours = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=14), min_size=1, max_size=5)


@pytest.mark.slow
@given(hours, st.data())
@examples(25)
def test_no_window_trains_before_an_earlier_one(tmp_path_factory, hours, data):
    folder, count = tmp_path_factory.mktemp("files"), itertools.count()
    files = [[(next(count), float(hour)) for hour in of_file] for of_file in hours]
    ending, seed = data.draw(st.sampled_from(["csv", "parquet"])), data.draw(st.integers(0, 99))
    is_shuffled, num_workers = data.draw(st.booleans()), data.draw(st.sampled_from([0, 2]))
    config = config_of(folder, shuffle=is_shuffled, seed=seed, shuffle_window=2, num_workers=num_workers)
    places = [data.draw(st.integers(1, 3)) for _ in range(2)]  # ranks before a resume, and after it
    sources, found, left = [FollowedSource(config, []) for _ in range(places[0])], list[int](), list(enumerate(files))
    streams = streams_of(sources, config, 2)
    chance = random.Random(data.draw(st.integers(0, 999)))
    while left or sources[0].find_next({})[0] is not None:
        if left and chance.random() < 0.5:
            number, rows = left.pop(0)
            write(folder / f"part_{number}.{ending}", rows)
        if chance.random() < 0.5:
            take(*sources)
        if chance.random() < 0.5:
            found += numbers_of(streams)
    found += numbers_of(streams)
    own = {number: hour for rows in files for number, hour in rows}
    newest = np.maximum.accumulate([0.0, *(max(hour for _, hour in rows) for rows in files)])
    taken = {number: max(hour, least) for rows, least in zip(files, newest, strict=False) for number, hour in rows}
    size = 2 * places[0]
    assert len(found) == len(own) // size * size, "what fills no batch waits"
    assert len(set(found)) == len(found), "none twice"
    assert [taken[number] for number in found] == sorted(taken[number] for number in found)
    on_time = [own[number] for number in found if own[number] == taken[number]]
    assert on_time == sorted(on_time)
    whole = all_of(config)
    assert sorted(whole) == sorted(own)
    assert found == whole[: len(found)], "the order knows nothing of arrivals, ranks and batches"
    start = data.draw(st.integers(0, len(whole)))
    again = [FollowedSource(config, sources[0].files) for _ in range(places[1])]
    for source in again:
        source.start_at(start)
    rest = streams_of(again, config, 1, start)
    while take(*again):
        pass
    left_over = whole[start:]
    assert numbers_of(rest) == left_over[: len(left_over) // places[1] * places[1]]
    for stream in (*streams, *rest):
        stream.close()
    if not is_shuffled and len({*taken.values()}) > 1:
        with streams_of_all(config) as stream:
            assert numbers_of([stream]) == whole, "as files that were all there"


def streams_of_all(config: DataConfig) -> BatchStream:
    source, there = open_source(config.unfollowed()), config.unfollowed()
    return BatchStream(source, batch_size=1, rank=0, world_size=1, split="train", epochs=1, config=there)


@pytest.mark.parametrize("kind", ["table", "parquet"])
def test_windows_and_late_rows_of_each_file(tmp_path, kind):
    config = config_of(tmp_path)
    if kind == "parquet":
        parquet = ParquetConfig(dense=("number",), sparse=("user",), num_rows=(9,), label="label", files=("*",))
        config = replace(config, kind="parquet", parquet=parquet, table=TableConfig())
    write(tmp_path / "a.parquet", [(0, 0.1), (1, 1.2), (2, 0.5)])
    source = FollowedSource(config, [])
    assert take(source)
    write(tmp_path / "b.parquet", [(3, 0.2), (4, 1.9), (5, 3.0)])
    assert take(source)
    assert not take(source)
    first, second = source.files
    assert (first.rows, first.windows, first.first_window, first.last_window) == (3, 2, 0, 1)
    assert (second.rows, second.windows, second.first_window, second.last_window) == (3, 2, 1, 3)
    found = list(source.windows_between(0, 6))
    places = [(each.number, each.start[11:], each.late) for each in found]
    assert places == [(0, "00:00:00", 0), (1, "01:00:00", 0), (2, "01:00:00", 1), (3, "03:00:00", 0)]
    assert [each.source.chunks("eval").num_samples for each in found] == [2, 1, 2, 1]
    assert [each.number for each in source.windows_between(2, 5)] == [1, 2], "those that begin there"
    assert (source.has_window(2, 5), source.has_window(4, 5), source.has_window(5, 6)) == (True, False, True)
    assert source.chunks("eval").num_samples == 0
    source.forget(3)
    assert [each.number for each in source.windows_between(0, 6)] == [2, 3], "the first file is forgotten"


def test_which_file_is_next(tmp_path):
    for name in ("part_10.csv", "part_2.csv", "_SUCCESS.csv", ".part_1.csv", "part_1.csv.tmp", "notes.txt"):
        (tmp_path / name).write_text("text")
    (tmp_path / "part_0.csv").touch()
    (tmp_path / "part_00.csv").mkdir()
    patterns, known = ("*.csv", "*.tmp", "*.csv.partial"), set[str]()
    (tmp_path / "part_1.csv.partial").write_text("text")
    while (path := next_file(tmp_path, patterns, known)[0]) is not None:
        known.add(path.name)
    assert known == {"part_2.csv", "part_10.csv"}
    assert next_file(tmp_path, patterns, ()) == (tmp_path / "part_2.csv", {"part_00.csv": "a folder"})
    with pytest.raises(DataError, match="gone: No such file or directory"):
        next_file(tmp_path / "gone", patterns, ())


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_file_without_rows(tmp_path, ending):
    config, source = config_of(tmp_path), FollowedSource(config_of(tmp_path), [])
    for place, rows in enumerate([[], [(0, 2.0)], [], [(1, 0.0), (2, 3.0)], []]):
        write(tmp_path / f"{place}.{ending}", rows)
        assert take(source)
    assert [file.rows for file in source.files] == [0, 1, 0, 2, 0]
    assert [file.last_window for file in source.files][1:] == [2, 2, 3, 3]
    assert all_of(config) == [0, 1, 2]
    assert [each.number for each in source.windows_between(0, 3)] == [0, 1, 2]


def test_files_that_changed_or_vanished(tmp_path):
    config = config_of(tmp_path)
    paths = [write(tmp_path / f"{n}.csv", [(n, float(n)), (n + 1, float(n))]) for n in range(3)]
    source = FollowedSource(config, [])
    while take(source):
        pass
    (stream,) = streams_of([source], config, 1)
    assert numbers_of_next(stream) == 0
    os.utime(paths[1], (5, 5))
    assert numbers_of_next(stream) == 1, "it has not to be read yet"
    assert [numbers_of_next(stream), numbers_of_next(stream)] == [1, 2], "it was only touched"
    whole = paths[2].read_text()
    paths[2].write_text(whole.replace("2,2", "2,7"))
    with pytest.raises(
        DataError, match=r"2\.csv: changed while it was read, at byte 0: .* Bring it back as it was, or"
    ):
        numbers_of_next(stream)
    paths[2].write_text(whole)
    resumed = FollowedSource(config, source.files)
    resumed.start_at(2)
    assert take(resumed), "of the same bytes: a copy of the folder has other times"
    paths[2].write_text(whole.replace("2,2", "2,7"))
    with pytest.raises(DataError, match=r"2\.csv: changed since it was taken: it had 43 bytes, and has other ones now"):
        take(resumed)
    paths[2].unlink()
    with pytest.raises(DataError, match=r"2\.csv: No such file"):
        take(resumed)
    paths[0].unlink()
    resumed.start_at(2)
    assert take(resumed), "nobody needs the first file any more"


def numbers_of_next(stream: BatchStream) -> int:
    return int(next(stream).dense_features[0, 0])


def test_what_a_checkpoint_has(tmp_path):
    source = FollowedSource(config_of(tmp_path), [])
    for place in range(3):
        write(tmp_path / f"{place}.csv", [(place, float(place)), (9, float(place))])
        assert take(source)
    states = [source.state_at(position) for position in range(7)]
    assert [state["files"] for state in states] == [0, 1, 1, 2, 2, 3, 3]
    grown, other = FollowedSource(config_of(tmp_path), source.files), source.files[1:]
    for state in states:
        grown.check_state(Path("step_4"), state)
    for files in (source.files[:2], other, [*reversed(source.files)]):
        with pytest.raises(CheckpointError, match=r"step_4 was saved after 3 files .* files\.jsonl"):
            FollowedSource(config_of(tmp_path), files).check_state(Path("step_4"), states[6])


def test_what_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.path = .*gone': no such folder"):
        FollowedSource(config_of(tmp_path / "gone"), [])
    with pytest.raises(ConfigError, match=r"data\.eval_fraction = 1 with data\.follow"):
        FollowedSource(config_of(tmp_path, eval_fraction=1.0), [])
    with pytest.raises(ConfigError, match=r"data\.follow = true; needed data\.time\.column"):
        config_of(tmp_path, time=TimeConfig())
    with pytest.raises(ConfigError, match=r"data\.idle_seconds = 9; needed nothing"):
        config_of(tmp_path, follow=False, idle_seconds=9)
    with pytest.raises(ConfigError, match=r"data\.idle_seconds = 0; needed more than 0"):
        config_of(tmp_path, idle_seconds=0)
    with pytest.raises(ConfigError, match=r'data\.kind = "criteo"; needed "table" or "parquet"'):
        DataConfig("criteo", str(tmp_path), time=TimeConfig("ts", HOUR), follow=True)
    with pytest.raises(ConfigError, match=r"data\.split"):
        config_of(tmp_path, split="random")


def test_a_first_look_at_a_folder_that_is_empty(tmp_path):
    check_data(config_of(tmp_path))
    write(tmp_path / "a.csv", [(0, 0.0)])
    check_data(config_of(tmp_path))
    (tmp_path / "b.csv").write_text("label,number,user\n0,1,2\n")
    with pytest.raises(DataError, match=r"b\.csv: no column 'ts'"):
        check_data(config_of(tmp_path))
