"""Files that belong together: partitions, parts that differ, parts without rows. JSON lines. Plain copies."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embershard.commands import cli
from embershard.commands.data.columns import columns_of_files, survey_files
from embershard.commands.data.command import parser
from embershard.data import DataConfig, TableConfig, TableFeature, open_source
from embershard.data.block import Block
from embershard.data.sources.check import check_data
from embershard.data.sources.input_file import InputFile, identify_files
from embershard.data.sources.source import FileSource
from embershard.data.sources.table import plain_text
from embershard.data.text_form import TextForm
from embershard.errors import DataError
from embershard.settings.files import load_config
from embershard.training.config import RunConfig

N = 40
ROWS = [{"click": n % 2, "user": f"u{n % 7}", "price": n / 4} for n in range(N)]
SPARSE = {"mapping": "text", "num_rows": 1000}
PRICE = TableFeature("dense")
USER = TableFeature("sparse", **SPARSE)


@pytest.fixture(autouse=True)
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EMBERSHARD_COPIES", str(tmp_path / "copies"))
    return tmp_path / "copies"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def config_of(path: Path, bad_rows: float | str = "stop", **more: object) -> DataConfig:
    settings = {"label": "click", "features": {"price": PRICE, "user": USER}} | more
    return DataConfig(kind="table", path=str(path), eval_fraction=0, bad_rows=bad_rows, table=TableConfig(**settings))


def samples(config: DataConfig) -> Block:
    check_data(config)
    source = open_source(config)
    assert isinstance(source, FileSource)
    return Block.join([source.parse(number).samples for number in range(source.num_physical)])


def bad_rows(config: DataConfig) -> list[str]:
    source = open_source(config)
    return [str(bad) for number in range(source.num_physical) for bad in source.parse(number).bad.values()]


def write_csv(path: Path, rows: list[dict[str, object]], names: list[str]) -> None:
    cells = [[str("" if row.get(name) is None else row[name]) for name in names] for row in rows]
    path.write_text("\n".join(map(",".join, [names, *cells])) + "\n")


def write_parquet(path: Path, rows: list[dict[str, object]], names: list[str]) -> None:
    pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), path, write_page_checksum=True)


def write_json(path: Path, rows: list[dict[str, object]], names: list[str]) -> None:
    path.write_text("".join(json.dumps({name: row[name] for name in names if name in row}) + "\n" for row in rows))


Write = Callable[[Path, list[dict[str, object]], list[str]], None]
FORMATS = [(write_csv, "csv"), (write_parquet, "parquet"), (write_json, "jsonl")]
ALL = ["click", "user", "price"]


def assert_same(one: Block, other: Block) -> None:
    np.testing.assert_array_equal(one.dense, other.dense)
    np.testing.assert_array_equal(one.labels, other.labels)
    for a, b in zip(one.values, other.values, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("write", "ending"), FORMATS)
def test_folders_name_a_column(data, write: Write, ending):
    """Rows in folders by day are those of one file with the day in each row; files of one name are told apart."""
    whole = data.parent / f"whole.{ending}"
    rows = [row | {"day": f"2026-01-{1 + n // 20:02} 10:00"} for n, row in enumerate(ROWS)]
    write(whole, rows, [*ALL, "day"])
    for day in ("01", "02"):
        (data / "country=x" / f"day=2026-01-{day} 10%3A00").mkdir(parents=True)
        of_day = [row for row in rows if row["day"].startswith(f"2026-01-{day}")]
        write(data / "country=x" / f"day=2026-01-{day} 10%3A00" / f"part-0.{ending}", of_day, ALL)
    (data / "_SUCCESS").touch()
    (data / ".day=x").mkdir()
    features = {"price": PRICE, "user": USER, "hour": TableFeature("sparse", "day", mapping="hour")}
    features["day"] = TableFeature("sparse", **SPARSE)
    assert_same(samples(config_of(data, features=features)), samples(config_of(whole, features=features)))
    names = [file.name for file in identify_files(config_of(data))["files"]]
    assert names == [f"country=x/day=2026-01-{day} 10%3A00/part-0.{ending}" for day in ("01", "02")]
    with pytest.raises(DataError, match=r"no column 'dax'; did you mean 'day'"):
        samples(config_of(data, features={"user": TableFeature("sparse", "dax", **SPARSE)}))


@pytest.mark.parametrize("of", ["folder", "file"])
@pytest.mark.parametrize(("write", "ending"), FORMATS)
def test_a_part_has_the_columns_of_the_folders_that_it_is_in(data, write: Write, ending, of):
    """As the data of `predict`: its samples are those of the whole, and its own column wins over a folder's name."""
    for day in ("01", "02"):
        (data / f"user=u{day}" / f"day=2026-01-{day}").mkdir(parents=True)
        write(data / f"user=u{day}" / f"day=2026-01-{day}" / f"a.{ending}", ROWS[int(day) :: 2], ALL)
    features = {"price": PRICE, "user": USER, "day": TableFeature("sparse", "day", mapping="weekday")}
    whole = samples(config_of(data, features=features))
    part = data / "user=u02" / "day=2026-01-02"
    found = samples(config_of(part / f"a.{ending}" if of == "file" else part, features=features))
    assert_same(found, whole.take(np.arange(len(ROWS[1::2]), whole.num_samples)))
    assert len(set(found.values[0].tolist())) == 7, "the file's users, and not u02 of its folder"
    assert [each.name for each in identify_files(config_of(part))["files"]] == [f"a.{ending}"]


def test_json_lines_to_score_may_lack_a_key(data):
    """A key that no line has is missing; but not for training, where it may be a name that is written wrongly."""
    write_json(data / "a.jsonl", [{"click": 1, "user": "u1"}, {"click": 0, "user": "u2"}], ALL)
    config = config_of(data / "a.jsonl")
    with pytest.raises(DataError, match="no column 'price'"):
        check_data(config)
    check_data(config, needs_labels=False)
    source = open_source(config, needs_labels=False)
    assert source.read("train", 0, np.arange(2)).dense.tolist() == [[0], [0]]
    assert "1 of 1 files have no column 'price': it is missing in their rows." in source.notes
    write_json(data / "a.jsonl", [{"other": 1}], ["other"])
    with pytest.raises(DataError, match="no column"):
        check_data(config_of(data / "a.jsonl"), needs_labels=False)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("ending", ["csv", "jsonl", "csv.gz"])
def test_blank_lines_are_no_rows(data, ending, end):
    """At the start, between rows and at the end; rows keep their places in chunks, and their lines in the file."""
    write = write_json if ending == "jsonl" else write_csv
    whole = data.parent / f"whole.{ending.removesuffix('.gz')}"
    write(whole, [*ROWS[:9], {"click": "x", "user": "u", "price": 1}, *ROWS[9:]], ALL)
    lines = whole.read_text().splitlines()
    for place in (len(lines), 12, 12, 6, 2, 1):
        lines.insert(place, "")
    text = (end.join(lines) + end).encode()
    (data / f"a.{ending}").write_bytes(gzip.compress(text) if ending.endswith("gz") else text)
    number = 1 + next(n for n, line in enumerate(lines) if "x" in line)
    config = config_of(data, 0.5, max_bag_size=5)
    assert [line.partition(" ")[0] for line in bad_rows(config)] == [f"{data}/a.{ending}:{number}"]
    for chunk_rows in (1, 3, 64):
        assert_same(samples(replace(config, chunk_rows=chunk_rows)), samples(config_of(whole, 0.5)))
    with pytest.raises(DataError, match=f":{number} click='x'"):
        check_data(replace(config, bad_rows="stop"))
    surveyed = survey_files(columns_of_files(data, parser().parse_args(["inspect", str(data)])))
    assert (surveyed.columns["click"].rows, surveyed.bad) == (N + 1, [])


def test_other_folders_are_named(tmp_path):
    (tmp_path / "january").mkdir()
    with pytest.raises(DataError, match="only those called NAME=VALUE are read, and not january"):
        open_source(config_of(tmp_path))


@pytest.mark.parametrize(("write", "ending"), FORMATS)
def test_parts_may_lack_columns_and_rows(data, write: Write, ending):
    rows = [row if n < 20 else {**row, "price": None} for n, row in enumerate(ROWS)]
    write(data.parent / f"whole.{ending}", rows, ALL)
    write(data / f"a.{ending}", rows[:20], ALL)
    if ending != "jsonl":
        write(data / f"b.{ending}", [], ALL)
    write(data / f"c.{ending}", rows[20:], ["user", "click"])
    assert_same(samples(config_of(data)), samples(config_of(data.parent / f"whole.{ending}")))
    assert any(
        "have no column 'price': it is missing in their rows" in note for note in open_source(config_of(data)).notes
    )
    with pytest.raises(DataError, match=r"no column 'prize'; did you mean 'price'"):
        samples(config_of(data, features={"prize": PRICE, "user": USER}))
    write(data / f"d.{ending}", ROWS[:1], ["user", "price"])
    with pytest.raises(DataError, match=rf"d.{ending}: no column 'click'"):
        samples(config_of(data))


def test_parts_of_integers_and_of_numbers(data):
    write_parquet(data / "a.parquet", [{"click": 1, "user": "a", "price": 3}], ALL)
    write_parquet(data / "b.parquet", [{"click": 1, "user": "a", "price": 3.5}], ALL)
    assert samples(config_of(data)).dense[:, 0].tolist() == [3.0, 3.5]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_no_part_has_a_row(data, ending):
    for name in ("a", "b"):
        {"csv": write_csv, "parquet": write_parquet}[ending](data / f"{name}.{ending}", [], ALL)
    with pytest.raises(DataError, match=rf"a.{ending}: no (row in it|line behind its header)"):
        open_source(config_of(data))


def test_json_lines_are_the_samples_of_parquet(data):
    """Whatever the order of the keys; a missing key, null, and an object in an object; lists are bags."""
    lines = [
        {"click": 1, "user": "7", "price": 2, "of": {"tag": "x"}, "ids": [1, 2]},
        {"ids": [], "user": None, "price": 2.5, "click": 0, "of": {"tag": None}},
        {"click": True, "price": None, "user": 'ö\n"', "of": None, "ids": None, "late": "2026-01-01 05:00:00"},
    ]
    (data / "a.jsonl").write_text("".join(json.dumps({**line, "click": int(line["click"])}) + "\n" for line in lines))
    table = {
        "click": [1, 0, 1],
        "user": ["7", None, 'ö\n"'],
        "price": [2, 2.5, None],
        "of.tag": ["x", None, None],
        "ids": [[1, 2], [], None],
        "late": pa.array([None, None, "2026-01-01 05:00:00"]),
    }
    pq.write_table(pa.table(table), data.parent / "a.parquet")
    features = {
        "price": PRICE,
        "user": USER,
        "tag": TableFeature("sparse", "of.tag", **SPARSE),
        "late": TableFeature("sparse", mapping="hour"),
    }
    features["ids"] = TableFeature("sparse", mapping="modulo", num_rows=9)
    found, expected = (samples(config_of(path, features=features)) for path in (data, data.parent / "a.parquet"))
    assert_same(found, expected)
    np.testing.assert_array_equal(found.lengths, expected.lengths)


def test_bad_json_lines_keep_their_places(data):
    write_json(data / "a.jsonl", ROWS, ALL)
    lines = (data / "a.jsonl").read_text().splitlines()
    lines[3], lines[7], lines[20] = '{"click": 1, "user"', '{"click": 1, "user": "a", "price": "free"}', "[1]"
    (data / "a.jsonl").write_text("\n".join(lines) + "\n")
    config = config_of(data, 0.5)
    found = [line.split("a.jsonl:")[1] for line in bad_rows(config)]
    assert found[0].startswith("4 '{\"click\": 1, \"user\"': is no JSON object (Expecting ':'")
    assert found[1:] == [
        "8 price='free': needed a number, or nothing",
        "21 '[1]': needed a JSON object, with the columns as keys",
    ]
    good = np.delete(np.arange(N), [3, 7, 20])
    assert samples(config).dense[:, 0].tolist() == [ROWS[n]["price"] for n in good]


@pytest.mark.parametrize("late", [False, True])
def test_ids_that_are_numbers_in_some_lines_and_texts_in_others_are_texts(data, late):
    """As some logs have them; 7 and "7" are one id, as they are in CSV, wherever the first text comes."""
    lines = [
        {**row, "user": n % 7 if n % 3 or (late and n < 25) else str(n % 7), "of": {"id": n}}
        for n, row in enumerate(ROWS)
    ]
    lines[30]["of"], lines[31]["price"] = {"id": "x"}, str(lines[31]["price"])
    lines[32]["user"] = 'say "user": 5, "x": true}'
    write_json(data / "a.jsonl", lines, [*ALL, "of"])
    write_csv(data.parent / "a.csv", [row | {"user": line["user"]} for row, line in zip(ROWS, lines, strict=True)], ALL)
    text = (data.parent / "a.csv").read_text().replace('say "user": 5, "x": true}', '"say ""user"": 5, ""x"": true}"')
    (data.parent / "a.csv").write_text(text)
    assert_same(samples(config_of(data)), samples(config_of(data.parent / "a.csv")))
    columns, bad = survey_files(columns_of_files(data, parser().parse_args(["inspect", str(data)])))[1:]
    assert (columns["user"].rows, bad) == (N, [])
    assert columns["click"].type == pa.int64()
    assert columns["user"].type == columns["of.id"].type == pa.string()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", '[\n{"click": 1}]\n', r"is one JSON list; needed an object to a line: jq -c '.\[\]'"),
        ("a.json", '{\n "click": 1\n}\n', r"a.json:1 is no JSON object: '{'; needed one to a line: jq -c ."),
    ],
)
def test_other_json_is_named(data, name, text, said):
    (data / name).write_text(text)
    with pytest.raises(DataError, match=said):
        open_source(config_of(data))


def other_form(path: Path) -> DataConfig:
    """Write the rows in UTF-16 with two separators, and one row that is none; return settings for them."""
    lines = ["a title", "click::user::price", *(f"{r['click']}::{r['user']}::{r['price']}" for r in ROWS)]
    lines[12] = "1::2"
    path.write_bytes("".join(f"{line}\r\n" for line in lines).encode("utf-16"))
    return config_of(path, 0.5, separator="::", encoding="utf-16", skip_lines=1)


def test_rows_of_a_copy_have_their_places_in_the_file(data):
    assert bad_rows(other_form(data / "a.csv")) == [
        f"{data}/a.csv:13 has 2 '::'-separated columns; needed 3: click, user, price"
    ]


def test_a_copy_is_made_once_and_never_stale(data, copies, monkeypatch):
    config, made, blocks = other_form(data / "a.csv"), [], plain_text.plain_blocks
    monkeypatch.setattr(plain_text, "plain_blocks", lambda *given: made.append(given) or blocks(*given))
    file = InputFile.at(data / "a.csv")
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: plain_text.plain_file(file, config.table).path, range(8)))
    assert len(found) == len(made) == 1
    before = samples(config).num_samples
    (data / "a.csv").write_bytes((data / "a.csv").read_bytes() + "1::u1::9\n".encode("utf-16-le"))
    assert samples(config).num_samples == before + 1
    plain = config_of(data / "b.csv")
    write_csv(data / "b.csv", ROWS, ALL)
    assert plain_text.plain_file(InputFile.at(data / "b.csv"), plain.table).path == data / "b.csv"


_KILLED = """
import os, signal, sys
from pathlib import Path
from embershard.data.sources.input_file import InputFile
from embershard.data.sources.table import plain_text
from embershard.data.text_form import TextForm
def first_block(file, form):
    yield b"click,user,price\\n"
    os.kill(os.getpid(), signal.SIGKILL)
plain_text.plain_blocks = first_block
plain_text.plain_file(InputFile.at(Path(sys.argv[1])), TextForm(separator="::", encoding="utf-16", skip_lines=1))
"""


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_no_copy(data, copies):
    config = other_form(data / "a.csv")
    done = subprocess.run([sys.executable, "-c", _KILLED, str(data / "a.csv")], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in copies.rglob("a.csv*")] == ["a.csv.txt.partial"]
    assert samples(config).num_samples == N - 1


def test_a_name_that_only_looks_like_a_form_is_refused():
    assert TextForm(separator="::").is_plain is False
    assert TextForm(encoding="UTF8").is_plain


def inspected(path: Path, *options: str) -> DataConfig:
    settings = path.parent / "run.toml"
    assert cli.main(["data", "inspect", str(path), "-o", str(settings), *options]) == 0
    return replace(load_config(RunConfig, settings).data, eval_fraction=0, split="tail")


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(9, 9, 22), (20, 15, 5)])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_parts_that_split_made_are_the_whole(data, sizes, ending):
    """The first one has the header, whichever is the largest; settings of inspect, training and convert agree."""
    rows = [row | {"place": n} for n, row in enumerate(ROWS)]
    write_csv(data.parent / "whole.csv", rows, [*ALL, "place"])
    lines = (data.parent / "whole.csv").read_bytes().splitlines(keepends=True)
    for number in range(3):
        first = sum(sizes[:number]) + (number > 0)
        text = b"".join(lines[first : 1 + sum(sizes[: number + 1])])
        (data / f"part{number}.csv{ending}").write_bytes(gzip.compress(text) if ending else text)
    config = inspected(data)
    assert config.table.columns == (*ALL, "place")
    check_data(config)
    assert_same(samples(config), samples(replace(config, path=str(data.parent / "whole.csv"))))
    assert cli.main(["data", "convert", str(data), "-o", str(data.parent / "a.parquet")]) == 0
    assert pq.read_table(data.parent / "a.parquet").column("place").to_pylist() == list(range(N))


def test_lines_of_split_parts_are_named_by_their_places(data):
    (data / "a.csv").write_text("click,user,price\n1,u,1\nx,u,2\n")
    (data / "b.csv").write_text("0,u,3\ny,u,4\n")
    config = config_of(data, 0.9, columns=("click", "user", "price"))
    assert [line.partition(" ")[0] for line in bad_rows(config)] == [f"{data}/a.csv:3", f"{data}/b.csv:2"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("click;user;price\n1;u1;2\n", r"b.csv: its first line is not cut by ','.*'click;user;price'.* data convert"),
        ("film,year\nAlien,1979\n", r"b.csv has the columns 'film, year'; needed those of .*a.csv.*--files PATTERN"),
    ],
)
def test_parts_of_another_kind_are_named(data, capsys, text, said):
    write_csv(data / "a.csv", ROWS, ALL)
    (data / "b.csv").write_text(text)
    for command in (["inspect", str(data)], ["convert", str(data), "-o", str(data.parent / "a.parquet")]):
        assert cli.main(["data", *command]) == 2
        assert re.search(said, capsys.readouterr().err)


def test_parts_of_other_separators_are_read_as_told(data):
    """By convert, one by one."""
    write_csv(data / "a.csv", ROWS[:20], ALL)
    write_csv(data / "b.csv", ROWS[20:], ALL)
    (data / "b.csv").write_text((data / "b.csv").read_text().replace(",", ";"))
    (new := data.parent / "new").mkdir()
    for name in ("a", "b"):
        assert cli.main(["data", "convert", str(data / f"{name}.csv"), "-o", str(new / f"{name}.parquet")]) == 0
    assert samples(inspected(new)).num_samples == N


def test_a_part_without_a_byte_behind_its_compression_is_passed_over(data):
    write_csv(data / "a.csv", ROWS, ALL)
    (data / "b.csv.gz").write_bytes(gzip.compress(b""))
    assert samples(inspected(data)).num_samples == N


def test_texts_are_read_beside_dictionaries_and_numbers(data):
    """As Parquet parts have them whose writers differed: a value is the same in each of them."""
    kinds = [
        pa.string(),
        pa.dictionary(pa.int8(), pa.string()),
        pa.dictionary(pa.int32(), pa.large_string()),
        pa.int64(),
    ]
    rows = pa.table({"click": [n % 2 for n in range(60)], "user": [str(n % 7) for n in range(60)]})
    pq.write_table(rows, data.parent / "whole.parquet")
    for number, kind in enumerate(kinds):
        part = rows.slice(15 * number, 15)
        users = part["user"].cast(kind) if number == 3 else part["user"].cast(getattr(kind, "value_type", kind))
        users = users.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else users
        pq.write_table(part.set_column(1, "user", users), data / f"{number}.parquet")
    config = inspected(data)
    config = replace(config, table=replace(config.table, features={"user": USER}))
    assert_same(samples(config), samples(replace(config, path=str(data.parent / "whole.parquet"))))
    assert cli.main(["data", "convert", str(data), "-o", str(data.parent / "a.parquet")]) == 0
    assert pq.read_table(data.parent / "a.parquet")["user"].to_pylist() == rows["user"].to_pylist()


def test_a_column_without_a_name_has_its_place_in_parquet_too(data):
    columns = {"click": [n % 2 for n in range(60)], "": [n * 3 % 17 for n in range(60)]}
    pq.write_table(pa.table(columns | {"user": ["u"] * 60}), data / "a.parquet")
    pq.write_table(pa.table({"user": ["u"] * 60} | columns), data.parent / "b.parquet")
    config = inspected(data)
    assert config.table.features["Unnamed_1"].column == "Unnamed: 1"
    assert samples(config).num_samples == 60
    assert cli.main(["data", "convert", str(data), "-o", str(data.parent / "c.parquet")]) == 0
    assert pq.read_table(data.parent / "c.parquet")["Unnamed: 1"].to_pylist() == columns[""]
    with pytest.raises(DataError, match="no column 'Unnamed: 1'; did you mean 'Unnamed: 2'"):
        check_data(replace(config, path=str(data.parent / "b.parquet")))
