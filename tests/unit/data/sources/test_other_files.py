"""Files that are no tables are named as what they are, with what to do; and what is to be done works."""

from __future__ import annotations

import gzip
import io
import re
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from embershard.data.sources.input_file import InputFile
from embershard.data.sources.table.containers import refuse_features
from embershard.data.sources.table.text_forms import Given, find_form
from embershard.data.sources.table.whole_columns import WholeColumns
from embershard.errors import DataError
from tests.covering import covering

TEXT = "bought,shop\n" + "".join(f"{n % 2},s{n % 9}\n" for n in range(300))


def archive(mode: str) -> bytes:
    kept = io.BytesIO()
    with tarfile.open(fileobj=kept, mode=mode) as tar:
        entry = tarfile.TarInfo("sales.csv")
        entry.size = len(TEXT)
        tar.addfile(entry, io.BytesIO(TEXT.encode()))
    return kept.getvalue()


def records(*data: bytes) -> bytes:
    return b"".join(struct.pack("<QI", len(each), 7) + each + b"sums" for each in data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (archive("w"), "an archive of tar: tar -xf .*other.bin, then give"),
        (archive("w:gz"), "an archive of tar: tar -xf"),
        (archive("w:xz"), "an archive of tar: tar -xf"),
        (records(b"\n\x03abc", b"\n\x02ab"), "TFRecords; write them as Parquet"),
        (records(*[b"raw bytes"] * 9), "TFRecords; write them as Parquet"),
        (b"Obj\x01\x04\x14avro.codec" + bytes(400), "an Avro file; write it as Parquet"),
        (b"7z\xbc\xaf\x27\x1c" + bytes(99), "an archive of 7-Zip: 7z x FILE"),
        (np.random.default_rng(3).bytes(90_000), "is no text: it has bytes that are 0, as at byte"),
        (TEXT.encode() + bytes(999), "its last bytes are 0, from byte 1,512 on, .* head -c 1512 .*other.bin > NEW"),
        (bytes(5000), "has bytes that are 0 where text should be"),
    ],
)
def test_what_is_no_table_is_named(tmp_path, data, said):
    (tmp_path / "other.bin").write_bytes(data)
    with pytest.raises(DataError, match=f"other.bin: {said}") as raised:
        WholeColumns.at(tmp_path / "other.bin", Given())
    assert "\n" not in str(raised.value)


def test_zeros_at_the_end_are_cut_off_as_told(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(TEXT.encode() + bytes(4096))
    with pytest.raises(DataError) as raised:
        WholeColumns.at(path, Given())
    command = str(raised.value).rpartition(": ")[2].replace("NEW", str(tmp_path / "b.csv"))
    subprocess.run(command, shell=True, check=True)
    assert (tmp_path / "b.csv").read_text() == TEXT


@pytest.mark.parametrize("letters", ["Köln", "北京市朝阳区", "a"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_letters_of_two_bytes_are_still_text(tmp_path, letters, encoding):
    """The negative control of the bytes that are 0."""
    (tmp_path / "a.csv").write_bytes(TEXT.replace("s", letters).encode(encoding))
    assert find_form(InputFile.at(tmp_path / "a.csv"), Given()).encoding == encoding


FORMATS = {
    "libffm": ("{y} 0:{n}:1 0:{few}:1 1:a{few}:0.5", ["label", "f0", "f1"]),
    "libsvm whose values are 1": ("{y} {few}:1 1{few}:1.0", ["label", "features"]),
    "libsvm": ("{y} qid:{few} 1:0.25 7:-3e-2 # {n}", ["label", "qid", "f1", "f7"]),
    "Vowpal Wabbit, tagged": ("{y} 1.5 'row{n} |user u{few} |ad a{n} b:0.5", ["label", "user", "ad"]),
    "Vowpal Wabbit": ("{y} | u{few} a{n}", ["label", "features"]),
}


def run_as_told(said: str, new: Path) -> None:
    """Run the command at the end of a message."""
    command = re.search(r"(?:gzip -dc|python -c) .*", said)[0].rpartition(" > NEW")[0]
    command = command.replace("python -c", f"{sys.executable} -c")
    subprocess.run(f"{command} > {new}", shell=True, check=True)


@pytest.mark.parametrize(("name", "ending"), covering(list(FORMATS), ("", ".gz")))
def test_the_line_of_python_that_is_named_makes_json_lines(tmp_path, name, ending):
    line, columns = FORMATS[name]
    lines = [line.format(y=1 - 2 * (n % 2), n=n, few=n % 9) for n in range(200)]
    path, new = tmp_path / f"train.txt{ending}", tmp_path / "new.jsonl"
    text = ("\n".join(lines) + "\n\n").encode()
    path.write_bytes(gzip.compress(text) if ending else text)
    with pytest.raises(DataError, match=f"train.txt{ending}: is .*{name.split(',')[0]}.*python -c") as raised:
        WholeColumns.at(path, Given())
    run_as_told(str(raised.value), new)
    (batch,) = WholeColumns.at(new, Given()).batches()
    assert set(batch.schema.names) == set(columns)
    assert batch.num_rows == 200
    assert batch.column("label").to_pylist() == [1 - n % 2 for n in range(200)]


@pytest.mark.parametrize(
    "line", ["{n}|24|M|technician|85711", "{n} | {n} | b", "{n} {n} 12:30", "u{n}:1 3:4", "{n}|a b c"]
)
def test_other_texts_are_none_of_these(tmp_path, line):
    path: Path = tmp_path / "a.txt"
    path.write_text("".join(line.format(n=n) + "\n" for n in range(200)))
    assert find_form(InputFile.at(path), Given(has_header=True)).separator in "| "


@pytest.mark.parametrize(
    "line", ["\t".join(["123456789"] * 40), " ".join(["1:2:3"] * 40) + " x", "1 " + "|a b " * 40 + "|"]
)
def test_a_line_of_many_numbers_takes_no_time(line):
    """A pattern that matches a number in several ways would try all of them: it would not end."""
    refuse_features(InputFile(Path("a.txt"), 1, 0), [line] * 500)


@pytest.mark.slow
def test_dicts_of_python_become_json_as_told(tmp_path):
    (tmp_path / "a.json").write_text("".join(f"{{u'bought': {n % 2}, 'shop': \"it's {n}\"}}\n" for n in range(200)))
    with pytest.raises(DataError, match=r"a.json: is dicts as Python writes them, and no JSON") as raised:
        list(WholeColumns.at(tmp_path / "a.json", Given()).batches())
    run_as_told(str(raised.value), tmp_path / "new.jsonl")
    (batch,) = WholeColumns.at(tmp_path / "new.jsonl", Given()).batches()
    assert batch.to_pylist()[3] == {"bought": 1, "shop": "it's 3"}


def test_lines_above_groups_of_rows_come_into_each_row_as_told(tmp_path):
    lines = [
        line for n in range(40) for line in (f"{n}:", *(f"{user},{n % 5},2026-01-0{1 + n % 9}" for user in range(9)))
    ]
    (tmp_path / "a.txt").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"a.txt: its rows stand below lines as '0:'") as raised:
        WholeColumns.at(tmp_path / "a.txt", Given())
    run_as_told(str(raised.value), tmp_path / "new.csv")
    (batch,) = WholeColumns.at(tmp_path / "new.csv", Given(columns=("film", "user", "stars", "day"))).batches()
    assert batch.num_rows == 360
    assert batch.column("film").to_pylist()[-1] == "39"
