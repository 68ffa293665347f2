"""Tables: text and Parquet files give the same samples, and values become what the page says."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv

from embershard.data import BatchStream, DataConfig, open_source, schema_of
from embershard.data.config import CONSTANT, TableConfig, TableFeature
from embershard.data.hashing import make_key, mix64
from embershard.data.sources.check import check_data
from embershard.data.sources.kinds import serving_inputs
from embershard.data.sources.table.decode import scaled, text_words
from embershard.errors import ConfigError, DataError
from embershard.extras.serving import serving_values
from embershard.extras.serving.serving_model import Model
from tests.covering import examples

FEATURES = {
    "age": TableFeature("dense", scale="standardize", mean=30.0, std=10.0),
    "price": TableFeature("dense", scale="log1p"),
    "place": TableFeature("dense", column="price", scale="quantile", quantiles=(0.0, 10.0, 1000.0)),
    "user": TableFeature("sparse", num_rows=50, mapping="hash"),
    "city": TableFeature("sparse", num_rows=100),
    "genres": TableFeature("sparse", num_rows=20, separator="|"),
    "hour": TableFeature("sparse", column="time", mapping="hour"),
    "weekday": TableFeature("sparse", column="time", mapping="weekday"),
}
SETTINGS = TableConfig(FEATURES, label="rating", label_at_least=4)
COLUMNS = {
    "rating": pa.array([5, 1, 4, 3]),
    "age": pa.array([20, 30, None, 45]),
    "price": pa.array([0.5, None, 505.0, -3.0]),
    "user": pa.array([7, 8, None, 7]),
    "city": pa.array(["Oslo, N", "7", None, "Bern"]),
    "genres": pa.array(["War|Action", "Action", None, "War"]),
    "time": pa.array([0, 3600 * 24 * 4 + 7200, None, 881250949], pa.timestamp("s")),
    "unused": pa.array(["x"] * 4),
}


def as_lists(table: pa.Table) -> pa.Table:
    """The texts of genres as lists."""
    lists = [None if each is None else each.split("|") for each in table["genres"].to_pylist()]
    return table.set_column(table.column_names.index("genres"), "genres", pa.array(lists))


def write(path: Path, table: pa.Table, separator: str = ",") -> Path:
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    else:
        csv.write_csv(table, path, csv.WriteOptions(delimiter=separator))
    return path


def config_of(path: Path, settings: TableConfig = SETTINGS, **options: Any) -> DataConfig:
    options = {"eval_fraction": 0.0, "shuffle": False, "chunk_rows": 2} | options
    return DataConfig("table", str(path), table=settings, **options)


def read(path: Path, settings: TableConfig = SETTINGS, **options: Any):
    """All samples, as one block."""
    source = open_source(config_of(path, settings, **options))
    blocks = [source.parse(number).samples for number in range(source.num_physical)]
    return type(blocks[0]).join(blocks)


def bags(block: Any, feature: str) -> list[list[int]]:
    number = [name for name, each in FEATURES.items() if each.kind == "sparse"].index(feature)
    sizes = np.asarray(block.lengths[number])
    return [part.tolist() for part in np.split(block.values[number], np.cumsum(sizes)[:-1])]


def text_word(value: Any) -> int:
    """The hash of a value as an export makes it."""
    return int(serving_values.text_words([value])[0])


def row(text: str, num_rows: int) -> int:
    return 1 + text_word(text) % (num_rows - 1)


def test_values_become_what_the_page_says(tmp_path):
    block = read(write(tmp_path / "a.parquet", pa.table(COLUMNS)))
    assert block.labels.tolist() == [1, 0, 1, 0]
    assert block.dense[:, 0].tolist() == [-1.0, 0.0, 0.0, 1.5]
    assert block.dense[:, 1].tolist() == np.log1p(np.array([0.5, 0, 505, 0], np.float32)).tolist()
    assert block.dense[:, 2].tolist() == [np.float32(0.025), 0.5, 0.75, 0.0]
    hashed = (1 + mix64(np.array([7, 8], np.uint64)) % np.uint64(49)).tolist()
    assert bags(block, "user") == [[hashed[0]], [hashed[1]], [0], [hashed[0]]]
    assert bags(block, "city") == [[row("Oslo, N", 100)], [row("7", 100)], [0], [row("Bern", 100)]]
    war, action = row("War", 20), row("Action", 20)
    assert bags(block, "genres") == [[war, action], [action], [0], [war]], "in their order"
    assert bags(block, "hour") == [[1], [3], [0], [16]]  # 881250949 is 1997-12-04 15:55:49, a Thursday
    assert bags(block, "weekday") == [[4], [1], [0], [4]]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz", "lists.parquet", "dictionary.parquet", "headless.csv"])
def test_every_format_gives_the_same_samples(tmp_path, name):
    table = pa.table(COLUMNS)
    expected = read(write(tmp_path / "expected.parquet", table))
    settings = SETTINGS
    if name == "lists.parquet":
        table = as_lists(table)
    elif name == "dictionary.parquet":
        table = table.set_column(4, "city", table["city"].dictionary_encode())
        table = table.set_column(3, "user", table["user"].cast(pa.int16()))
    separator = "\t" if name == "a.tsv" else ","
    path = write(tmp_path / name, table, separator)
    if name == "headless.csv":
        path.write_bytes(path.read_bytes().partition(b"\n")[2])
        settings = replace(settings, columns=tuple(COLUMNS))
    elif name == "a.csv.gz":
        path.write_bytes(gzip.compress(path.read_bytes()))
    found = read(path, replace(settings, separator=separator))
    assert found.labels.tolist() == expected.labels.tolist()
    assert found.dense.tobytes() == expected.dense.tobytes()
    assert [each.tolist() for each in found.values] == [each.tolist() for each in expected.values]
    assert np.array_equal(found.lengths, expected.lengths)


@pytest.mark.slow
@given(st.lists(st.one_of(st.text(max_size=40), st.integers(-(2**63), 2**63 - 1)), max_size=20))
def test_the_hash_is_that_of_the_text(values):
    texts = [str(value) for value in values]
    words, sizes, is_missing = text_words(pa.array(texts, pa.string()))
    data = [text.encode() for text in texts]
    assert sizes.tolist() == [len(each) for each in data]
    assert is_missing.tolist() == [not each for each in data]
    parts = [
        [len(each), *(int.from_bytes(each[at : at + 8], "little") for at in range(0, len(each), 8))] for each in data
    ]
    assert words.tolist() == [make_key(*each) for each in parts] == [text_word(text) for text in texts]
    numbers = [value for value in values if isinstance(value, int)]
    assert text_words(pa.array(numbers, pa.int64()))[0].tolist() == [text_word(number) for number in numbers]


@pytest.mark.slow
@given(st.lists(st.from_regex(r"-?[0-9]{0,3}\.?0*", fullmatch=True) | st.sampled_from(["True", "tRUE", "FALSE"])))
def test_an_export_knows_the_same_words(texts):
    texts = [text for text in texts if text]
    assert text_words(pa.array(texts, pa.string()))[0].tolist() == [text_word(text) for text in texts]


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("7.0", 7.0),
        ("-12.00", -12),
        ("7.", np.float16(7)),
        ("-0.0", -0.0),
        ("-0", 0),
        (".0", np.float32(0)),
        ("True", True),
        ("FALSE", False),
        ("1000000000000000003", 10**18 + 3),
        ("18446744073709551615", np.uint64(2**64 - 1)),
        ("caf\u00e9", "caf\u00e9".encode()),
    ],
)
def test_a_value_is_one_row_in_every_format(tmp_path, cell, value):
    settings = TableConfig({"u": TableFeature("sparse", num_rows=10**9)})
    text = write(tmp_path / "a.csv", pa.table({"label": [1], "u": [cell]}))
    columns = pa.table({"label": [1], "u": pa.array([value])})
    expected = read(text, settings).values[0].tolist()
    assert read(write(tmp_path / "a.parquet", columns), settings).values[0].tolist() == expected
    model = Model([], np.array, serving_inputs(config_of(text, settings)))  # type: ignore[arg-type]
    assert [model.encode([{"u": each}])[1][0].tolist() for each in (cell, value)] == [expected, expected]


@pytest.mark.parametrize("cell", ["7.5", "07.0", "1e3", "v1.0", "1.0.0", "\u0667.0"])
def test_other_texts_stay_as_they_are(cell):
    data = cell.encode()
    assert text_words(pa.array([cell]))[0].tolist() == [make_key(len(data), int.from_bytes(data, "little"))]


def test_bools_of_text_files_are_numbers(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("label,x,u\nTrue,false,a\nFALSE,TRUE,b\ntrue,2.5,c\n")
    settings = TableConfig({"x": TableFeature("dense"), "u": TableFeature("sparse", num_rows=9)})
    block = read(path, settings, chunk_rows=9)
    assert block.labels.tolist() == [1, 0, 1]
    assert block.dense[:, 0].tolist() == [0, 1, 2.5]


@pytest.mark.parametrize(
    ("column", "mapping", "expected", "said"),
    [
        (pa.array([0, 2**62], pa.timestamp("ms")), "hour", [1], "at=146140482-04-24T15:36:28: is beyond the last time"),
        (
            pa.array([0, 253402214400], pa.timestamp("s")),
            "weekday",
            [4],
            "at=9999-12-31T00:00:00: is beyond the last time",
        ),
        (pa.array([0, 20241231]), "hour", [1], "at=20241231.0: needed a time as 2024-12-31"),
        (pa.array(["", "20241231"]), "weekday", [0], "at='20241231': needed a time as 2024-12-31"),
        (pa.array(["2024-12-31", ""]), "weekday", [2, 0], None),
        (pa.array([0, 2**62], pa.timestamp("ms")), None, [0], "needed a time that 64 bits of microseconds"),
        (pa.array([0, 253402214400], pa.timestamp("s")), None, [0, 253402214400], None),
    ],
)
def test_far_times_and_dates_in_digits(tmp_path, column, mapping, expected, said):
    at = TableFeature("dense") if mapping is None else TableFeature("sparse", mapping=mapping)
    settings = TableConfig({"at": at, "u": TableFeature("sparse", num_rows=9)})
    path = write(tmp_path / "a.parquet", pa.table({"label": [1, 0], "at": column, "u": ["a", "b"]}))
    parsed = open_source(config_of(path, settings, bad_rows=0.9)).parse(0)
    found = parsed.samples.dense[:, 0] if mapping is None else parsed.samples.values[0]
    assert found.tolist() == np.array(expected, found.dtype).tolist()
    assert [said in str(bad) for bad in parsed.bad.values()] == ([] if said is None else [True])


def test_numbers_that_overflow_when_scaled_are_bad(tmp_path):
    feature = TableFeature("dense", scale="standardize", mean=0.0, std=1e-20)
    settings = TableConfig({"x": feature, "u": TableFeature("sparse", num_rows=9)})
    path = write(tmp_path / "a.csv", pa.table({"label": [1, 0], "x": [1e30, 1e10], "u": ["a", "b"]}))
    with pytest.raises(DataError, match=r"a.csv:2 x=1e\+30: needed a number that is finite after standardize"):
        check_data(config_of(path, settings))
    parsed = open_source(config_of(path, settings, bad_rows=0.9)).parse(0)
    assert (list(parsed.bad), parsed.samples.num_samples) == ([0], 1)


def test_integers_of_64_unsigned_bits_are_ids(tmp_path):
    table = pa.table({"label": [1, 0], "u": pa.array([2**64 - 1, 7], pa.uint64())})
    settings = TableConfig({"u": TableFeature("sparse", num_rows=10**6, mapping="hash")})
    expected = read(write(tmp_path / "a.parquet", table), settings).values[0].tolist()
    assert read(write(tmp_path / "a.csv", table), settings).values[0].tolist() == expected
    settings = TableConfig({"u": TableFeature("sparse", num_rows=10**6, mapping="none")})
    with pytest.raises(DataError, match="u='18446744073709551615': needed an integer, or nothing"):
        check_data(config_of(tmp_path / "a.csv", settings))


def test_hashes_stay_as_they_are():
    """The vectors of docs/own_data.md: rows of trained tables depend on them."""
    expected = {"a": 0x9B44D8EECE61CD2C, "7": 0x93B8F4A3BA040867, "Action": 0xB45C2A9BA0742903}
    assert {text: text_word(text) for text in expected} == expected


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("age", ["20", "x", "", "45"], "a.csv:3 age='x': needed a number, or nothing"),
        ("age", ["20", "1e39", "", "45"], r"a.csv:3 age=1e\+39: needed a finite number"),
        ("rating", ["5", "", "4", "3"], "a.csv:3 rating=nan: a label must be a number"),
        ("user", ["7", "8.5", "", "7"], "a.csv:3 user='8.5': needed an integer, or nothing"),
        ("time", ["0", "31.12.1999", "", "0"], "a.csv:3 time='31.12.1999': needed a time as 2024-12-31"),
        ("time", ["0", "20241231", "", "0"], "a.csv:3 time='20241231': needed a time as 2024-12-31"),
        ("time", ["0", "inf", "", "0"], "a.csv:3 time=inf: needed a time as 2024-12-31"),
        ("time", ["0", "1700000000000", "", "0"], "a.csv:3 time='1700000000000': is beyond .* divide by 1000"),
        ("genres", ["a", "|" * 4, "", "b"], "a.csv:3 genres=5 ids: needed at most 4 .data.table.max_bag_size"),
        ("city", ["a", "x" * 1025, "", "b"], "a.csv:3 city has 1,025 bytes: needed at most 1,024 bytes"),
    ],
)
def test_bad_cells_are_named_and_replaced(tmp_path, column, values, said):
    table = pa.table({**COLUMNS, column: pa.array(values)})
    path, settings = write(tmp_path / "a.csv", table), replace(SETTINGS, max_bag_size=4)
    config = config_of(path, settings, bad_rows=0.5, chunk_rows=4)
    parsed = open_source(config).parse(0)
    assert list(parsed.bad) == [1]
    assert str(parsed.bad[1]).startswith(str(tmp_path))
    assert parsed.samples.num_samples == 3
    with pytest.raises(DataError, match=said), BatchStream(
        open_source(replace(config, bad_rows="stop")),
        batch_size=4, rank=0, world_size=1, split="train", epochs=1, config=config,
    ) as stream:  # fmt: skip
        next(stream)


def test_lines_that_are_no_rows_are_bad_rows(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('label,user\n1,a\n0\n1,"b\n0,"c,d"\n1,x,y\n0,e\n')
    settings = TableConfig({"user": TableFeature("sparse", num_rows=9)})
    parsed = open_source(config_of(path, settings, bad_rows=0.9, chunk_rows=9)).parse(0)
    assert parsed.samples.num_samples == 3
    said = [str(bad).removeprefix(str(path)) for bad in parsed.bad.values()]
    assert said[0] == ":3 has 1 comma-separated columns; needed 2: label, user"
    assert said[1].startswith(""":4 '1,"b': a quote opens a cell that does not end in this line""")
    assert said[2].startswith(":6 has 3 comma-separated columns")
    plain = open_source(config_of(path, replace(settings, quoted=False), bad_rows=0.9, chunk_rows=9)).parse(0)
    assert list(plain.bad) == [1, 3, 4]


def test_floats_are_ids_where_they_are_whole(tmp_path):
    table = pa.table({"label": [1, 0, 1, 1], "user": pa.array([7.0, None, 7.5, np.inf])})
    settings = TableConfig({"user": TableFeature("sparse", num_rows=99)})
    parsed = open_source(config_of(write(tmp_path / "a.parquet", table), settings, bad_rows=0.9))
    assert parsed.parse(0).samples.values[0].tolist() == [row("7", 99), 0]
    said = [str(bad).partition("a.parquet")[2] for bad in parsed.parse(1).bad.values()]
    needed = "needed text or a whole number, or nothing"
    assert said == [f":3 user=7.5: {needed}", f":4 user=inf: {needed}"]


@pytest.mark.parametrize(
    ("feature", "said"),
    [
        (
            TableFeature("dense", column="genres"),
            "column 'genres' is of type list<.*>; needed a number, or text that is",
        ),
        (
            TableFeature("sparse", column="price", num_rows=9, mapping="hash"),
            "needed integers, texts that are, or lists",
        ),
        (TableFeature("sparse", column="price", mapping="hour"), "needed a time, seconds since 1970, or text"),
        (TableFeature("dense", column="agee"), r"no column 'agee'; did you mean 'age'\?"),
    ],
)
def test_columns_that_do_not_fit_are_named(tmp_path, feature, said):
    path = write(tmp_path / "a.parquet", as_lists(pa.table(COLUMNS)))
    with pytest.raises(DataError, match=said):
        open_source(config_of(path, TableConfig({"user": FEATURES["user"], "x": feature}, label="rating")))


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_numbers_in_text_are_numbers_in_every_format(tmp_path, name):
    """An empty text is a missing value; a text that is no number is a bad row, and a dry run names it."""
    texts = pa.table({key: column.cast(pa.string()) for key, column in COLUMNS.items() if key != "genres"})
    texts = texts.append_column("genres", COLUMNS["genres"])
    texts = texts.set_column(1, "age", pa.array(["20", "30.0", "", "45"]))
    expected, found = read(write(tmp_path / "typed.parquet", pa.table(COLUMNS))), read(write(tmp_path / name, texts))
    assert found.dense.tobytes() == expected.dense.tobytes()
    assert found.labels.tolist() == expected.labels.tolist()
    assert [each.tolist() for each in found.values] == [each.tolist() for each in expected.values]
    bad = config_of(write(tmp_path / name, texts.set_column(1, "age", pa.array(["20", "x", "", "45"]))))
    with pytest.raises(DataError, match=rf"{name}:{2 + name.endswith('csv')} age='x': needed a number, or nothing"):
        check_data(bad)


def test_days_of_a_time_are_a_dense_feature(tmp_path):
    """In each format, in exports too: days since 1970, standardized; 0 for a missing time."""
    settings = TableConfig({"d": TableFeature("dense", scale="days", mean=10.0, std=4.0), "u": FEATURES["user"]})
    moment = datetime(1970, 1, 12, 12, tzinfo=timezone.utc)  # 11.5 days
    columns = {"label": [1, 0], "u": [1, 2]}
    texts = ["1970-01-12 12:00:00", ""], ["1970-01-12T14:00+02:00", None], ["993600", ""]
    for number, times in enumerate([pa.array([moment, None], pa.timestamp("us", "UTC")), [993600, None], *texts]):
        for name in (f"{number}.csv", f"{number}.parquet"):
            path = write(tmp_path / name, pa.table({**columns, "d": pa.array(times)}))
            assert read(path, settings).dense[:, 0].tolist() == [0.375, 0.0], name
            model = Model([], np.array, serving_inputs(config_of(path, settings)))  # type: ignore[arg-type]
            samples = [{"d": each, "u": 1} for each in pa.array(times).to_pylist()]
            assert model.encode(samples)[0][:, 0].tolist() == [0.375, 0.0], name
    wrong = write(tmp_path / "wrong.csv", pa.table({**columns, "d": ["20241231", ""]}))
    with pytest.raises(DataError, match="d='20241231': needed a time as 2024-12-31"):
        check_data(config_of(wrong, settings))


def test_files_that_do_not_fit_are_named(tmp_path):
    write(tmp_path / "a.parquet", pa.table(COLUMNS))
    write(tmp_path / "b.csv", pa.table(COLUMNS))
    with pytest.raises(DataError, match=r"a.parquet is Parquet and .*b.csv is not; needed one format"):
        open_source(config_of(tmp_path))
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"a,b\n" * 99, mtime=0)[:-9])
    with pytest.raises(DataError, match=r"b.csv.gz: not a sound gzip file \(.*\); fetch it again"):
        check_data(config_of(tmp_path / "b.csv.gz"))
    columns = [pa.array([1]), pa.array([2]), pa.array([3])]
    pq.write_table(pa.table(columns, names=["rating", "u", "u"]), tmp_path / "twice.parquet")
    for fails in (open_source, check_data):
        with pytest.raises(DataError, match=r"twice.parquet: has the column 'u' twice; write it again with another"):
            fails(config_of(tmp_path / "twice.parquet"))
    (tmp_path / "b.csv").write_text("\n1,2\n")
    with pytest.raises(DataError, match=r"b.csv:1 the header has no name"):
        open_source(config_of(tmp_path / "b.csv"))


@pytest.mark.parametrize(
    ("feature", "said"),
    [
        (
            TableFeature("dense", scale="standardize"),
            r"x.mean is not set; needed a number where scale = \"standardize\"",
        ),
        (TableFeature("dense", std=1.0), r"x.std = 1.0; needed"),
        (TableFeature("dense", scale="log1p", mean=1.0), r"x.mean = 1.0; needed a number .* or neither, where it is"),
        (TableFeature("dense", scale="log1p", std=1.0), r"x.mean is not set; needed"),
        (TableFeature("dense", scale="log1p", mean=1.0, std=0.0), r"x.std = 0.0; needed .*, above 0"),
        (TableFeature("dense", scale="none", mean=1.0), r"x.mean = 1.0; needed"),
        (TableFeature("dense", scale="quantile", quantiles=(1.0, 1.0)), "at least 2 rising numbers"),
        (TableFeature("dense", num_rows=5), "a dense feature needs none"),
        (TableFeature("sparse"), "x.num_rows is not set; needed at least 2"),
        (TableFeature("sparse", num_rows=1), "x.num_rows = 1; needed at least 2"),
        (TableFeature("sparse", num_rows=0, mapping="none"), "x.num_rows = 0; needed at least 1"),
        (TableFeature("sparse", mapping="hour", num_rows=9), "a time needs none"),
        (TableFeature("sparse", num_rows=9, scale="log1p"), "no effect on a sparse feature"),
        (TableFeature("dense", separator="|"), "x.separator = '|'; needed nothing"),
        (TableFeature("dense", stripped=True), "x.stripped = True; needed false: it has an effect on texts only"),
        (TableFeature("dense", mapping="modulo"), "no effect on a dense feature"),
        (TableFeature("spares", num_rows=9), "x.kind = 'spares'; needed one of"),  # type: ignore[arg-type]
    ],
)
def test_settings_without_an_effect_are_refused(feature, said):
    with pytest.raises(ConfigError, match=rf"data\.table\.features\.{said}" if said[0] == "x" else said):
        TableConfig({"x": feature})


@pytest.mark.parametrize(
    ("plain", "missing"),
    [
        (TableFeature("dense", scale="log1p"), 0.0),
        (TableFeature("dense", scale="quantile", quantiles=(0.0, 10.0, 1000.0)), 0.5),
    ],
)
def test_logarithms_and_places_are_standardized_where_mean_and_std_are_given(plain, missing):
    """In training and in an export; without both, they are as before there were such settings."""
    numbers = [5.0, 0.0, -3.0, None, 4000.0, 77.0]
    cells = np.array([np.nan if each is None else each for each in numbers])
    centred = replace(plain, mean=0.75, std=0.3)
    before, found = scaled(cells, plain), scaled(cells, centred)
    assert before[3] == missing
    assert before[0] == np.float32(np.log1p(np.float32(5)) if plain.scale == "log1p" else 0.25)
    assert found[3] == 0, "as many as the mean"
    assert np.delete(found, 3) == pytest.approx((np.delete(before, 3) - 0.75) / 0.3, rel=1e-6)
    for feature, expected in ((plain, before), (centred, found)):
        table = TableConfig({"x": feature, "u": TableFeature("sparse", num_rows=9)}, "y")
        (exported,) = serving_inputs(DataConfig(kind="table", path="a.csv", table=table))["dense"]
        assert serving_values.scaled(numbers, exported).tobytes() == expected.tobytes()


def test_a_table_without_dense_features_gets_a_constant(tmp_path):
    config = config_of(write(tmp_path / "a.csv", pa.table({"label": [1], "u": ["a"]})))
    config = replace(config, table=TableConfig({"u": TableFeature("sparse", num_rows=9)}))
    assert schema_of(config).dense == (CONSTANT,)
    assert read(tmp_path / "a.csv", config.table).dense.tolist() == [[1.0]]
    with pytest.raises(ConfigError, match=r"embershard data inspect FILE -o run.toml"):
        open_source(replace(config, table=TableConfig()))


def test_labels_may_be_absent_where_none_are_needed(tmp_path):
    for name in ("a.csv", "a.parquet"):
        path = write(tmp_path / name, pa.table(COLUMNS).drop_columns(["rating"]))
        source = open_source(config_of(path), needs_labels=False)
        assert np.isnan(source.parse(0).samples.labels).all()
        with pytest.raises(DataError, match="no column 'rating'"):
            open_source(config_of(path))


def test_an_export_encodes_as_training_did(tmp_path):
    path = write(tmp_path / "a.parquet", as_lists(pa.table(COLUMNS)))
    config = config_of(path)
    block = read(path)
    model = Model([], np.array, serving_inputs(config))  # type: ignore[arg-type]
    samples = pq.read_table(path, columns=model.columns).to_pylist()
    samples[0]["time"] = datetime(1970, 1, 1, tzinfo=timezone.utc)
    samples[3]["time"] = "1997-12-04 15:55:49"
    samples[1]["genres"] = "Action"
    dense, ids, offsets = model.encode(samples)
    assert dense.numpy().tobytes() == block.dense.tobytes()
    for found, expected, places, sizes in zip(ids, block.values, offsets, block.lengths, strict=True):
        assert found.tolist() == expected.tolist()
        assert np.diff(places.numpy()).tolist() == list(sizes)


@pytest.mark.parametrize(
    ("feature", "values", "expected"),
    [
        ("user", [7, "7", 7.0, np.int8(7), np.float32(7), np.array([7]), b"7", [7]], "7"),
        ("user", [None, "", float("nan"), np.float32("nan"), "NA"], ""),
        ("city", ["7", 7, "7.0", np.float32(7), np.array(["7"]), (7,)], "7"),
        ("genres", ["War|7", b"War|7", ["War", 7], np.array(["War", "7"])], "War|7"),
        ("hour", ["2024-12-31 23:00:00", np.datetime64("2024-12-31T23:00:00.5", "ns"), "2024-12-31T23:00:00.5Z",
                  "2025-01-01 01:00+02", "2025-01-01 01:00:00+0200", 1735686000, "1735686000.0"], "2024-12-31 23"),
        ("age", ["20", 20, np.float16(20), b"20", "2e1", "+20"], "20"),
        ("age", [None, float("nan"), "nan", "", "NA", np.datetime64("NaT")], ""),
        ("price", [True, "True", 1, Decimal("1.00")], "1"),
    ],
)  # fmt: skip
def test_an_export_reads_values_of_programs(tmp_path, feature, values, expected):
    column = FEATURES[feature].column or feature
    path = write(tmp_path / "a.csv", pa.table({**COLUMNS, column: pa.array([expected] * 4)}))
    settings = replace(SETTINGS, null_values=("", "NA"))
    block = read(path, settings)
    inputs = json.loads(json.dumps(serving_inputs(config_of(path, settings))))
    model = Model([], np.array, inputs)  # type: ignore[arg-type]
    for value in values:
        dense, ids, _ = model.encode([{**dict.fromkeys(model.columns), column: value}])
        if FEATURES[feature].kind == "dense":
            place = [each for each in FEATURES if FEATURES[each].kind == "dense"].index(feature)
            assert dense[0, place] == block.dense[0, place], value
        else:
            place = [each for each in FEATURES if FEATURES[each].kind == "sparse"].index(feature)
            assert ids[place].tolist() == bags(block, feature)[0], value


#: What reads values together, and what reads one in the careful way.
READS = {
    "text": (serving_values.text_words, text_word),
    "integers": (serving_values.integers, lambda value: serving_values.integers([str(value)])[0]),
    "numbers": (serving_values.numbers_of, serving_values.number),
    "times": (serving_values.times, serving_values.seconds_of_time),
}
#: By what reads them, values of one type that are read together, and others.
READ = [
    ("text", st.text(max_size=20) | st.sampled_from(["7.0", "True", "-0", "x" * 1025]), st.integers(-9, 9)),
    ("integers", st.integers(-(2**65), 2**65) | st.integers(0, 9), st.sampled_from(["8", "x"])),
    ("numbers", st.integers(-(2**130), 2**130) | st.floats(allow_nan=False), st.sampled_from(["8", True, Decimal(3)])),
    ("times", st.integers(-(2**40), 2**40) | st.sampled_from([20241231, 2**70]), st.just("8")),
    ("times", st.datetimes().map(lambda at: str(at)[:19]), st.sampled_from(["2024-02-30", "0000-01-01", "24", "x"])),
    ("times", st.dates().map(str), st.sampled_from(["2024-01-01 24:00:00", "2024-01-01\n2024-01-02"])),
]


@pytest.mark.slow
@pytest.mark.parametrize(("read", "usual", "others"), READ)
@given(data=st.data())
@examples(30)
def test_values_that_are_read_together_are_read_as_one_by_one(read, usual, others, data):
    values = data.draw(st.lists(usual, max_size=9) | st.lists(usual | others, max_size=9))

    together, one = READS[read]

    def outcome(make: Any) -> list[float] | str:
        try:
            return [each.item() if isinstance(each, np.generic) else each for each in make()]
        except ValueError:
            return "refused"

    assert outcome(lambda: together(values)) == outcome(lambda: [one(value) for value in values])


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("user", 7.5, "user: 7.5: needed an integer of 64 bits"),
        ("user", "0x1F", "user: '0x1F': needed an integer of 64 bits"),
        ("user", 2**64, "needed an integer of 64 bits"),
        ("exact", -1, "exact: id 18446744073709551615: needed a row in 0..8"),
        ("user", True, "user: True: needed an integer of 64 bits"),
        ("city", 7.5, "city: 7.5: needed text or a whole number"),
        ("city", {7, 8}, "city: {8, 7}: needed text or a whole number"),
        ("city", "x" * 1025, r"city: 'x*'\.\.\.: needed at most 1,024 bytes"),
        ("time", 1735689599000, "hour: 1735689599000: needed a time as 2024-12-31"),
        ("time", "20241231", "hour: '20241231': needed a time as 2024-12-31"),
        ("time", 20241231, "hour: 20241231: needed a time as 2024-12-31"),
        ("time", "2024-02-30", "hour: '2024-02-30': needed a time as 2024-12-31"),
        ("time", "20241231T2359", "hour: '20241231T2359': needed a time as 2024-12-31"),
        ("age", "1e39", "age: '1e39': needed a finite number, below 3.4e38"),
        ("age", float("inf"), "age: inf: needed a finite number"),
        ("age", "1_000", "age: '1_000': needed a number"),
        ("age", [20], r"age: \[20\]: needed a number"),
    ],
)
def test_an_export_refuses_what_training_does(tmp_path, column, value, said):
    features = {**FEATURES, "exact": TableFeature("sparse", num_rows=9, mapping="none")}
    config = config_of(tmp_path / "a.csv", TableConfig(features))
    model = Model([], np.array, serving_inputs(config))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=said):
        model.encode([{**dict.fromkeys(model.columns), column: value}])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_a_stream_goes_on_at_the_row(tmp_path, name):
    """The same samples on one rank and on two, and after a restart in the middle of an epoch."""
    num_rows = 101
    table = pa.table({"label": [1] * num_rows, "n": range(num_rows), "u": [f"u{n}" for n in range(num_rows)]})
    settings = TableConfig({"n": TableFeature("dense"), "u": TableFeature("sparse", num_rows=99)})
    config = config_of(write(tmp_path / name, table), settings, shuffle=True, chunk_rows=7, eval_fraction=0.1)

    def numbers(batch_size: int, rank: int, world_size: int, state: Any = None) -> list[list[int]]:
        with BatchStream(
            open_source(config), batch_size=batch_size, rank=rank, world_size=world_size, split="train", epochs=2,
            config=config, state=state,
        ) as stream:  # fmt: skip
            batches = [(batch.dense_features[:, 0].int().tolist(), stream.state) for batch in stream]
        states.append(batches[4][1])
        return [found for found, _ in batches]

    states: list[Any] = []
    alone = numbers(10, 0, 1)
    halves = [numbers(5, rank, 2) for rank in range(2)]
    assert [a + b for a, b in zip(*halves, strict=True)] == alone
    assert numbers(10, 0, 1, states[0]) == alone[5:]


def test_ids_beyond_a_table_are_counted(tmp_path):
    feature = TableFeature("sparse", num_rows=11, mapping="modulo")
    pq.write_table(pa.table({"click": [0, 1] * 4, "user": [0, 9, 10, None, -1, 99, 5, 10]}), tmp_path / "a.parquet")
    config = DataConfig("table", str(tmp_path / "a.parquet"), eval_fraction=0, table=TableConfig({"user": feature}))
    config = replace(config, table=replace(config.table, label="click"))
    source = open_source(config)
    assert source.beyond_tables() == {}
    for _ in range(2):  # a chunk that is read again counts once
        source.parse(0)
    assert source.beyond_tables() == {"user": 4}
    pq.write_table(pa.table({"click": [0, 1], "user": [0, 9]}), tmp_path / "a.parquet")
    source = open_source(config)
    source.parse(0)
    assert source.beyond_tables() == {}
