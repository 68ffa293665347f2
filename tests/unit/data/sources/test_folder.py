"""All that is data in a folder is read, by inspect, convert and training alike; or it is named, with the reason."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from embershard.commands import cli
from embershard.commands.train.from_data import is_data
from embershard.data import DataConfig, TableConfig, TableFeature, open_source
from embershard.data.config import DATA_FILES
from embershard.data.sources.folder import Listing
from embershard.data.sources.input_file import next_file
from embershard.errors import DataError
from embershard.settings.files import load_config
from embershard.training.config import RunConfig

ROWS = "bought,shop\n" + "".join(f"{n % 2},s{n % 9}\n" for n in range(150))
FEATURES = {"shop": TableFeature("sparse", num_rows=99)}


def config_of(folder: Path, **more: object) -> DataConfig:
    table = TableConfig(FEATURES, "bought", **more)
    return DataConfig("table", str(folder), table=table, num_workers=0, eval_fraction=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shops").mkdir()
    (tmp_path / "shops" / "a.csv").write_text(ROWS)
    return tmp_path / "shops"


@pytest.mark.parametrize(
    "name",
    [
        "B.CSV",
        "b.Csv.GZ",
        "part-00001",
        "part-r-1",
        "part-00001.gz",
        "000000_0",
        "xab",
        "b-00000-of-00002",
        "b.ndjson.gz",
    ],
)
def test_parts_of_usual_names_are_read(folder, name):
    text = ROWS
    if "json" in name:
        text = "".join(json.dumps({"bought": n % 2, "shop": f"s{n % 9}"}) + "\n" for n in range(150))
        (folder / "a.csv").rename(folder / "README.csv")
        (folder / "a.jsonl").write_text(text)
    (folder / name).write_bytes(gzip.compress(text.encode()) if name.lower().endswith("gz") else text.encode())
    source = open_source(config_of(folder))
    assert source.chunks("train").num_samples == 300
    assert "/a." not in " ".join(source.notes)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("b.dat", ROWS, "not read: b.dat (no pattern of data.table.files fits)"),
        ("_b.csv", ROWS, "not read: _b.csv (names with _ or . in front are of programs)"),
        ("readme.txt", "how to read it", "not read: readme.txt (no data, by its name)"),
        ("b.csv.tmp", ROWS, "not read: b.csv.tmp (it is being written, by its name)"),
        ("b.csv", "", "not read: b.csv (0 bytes)"),
        ("2025/b.csv", ROWS, "not read: 2025/b.csv (folders in it belong to the data if they are called NAME=VALUE"),
        ("b.csv", None, "not read: b.csv (a link to nothing)"),
    ],
)
def test_what_is_not_read_is_named(folder, name, data, said, capsys):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to("nowhere") if data is None else path.write_text(data)
    source = open_source(config_of(folder))
    assert source.chunks("train").num_samples == 150
    assert any(said in note for note in source.notes)
    for command in (["inspect", str(folder)], ["convert", str(folder), "-o", str(folder.parent / "a.parquet")]):
        assert cli.main(["data", *command]) == 0
        assert said in " ".join(capsys.readouterr().out.split())


def test_what_is_known_to_be_no_data_is_not_mentioned(folder):
    for name in ("_SUCCESS", ".a.csv.crc", "._a.csv", "README.md", "run.toml", "a.csv.md5", "_metadata"):
        (folder / name).write_text("x")
    for name in ("empty", "_temporary", ".cache"):
        (folder / name).mkdir()
    assert Listing.of(folder, DATA_FILES, "table").sentences() == ()


def test_many_names_are_cut_short(folder):
    for n in range(30):
        (folder / f"b{n:02}.dat").touch()
    (said,) = open_source(config_of(folder)).notes
    assert "not read: b00.dat, b01.dat, b02.dat, b03.dat, b04.dat and 25 more (no pattern" in said


@pytest.mark.parametrize("name", ["visits.dat", "log_01"])
def test_the_option_that_is_named_reads_a_folder(folder, name, capsys):
    (folder / "a.csv").rename(folder / name)
    assert is_data(folder)
    assert cli.main(["data", "inspect", str(folder)]) == 2
    said = f"(there are: {name}); set data.table.files to the names of your files (inspect, convert and train: --files"
    assert said in capsys.readouterr().err
    settings, output = folder.parent / "run.toml", folder.parent / "a.parquet"
    options = ["--files", "*.dat", "--files", "log_*"]
    assert cli.main(["data", "inspect", str(folder), "-o", str(settings), *options]) == 0
    config = load_config(RunConfig, settings).data
    assert config.table.files == ("*.dat", "log_*")
    assert open_source(config).chunks("train").num_samples > 100
    assert cli.main(["data", "convert", str(folder), "-o", str(output), *options]) == 0
    assert pq.read_table(output).num_rows == 150
    assert cli.main(["train", str(folder), "--dry-run", *options]) == 0


def test_a_pattern_that_means_it_reads_what_is_usually_no_data(folder):
    (folder / "readme.csv").write_text(ROWS)
    assert open_source(config_of(folder)).chunks("train").num_samples == 150
    assert open_source(config_of(folder, files=("readme*",))).chunks("train").num_samples == 150
    assert open_source(config_of(folder, files=("*",))).chunks("train").num_samples == 300


def test_a_folder_of_empty_files_is_refused(folder):
    (folder / "a.csv").write_text("")
    (folder / "b.csv").touch()
    with pytest.raises(DataError, match=r"a.csv: the file is empty"):
        open_source(config_of(folder))


def test_a_folder_that_is_followed_takes_names_in_letters_of_any_case(folder):
    (folder / "a.csv").rename(folder / "A.CSV")
    assert next_file(folder, DATA_FILES, ()) == (folder / "A.CSV", {})
