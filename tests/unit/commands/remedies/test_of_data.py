"""Messages about files of data and their columns, mixed folders, times and splits."""

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
from tests.unit.commands.remedies.table import DRY_RUN, FILES, TABLE, Remedy, cases, check, of_settings, shell

_CITY = str(FILES["city.csv"])
_ROWS = [{"click": n % 2, "user": f"u{n % 9}"} for n in range(60)]


def _zip(*names: str) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as opened:
        for name in names:
            opened.writestr(name, _CITY)
    return written.getvalue()


def _parquet(*columns: str, rows: int = 60) -> bytes:
    written = io.BytesIO()
    values = {"click": [0, 1], "user_id": [3, 4], "at": [None, None], "tags": [[1], [2]]}
    table = pa.Table.from_arrays([pa.array(values[name] * 30) for name in columns], list(columns))
    pq.write_table(table.slice(0, rows), written)
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
    "parts/a.csv": "click,user_id\n" + "1,2\n0,3\n" * 30,
    "parts/b.csv": "klick,user\n" + "1,2\n0,3\n" * 30,
    "split/a.csv": "click,user_id\n" + "1,2\n0,3\n" * 30,
    "split/b.csv": "1,2\n0,3\n" * 30,
    "split/c.csv": "label,user_id\n" + "1,2\n0,3\n" * 30,
    "looks.csv": "".join(f"{n % 5},{n % 7},{n % 2},look,{1500000000 + n}\n" for n in range(60)),
    "titles.csv": "user,item,category,behaviour,time\n1,2,3,pv,1500000000\n",
    "alike.csv": "".join(f"{n % 5},{n % 7},{n % 2},pv,{1500000000 + n}\n" for n in range(60)),
    "stretch.csv": "click,user_id\n" + "1,2\n" * 24 + "x,2\n" * 8 + "0,4\n" * 24,
    "one_item.csv": "".join(f"{n % 5},7,{n % 2},pv,{1500000000 + n}\n" for n in range(60)),
    "once.csv": "".join(f"{n},{n % 7},{n % 2},pv,{1500000000 + n}\n" for n in range(60)),
    "log.jsonl": "".join(f'{{"usr": {n % 5}, "item": {n % 7}}}\n' for n in range(60)),
    "types/a.jsonl": "".join(f"{json.dumps(each)}\n" for each in _ROWS),
    "types/b.jsonl": "".join(f"{json.dumps({**each, 'user': [each['user']]})}\n" for each in _ROWS),
    "repeats.csv": "user_id,size\n1,2\n1,3\n",
    "zeros.csv": _CITY.encode() + b"\0" * 9 + _CITY.encode(),
    "blank.csv": "\n\n",
    "none.parquet": _parquet("click", "user_id", rows=0),
    "bags.csv": "click,user_id,tags\n" + "1,2,a b c d\n0,3,a\n" * 30,
    "beyond.csv": "click,user_id\n" + "".join(f"{n % 2},{9 * n}\n" for n in range(60)),
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
_BAGS = (
    "data.path=bags.csv data.table.features.tags.kind=sparse data.table.features.tags.num_rows=9 "
    'data.table.features.tags.mapping=text data.table.features.tags.separator="\\u0020" data.table.max_bag_size=3'
)


def _write_texts(_: str) -> None:
    Path("types/b.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in _ROWS))


#: Columns, rows and batches of tables, and logs of events.
OF_TABLES = [
    Remedy((_INSPECT,), "", "city.csv --label 'c*'", "got click, city; needed (one column)", "city.csv --label click",
        True),
    Remedy((_INSPECT,), "", "city.csv --category city --drop city", "(name it once)", "city.csv --drop city", True),
    Remedy((_INSPECT,), "", "city.csv --category 'ct*'", "did you mean '(city)'",
        "city.csv --category city", True),
    Remedy((_INSPECT,), "", "days.csv --time when:%Q", r"fields of strptime \((%Y)", "days.csv --time when:%d/%m/%Y",
        True),
    Remedy((_INSPECT, _CONVERT), "", "parts", "one kind of files at a time: (--files) PATTERN", "parts --files 'a*'",
        True),
    Remedy((_INSPECT, _TRAIN), "", "split", "one kind of files at a time: (--files) PATTERN",
        "split --files 'a*' --files 'b*'", True),
    Remedy((_CONVERT,), "", "bad.csv --bad-rows 0.01", "(--bad-rows) 0.01 allows", "bad.csv --bad-rows 0.05", True),
    Remedy(("data events -o out.d",), "", "looks.csv", "a behaviour among (pv), buy", "alike.csv", True),
    Remedy(("data events -o out.d",), "", "titles.csv", "lines (without a header): user,item", "alike.csv", True),
    Remedy(("data events -o out.d",), "", "alike.csv --history 0", "a whole number, (1) or more",
        "alike.csv --history 1", True),
    *(
        Remedy(("data events -o out.d",), "", file, said, "alike.csv", True)
        for file, said in (
            ("one_item.csv", "needed (two), for samples"),
            ("once.csv", "needed (users with a history)"),
            ("log.jsonl", "(Rename its columns)"),
        )
    ),
    Remedy((_INSPECT, _CONVERT), "", "types", "(Write one of them) with the other type", "types", True,
        done=_write_texts),
    Remedy((_CONVERT,), "", "city.csv --join repeats.csv", "needed each value (once)", "city.csv", True),
    Remedy((_INSPECT,), "", "zeros.csv", "needed (CSV), TSV", "city.csv", True),
    Remedy((_INSPECT,), "", "blank.csv", "or (fetch it again)", "city.csv", True),
    *(
        Remedy((_VALIDATE,), "times.toml", f"--set data.path={file}", said, "--set data.path=city.csv", True)
        for file, said in (
            ("none.parquet", "(remove it), or fetch"),
            ("torn.gz", "(fetch it again)"),
            ("blank.csv", "(remove it), or fetch it again"),
        )
    ),
    *(of_settings("times.toml", *row) for row in (
        ("data.num_workers=-1", "needed (0) or more", "data.num_workers=0"),
        ("data.shuffle_window=0", "needed at least (1)", "data.shuffle_window=1"),
        ("data.kind=tabel", '"(table)"', "data.kind=table"),
        ("data.path=none", "(a file), or a folder of files", "data.path=times.csv"),
        ("data.table.columns=[a,a]", "needed (every name once)", "data.table.columns=[click,user_id,at,tags]"),
        ("data.table.separator=''", "as \"(::)\"", "data.table.separator=,"),
        ("data.table.line_breaks=true data.table.quoted=false", "needed (false) where", "data.table.line_breaks=false"),
        ("data.table.decimal.user_id=comma", "needed .*(\",\")", "data.table.decimal.user_id=,"),
        ("data.eval_fraction=0 train.early_stopping=2", "nothing is held out .(data.eval_fraction) is 0",
            "data.eval_fraction=0.1"),
        ("data.eval_fraction=0 train.eval_every=2", "nothing is held out .(data.eval_fraction) is 0",
            "data.eval_fraction=0.1"),
        (_BAGS, "needed at most 3 .(data.table.max_bag_size)", "data.table.max_bag_size=4"),
        (_BAGS, r"(--set data\.bad_rows=0\.01)", "data.bad_rows=0.01"),
        ("data.path=beyond.csv data.table.features.user_id.mapping=none", r"(--set data\.bad_rows=0\.01)",
            "data.bad_rows=0.01"),
    )),
]  # fmt: skip
_TRAINS = "train times.toml --set cache.ratio=0.9 --set train.batch_size=4"
OF_STRETCHES = [
    Remedy((_TRAINS,), "", "--run-dir one --set train.batch_size=500", "use a (smaller batch size)",
        "--run-dir two --set train.batch_size=20", True),
    Remedy((_TRAINS,), "", "--run-dir one --set data.path=stretch.csv --set data.chunk_rows=8 --set data.bad_rows=0.9",
        "set a larger (data.chunk_rows)",
        "--run-dir two --set data.path=stretch.csv --set data.chunk_rows=60 --set data.bad_rows=0.9", True),
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
        ("data.path=twice.parquet", "(with another name)", "data.path=columns.parquet"),
    )),
    Remedy((DRY_RUN,), "near.toml", "", r"(--set data.bad_rows=[\d.]+)"),
    Remedy((_VALIDATE,), "times.toml", "--set data.split=last --set data.split_column=click --set data.split_time=tags",
        r"(--set data.bad_rows=[\d.]+)", leads_to="Needed a column of times"),
    Remedy((_VALIDATE,), "times.toml", "--set data.path=returns.csv", "(tr .*) FILE >", "--set data.path=NEW",
        done=lambda words: shell(f"{words} returns.csv > NEW")),
]  # fmt: skip


@pytest.mark.parametrize(("row", "command"), cases(OF_FILES))
def test_what_is_advised_of_files_helps(row: Remedy, command: str, capsys: pytest.CaptureFixture[str]):
    check(row, command, capsys)


@pytest.mark.parametrize(("row", "command"), cases(OF_TABLES))
def test_what_is_advised_of_tables_helps(row: Remedy, command: str, capsys: pytest.CaptureFixture[str]):
    check(row, command, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "command"), cases(OF_STRETCHES))
def test_what_is_advised_of_batches_and_chunks_helps(
    row: Remedy, command: str, one_rank_here: None, capsys: pytest.CaptureFixture[str]
):
    check(row, command, capsys)


def test_copies_are_written_where_it_says(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("EMBERSHARD_COPIES", "times.csv/copies")
    validate = _VALIDATE.format("times.toml --set data.table.encoding=latin-1")

    def set_to_new(name: str) -> None:
        monkeypatch.setenv(name, "new")

    check(Remedy((validate,), "", "", "set (EMBERSHARD_COPIES) to one", done=set_to_new), validate, capsys)


@pytest.mark.parametrize(("row", "command"), cases(OF_TIMES))
def test_what_is_advised_of_times_and_splits_helps(row: Remedy, command: str, capsys: pytest.CaptureFixture[str]):
    check(row, command, capsys)


INSPECT, TRAIN, CONVERT = "data inspect {} -o out.toml", "train {} --dry-run", "data convert {} -o out.parquet"
_OF_COLUMNS, _OF_FORMS = (INSPECT, TRAIN), (INSPECT, TRAIN, CONVERT)

OF_DATA = [
    Remedy(_OF_COLUMNS, "two.csv", "", r"Or the text that is 1: (--label \S+)"),
    Remedy(_OF_COLUMNS, "three.csv", "", r"Or the text that is 1: (--label \S+)"),
    Remedy(_OF_COLUMNS, "sold.csv", "", r"those of 0 and 1: (--label weekend) or --label revenue"),
    Remedy(_OF_COLUMNS, "sold.csv", "", r"those of 0 and 1: --label weekend or (--label revenue)"),
    Remedy(_OF_COLUMNS, "three.csv", "--label outcome", r"Or the text that is 1: (--label \S+) or", instead=True),
    Remedy(_OF_COLUMNS, "two.csv", "--label outcome=x", r"there are '\w+', ('kept')", "--label outcome=kept", True),
    Remedy(_OF_COLUMNS, "two.csv", "--label 'amount>=x'", r"for instance (amount>=4)", "--label 'amount>=4'", True),
    Remedy(_OF_COLUMNS, "two.csv", "--label amuont", r"did you mean ('amount')", "--label amount", True),
    Remedy(_OF_COLUMNS, "two.csv", "--label outcome --drop outcome", r"(name it once)", "--label outcome", True),
    Remedy(_OF_FORMS, "headless.csv", "", r"Name the columns: (--columns NAME,\.\.\.)", "--columns user,amount,click"),
    Remedy(_OF_COLUMNS, "words.csv", "", r"(--columns NAME,\.\.\.)", "--columns user,city,click --label click=d0"),
    Remedy((CONVERT,), "words.csv", "", r"(--columns NAME,\.\.\.)", "--columns user,city,click"),
    Remedy((CONVERT,), "words.csv", "", r"(--header)", "--header"),
    Remedy(_OF_FORMS, "odd.csv", "", r"(--separator), for instance", "--separator @ --columns user,amount,click"),
    Remedy(_OF_FORMS, "latin.csv", "", r"by (--encoding): in (?:\S+), for", "--encoding cp1252"),
    Remedy(_OF_FORMS, "latin.csv", "--encoding ascii", r"(--encoding)", "--encoding latin-1", True),
    Remedy(_OF_COLUMNS, "numbers.csv", "", r"Likeliest: (--category \S+)"),
    Remedy(_OF_COLUMNS, "city.csv", "--number city", r"Or leave it out: (--drop city)", instead=True),
    Remedy(_OF_COLUMNS, "days.csv", "--time when:%Y", r"leave it out: (--drop when)", instead=True),
    Remedy(_OF_COLUMNS, "days.csv", "--time when:%Y-%m-%d", r"(--time when:%\S+)", "--time when:%d/%m/%Y", True),
    Remedy(_OF_COLUMNS, "city.csv", "--time city", r"(--drop city)", instead=True),
    Remedy(_OF_COLUMNS, "lists.csv", "--list tags", r"for instance (--list tags:),", "--list tags:%", True),
    Remedy(_OF_COLUMNS, "city.csv", "--feature ctiy", r"there are click, user_id, (city)", "--feature city", True),
    Remedy(_OF_COLUMNS, "blanks.csv", "", r"To take them as missing: (--number 'unit price')", wrong_code=0),
    Remedy(_OF_COLUMNS, "blanks.csv", "--list 'user id'", r"leave it out: (--drop 'user id')", instead=True),
    Remedy(_OF_COLUMNS, "results.csv", "", r"To use one that is: (--feature purchased)", wrong_code=0),
    Remedy(_OF_COLUMNS, "results2.csv", "", r"To use one that is: (--feature 'was purchased')", wrong_code=0),
    Remedy(_OF_COLUMNS, "days.csv", "", r"Else: (--time when:%\S+)", wrong_code=0),
    Remedy((CONVERT,), "bad.csv", "", r"(--bad-rows [\d.]+)"),
    Remedy(_OF_COLUMNS, "torn.csv", "", r"or leave them out: (--bad-rows [\d.]+)"),
    Remedy(_OF_FORMS, "short.csv", "", r"Name all of them: (--columns NAME,\.\.\.)", "--columns click,user_id,day"),
    Remedy((CONVERT,), "open.csv", "", r"inspect, convert and train: (--no-quotes)"),
    *(
        Remedy((CONVERT,), "two.csv", words, r"(--join \S+NAME,\.\.\.)", "--join sizes.csv:user,size", True)
        for words in ("--join sizes.csv", "--join sizes.csv:id,size")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("row", "command"), cases(OF_DATA))
def test_what_is_advised_of_data_helps(row: Remedy, command: str, capsys: pytest.CaptureFixture[str]):
    check(row, command, capsys)
