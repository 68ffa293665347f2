"""Messages about files of data that cannot be read as they are, and about mixed folders, times and splits."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import shlex
import shutil
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embershard.commands import cli
from tests.unit.commands.remedies.table import FILES, TABLE, Remedy, cases, check, of_settings, shell

_CITY = str(FILES["city.csv"])
_ROWS = [{"click": n % 2, "user": f"u{n % 9}"} for n in range(60)]


def _zip(*names: str) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as opened:
        for name in names:
            opened.writestr(name, _CITY)
    return written.getvalue()


def _parquet(*columns: str) -> bytes:
    written = io.BytesIO()
    values = {"click": [0, 1], "user_id": [3, 4], "at": [None, None], "tags": [[1], [2]]}
    table = pa.Table.from_arrays([pa.array(values[name] * 30) for name in columns], list(columns))
    pq.write_table(table, written)
    return written.getvalue()


FILES |= {
    "several.zip": _zip("a.csv", "b.csv"),
    "book.xlsx": _zip("[Content_Types].xml", "sheet.xml"),
    "torn.gz": gzip.compress(_CITY.encode())[:60],
    "torn.bz2": bz2.compress(_CITY.encode())[:60],
    "page.csv": "<!DOCTYPE html>\n<p>Sign in</p>\n",
    "pointer.csv": "version https://git-lfs.github.com/spec/v1\n",
    "values.svm": "".join(f"{n % 2} 1:0.{n % 7} 2:{n % 5}\n" for n in range(60)),
    "ones.svm": "".join(f"{n % 2} {n % 5 + 1}:1 {n % 5 + 7}:1\n" for n in range(60)),
    "fields.ffm": "".join(f"{n % 2} 0:{n % 5 + 1}:1 1:{n % 5 + 7}:1.5\n" for n in range(60)),
    "words.vw": "".join(f"{n % 2 * 2 - 1} |user u{n % 9} |city c{n % 4}\n" for n in range(60)),
    "rated by film.txt": "".join(
        f"{n}:\n" if n % 20 == 0 else f"{n},{n % 2},2005-09-{n % 19 + 10}\n" for n in range(60)
    ),
    "python.json.gz": gzip.compress("".join(f"{each}\n" for each in _ROWS).encode()),
    "a list.json": json.dumps(_ROWS),
    "list.json.gz": gzip.compress(json.dumps(_ROWS).encode()),
    "a wide.json": "".join(json.dumps(each, indent=1) + "\n" for each in _ROWS),
    "cut off.csv": _CITY.encode() + b"\0" * 50,
    "returns.csv": "click,user_id\r" + "0,1\r1,2\r" * 30 + "1,2\n",
    "titled.csv": "\n" + _CITY,
    "untitled.csv": "\n" + "".join(f"{n % 2},{n},x\n" for n in range(60)),
    "text.parquet": _CITY,
    "fractions.jsonl": "".join(
        json.dumps({"click": n % 2, "price": n % 7 + 0.5, "size": n % 5 * 1.0, "age": n % 13}) + "\n" for n in range(60)
    ),
    "mixed/a.csv": _CITY,
    "mixed/b.jsonl": "".join(f"{json.dumps(each)}\n" for each in _ROWS),
    "both/a.parquet": _parquet("click", "user_id"),
    "both/b.csv": _CITY,
    "separators/a.csv": _CITY,
    "separators/b b.csv": _CITY.replace(",", ";"),
    "none/a.csv": "",
    "named.csv": "".join(f"{n},{n % 3},x\n" for n in range(9)),
    "pieces.csv": "".join(f"{n % 2},u{n},x\n" if n % 4 else f"{n % 2};u{n};x;\n" for n in range(60)),
    "columns.parquet": _parquet("click", "user_id", "at", "tags"),
    "twice.parquet": _parquet("click", "user_id", "user_id"),
    "times.csv": "click,user_id,at,tags\n" + "".join(f"{n % 2},{n},{10**9 + 600 * n},a b\n" for n in range(60)),
}
FILES["times.toml"] = TABLE.format("times.csv").replace("features.price", "# features.price")
_INSPECT, _CONVERT, _TRAIN = "data inspect -o out.toml", "data convert -o out.parquet", "train --dry-run"
_VALIDATE = "data validate --config {}"


def _each_as_parquet(line: str) -> None:
    """Convert each file of a folder by the line that is shown for one of them."""
    Path("new").mkdir()
    words = shlex.split(line)
    for number, path in enumerate(sorted(Path("separators").iterdir())):
        words[3:] = [str(path), "-o", f"new/{number}.parquet"]
        assert cli.main(words[1:]) == 0


def _shell_with_jq(line: str) -> None:
    if not shutil.which("jq"):
        pytest.skip("needs jq, which the message names")
    shell(line)


def _unzip(_: str) -> None:
    with zipfile.ZipFile("several.zip") as opened:
        opened.extractall("unzipped")


def _name_anew(_: str) -> None:
    table = pa.table({"click": [0, 1] * 30, "user_id": [*range(60)], "user": [*range(60)]})
    pq.write_table(table, "new.parquet")


OF_FILES = [
    Remedy((_INSPECT, _CONVERT), "", "several.zip", "(Unzip it), and give one", "unzipped/a.csv", True, done=_unzip),
    Remedy((_INSPECT, _TRAIN), "", "several.zip", "or (a folder) of those", "unzipped", True, done=_unzip),
    *(
        Remedy((_INSPECT,), "", file, said, "city.csv", True)
        for file, said in (
            ("book.xlsx", "(save it as CSV)"),
            ("torn.gz", "(fetch it again)"),
            ("torn.bz2", "(fetch it again)"),
            ("page.csv", "(fetch the file itself)"),
            ("pointer.csv", "(git lfs pull)"),
            ("none", "(fetch it again)"),
        )
    ),
    *(
        Remedy((_INSPECT,), "", f"'{file}'", said, new, True, done=shell)
        for file, said, new in (
            ("values.svm", "JSON lines: (.*)", "NEW.jsonl --category f2"),
            ("ones.svm", "JSON lines: (.*)", "NEW.jsonl"),
            ("fields.ffm", "JSON lines: (.*)", "NEW.jsonl"),
            ("words.vw", "JSON lines: (.*)", "NEW.jsonl"),
            ("rated by film.txt", "each row: (.*)", "NEW.csv --columns film,user,rating,date --label rating"),
            ("python.json.gz", "JSON lines: (.*)", "NEW.jsonl"),
            ("cut off.csv", "Cut them off: (.*)", "NEW"),
        )
    ),
    *(
        Remedy((_INSPECT,), "", f"'{file}'", "to a line: (.*)", "NEW.jsonl", True, done=_shell_with_jq)
        for file in ("a list.json", "list.json.gz", "a wide.json")
    ),
    Remedy((_INSPECT, _CONVERT, _TRAIN), "", "mixed", r"train: (--files '\*\.jsonl')"),
    Remedy((_INSPECT, _CONVERT, _TRAIN), "", "both", r"train: (--files '\*\.parquet')"),
    Remedy((_INSPECT,), "", "mixed --files 'x*'", r"train: (--files) 'PATTERN'", "mixed --files '*.csv'", True),
    Remedy((_INSPECT,), "", "separators", "(embershard data convert .*)", "new", True, done=_each_as_parquet),
    Remedy((_INSPECT, _TRAIN), "", "pieces.csv", "(--separator)", "--separator , --columns a,b,c",
        leads_to=r"--bad-rows|rows are bad"),
    Remedy((_CONVERT,), "", "city.csv --join named.csv:number", r"needed (1): number",
        "city.csv --join named.csv:user_id,size,x", True),
    Remedy((_INSPECT,), "", "named.csv --columns number", r"has (3) comma-separated columns",
        "named.csv --columns a,size,x --label size=1", True),
    Remedy((_INSPECT, _TRAIN), "", "fractions.jsonl", r"Likeliest: (--category \S+)"),
    Remedy((_INSPECT,), "", "twice.parquet", "(with another name) for one", "new.parquet", True, done=_name_anew),
]  # fmt: skip
#: Settings that only a look at all rows, or at a first one, shows to be wrong.
OF_TIMES = [
    *(of_settings("times.toml", *row, command=_VALIDATE) for row in (
        ("data.time.column=at data.time.window=999999999", "Set a (shorter) one", "data.time.window=3600"),
        ("data.time.column=at data.time.window=999999999999999", "needed at most ([0-9]+),", "data.time.window=3600"),
        ("data.time.column=tags data.time.window=3600", r"needed a time as .*, (seconds since 1970)",
            "data.time.column=at"),
        ("data.time.column=tags data.time.window=3600 data.bad_rows=0.5", "Needed a (column of times)",
            "data.time.column=at"),
        ("data.path=columns.parquet data.time.column=at data.time.window=3600", "by (data.time.column)",
            "data.time.column=user_id data.time.window=1"),
        ("data.time.column=city data.time.window=3600", "it has: click, user_id, (at)", "data.time.column=at"),
        ("data.time.column= data.time.window=3600", "the name of a (column)", "data.time.column=at"),
        ("data.time.files=both", '"(in_turn)"', "data.time.files=in_turn data.time.column=at data.time.window=3600"),
        ("data.split=hash data.split_column=click data.eval_fraction=0.0001", "Choose (another column)",
            "data.split_column=user_id data.eval_fraction=0.1"),
        ("data.split=hash data.split_column=click data.eval_fraction=0.0001", "(data.eval_fraction) or",
            "data.eval_fraction=0.5"),
        ("data.split=hash data.split_column=click", "or (data.split_seed)",
            "data.split_seed=10"),
        ("data.split=time data.split_time=at data.path=columns.parquet", "Choose (another column)",
            "data.split_time=user_id"),
        ("data.split=last data.split_column=user_id", "Choose another (column)", "data.split_column=click"),
        ("data.split=hash data.split_column=tags data.path=columns.parquet", "needed (one value) in each row",
            "data.split_column=user_id data.eval_fraction=0.5"),
        ("data.split=hash data.split_column=usr_id", "did you mean ('user_id')", "data.split_column=user_id"),
        ("data.path=mixed", r"(data.table.files) = \['\*\.jsonl'\]",
            "data.table.files=[*.jsonl] data.table.features.user_id.column=user "
            "data.table.features.user_id.mapping=text"),
        ("data.path=titled.csv", "(data.table.skip_lines = 1)", "data.table.skip_lines=1"),
        ("data.path=untitled.csv", "(data.table.columns) names", "data.table.columns=[click,user_id,more]"),
        ("data.table.skip_lines=99", "(data.table.skip_lines) leaves out", "data.table.skip_lines=0"),
        ("data.table.encoding=utf-16", r"(data\.table\.encoding)", "data.table.encoding=latin-1"),
        ("data.path=text.parquet", "files that are not (called .parquet)", "data.path=city.csv"),
        ("data.kind=parquet data.path=city.csv data.parquet.sparse=[user_id] data.parquet.num_rows=[9]",
            'by (data.kind = "table")', "data.kind=table data.parquet.sparse=[] data.parquet.num_rows=[]"),
        ("data.kind=parquet", "needs (data.parquet.sparse) and .num_rows",
            "data.parquet.sparse=[user_id] data.parquet.num_rows=[9] data.path=columns.parquet "
            "data.parquet.label=click"),
        ("data.path=twice.parquet", "(with another name)", "data.path=columns.parquet"),
    )),
    Remedy((_VALIDATE,), "times.toml", "--set data.path=returns.csv", "(tr .*) FILE >", "--set data.path=NEW",
        done=lambda words: shell(f"{words} returns.csv > NEW")),
]  # fmt: skip


@pytest.mark.parametrize(("row", "command"), cases(OF_FILES))
def test_what_is_advised_of_files_helps(row: Remedy, command: str, capsys: pytest.CaptureFixture[str]):
    check(row, command, capsys)


@pytest.mark.parametrize(("row", "command"), cases(OF_TIMES))
def test_what_is_advised_of_times_and_splits_helps(row: Remedy, command: str, capsys: pytest.CaptureFixture[str]):
    check(row, command, capsys)
