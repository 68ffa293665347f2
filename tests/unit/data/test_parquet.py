"""Parquet: declared columns, bags, missing values, and what is said of files that do not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.data import Batch, DataConfig, ParquetConfig, Schema, SparseFeature, open_source
from embershard.data.block import take_bags
from embershard.errors import ConfigError, DataError, IdOutOfRangeError

SETTINGS = ParquetConfig(
    dense=("price", "age"),
    sparse=("user", "seen"),
    num_rows=(11, 101),
    label="click",
    dense_transform="log1p",
)
COLUMNS = {
    "click": pa.array([1, 0, 1, 0, 0]),
    "price": pa.array([1.0, None, float("nan"), -5.0, 2.5]),
    "age": pa.array([7, 8, None, 0, 1], pa.int16()),
    "user": pa.array([0, 9, 10, None, 25], pa.int32()),
    "seen": pa.array([[1, 2, 3], [], None, [None, 100], [7]], pa.list_(pa.int64())),
    "unused": pa.array(["a"] * 5),
}


def write(path: Path, row_group_size: int = 2, **columns: pa.Array) -> Path:
    pq.write_table(pa.table(COLUMNS | columns), path, row_group_size=row_group_size)
    return path


@pytest.fixture
def read(open_stream):
    """All samples of a path, as one batch."""

    def run(path: Path, settings: ParquetConfig = SETTINGS, batch_size: int = 5, **options: object) -> Batch:
        options = {"eval_fraction": 0.0, "shuffle": False} | options
        config = DataConfig(kind="parquet", path=str(path), parquet=settings, **options)
        return next(open_stream(open_source(config), config, batch_size=batch_size))

    return run


def bags_of(batch: Batch, name: str) -> list[list[int]]:
    jagged = batch.sparse_features[name]
    return [bag.tolist() for bag in jagged.values().split(jagged.lengths().tolist())]


@pytest.mark.parametrize("row_group_size", [1, 2, 5])
@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.large_list(pa.int32())])
def test_values_bags_and_missing_ones(read, tmp_path, row_group_size, kind):
    batch = read(write(tmp_path / "a.parquet", row_group_size, seen=COLUMNS["seen"].cast(kind)))
    assert batch.labels.tolist() == [1, 0, 1, 0, 0]
    logs = np.log1p([[1, 7], [0, 8], [0, 0], [0, 0], [2.5, 1]])
    assert batch.dense_features.numpy() == pytest.approx(logs)
    assert bags_of(batch, "user") == [[1], [10], [1], [0], [6]]
    assert bags_of(batch, "seen") == [[2, 3, 4], [], [0], [0, 1], [8]]


def test_plain_columns_need_no_lengths(read, tmp_path):
    settings = ParquetConfig(dense=("age",), sparse=("user",), num_rows=(100,), label="click")
    batch = read(write(tmp_path / "a.parquet"), settings)
    assert batch.sparse_features.lengths().tolist() == [1] * 5
    assert bags_of(batch, "user") == [[1], [10], [11], [0], [26]]
    assert batch.dense_features[:, 0].tolist() == [7, 8, 0, 0, 1]


def test_ids_that_are_rows_are_checked(read, tmp_path):
    settings = ParquetConfig(sparse=("user", "seen"), num_rows=(26, 101), label="click", id_mapping="none")
    batch = read(write(tmp_path / "a.parquet"), settings)
    assert bags_of(batch, "user") == [[0], [9], [10], [0], [25]]
    assert bags_of(batch, "seen") == [[1, 2, 3], [], [0], [0, 100], [7]]
    for numbers, message in (((26, 100), r"a.parquet:4 seen=100: needed a row in 0..99"),):
        settings = ParquetConfig(sparse=("user", "seen"), num_rows=numbers, label="click", id_mapping="none")
        with pytest.raises(IdOutOfRangeError, match=message):
            read(tmp_path / "a.parquet", settings)
    write(tmp_path / "a.parquet", user=pa.array([1, 2, 3, 4, -1]))
    with pytest.raises(IdOutOfRangeError, match=r"a.parquet:5 user=-1: needed a row in 0..25"):
        read(
            tmp_path / "a.parquet",
            ParquetConfig(sparse=("user",), num_rows=(26,), label="click", id_mapping="none"),
        )


def test_folder_of_files_each_with_a_tail(tmp_path, open_stream):
    for name in ("a", "b"):
        write(tmp_path / f"{name}.parquet")
    config = DataConfig(kind="parquet", path=str(tmp_path), parquet=SETTINGS, eval_fraction=0.4, shuffle=False)
    source = open_source(config)
    train = next(open_stream(source, config, batch_size=6))
    held_out = next(open_stream(source, config, batch_size=9, split="eval"))
    assert bags_of(train, "user") == [[1], [10], [1]] * 2
    assert bags_of(held_out, "user") == [[0], [6]] * 2


def test_columns_that_do_not_fit_are_named(read, tmp_path):
    path = write(tmp_path / "a.parquet")
    wrong = ParquetConfig(dense=("prise",), sparse=("user",), num_rows=(9,), label="click")
    with pytest.raises(DataError, match=r"a.parquet: no column 'prise'; did you mean 'price'\?"):
        read(path, wrong)
    wrong = ParquetConfig(sparse=("zzz",), num_rows=(9,), label="click")
    with pytest.raises(DataError, match=r"no column 'zzz'; it has: click, price"):
        read(path, wrong)
    wrong = ParquetConfig(sparse=("price",), num_rows=(9,), label="click")
    with pytest.raises(DataError, match=r"column 'price' is of type double; needed integers, texts that are"):
        read(path, wrong)
    wrong = ParquetConfig(dense=("unused",), sparse=("user",), num_rows=(9,), label="click")
    with pytest.raises(DataError, match=r"a.parquet:1 unused='a': needed a number"):
        read(path, wrong)


def test_bad_values_and_files_are_named(read, tmp_path):
    path = write(tmp_path / "a.parquet", click=pa.array([0, 1, 0, 2, 0]))
    with pytest.raises(DataError, match=r"a.parquet:4 click=2.0: a label must be 0 or 1"):
        read(path)
    write(path, click=pa.array([0, 1, None, 1, 0]))
    with pytest.raises(DataError, match=r"a.parquet:3 click=nan"):
        read(path)
    write(path, price=pa.array([0, 0, float("inf"), 0, 0]))
    with pytest.raises(DataError, match=r"a.parquet:3 price=inf: needed a finite number"):
        read(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a.parquet: not a sound Parquet file"):
        read(path)
    pq.write_table(pa.table(COLUMNS).slice(0, 0), path)
    with pytest.raises(DataError, match=r"a.parquet: no row in it"):
        read(path)


def test_flipped_bits_are_found(read, tmp_path):
    path = tmp_path / "a.parquet"
    columns = COLUMNS | {"user": pa.array(range(5)), "seen": COLUMNS["seen"]}
    pq.write_table(pa.table(columns), path, compression="none", use_dictionary=False, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    place = data.index(bytes(pa.array(range(5)).buffers()[1])[:40])
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a.parquet: row group 0, at byte 4, cannot be read .*checksum"):
        read(path)


def test_wrong_settings_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"data.parquet.num_rows = .* needed 2 numbers"):
        ParquetConfig(sparse=("a", "b"), num_rows=(5,))
    with pytest.raises(ConfigError, match=r"data.parquet.num_rows = \(1, 5\); needed 2 numbers, .* each at least 2"):
        ParquetConfig(sparse=("a", "b"), num_rows=(1, 5))
    assert ParquetConfig(sparse=("a",), num_rows=(1,), id_mapping="none").num_rows == (1,)
    with pytest.raises(ConfigError, match=r"needs data.parquet.sparse"):
        open_source(DataConfig(kind="parquet", path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"the schema has columns twice: a"):
        Schema(("a",), (SparseFeature("a", 5),))
    with pytest.raises(ConfigError, match=r"no sparse column"):
        Schema(("a",), ())
    with pytest.raises(ConfigError, match=r"num_rows=0; needed at least 1"):
        SparseFeature("a", 0)
    for name in ("../../x", "a.b", "", "a\n"):
        with pytest.raises(ConfigError, match=r"needed a name without dot, slash"):
            SparseFeature(name, 5)


@given(st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=9), st.data())
def test_taking_bags(bags, data):
    rows = data.draw(st.lists(st.integers(0, len(bags) - 1), max_size=9))
    values = np.array([x for bag in bags for x in bag], np.int64)
    lengths = np.array([len(bag) for bag in bags], np.int32)
    assert take_bags(values, lengths, np.array(rows, np.int64)).tolist() == [x for r in rows for x in bags[r]]
