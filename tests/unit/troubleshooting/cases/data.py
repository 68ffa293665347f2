"""Data that cannot be read, or are not what the settings say."""

import gzip

from tests.unit.troubleshooting.case import Case, Files, Provoke, command, rank

TITLE = "Data"
_LINE = "\t".join(["1", *["3"] * 13, *["a"] * 26]) + "\n"
_SETTINGS = """
[data]
kind = "criteo"
path = "logs"
chunk_rows = 4
eval_fraction = 0.0
criteo.num_rows = 10
[train]
batch_size = 4
log_every = 1
device = "cpu"
[checkpoint]
at_end = false
[cache]
enabled = false
"""


_TABLE = """
[data]
kind = "table"
path = "a.csv"
[data.table.features]
usr = {kind = "sparse", num_rows = 9, mapping = "hash"}
"""
_FOLLOWED = """
[data]
kind = "table"
path = "hours"
follow = true
idle_seconds = 0.01
chunk_rows = 4
eval_fraction = 0.0
time = {column = "at", window = 3600}
[data.table]
label = "click"
files = ["*.csv"]
[data.table.features]
user = {kind = "sparse", num_rows = 9, mapping = "hash"}
price = {kind = "dense"}
[train]
batch_size = 2
device = "cpu"
"""
_HOURS = {
    "hours/a.csv": "at,user,price,click\n" + "10,7,1.0,0\n" * 4,
    "hours/b.csv": "at,user,price,click\n" + "4000,7,cheap,0\n" * 4,
}
_AVAZU = ",".join(["1", "0", "14102100", *["a"] * 21]) + "\n"
_AVAZU_HEADER = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,device_ip,"
    "device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
)


def _avazu(first: str, *lines: str) -> Provoke:
    settings = ("--config", "run.toml", "--run-dir", "mine", "--set", "data.kind=avazu")
    return rank(*settings, files={"run.toml": _SETTINGS, "logs/train.csv": "".join([f"{first}\n", *lines])})


def _files(*lines: str) -> Files:
    return {"run.toml": _SETTINGS, "logs/day_0": "".join(lines)}


def _train(*lines: str, settings: str = "") -> Provoke:
    words = ["--config", "run.toml", "--run-dir", "mine", *(["--set", settings] if settings else [])]
    return rank(*words, files=_files(*lines))


_WITHOUT = ". To go on without such rows: --set data.bad_rows=0.01"
_BAD = "Correct or remove the row, or let up to a share of such rows be replaced: `data.bad_rows`. " + (
    "`embershard data validate` finds all of them before training."
)

CASES = [
    Case(
        "A cell is not what its column needs",
        _train(_LINE, _LINE[:-2] + "zebra\n", _LINE, _LINE),
        "[rank<number>]: DataError: logs/day_0:2 C26='zebra': needed 1 to 8 hexadecimal digits, or nothing" + _WITHOUT,
        _BAD,
        code=1,
    ),
    Case(
        "A number is too large",
        _train(_LINE, _LINE.replace("3", "1e39", 1), _LINE, _LINE),
        "[rank<number>]: DataError: logs/day_0:2 I1='1e39': needed a number below 3.4e38, or nothing where it is "
        "missing" + _WITHOUT,
        _BAD,
        code=1,
    ),
    Case(
        "A row has not the right columns",
        _train(_LINE, "1\t2\n", _LINE, _LINE),
        "[rank<number>]: DataError: logs/day_0:2 has 2 tab-separated columns; needed 40: label, 13 integers, 26 "
        "categoricals" + _WITHOUT,
        _BAD,
        code=1,
    ),
    Case(
        "An hour of Avazu's format is none",
        _avazu(_AVAZU_HEADER, _AVAZU, _AVAZU.replace("14102100", "14102124"), _AVAZU, _AVAZU),
        "[rank<number>]: DataError: logs/train.csv:3 hour='14102124': needed YYMMDDHH, a date and an hour, or nothing"
        + _WITHOUT,
        _BAD,
        code=1,
    ),
    Case(
        "A value of Avazu's format is too long",
        _avazu(_AVAZU_HEADER, _AVAZU, _AVAZU.replace("a", "x" * 65, 1), _AVAZU, _AVAZU),
        "[rank<number>]: DataError: logs/train.csv:3 C1='<value>': needed at most 64 bytes" + _WITHOUT,
        _BAD,
        code=1,
    ),
    Case(
        "A file of Avazu's format without its header, or with another one, as that of the test set",
        _avazu(_AVAZU_HEADER.replace("click,", ""), _AVAZU),
        f"[rank<number>]: DataError: logs/train.csv:1 the header is <first line>; needed {_AVAZU_HEADER}",
        "Put the header there. A file without labels (`click`) is not for training: leave it out (`data.avazu.files`).",
        code=1,
    ),
    Case(
        "More bad rows than `data.bad_rows` allows",
        _train(*[_LINE, _LINE, _LINE, "1\n"] * 2, settings="data.bad_rows=0.1"),
        "[rank<number>]: DataError: <number> bad rows in 8 samples (<share>) of the training data; "
        "data.bad_rows = 0.1 allows 10.00%. They are listed in the run's bad_rows.jsonl; "
        "`embershard data validate` counts all. Correct them, or go on from the newest checkpoint: --resume --set "
        "data.bad_rows=<share>",
        "Look at `bad_rows.jsonl` in the folder of the run; correct the data, or allow more. Training was saved.",
        code=1,
    ),
    Case(
        "A file that came to a followed folder is bad",
        rank("--config", "run.toml", "--run-dir", "mine", files={"run.toml": _FOLLOWED, **_HOURS}),
        "[rank<number>]: DataError: hours/b.csv:2 price='cheap': needed a number, or nothing"
        f"{_WITHOUT}. Nothing of this file has trained, and all before it has: mend it in place or move it away, then "
        'go on with --resume. Or set data.bad_files = "skip", which leaves out such files',
        "Do one of these. A file that is left out is named in the run's files.jsonl.",
        code=1,
    ),
    Case(
        "A stretch of bad rows that nothing can replace",
        _train(*[_LINE] * 4, *["1\n"] * 4, settings="data.bad_rows=0.9"),
        "[rank<number>]: DataError: logs/day_0:<row> has 1 tab-separated columns; needed 40: label, 13 integers, 26 "
        "categoricals; and no row near it is good: 4 bad rows one after another. Remove such rows or, of text files, "
        "set a larger data.chunk_rows",
        "Correct or remove the rows. A chunk (`data.chunk_rows`, or a Parquet row group) needs a good row.",
        code=1,
    ),
    Case(
        "There is nothing at `data.path`",
        command("data", "validate", "nowhere"),
        "embershard: nowhere: no such file or folder; check data.path and data.eval_path",
        "Check the path; a relative one starts from the current folder.",
    ),
    Case(
        "No file of the folder has the expected name",
        command("data", "validate", "logs", files={"logs/notes.md": "x"}),
        "embershard: logs: none of its 1 files matches day_*, train*, part-*, *.tsv, *.tsv.gz (there are: notes.md); "
        "set data.criteo.files to the names of your files",
        "Set `data.criteo.files`, `data.avazu.files`, `data.parquet.files` or `data.table.files`.",
    ),
    Case(
        "A column that a feature needs is not in the files",
        command("train", "--config", "run.toml", "--dry-run", files={"run.toml": _TABLE, "a.csv": "label,user\n1,7\n"}),
        "embershard: a.csv: no column 'usr'; did you mean 'user'?",
        "Correct the feature's `column`, or its name. `embershard data inspect` shows the columns.",
    ),
    Case(
        "A cell of a table is not what its feature needs",
        command(
            *("train", "--config", "run.toml", "--dry-run", "--set", "data.table.features.usr.column=user"),
            files={"run.toml": _TABLE, "a.csv": "label,user\n1,7\n0,x\n"},
        ),
        "embershard: a.csv:3 user='x': needed an integer, or nothing" + _WITHOUT,
        "Correct the cell, set another `mapping`, or tolerate such rows (`data.bad_rows`).",
    ),
    Case(
        "No column looks like a label",
        command("data", "inspect", "a.csv", "-o", "run.toml", files={"a.csv": "user,price\n1,2.5\n2,7\n"}),
        "embershard: --label: no column looks like a label. Name the column to predict; columns of numbers: user, "
        "price.",
        "Give `--label NAME`.",
    ),
    Case(
        "A file cannot be joined: a value of the common column is in it twice",
        command(
            *("data", "convert", "a.csv", "--join", "users.csv", "-o", "all.parquet"),
            files={"a.csv": "user,label\n1,0\n", "users.csv": "user,age\n1,30\n1,31\n"},
        ),
        "embershard: users.csv: user=1 is in 2 rows; needed each value once",
        "Keep one row per value; a file with several is the one to join the others to.",
    ),
    Case(
        "A file is empty",
        command("data", "validate", "logs", files={"logs/day_0": ""}),
        "embershard: logs/day_0: the file is empty (0 bytes); remove it, or fetch it again",
        "Fetch the file again; a transfer has probably failed.",
    ),
    Case(
        "A gzip file is truncated",
        command("data", "validate", "logs", files={"logs/day_0": gzip.compress(_LINE.encode() * 99, mtime=0)[:-9]}),
        "embershard: logs/day_0: the gzip file is truncated after byte <number>; fetch it again",
        "Fetch the file again.",
    ),
    Case(
        "A Parquet file is damaged",
        command(
            "data",
            "validate",
            "a.parquet",
            "--set",
            'data.parquet.sparse=["user"]',
            "--set",
            "data.parquet.num_rows=[9]",
            files={"a.parquet": "PAR1 and then text"},
        ),
        "embershard: a.parquet: not a sound Parquet file (<reason>); fetch it again",
        "Fetch the file again.",
    ),
    Case(
        "The training data are smaller than a global batch",
        _train(_LINE),
        "[rank<number>]: DataError: the training data have 1 samples, less than one global batch: 4 samples x 1 ranks "
        "= 4; use a smaller batch size or more data",
        "Use a smaller `train.batch_size`, or more data.",
        code=1,
    ),
    Case(
        "A line of a log is no event",
        command("data", "events", "log.csv", "-o", "windows", files={"log.csv": "1,2,3,view,4\n"}),
        "embershard: log.csv: event 1 is 1,2,3,view,4; needed ids and a time of 0 or more, and a behaviour among pv, "
        "buy, cart, fav.",
        "Correct or remove the line.",
    ),
]
