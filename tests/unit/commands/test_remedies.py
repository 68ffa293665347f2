"""What a message advises helps: each remedy is taken from the message, and tried in the command that said it.

A row: what is wrong, the command, the remedy's words in its message, and how they are applied. Remedies with names to
fill in (`--columns NAME,...`) are tried with names.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from embershard.commands import cli
from tests.unit.commands.conftest import Trained

_ROWS = range(60)


def _lines(header: str, line: Callable[[int], str]) -> str:
    return "".join(f"{each}\n" for each in [*([header] if header else []), *map(line, _ROWS)])


FILES: dict[str, str | bytes] = {
    "two.csv": _lines("user;amount;outcome", lambda n: f"u{n % 9};{20 + n % 40};{'kept' if n % 3 else 'sent'}"),
    "three.csv": _lines("user;outcome", lambda n: f"u{n % 9};{'abc'[n % 3]}"),
    "headless.csv": _lines("", lambda n: f"u{n % 9},{20 + n % 40},{n % 2}"),
    "words.csv": _lines("", lambda n: f"u{n % 9},c{n % 7},d{n % 3}"),
    "odd.csv": _lines("user amount click", lambda n: f"u{n % 9}@{n % 5}@{n % 2}"),
    "latin.csv": _lines("user,city,click", lambda n: f"u{n % 9},Köln{n % 5},{n % 2}").encode("latin-1"),
    "numbers.csv": _lines("click,size,price", lambda n: f"{n % 2},{n * 7 % 50}.5,{n * 3 % 40}.25"),
    "city.csv": _lines("click,user_id,city", lambda n: f"{n % 2},{n % 9},c{n % 4}"),
    "lists.csv": _lines("click,user_id,tags", lambda n: f"{n % 2},{n % 9},a{n % 4}%b{n % 3}"),
    "results.csv": _lines("click,user_id,purchased", lambda n: f"{n % 2},{n % 9},{int(n % 4 == 1)}"),
    "near.csv": _lines("click,user_id,price", lambda n: f"{n % 2},{n % 9},{n / 4 if n % 8 else 'free'}"),
    "bad.csv": _lines("click,user_id,price", lambda n: f"{n % 2},{n % 9},{n / 4}" if n % 20 else "x"),
    "sizes.csv": "".join(f"u{n},{n % 5}\n" for n in range(9)),
    "blanks.csv": _lines("click;user id;unit price", lambda n: f"{n % 2};u{n % 9};{n / 4 if n % 8 else 'free'}"),
    "results2.csv": _lines("click;user id;was purchased", lambda n: f"{n % 2};u{n % 9};{int(n % 4 == 1)}"),
    "short.csv": _lines("click,user_id", lambda n: f"{n % 2},{n % 9},{n % 4}"),
    "torn.csv": _lines("click,user_id", lambda n: f"{n % 2},u{n % 9}" if n % 11 else f"{n % 2}"),
    "open.csv": _lines("click,user_id", lambda n: f'{n % 2},"u{n % 9}' + ('"' if n % 25 else "")),
    "days.csv": _lines("click,user_id,when", lambda n: f"{n % 2},{n % 9},{n % 12 + 1:02}/{n % 11 + 1:02}/2024"),
}


class Remedy(NamedTuple):
    """A row of the table.

    Attributes:
        commands: that say it, of a file that `{}` stands for.
        file: of `FILES`.
        words: behind the command, that are wrong.
        said: a regular expression of the message, whose group is the remedy's words.
        tried: these in place of the remedy's, which has names to fill in.
        instead: the remedy's words stand in place of the wrong ones, not behind them.
        wrong_code: the exit code without the remedy.
    """

    commands: tuple[str, ...]
    file: str
    words: str
    said: str
    tried: str = ""
    instead: bool = False
    wrong_code: int = 2


INSPECT, TRAIN, CONVERT = "data inspect {} -o out.toml", "train {} --dry-run", "data convert {} -o out.parquet"
_OF_COLUMNS, _OF_FORMS = (INSPECT, TRAIN), (INSPECT, TRAIN, CONVERT)

OF_DATA = [
    Remedy(_OF_COLUMNS, "two.csv", "", r"Or the text that is 1: (--label \S+)"),
    Remedy(_OF_COLUMNS, "three.csv", "", r"Or the text that is 1: (--label \S+)"),
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


TINY = """
[data]
num_workers = 0
[data.synthetic]
num_samples = 600
scale = 0.0001
[model]
embedding_dim = 4
dense_arch_layer_sizes = [8, 4]
over_arch_layer_sizes = [8, 1]
[cache]
ratio = 0.5
[train]
batch_size = 20
max_steps = 2
device = "cpu"
"""
#: Settings of the files of data that `data validate` and trainings read.
TABLE = """
[data]
kind = "table"
path = "{}"
eval_fraction = 0.1
[data.table]
label = "click"
features.user_id = {{kind = "sparse", mapping = "hash", num_rows = 99}}
features.price = {{kind = "dense"}}
"""
FILES |= {"tiny.toml": TINY, "bad.toml": TABLE.format("bad.csv"), "near.toml": TABLE.format("near.csv")}
FILES["city.toml"] = TABLE.format("city.csv").replace("features.price", "# features.price")
_DRY, _VALIDATE = ("train {} --dry-run", "verify {} --nproc 1"), ("data validate --config {}",)
_TRAIN = _DRY[:1]

OF_SETTINGS = [
    Remedy(_TRAIN, "tiny.toml", "--set train.global_batch_size=20", "(--set train.global_batch_size=none)"),
    Remedy(_TRAIN, "tiny.toml", "--set train.global_batch_size=20", "(--set train.batch_size=none)"),
    Remedy(
        _TRAIN, "tiny.toml", "--nproc 2 --set train.batch_size=none --set train.global_batch_size=21",
        r"for instance (20)\.", "--set train.global_batch_size=20",
    ),
    Remedy(
        _TRAIN, "tiny.toml", "--set train.batchsize=3",
        "Did you mean (train.batch_size)", "--set train.batch_size=3", True,
    ),
    Remedy(
        _TRAIN, "tiny.toml", "--set batch_size=3",
        "Did you mean (train.batch_size)", "--set train.batch_size=3", True,
    ),
    Remedy(_TRAIN, "tiny.toml", "--batch-size 3", "Did you mean (--set train.batch_size=3)", instead=True),
    Remedy(_TRAIN, "tiny.toml", "train.batch_size=3", r"Did you mean (--set train.batch_size=3)\?", instead=True),
    Remedy(_TRAIN, "tiny.toml", "--set train.batch_size", r"for instance (--set train.batch_size=\d+)", instead=True),
    Remedy(
        _TRAIN, "tiny.toml", "--set model.embedding_dim=6", r"The next one is (8)\.",
        "--set model.embedding_dim=8 --set model.dense_arch_layer_sizes=[8,8]", True,
    ),
    Remedy(_TRAIN, "tiny.toml", "--set sharding.exchange=auto", 'needed ("pooled")', "--set sharding.exchange=pooled"),
    Remedy(
        _TRAIN, "tiny.toml", "--set cache.host=file", "needs (cache.host_dir).*, and cache.host_bytes",
        "--set cache.host_dir=rows --set cache.host_bytes=1000000",
    ),
    Remedy(_TRAIN, "tiny.toml", "--set cache.host_dtype=int8", "(cache.full_rows = 0)", "--set cache.full_rows=0"),
    Remedy(
        _TRAIN, "tiny.toml", "--set cache.host_dtype=int8",
        "(profile.samples = 200000)", "--set profile.samples=200000",
    ),
    Remedy(_TRAIN, "tiny.toml", "--set cache.host_dtype=int8", '("fp16") needs none', "--set cache.host_dtype=fp16"),
    Remedy(_TRAIN, "tiny.toml", "--set cache.device_bytes=1000000", "(Remove the other)", "--set cache.ratio=none"),
    Remedy(
        _TRAIN, "tiny.toml", "--set cache.decay=0.5 --set cache.policy=lru",
        'belongs to ("lfu")', "--set cache.policy=lfu",
    ),
    Remedy(
        _TRAIN, "tiny.toml", "--set train.metric=auc",
        "without (checkpoint.keep_best)", "--set checkpoint.keep_best=true",
    ),
    Remedy(_TRAIN, "tiny.toml", "--set profile.path=p.npz --set profile.samples=9", "(--set profile.samples=none)"),
    Remedy(
        _TRAIN, "tiny.toml", "--set look_ahead.prefetch=99",
        "(look_ahead.lookahead)", "--set look_ahead.lookahead=99",
    ),
    Remedy(
        _TRAIN, "tiny.toml", "--set schedule.decay=linear",
        "schedule.(decay_steps)", "--set schedule.decay_steps=5",
    ),
    Remedy(_TRAIN, "tiny.toml", "--set publish.folder=p", "needs (publish.every_steps)", "--set publish.every_steps=2"),
    Remedy(_TRAIN, "tiny.toml", "--set publish.every_steps=2", "without (publish.folder)", "--set publish.folder=p"),
    Remedy(_TRAIN, "tiny.toml", "--set train.precision=fp16", '("bf16") is as fast', "--set train.precision=bf16"),
    Remedy(_TRAIN, "tiny.toml", "--resume", "needs (--run-dir)", "--run-dir new"),
    Remedy(_TRAIN, "tiny.toml", "--allow-change data.seed --run-dir new", "without (--resume)", "--resume"),
    Remedy(
        _TRAIN, "tiny.toml", "--allow-change data.sed --run-dir new --resume", "Did you mean (data.seed)",
        "--allow-change data.seed --run-dir new --resume", True,
    ),
    Remedy(
        _TRAIN, "city.toml", "--set metrics.group=user_id --set metrics.names=[auc]",
        'add ("gauc")', "--set metrics.names=[auc,gauc]",
    ),
    Remedy(_TRAIN, "city.toml", "--set metrics.names=[gauc]", "(metrics.group) = ", "--set metrics.group=user_id"),
    Remedy(
        _TRAIN, "city.toml", "--set metrics.most_slices=3",
        "without (metrics.slices)", "--set metrics.slices=[user_id]",
    ),
    Remedy(_VALIDATE, "bad.toml", "", "(--set data.bad_rows=[\\d.]+)", wrong_code=1),
    Remedy(_VALIDATE, "near.toml", "", "(--set data.bad_rows=[\\d.]+)", wrong_code=1),
    Remedy(("data validate",), "", "", "or (--config)", "--config bad.toml --set data.bad_rows=0.5"),
    Remedy(("train bad.csv --dry-run",), "", "--label click --label user_id", "(give one)", "--label click", True),
    Remedy(("export nowhere -o out",), "", "--dtype int8 --format parquet", "(Leave it out)", "--help", True),
]  # fmt: skip
#: Of a run on Parquet files with columns user, items, age and click.
OF_RUNS = [
    Remedy(("eval run",), "", "--set train.epochs=3", "(Leave it out)", "--step last", True),
    Remedy(("eval run",), "", "--step 9", "there is step_(12)", "--step 12", True),
    Remedy(("eval run",), "", "--set data.eval_fraction=0", "(--data PATH)", "--data clicks.parquet"),
    Remedy(("predict run -o out.parquet",), "", "--keep usr", "did you mean ('user')", "--keep user", True),
    Remedy(("predict run -o out.parquet",), "", "--keep label", "(Leave it out)", "--step last", True),
    Remedy(("compare run run",), "", "--metrics gauc", "(--group COLUMN)", "--group user"),
    Remedy(("compare run run",), "", "--group usr", "did you mean ('user')", "--group user", True),
    Remedy(("report run run",), "", "", "or (--format)", "--format csv"),
    Remedy(("report run run",), "", "", "need (-o FILE.html)", "-o out.html"),
    Remedy(("report run",), "", "--json --top 3", "(--top) has no effect", "--json", True),
    Remedy(("report run",), "", "--topology cpu", "without (--recalibrate)", "--json", True),
    Remedy(("report",), "", "run/result.json", r"give its folder: (\S+)\.", instead=True),
    Remedy(("ckpt prune run",), "", "", "required: (--keep)", "--keep 1"),
    Remedy(("export run -o out.d",), "", "--format parquet --dtype int8", "(Leave it out)", "--format parquet", True),
]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has the files, and is the current one."""
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said_by(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit code of a command, and all that it says, in one line."""
    try:
        code = cli.main(words)
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    return code, " ".join("".join(capsys.readouterr()).split())


def cases(table: list[Remedy]) -> list[object]:
    return [
        pytest.param(row, command, id=f"{command.format(row.file)} {row.words}".strip())
        for row in table
        for command in row.commands
    ]


@pytest.mark.parametrize(("row", "command"), cases(OF_SETTINGS))
def test_what_is_advised_of_settings_helps(row: Remedy, command: str, capsys: pytest.CaptureFixture[str]):
    check(row, command, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "command"), cases(OF_RUNS))
def test_what_is_advised_of_runs_helps(
    row: Remedy, command: str, trained: Trained, one_rank_here: None, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(trained.run_dir, "run")
    shutil.copy(trained.data, "clicks.parquet")
    check(row, command, capsys)


@pytest.mark.slow
def test_what_is_advised_of_plans_helps(capsys: pytest.CaptureFixture[str]):
    """The profile that is missing is made by the command that is named, and given as it says."""
    code, said = said_by(["plan", "tiny.toml"], capsys)
    found = re.search(r"give it as (--profile \S+): embershard (profile .*\.npz)", said)
    assert code == 2, said
    assert found is not None, said
    assert said_by(shlex.split(found[2]), capsys)[0] == 0
    plan = f"plan tiny.toml {found[1]} --ranks 2 -o out.json"
    for words, remedy, tried in (
        ("--topology h100x8x2 --ranks 8", r"or (--set train.device=auto)\.", ""),
        ("--device-memory 1kB", r"that fits: (--device-memory \d+)", ""),
        ("--host-memory 1kB", r"that fits: (--host-memory \d+)", ""),
        ("--device-memory 1GB,2GB,3GB", r"(or one for each of 2 ranks)", "--device-memory 1GB,2GB"),
        ("--ranks 2,4", r"give (one number of --ranks)", "--ranks 2"),
    ):
        check(Remedy((plan,), "", words, remedy, tried), plan, capsys)


@pytest.mark.parametrize(("row", "command"), cases(OF_DATA))
def test_what_is_advised_of_data_helps(row: Remedy, command: str, capsys: pytest.CaptureFixture[str]):
    check(row, command, capsys)


def check(row: Remedy, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the command, and again with the remedy that its message names."""
    words = shlex.split(command.format(row.file))
    code, said = said_by([*words, *shlex.split(row.words)], capsys)
    assert code == row.wrong_code, said
    found = re.search(row.said, said)
    assert found is not None, said
    for output in Path().glob("out.*"):
        output.unlink()
    remedy = shlex.split(row.tried or found[1].rstrip(".,"))
    code, said = said_by([*words, *(() if row.instead else shlex.split(row.words)), *remedy], capsys)
    assert code == 0, said
