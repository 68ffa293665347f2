"""What is held out: a function of settings and files; train and eval are all samples, each once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.data import DataConfig, SyntheticConfig, open_source
from embershard.data.config import TableConfig, TableFeature
from embershard.data.order.stream import SampleReader
from embershard.data.sample_bits import SampleBits
from embershard.data.sources.check import check_data
from embershard.data.sources.table import split as split_module
from embershard.errors import ConfigError, DataError
from tests.covering import examples, keep

TABLE = TableConfig(
    {
        "number": TableFeature("dense"),
        "item": TableFeature("sparse", column="number", mapping="none", num_rows=10_000),
    }
)
Row = tuple[str | None, int | None]  # user, seconds


def write(folder: Path, files: list[list[Row]], form: str) -> str:
    """Write users and times; `number` counts the samples of all files."""
    number = 0
    folder.mkdir(exist_ok=True)
    for each in folder.iterdir():
        each.unlink()
    for place, rows in enumerate(files):
        columns = {
            "label": [0] * len(rows),
            "number": list(range(number, number + len(rows))),
            "user": [user for user, _ in rows],
            "time": [seconds for _, seconds in rows],
        }
        number += len(rows)
        if form == "parquet":
            types = {"user": pa.string(), "time": pa.int64()}
            arrays = {name: pa.array(values, types.get(name, pa.int64())) for name, values in columns.items()}
            pq.write_table(pa.table(arrays), folder / f"{place}.parquet", row_group_size=5)
            continue
        cells = ("" if cell is None else str(cell) for row in zip(*columns.values(), strict=True) for cell in row)
        lines = [",".join(line) for line in zip(*[cells] * len(columns), strict=True)]
        (folder / f"{place}.csv").write_text("\n".join([",".join(columns), *lines]) + "\n")
    return str(folder)


def config_of(path: str, **options: Any) -> DataConfig:
    files = TableConfig(TABLE.features, files=("*",))
    return DataConfig("table", path, table=files, **({"num_workers": 0, "shuffle": False} | options))


def numbers(config: DataConfig) -> dict[str, list[int]]:
    """The samples of both parts, in order, by the order of the epoch; counts of chunks are checked."""
    source, found = open_source(config), {}
    for part in ("train", "eval"):
        chunks = source.chunks(part)
        blocks = [source.read(part, number, np.arange(rows)) for number, rows in enumerate(chunks.rows)]
        assert [block.num_samples for block in blocks] == chunks.rows.tolist()
        found[part] = [int(each) for block in blocks for each in block.dense[:, 0]]
        reader = SampleReader(source, part, config)
        assert sorted(reader.read(1, [(0, chunks.num_samples)]).dense[:, 0].tolist()) == found[part]
    return found


def held_out(config: DataConfig) -> list[int]:
    found = numbers(config)
    everything = sorted(found["train"] + found["eval"])
    assert everything == list(range(len(everything)))
    return found["eval"]


users = st.none() | st.sampled_from(["", "ann", "bob", "cy", "dee", "7"])
rows = st.tuples(users, st.none() | st.integers(1, 40))
tables = st.lists(st.lists(rows, min_size=1, max_size=30), min_size=1, max_size=3)


def last_of_each(all_rows: list[Row], by_time: bool) -> list[int]:
    best: dict[str, tuple[float, int]] = {}
    for number, (user, seconds) in enumerate(all_rows):
        if user:  # an empty text is none, in files of all forms
            at = -math.inf if seconds is None else float(seconds)
            best[user] = max(best.get(user, (-math.inf, -1)), (at if by_time else 0.0, number))
    return sorted(number for _, number in best.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("split") / "data"


@pytest.mark.slow
@given(tables, st.sampled_from(["csv", "parquet"]), st.booleans(), st.integers(1, 40))
@examples(24)
def test_last_is_the_last_sample_of_each_user(folder, files, form, by_time, chunk_rows):
    all_rows = [row for rows in files for row in rows]
    wanted = last_of_each(all_rows, by_time)
    options = {"split": "last", "split_column": "user", "split_time": "time" if by_time else None}
    config = config_of(write(folder, files, form), chunk_rows=chunk_rows, **options)
    if 0 < len(wanted) < len(all_rows):
        assert held_out(config) == wanted
    else:
        with pytest.raises(DataError, match=f"got {len(wanted)} of {len(all_rows)} samples to hold out"):
            open_source(config)


@pytest.mark.slow
@given(tables, st.sampled_from(["csv", "parquet"]), st.floats(0.05, 0.95), st.integers(1, 40))
@examples(24)
def test_time_holds_out_what_is_not_before_the_threshold(folder, files, form, fraction, chunk_rows):
    times = [seconds for rows in files for _, seconds in rows]
    known = sorted(seconds for seconds in times if seconds is not None)
    options = {"split": "time", "split_time": "time", "eval_fraction": fraction}
    config = config_of(write(folder, files, form), chunk_rows=chunk_rows, **options)
    starts = sorted(set(known))
    # The start whose share is nearest, but never all of the samples.
    distance = {
        start: abs(sum(t < start for t in known) - (1 - fraction) * len(known)) for start in starts[1:] or starts
    }
    if not known or (len(starts) == 1 and len(known) == len(times)):
        with pytest.raises(DataError, match=r"data.split = \"time\": got"):
            open_source(config)
        return
    start = min(distance, key=lambda each: (distance[each], each))
    assert held_out(config) == [n for n, seconds in enumerate(times) if seconds is not None and seconds >= start]
    assert f"from 1970-01-01 00:00:{start:02} UTC on (time)" in open_source(config).held_out.how


@pytest.mark.slow
@given(tables, st.sampled_from([0.3, 0.6]), st.integers(0, 5))
@examples(12)
def test_hash_takes_all_of_a_user_or_nothing_and_the_same_of_every_format(folder, files, fraction, seed):
    all_rows = [row for rows in files for row in rows]
    options = {"split": "hash", "split_column": "user", "eval_fraction": fraction, "split_seed": seed}
    found = []
    for form, chunk_rows in (("csv", 3), ("parquet", 3), ("csv", 1000)):
        config = config_of(write(folder, files, form), chunk_rows=chunk_rows, **options)
        try:
            found.append(held_out(config))
        except DataError:  # no user, or all of them
            found.append([])
    assert found[0] == found[1] == found[2]
    if found[0]:
        chosen = {all_rows[number][0] for number in found[0]}
        assert not chosen & {None, ""}
        assert found[0] == [number for number, (user, _) in enumerate(all_rows) if user in chosen]


@pytest.mark.slow
@pytest.mark.parametrize("split", keep(["random"], ["random", "hash"]))
def test_chance_takes_its_share_by_a_seed_of_its_own(tmp_path, split):
    files = [[(f"u{number}", None) for number in range(start, start + 3000)] for start in (0, 3000)]
    options = {"split": split, "split_column": "user" if split == "hash" else None}
    path = write(tmp_path / "data", files, "csv")
    found = held_out(config_of(path, **options))
    assert 600 - 4 * 24 < len(found) < 600 + 4 * 24  # 4 standard deviations of 6,000 draws of 0.1
    assert min(np.bincount(np.array(found) // 1000, minlength=6)) > 50, "spread over the files"
    for same in ({"chunk_rows": 7}, {"num_workers": 2}, {"seed": 5}, {"shuffle": True, "bad_rows": 0.5}):
        assert sorted(held_out_in_any_order(config_of(path, **(options | same)))) == found
    assert held_out(config_of(path, **options, split_seed=1)) != found


def held_out_in_any_order(config: DataConfig) -> list[int]:
    source = open_source(config)
    blocks = [source.read("eval", n, np.arange(rows)) for n, rows in enumerate(source.chunks("eval").rows)]
    return [int(each) for block in blocks for each in block.dense[:, 0]]


@pytest.mark.slow
def test_generated_samples_are_held_out_by_chance_whatever_the_chunks():
    def labels(chunk_rows: int) -> list[float]:
        settings = SyntheticConfig(num_samples=3000, scale=0.0001)
        source = open_source(DataConfig(split="random", chunk_rows=chunk_rows, synthetic=settings))
        assert source.chunks("train").num_samples + source.chunks("eval").num_samples == 3000
        assert source.notes[0].startswith("Held out: 10% by chance (data.split_seed 0): ")
        reads = [source.read("eval", n, np.arange(rows)) for n, rows in enumerate(source.chunks("eval").rows)]
        return [float(each) for block in reads for each in block.dense[:, 0]]

    assert labels(7) == labels(4096)


@pytest.mark.parametrize(
    ("fraction", "notes"), [(0.05, ["Held out: the last 5% of all samples: 150 of 3,000 samples."]), (0, []), (1, [])]
)
def test_what_is_held_out_is_said_unless_it_is_none_or_all(fraction: float, notes: list[str]):
    settings = SyntheticConfig(num_samples=3000, scale=0.0001)
    assert list(open_source(DataConfig(eval_fraction=fraction, synthetic=settings)).notes) == notes


def test_counts_of_times_and_values_do_not_depend_on_how_they_are_gathered(monkeypatch):
    seconds = np.random.default_rng(0).integers(0, 10**7, 5000).astype(float)

    def start(parts: int) -> int:
        counts = split_module._TimeCounts()
        for part in np.array_split(seconds, parts):
            counts.add(part, np.ones(len(part), np.int64))
        return counts.start_of_last(0.25)

    assert start(1) == start(7) == np.sort(seconds)[3750]
    monkeypatch.setattr(split_module, "_WAITING", 100)
    monkeypatch.setattr(split_module, "_MOST_TIMES", 500)
    rough = start(1)
    assert rough == start(7) == start(50)
    assert rough % 32768 == 0, "10^7 seconds in at most 500 intervals of a power of two"
    assert abs(float((seconds >= rough).mean()) - 0.25) < 0.005


def test_bad_rows_and_rows_without_a_value_are_to_train_on(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("label,number,user,time\n0,0,ann,5\n0,1\n0,2,,9\n0,3,bob,yesterday\n0,4,ann,4\n0,5,cy,7\n")
    options = {"split": "last", "split_column": "user", "split_time": "time"}
    with pytest.raises(DataError, match=r"a.csv:3 has 2 comma-separated columns"):
        open_source(config_of(str(path), **options))
    source = open_source(config_of(str(path), **options, bad_rows=0.4))
    assert source.held_out.samples is not None
    assert source.held_out.samples.between(0, 6).tolist() == [True, False, False, False, False, True]
    assert source.notes[0] == (
        "Held out: the last sample of each of 2 values of user, by time (3 rows have no such value, and are to train "
        "on): 2 of 6 samples."
    )
    with pytest.raises(DataError, match=r"2 of 6 rows have no user and time that can be read; data.bad_rows = 0.3"):
        open_source(config_of(str(path), **options, bad_rows=0.3))
    path.write_text("label,number,user,time\n0,0,ann,F\n0,1,bob,M\n")
    with pytest.raises(DataError, match=r"data.split_time = 'time': no row has a time there"):
        open_source(config_of(str(path), **options, bad_rows=0.3))


def test_a_bad_row_is_replaced_by_a_row_of_its_part(tmp_path):
    path = tmp_path / "a.csv"
    lines = [f"{'x' if n % 5 == 0 else 0},{n},{'ann' if n % 2 else 'bob'},0" for n in range(40)]
    path.write_text("\n".join(["label,number,user,time", *lines]) + "\n")
    for seed in range(9):  # one of the two is held out
        config = config_of(
            str(path),
            split="hash",
            split_column="user",
            eval_fraction=0.5,
            split_seed=seed,
            bad_rows=0.5,
            chunk_rows=10,
        )
        try:
            source = open_source(config)
        except DataError:
            continue
        parts = {part: source.read(part, 0, np.arange(5)) for part in ("train", "eval")}
        assert {int(n) % 2 for n in parts["train"].dense[:, 0]} != {int(n) % 2 for n in parts["eval"].dense[:, 0]}
        assert [parts[part].num_samples for part in parts] == [5, 4]
        assert [len(parts[part].bad) for part in parts] == [1, 1]
        return
    raise AssertionError("no seed held out one of two")


def test_columns_of_held_out_samples_go_along_with_them(tmp_path):
    path = tmp_path / "a.csv"
    lines = [f"{'x' if n % 5 == 0 else 0},{n},{'' if n % 7 == 0 else f'u{n}'},0" for n in range(40)]
    lines[11] = "0,11"
    path.write_bytes(
        "\n".join(["label,number,user,time", *lines]).replace("u13", "\udcff").encode("utf-8", "surrogateescape")
    )
    source = open_source(config_of(str(path), split="random", eval_fraction=0.7, bad_rows=0.5, chunk_rows=9))
    reads = [source.read("eval", n, np.arange(rows)) for n, rows in enumerate(source.chunks("eval").rows)]
    numbers = [int(each) for block in reads for each in block.dense[:, 0]]
    found = pa.concat_tables(source.held_out_columns(["user", "number"]))
    assert found.schema.names == ["user", "number"]
    assert found["number"].to_pylist() == [str(n) for n in numbers]
    users = {n: None if n % 7 == 0 else "\\xff" if n == 13 else f"u{n}" for n in numbers}
    assert found["user"].to_pylist() == list(users.values())
    assert 15 < len(numbers) < 30
    assert not {0, 5, 11} & set(numbers)
    with pytest.raises(DataError, match="no column 'usr'"):
        source.held_out_columns(["usr"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "hash"}, r"data.split_column is not set; needed the name of a column"),
        ({"split": "time"}, r"data.split_time is not set; needed the name of a column"),
        ({"split": "last", "split_column": "user", "split_time": ""}, r"data.split_time = ''; needed the name"),
        ({"split": "random", "split_column": "user"}, r"split_column = 'user'; needed nothing: it has no effect"),
        (
            {"split": "hash", "split_column": "user", "split_time": "time"},
            r"split_time = 'time'; needed nothing: it has",
        ),
        ({"split": "tail", "split_seed": 1}, r"data.split_seed = 1; needed 0: it has no effect with data.split = "),
        ({"split": "last", "split_column": "user", "eval_fraction": 0.2}, r"eval_fraction = 0.2; needed 0.1, 0 or 1"),
        ({"split": "random", "eval_path": "other"}, r"data.split = 'random'; needed \"tail\": data.eval_path says"),
        ({"split": "often"}, r"data.split = 'often'; needed one of"),
    ],
)
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        config_of("data", **options)


def test_kinds_without_named_columns_are_split_by_chance_alone():
    assert DataConfig("criteo", "day_0", split="random").split == "random"
    with pytest.raises(ConfigError, match='data of kind "criteo" have no columns with names'):
        DataConfig("criteo", "day_0", split="hash", split_column="C1")


def test_a_missing_column_and_one_of_lists_are_named_before_a_run(tmp_path):
    path = write(tmp_path / "data", [[("ann", 1), ("bob", 2)]], "csv")
    wrong = config_of(path, split="hash", split_column="users")
    for look in (check_data, open_source):
        with pytest.raises(DataError, match=r"0.csv: no column 'users'; did you mean 'user'\?"):
            look(wrong)
    assert open_source(config_of(path, split="hash", split_column="users", eval_fraction=1.0)).held_out.how == "all"
    table = pa.table({"label": [0, 1], "number": [0, 1], "users": [["a"], ["b"]], "when": [True, False]})
    pq.write_table(table, tmp_path / "lists.parquet")
    lists = config_of(str(tmp_path / "lists.parquet"), split="hash", split_column="users")
    whens = config_of(str(tmp_path / "lists.parquet"), split="time", split_time="when")
    for look in (check_data, open_source):
        with pytest.raises(DataError, match="column 'users' is of type list<element: string>; needed one value"):
            look(lists)
        with pytest.raises(DataError, match="column 'when' is of type bool; needed a time"):
            look(whens)


def test_bits_of_another_number_of_samples_are_refused(counting_source):
    with pytest.raises(DataError, match="the split is of 4 samples, and there are 5"):
        counting_source([5], 2, chosen=SampleBits(np.zeros(1, np.uint8), 4))


def test_the_pass_is_made_where_share_has_it_made(tmp_path):
    path = write(tmp_path / "data", [[("ann", 1), ("ann", 2), ("bob", 2), ("bob", 3)]], "csv")
    config = config_of(path, split="last", split_column="user")
    found = open_source(config).held_out
    source = open_source(config, share=lambda find: found)
    assert source.held_out is found
    assert held_out(config) == [1, 3]
