"""What a message advises helps: each remedy is taken from the message, and tried in the command that said it.

A row: what is wrong, the command, the remedy's words in its message, and how they are applied. Remedies with names to
fill in (`--columns NAME,...`) are tried with names.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from embershard.commands import cli

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
    "lists.csv": _lines("click,user_id,tags", lambda n: f"{n % 2},{n % 9},a{n % 4}~b{n % 3}"),
    "results.csv": _lines("click,user_id,purchased", lambda n: f"{n % 2},{n % 9},{int(n % 4 == 1)}"),
    "near.csv": _lines("click,user_id,price", lambda n: f"{n % 2},{n % 9},{n / 4 if n % 8 else 'free'}"),
    "bad.csv": _lines("click,user_id,price", lambda n: f"{n % 2},{n % 9},{n / 4}" if n % 20 else "x"),
    "sizes.csv": "".join(f"u{n},{n % 5}\n" for n in range(9)),
    "blanks.csv": _lines("click;user id;unit price", lambda n: f"{n % 2};u{n % 9};{n / 4 if n % 8 else 'free'}"),
    "results2.csv": _lines("click;user id;was purchased", lambda n: f"{n % 2};u{n % 9};{int(n % 4 == 1)}"),
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
    Remedy(_OF_COLUMNS, "lists.csv", "--list tags", r"for instance (--list tags:),", "--list tags:~", True),
    Remedy(_OF_COLUMNS, "city.csv", "--feature ctiy", r"there are click, user_id, (city)", "--feature city", True),
    Remedy(_OF_COLUMNS, "blanks.csv", "", r"To take them as missing: (--number 'unit price')", wrong_code=0),
    Remedy(_OF_COLUMNS, "blanks.csv", "--list 'user id'", r"leave it out: (--drop 'user id')", instead=True),
    Remedy(_OF_COLUMNS, "results.csv", "", r"To use one that is: (--feature purchased)", wrong_code=0),
    Remedy(_OF_COLUMNS, "results2.csv", "", r"To use one that is: (--feature 'was purchased')", wrong_code=0),
    Remedy(_OF_COLUMNS, "days.csv", "", r"Else: (--time when:%\S+)", wrong_code=0),
    Remedy((CONVERT,), "bad.csv", "", r"(--bad-rows [\d.]+)"),
    *(
        Remedy((CONVERT,), "two.csv", words, r"(--join \S+NAME,\.\.\.)", "--join sizes.csv:user,size", True)
        for words in ("--join sizes.csv", "--join sizes.csv:id,size")
    ),
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
