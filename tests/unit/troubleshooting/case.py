"""A case of docs/troubleshooting.md: what happened, how to provoke it, and what the user sees."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from embershard.commands import cli
from tests.unit.troubleshooting.privileges import modes_hold

#: The files that a case needs, relative to the folder that it runs in, with their contents.
Files = Mapping[str, str | bytes]
Provoke = Callable[[], "Outcome"]
Prepare = Callable[[], object]


class Outcome(NamedTuple):
    """What a command left: its exit code, and all that it wrote to stderr."""

    code: int
    stderr: str


@dataclass(frozen=True)
class Case:
    """One row of the page, and one test.

    Attributes:
        cause: what happened, in a few words.
        provoke: makes it happen, in an empty folder that is the current one. See `command` and `rank`.
        message: the line on stderr. `<words>` stands for any text, and the folder of the test is left out.
        remedy: what to do.
        code: the exit code.
    """

    cause: str
    provoke: Provoke
    message: str
    remedy: str
    code: int = 2

    @property
    def pattern(self) -> str:
        """The message as a regular expression."""
        parts = re.split(r"(<[a-z][a-z ]*>)", self.message)
        return "".join(".+" if number % 2 else re.escape(part) for number, part in enumerate(parts))


def command(*words: str, files: Files | None = None, prepare: Prepare | None = None) -> Provoke:
    """Return a function that runs `embershard WORDS...` in this process, in the current folder.

    Args:
        files: made before.
        prepare: called after the files were made; for what is more than a file.
    """

    def run() -> Outcome:
        _make(files, prepare)
        return outcome_of(lambda: cli.main(words))

    return run


def rank(*words: str, files: Files | None = None, prepare: Prepare | None = None) -> Provoke:
    """Return a function that trains as a single rank in this process, with the arguments of `embershard train`.

    It is the program of each rank, so an exception is shown as a rank shows it. `embershard train` then ends with exit
    code 1.
    """
    from embershard.commands.train.command import rank_job
    from embershard.launch import rank as program

    def train() -> int:
        hook = sys.excepthook
        try:
            program.do(lambda: rank_job(words), stops_in_order=True)
        except Exception:
            sys.excepthook(*sys.exc_info())
            return 1
        finally:
            sys.excepthook = hook
        return 0

    def run() -> Outcome:
        _make(files, prepare)
        return outcome_of(train)

    return run


def _make(files: Files | None, prepare: Prepare | None) -> None:
    for name, content in (files or {}).items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    if prepare is not None:
        prepare()


def outcome_of(main: Callable[[], int]) -> Outcome:
    """Return the exit code of `main`, and what it wrote to stderr."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()), modes_hold():
        code = main()
    return Outcome(code, stderr.getvalue())
