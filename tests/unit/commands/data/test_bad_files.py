"""Files of which a part cannot be read: a few rows are left out and told; more end `inspect` with what reads them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from embershard.commands import cli
from embershard.data import open_source
from embershard.settings.files import load_config
from embershard.training.config import RunConfig

N = 400


def write(path: Path, row: str, **of_some: str) -> Path:
    """Write rows; of those whose number divides, other ones: `by_7="..."`."""
    lines = ["bought,shop,note"]
    for n in range(N):
        other = next((line for by, line in of_some.items() if n % int(by[3:]) == 0), row)
        lines.append(other.format(n=n, even=n % 2, few=n % 9))
    path.write_text("\n".join(lines) + "\n")
    return path


def inspected(path: Path, *options: str) -> tuple[int, Path]:
    output = path.parent / "run.toml"
    output.unlink(missing_ok=True)
    return cli.main(["data", "inspect", str(path), "-o", str(output), *options]), output


ROW = "{even},s{few},n{few}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{even},s{few}", ["34 lines are no rows", "a.csv:2 has 2 comma-separated columns", "a.csv:14", "a.csv:26"]),
        (",s{few},n{few}", ["34 rows have no label in 'bought'"]),
    ],
)
def test_more_bad_rows_than_a_few_end_inspect(tmp_path, capsys, row, said):
    """With examples, and an option that goes on in spite of them."""
    path = write(tmp_path / "a.csv", ROW, by_12=row)
    code, output = inspected(path)
    error = capsys.readouterr().err
    assert (code, output.exists()) == (2, False)
    assert all(each in error for each in ("34 of 400 rows are bad, more than 0.05 of them", *said, "--bad-rows 0.085"))
    assert inspected(path)[0] == cli.main(["data", "inspect", str(path)]) == 2
    assert cli.main(["train", str(path), "--dry-run"]) == 2
    assert cli.main(["train", str(path), "--dry-run", "--bad-rows", "0.085"]) == 0
    assert inspected(path, "--bad-rows", "0.085")[0] == 0
    config = load_config(RunConfig, output).data
    assert 0.8 < config.bad_rows < 1
    assert open_source(config).notes


@pytest.mark.parametrize("by", [10, 25])
def test_five_of_a_hundred_are_few(tmp_path, capsys, by):
    path = write(tmp_path / "a.csv", ROW, **{f"by_{by}": "{even},s{few}"})
    assert inspected(path)[0] == (2 if by == 10 else 0)
    assert f"{N // by} lines are no rows" in " ".join("".join(capsys.readouterr()).split())


BROKEN = '{even},s{few},"two\nlines {few}"'


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_line_breaks_that_the_look_did_not_see_are_read(tmp_path, monkeypatch, late, capsys):
    path = write(tmp_path / "a.csv", ROW, by_399=BROKEN)
    if late:
        text = path.read_text().replace(BROKEN.format(n=0, even=0, few=0), ROW.format(even=0, few=0))
        more = "".join(ROW.format(even=n % 2, few=n % 9) + "\n" for n in range(40_000))
        path.write_text(text + more)
        head, last = path.read_text()[:300_000].rpartition("\n")[0], BROKEN.format(even=0, few=1)
        path.write_text(f"{head}\n{last}\n{path.read_text()[len(head) + 1 :]}")
    monkeypatch.setenv("EMBERSHARD_COPIES", str(tmp_path / "copies"))
    code, output = inspected(path)
    assert code == 0
    config = load_config(RunConfig, output).data
    assert config.table.line_breaks
    assert config.bad_rows == "stop"
    num_rows = N + 40_001 if late else N
    source = open_source(config)
    assert sum(source.chunks(split).num_samples for split in ("train", "eval")) == num_rows
    assert cli.main(["data", "convert", str(path), "-o", str(tmp_path / "a.parquet")]) == 0
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.num_rows == num_rows
    assert any("\n" in note for note in table["note"].to_pylist())
    assert "cells have line breaks" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--line-breaks", "--no-quotes"])
def test_the_options_of_quotes_that_messages_name_are_taken(tmp_path, option):
    path = write(tmp_path / "a.csv", ROW)
    code, output = inspected(path, option)
    assert code == 0
    table = load_config(RunConfig, output).data.table
    assert (table.line_breaks, table.quoted) == (option == "--line-breaks", option != "--no-quotes")
    assert cli.main(["data", "convert", str(path), "-o", str(tmp_path / "a.parquet"), option]) == 0


def test_an_open_quote_is_still_a_bad_row(tmp_path, capsys):
    """The negative control of line breaks that are tried: they read no line more here."""
    path = write(tmp_path / "a.csv", '{even},"s, {few}",n{few}', by_399='{even},s{few},"open')
    code, output = inspected(path)
    assert code == 0
    config = load_config(RunConfig, output).data
    assert not config.table.line_breaks
    assert 0 < config.bad_rows < 0.1
    assert cli.main(["data", "convert", str(path), "-o", str(tmp_path / "a.parquet")]) == 2
    assert "(inspect, convert and train: --line-breaks" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["data inspect {} -o {}/run.toml", "data convert {} -o {}/all.parquet", "train {} --dry-run"]
)
def test_a_compressed_part_of_json_that_has_nothing_is_passed_over(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (parts := tmp_path / "parts").mkdir()
    lines = "".join(f'{{"click": {n % 2}, "user": "u{n % 9}", "shop": "s{n % 4}"}}\n' for n in range(60))
    for name, text in (("a", lines), ("b", ""), ("c", lines)):
        (parts / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    assert cli.main(command.format(parts, tmp_path).split()) == 0
    if "inspect" in command:
        assert cli.main(["data", "validate", "--config", f"{tmp_path}/run.toml"]) == 0
