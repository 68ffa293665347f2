"""`embershard data inspect` on columns that are hard to use: what it writes parses, and training takes it."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embershard.commands import cli
from embershard.data import open_source
from embershard.settings.files import load_config
from embershard.training.config import RunConfig

pytestmark = pytest.mark.extra

ROWS = 40


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def inspected(columns: dict[str, list[object]], *, is_text: bool = True) -> tuple[str, list[str]]:
    """Return the file that is written for these columns, and the names of its features; a dry run accepts it."""
    name = "a.csv" if is_text else "a.parquet"
    if is_text:
        lines = [",".join(map(str, row)) for row in [list(columns), *zip(*columns.values(), strict=True)]]
        Path(name).write_text("\n".join(lines) + "\n")
    else:
        pq.write_table(pa.table(columns), name, write_page_checksum=True)
    assert cli.main(["data", "inspect", name, "-o", "run.toml"]) == 0
    assert cli.main(["train", "--config", "run.toml", "--dry-run"]) == 0
    return Path("run.toml").read_text(), list(load_config(RunConfig, Path("run.toml")).data.table.features)


def label() -> list[object]:
    return [n % 2 for n in range(ROWS)]


def days() -> list[object]:
    return [f"2024-01-{1 + n % 28:02}" for n in range(ROWS)]


def clocks() -> list[object]:
    return [f"{day} {n % 24:02}:00:00" for n, day in enumerate(days())]


def some(*values: object) -> list[object]:
    """Return these values, and numbers in the other rows."""
    return [*values, *range(ROWS - len(values))]


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        ({"time_hour": some(), "time": clocks()}, ["time_hour", "time_2_hour", "time_2_weekday"]),
        ({"day_days": some(), "day": days()}, ["day_days", "day_2_days", "day_2_weekday"]),
        (
            {"day ": days(), "day": days(), "u": some()},
            ["day_days", "day_weekday", "day_2_days", "day_2_weekday", "u"],
        ),
        ({"click ": some(), "day": days()}, ["click_2", "day_days", "day_weekday"]),
        ({"time": clocks(), "time_hour": some()}, ["time_hour", "time_weekday", "time_hour_2"]),
    ],
)
def test_all_names_are_unique(columns, names):
    assert inspected({"click": label(), **columns})[1] == names


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (some("1e300", "-1e300"), "2 of its values are infinite or above 3.4e38: the run would stop at these rows"),
        (some("3.5e38"), "1 of its values are infinite or above 3.4e38"),
        (["9999-12-31", *days()[1:]], "1 of its values are times after 5138-11-16"),
        ([f"{n:02}" + "x" * 1030 for n in range(ROWS)], "? distinct, 0 missing; left out: 40 of its values are longer"),
    ],
)
def test_columns_that_training_refuses_are_left_out(values, why):
    written, names = inspected({"click": label(), "user_id": some(), "x": values})
    assert names == ["user_id"]
    assert why in written


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (some(float("inf"), 0.5), "1 of its values are infinite or above 3.4e38"),
        (some(1e300, -1e300, 0.5), "2 of its values are infinite"),
        ([b"\xff\xfe%d" % n for n in range(ROWS)], "? distinct, 0 missing; left out: its values are bytes that"),
    ],
)
def test_parquet_columns_that_training_refuses_are_left_out(values, why):
    values = [float(each) if isinstance(each, int) else each for each in values]
    written, names = inspected({"click": label(), "user_id": some(), "x": values}, is_text=False)
    assert names == ["user_id"]
    assert why in written


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        ([-1e19 - n * 1e5 for n in range(ROWS)], "ids are not read of large double: write integers, or text"),
        ([Decimal(n % 7) for n in range(ROWS)], "ids are not read of decimal128(1, 0): write integers, or text"),
    ],
)
def test_ids_that_training_refuses_are_left_out(ids, why):
    written, names = inspected({"click": label(), "user_id": list(range(ROWS)), "item_id": ids}, is_text=False)
    assert names == ["user_id"]
    assert why in written


def test_labels_that_are_no_numbers_are_counted():
    Path("a.csv").write_text("click,user\n1,a\n0,b\n,a\n1,b\n1e300,a\n")
    assert cli.main(["data", "inspect", "a.csv", "-o", "run.toml", "--bad-rows", "0.4"]) == 0
    written = Path("run.toml").read_text()
    assert "; 2 rows have no finite number, and are bad rows" in written
    assert re.search(r"^bad_rows = 0\.\d+ ", written, re.MULTILINE)


def test_long_cells_of_short_values_are_bags():
    cells = ["|".join(f"tag{n * at % 7}" for at in range(300 - n % 9)) for n in range(ROWS)]
    written, names = inspected({"click": label(), "tags": cells})
    assert names == ["tags"]
    assert "up to 300 values in a cell, 7 distinct" in written


def test_a_time_beyond_the_last_is_named_with_its_remedy(capsys):
    inspected({"click": label(), "until": clocks()})
    text = Path("a.csv").read_text()
    Path("a.csv").write_text(text.replace("2024-01-02 01:00:00", "9999-12-31"))
    assert cli.main(["train", "--config", "run.toml", "--dry-run"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "a.csv:3 until='9999-12-31': is beyond the last time, 5138-11-16." in said
    assert "data.table.null_values" in said
    assert "data.bad_rows" in said
    missing = "data.table.null_values=['', '9999-12-31']"
    assert cli.main(["train", "--config", "run.toml", "--dry-run", "--set", missing]) == 0


def test_a_second_label_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["data", "inspect", str(tmp_path / "a.csv"), "--label", "click", "--label", "buy"])
    said = capsys.readouterr().err
    assert "got --label click and --label buy; give one" in said
    assert "leave buy out of its features" in said


@pytest.mark.parametrize(
    ("name", "values", "split"),
    [
        ("day", [f"2026-01-{n:02}" for n in range(1, 13)], ("time", "day")),
        ("dt", [f"202601{n:02}" for n in range(1, 13)], ("time", "dt")),
        ("day", ["2026-01-01", "2026-01-02"], ("random", None)),  # half of the rows are of the latest day
        ("part", ["a", "b", "c", "d"], ("random", None)),
    ],
)
def test_folders_by_day_hold_the_latest_days_out(name, values, split):
    for value in values:
        Path("data", f"{name}={value}").mkdir(parents=True)
        rows = "".join(f"{n % 2},u{n % 7}\n" for n in range(ROWS))
        Path("data", f"{name}={value}", "part-0.csv").write_text(f"click,user\n{rows}")
    assert cli.main(["data", "inspect", "data", "-o", "run.toml"]) == 0
    data = load_config(RunConfig, Path("run.toml")).data
    assert (data.split, data.split_time) == split
    assert data.chunk_rows == 100_000, "rows in the order of users are mixed"
    held_out = open_source(data).held_out
    assert split[0] == "random" or held_out.how.startswith("from 2026-01-12")


@pytest.mark.parametrize("values", [["NA"] * ROWS, ["-", "null"] * (ROWS // 2)])
def test_a_column_of_words_for_a_missing_value_is_read(values):
    text, names = inspected({"label": label(), "shop": [f"s{n % 5}" for n in range(ROWS)], "note": values})
    assert names == ["shop"]
    assert "# note:" in text
    assert cli.main(["data", "convert", "a.csv", "-o", "new.parquet"]) == 0
    assert pq.read_table("new.parquet").column("note").to_pylist() == values
