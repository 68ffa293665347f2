"""What a message advises helps: each remedy is taken from the message, and tried in the command that said it.

A row: what is wrong, the command, the remedy's words in its message, and how they are applied. Remedies with names to
fill in (`--columns NAME,...`) are tried with names.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from embershard.commands import cli

_ROWS = range(60)


def _lines(header: str, line: Callable[[int], str]) -> str:
    return "".join(f"{each}\n" for each in [*([header] if header else []), *map(line, _ROWS)])


class _Files(dict[str, str | bytes]):
    """By name: the modules of tests add theirs, and are imported in any order."""

    def __setitem__(self, name: str, content: str | bytes) -> None:
        assert self.get(name, content) == content, f"two modules write {name}, each with its own content"
        super().__setitem__(name, content)

    def __ior__(self, more: Mapping[str, str | bytes]) -> _Files:  # type: ignore[override, misc]
        for name, content in more.items():
            self[name] = content
        return self


FILES = _Files(
    {
        "two.csv": _lines("user;amount;outcome", lambda n: f"u{n % 9};{20 + n % 40};{'kept' if n % 3 else 'sent'}"),
        "three.csv": _lines("user;outcome", lambda n: f"u{n % 9};{'abc'[n % 3]}"),
        "headless.csv": _lines("", lambda n: f"u{n % 9},{20 + n % 40},{n % 2}"),
        "words.csv": _lines("", lambda n: f"u{n % 9},c{n % 7},d{n % 3}"),
        "odd.csv": _lines("user amount click", lambda n: f"u{n % 9}@{n % 5}@{n % 2}"),
        "latin.csv": _lines("user,city,click", lambda n: f"u{n % 9},Köln{n % 5},{n % 2}").encode("latin-1"),
        "numbers.csv": _lines("click,size,price", lambda n: f"{n % 2},{n * 7 % 50}.5,{n * 3 % 40}.25"),
        "city.csv": _lines("click,user_id,city", lambda n: f"{n % 2},{n % 9},c{n % 4}"),
        "sold.csv": _lines("month,weekend,revenue", lambda n: f"{'abcd'[n % 4]},{n % 2},{n % 3 % 2}"),
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
)


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
FILES["tables.toml"] = "[tables.item]\nrows = 4000\n"
FILES |= {"tiny.toml": TINY, "bad.toml": TABLE.format("bad.csv"), "near.toml": TABLE.format("near.csv")}
FILES["city.toml"] = TABLE.format("city.csv").replace("features.price", "# features.price")
#: Of so many remedies of messages that one command says, `make test` tries one.
ONE_OF = 6
#: Behind a command, in place of what was wrong: nothing.
LEFT_OUT = " "
DRY_RUN = "train {} --dry-run"


class Remedy(NamedTuple):
    """A row of the table.

    Attributes:
        commands: that say it, of a file that `{}` stands for.
        file: of `FILES`.
        words: behind the command, that are wrong.
        said: a regular expression of the message, whose group is the remedy's words; all of it where no group is.
        tried: these in place of the remedy's, which has names to fill in; `{}` in them: the group's words.
        instead: the remedy's words stand in place of the wrong ones, not behind them.
        wrong_code: the exit code without the remedy.
        first: another command that the message names, done before the remedy; `{}` in it: the group's words.
        leads_to: a regular expression of what is said with the remedy, where the command does not end with 0 then.
        done: does with files, or with the environment, what the remedy's words ask for, which it is given. The command
            then runs with `tried`, or as before.
    """

    commands: tuple[str, ...]
    file: str
    words: str
    said: str
    tried: str = ""
    instead: bool = False
    wrong_code: int = 2
    first: str = ""
    leads_to: str = ""
    done: Callable[[str], object] | None = None


def shell(line: str) -> None:
    """Run a line of the shell that a message shows."""
    subprocess.run(line, shell=True, check=True)


def sets(settings: str) -> str:
    """Return "--set KEY=VALUE" for each of settings with blanks between them."""
    return " ".join(f"--set {shlex.quote(each)}" for each in shlex.split(settings, posix=False))


def of_settings(
    file: str,
    wrong: str,
    said: str,
    right: str = "",
    command: str = DRY_RUN,
    leads_to: str = "",
    instead: bool = False,
) -> Remedy:
    """Return a row of settings that are wrong, and of those that mend them: the words of the message, or `right`;
    `LEFT_OUT`: without the wrong ones."""
    if right == LEFT_OUT:
        return Remedy((command,), file, sets(wrong), said, LEFT_OUT, instead=True, leads_to=leads_to)
    tried = sets(right) if right else ""
    return Remedy((command,), file, sets(wrong), said, tried, instead, leads_to=leads_to)


def said_by(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit code of a command, and all that it says, in one line."""
    try:
        code = cli.main(words)
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    return code, " ".join("".join(capsys.readouterr()).split())


def cases(table: list[Remedy], *marks: pytest.MarkDecorator) -> list[object]:
    """Return the rows by command; `make test` tries the first of each command, and one of `ONE_OF` of the others."""
    found, numbers = list[object](), Counter[str]()
    for row, command in [(each, command) for each in table for command in each.commands]:
        kind = " ".join(command.split()[: 2 if command.startswith(("data", "ckpt")) else 1])
        of_row = marks or (() if numbers[kind] % ONE_OF == 0 else (pytest.mark.matrix,))
        numbers[kind] += 1
        found.append(pytest.param(row, command, id=f"{command.format(row.file)} {row.words}".strip(), marks=of_row))
    return found


def check(row: Remedy, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the command, and again with the remedy that its message names."""
    words = shlex.split(command.format(row.file))
    code, said = said_by([*words, *shlex.split(row.words)], capsys)
    assert code == row.wrong_code, said
    found = re.search(row.said, said)
    assert found is not None, said
    advised = found[found.lastindex or 0]
    for output in Path().glob("out.*"):
        output.unlink()
    if row.first:
        code, said = said_by(shlex.split(row.first.format(advised)), capsys)
        assert code == 0, said
    if row.done:
        row.done(advised.rstrip(".,"))
    remedy = shlex.split(row.tried.replace("{}", advised) or ("" if row.done else advised.rstrip(".,")))
    code, said = said_by([*words, *(() if row.instead else shlex.split(row.words)), *remedy], capsys)
    assert re.search(row.leads_to, said) if row.leads_to else code == 0, said
