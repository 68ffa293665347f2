"""Avazu files: the rows that a slow reader gives, from any kind of file; messages about bad input."""

from __future__ import annotations

import datetime
import gzip

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.commands.data.command import main as data_command
from embershard.data import AvazuConfig, DataConfig, open_source, schema_of
from embershard.data.hashing import make_key, text_keys
from embershard.data.sources.avazu import time_rows
from embershard.data.sources.input_file import identify_files
from embershard.errors import ConfigError, DataError

HEADER = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,device_ip,"
    "device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
)
HASHED = HEADER.split(",")[3:]
NUM_ROWS = (*range(2, 22), 1_000_003)


def line_of(number: int, **cells: str) -> str:
    """A line of the layout of Avazu's train.csv."""
    words = {
        "id": f"{10**19 + number}",
        "click": str(int(number % 5 == 0)),
        "hour": f"1410{21 + number % 10}{number % 24:02d}",
        **{name: f"{number * 7919 + place:08x}" for place, name in enumerate(HASHED)},
        "C1": "1005",
        "banner_pos": str(number % 3),
        "C20": "-1",
        "C15": str(300 + number % 20),
    }
    return ",".join((words | cells).values())


def write(path, lines):
    content = "".join(f"{line}\n" for line in (HEADER, *lines)).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def slow_sample(line: str) -> tuple[float, list[int]]:
    _, click, hour, *cells = line.split(",")
    time = datetime.datetime.strptime(hour, "%y%m%d%H").replace(tzinfo=datetime.UTC)
    rows = []
    for cell, num_rows in zip(cells, NUM_ROWS, strict=True):
        data = cell.encode()
        words = [int.from_bytes(data[start : start + 8], "little") for start in range(0, len(data), 8)]
        rows.append(1 + make_key(len(data), *words) % (num_rows - 1) if cell else 0)
    return float(click), [1 + time.hour, time.isoweekday(), *rows]


def read_all(open_stream, path, *, batch_size=100, split="train", **settings):
    """The samples of a split in file order, as (labels, rows [B, 23])."""
    settings = {"eval_fraction": 0.0, "shuffle": False, "num_workers": 0} | settings
    config = DataConfig(kind="avazu", path=str(path), avazu=AvazuConfig(num_rows=NUM_ROWS), **settings)
    batches = list(open_stream(open_source(config), config, batch_size=batch_size, split=split))
    assert all(torch.equal(b.dense_features, torch.ones(b.num_samples, 1)) for b in batches)
    assert all(b.sparse_features.keys() == ["hour_of_day", "weekday", *HASHED] for b in batches)
    rows = torch.cat([b.sparse_features.values().view(23, -1).T for b in batches])
    return torch.cat([b.labels for b in batches]), rows


@pytest.mark.slow
def test_plain_packed_and_folder_as_a_slow_reader_sees_them(open_stream, tmp_path):
    lines = [line_of(number) for number in range(60)]
    lines[7] = line_of(7, site_id="", C21="more than eight bytes", app_id="größe", device_ip="x" * 64)
    wanted = [slow_sample(line) for line in lines]
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train_1.csv", lines[:21])
    write(folder / "train_2.csv.gz", lines[21:])
    (folder / "test.csv").write_text(HEADER.replace("click,", ""))
    windows = tmp_path / "train_windows.csv"
    windows.write_text("\n".join((HEADER, *lines)), newline="\r\n")
    for path in (write(tmp_path / "train.csv", lines), write(tmp_path / "train.gz", lines), folder, windows):
        for chunk_rows in (1, 7, 4096):
            labels, rows = read_all(open_stream, path, batch_size=20, chunk_rows=chunk_rows)
            assert labels.tolist() == [label for label, _ in wanted]
            assert rows.tolist() == [row for _, row in wanted]


def test_the_schema_needs_no_file():
    schema = schema_of(DataConfig(kind="avazu", path="x", avazu=AvazuConfig(num_rows=NUM_ROWS)))
    assert [feature.num_rows for feature in schema.sparse] == [25, 8, *NUM_ROWS]
    assert (schema.dense, schema.target.labels) == (("constant",), ("click",))
    with pytest.raises(ConfigError, match=r"data.avazu.num_rows = \(5, 6\); needed one number or 21 numbers"):
        AvazuConfig(num_rows=[5, 6])  # type: ignore[arg-type]


def test_tail_is_held_out_and_files_are_identified(open_stream, tmp_path):
    write(tmp_path / "train.csv", [line_of(number) for number in range(50)])
    labels, rows = read_all(open_stream, tmp_path, split="eval", eval_fraction=0.2, chunk_rows=8)
    assert labels.tolist() == [1, 0, 0, 0, 0] * 2
    assert rows[:, 0].tolist() == [1 + number % 24 for number in range(40, 50)]
    first = identify_files(DataConfig(kind="avazu", path=str(tmp_path)))
    write(tmp_path / "train.csv", [line_of(number) for number in range(1, 51)])
    assert first["files"][0].name == "train.csv"
    assert identify_files(DataConfig(kind="avazu", path=str(tmp_path))) != first


@pytest.mark.slow
def test_hours_are_those_of_the_calendar():
    first = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
    times = [first + datetime.timedelta(hours=hours) for hours in range(0, 876_000, 37)]  # to the end of 2099
    text = np.frombuffer("".join(f"{time:%y%m%d%H}" for time in times).encode(), np.uint8)
    hours, weekdays = time_rows(text, np.full(len(times), 8, np.int32))
    assert hours.tolist() == [1 + time.hour for time in times]
    assert weekdays.tolist() == [time.isoweekday() for time in times]


@pytest.mark.slow
@given(st.text("0123456789 -/:", min_size=1, max_size=9))
def test_an_hour_is_refused_exactly_if_it_is_none(text):
    try:
        datetime.datetime.strptime(text, "%y%m%d%H")
        is_hour = len(text) == 8 and text.isdecimal()
    except ValueError:
        is_hour = False
    try:
        time_rows(np.frombuffer(text.encode(), np.uint8), np.array([len(text)], np.int32))
        assert is_hour
    except ValueError:
        assert not is_hour


@given(st.lists(st.binary(max_size=64), min_size=1))
def test_keys_of_texts_are_those_of_each_alone(texts):
    keys = text_keys(np.frombuffer(b"".join(texts), np.uint8), np.array([len(text) for text in texts], np.int32))
    for text, key in zip(texts, keys.tolist(), strict=True):
        words = [int.from_bytes(text[start : start + 8], "little") for start in range(0, len(text), 8)]
        assert key == make_key(len(text), *words)


def test_keys_do_not_change():
    """Rows of a checkpoint mean the same values for ever."""
    texts = [b"", b"1005", b"1fbe01fe", b"a_longer_value"]
    keys = text_keys(np.frombuffer(b"".join(texts), np.uint8), np.array([len(text) for text in texts], np.int32))
    assert [f"{key:016x}" for key in keys.tolist()] == [
        "e220a8397b1dcdaf",
        "4030ef2a17a44335",
        "588e7a77893792f1",
        "1f53da178908f78d",
    ]


BAD = [
    ({"click": "2"}, r"train.csv:13 click='2': a label must be 0 or 1"),
    ({"click": ""}, r"train.csv:13 click='': a label must be 0 or 1"),
    ({"hour": "14102124"}, r"train.csv:13 hour='14102124': needed YYMMDDHH, a date and an hour, or nothing"),
    ({"hour": "2014-10-21"}, r"train.csv:13 hour='2014-10-21': needed YYMMDDHH"),
    ({"site_id": "x" * 65}, r"train.csv:13 site_id='x{65}': needed at most 64 bytes"),
    ({"C21": "1,2"}, r"train.csv:13 has 25 comma-separated columns; needed 24: id, click, hour, 21 categoricals"),
]


@pytest.mark.parametrize(("cells", "message"), BAD)
def test_bad_cells_are_named_by_their_line(open_stream, tmp_path, cells, message):
    lines = [line_of(number) for number in range(30)]
    lines[11] = line_of(11, **cells)  # behind the header: line 13 of the file
    path = write(tmp_path / "train.csv", lines)
    with pytest.raises(DataError, match=message):
        read_all(open_stream, path, batch_size=8, chunk_rows=8)
    labels, _ = read_all(open_stream, path, batch_size=15, chunk_rows=8, bad_rows=0.5)
    assert len(labels) == 30, "another row takes the place of the bad one"


def test_a_missing_hour_is_row_0(open_stream, tmp_path):
    _, rows = read_all(open_stream, write(tmp_path / "train.csv", [line_of(3, hour=""), line_of(4)]), batch_size=2)
    assert rows[:, :2].tolist() == [[0, 0], [5, 6]]


def test_other_files_are_refused(tmp_path):
    def problem(name: str, content: str) -> str:
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError) as caught:
            open_source(DataConfig(kind="avazu", path=str(tmp_path / name)))
        return str(caught.value)

    without_labels = HEADER.replace("click,", "")
    assert "test.csv:1 the header is 'id,hour,C1,banner_pos" in problem("test.csv", f"{without_labels}\n1\n")
    assert problem("test.csv", f"{without_labels}\n1\n").endswith(f"; needed {HEADER}")
    assert "train.csv: no line behind its header" in problem("train.csv", f"{HEADER}\n")
    assert "train.csv: no line behind its header" in problem("train.csv", HEADER)
    assert "train.csv:1 the header is '1000" in problem("train.csv", f"{line_of(0)}\n{line_of(1)}\n")


def test_validate_counts_every_row(tmp_path, capsys):
    lines = [line_of(number) for number in range(20)]
    path = write(tmp_path / "train.csv", [*lines, line_of(20, hour="x")])
    assert data_command(["validate", str(path), "--set", "data.bad_rows=0.2", "--set", "data.eval_fraction=0"]) == 0
    said = capsys.readouterr().out
    assert "21 rows" in said
    assert "1 bad" in said
    assert "hour_of_day" in said
