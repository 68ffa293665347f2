"""`embershard data validate`: what it counts is what training does."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embershard.commands import cli

LINE = "\t".join(["1", *["3"] * 13, *["a"] * 26])


@pytest.fixture
def validate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run it on the folder `logs` with overrides; return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv("COLUMNS", "200")

    def run(*overrides: str, path: str = "logs"):
        code = cli.main(["data", "validate", path, *(word for text in overrides for word in ("--set", text))])
        return code, *capsys.readouterr()

    return run


def write(path: Path, num_rows: int, bad: dict[int, str]) -> None:
    path.write_text("".join(f"{bad.get(row, LINE)}\n" for row in range(num_rows)))


def test_good_data_end_well(validate, tmp_path):
    write(tmp_path / "logs" / "day_0", 100, {})
    code, out, _ = validate()
    assert code == 0
    assert "100 rows in" in out
    assert "90 to train on, 10 held out; 0 bad." in out
    assert "train would read every row." in out


@pytest.mark.slow
def test_bad_rows_are_counted_by_reason(validate, tmp_path):
    zebra, short = LINE[:-1] + "zebra", LINE[:-2]
    write(tmp_path / "logs" / "day_0", 1000, {3: zebra, 4: zebra, 500: short, 950: LINE.replace("1", "5", 1)})
    code, out, _ = validate("data.chunk_rows=64")
    assert code == 1
    assert "4 bad." in out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    hexadecimal = "needed 1 to 8 hexadecimal digits, or nothing"
    assert ["C26", hexadecimal, f"logs/day_0:4 C26='zebra': {hexadecimal}", "2"] in rows
    assert ["label", "996", "0.00%", "1", "1", "1"] in rows
    assert "train would stop at logs/day_0:4 C26='zebra'" in out
    share = out.split("--set data.bad_rows=")[1].split()[0]
    code, out, _ = validate("data.chunk_rows=64", f"data.bad_rows={share}")
    assert code == 0
    assert "3 rows would be replaced (0.333% of the training rows" in out
    assert "1 held-out rows left out" in out
    assert validate("data.chunk_rows=64", "data.bad_rows=0.005")[0] == 1  # 1 % of the held-out rows
    code, out, _ = validate("data.chunk_rows=64", "data.bad_rows=0.002")
    assert code == 1
    assert "train would stop: 0.333% of the training rows are bad, data.bad_rows allows 0.200%" in out


def test_a_stretch_that_nothing_can_replace_stops(validate, tmp_path):
    write(tmp_path / "logs" / "day_0", 100, dict.fromkeys(range(16, 32), "x"))
    code, out, _ = validate("data.chunk_rows=16", "data.bad_rows=0.9")
    assert code == 1
    assert "and none of the 16 rows to train on near it is good" in out


@pytest.mark.parametrize("has_checksums", [True, False])
def test_parquet_says_if_bits_can_be_verified(validate, tmp_path, has_checksums):
    table = pa.table({"label": [0, 1] * 50, "user": [[1, 2, 3]] * 100})
    pq.write_table(table, tmp_path / "logs" / "a.parquet", write_page_checksum=has_checksums)
    code, out, _ = validate("data.kind=parquet", "data.parquet.sparse=user", "data.parquet.num_rows=[9]")
    assert code == 0
    assert ("1 of 1 Parquet files have no page checksums" in out) is not has_checksums


def test_damage_is_named_and_the_rest_is_read(validate, tmp_path):
    path = tmp_path / "logs" / "a.parquet"
    table = pa.table({"label": [0, 1] * 50, "user": list(range(100))})
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(table, path, row_group_size=50, **options)
    content = bytearray(path.read_bytes())
    content[200] ^= 1  # in the first page of the first row group
    path.write_bytes(content)
    code, out, _ = validate("data.kind=parquet", "data.parquet.sparse=user", "data.parquet.num_rows=[9]")
    assert code == 1
    assert "damaged: logs/a.parquet: row group 0, at byte 4, cannot be read" in out


def test_nothing_to_validate(validate, capsys):
    assert cli.main(["data", "validate", "synthetic"]) == 2
    assert 'data.kind = "synthetic" reads no file' in capsys.readouterr().err
    assert cli.main(["data", "validate"]) == 2
