"""Output of commands: lines, tables, numbers, progress bars; and the silencing of libraries."""

from __future__ import annotations

import errno
import json
import logging
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any, Literal, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from embershard.errors import DataError, naming_file, printable
from embershard.launch.arguments import as_called
from embershard.launch.stop_signals import is_device, leave_closed_terminal

LogFormat = Literal["text", "json"]
_WIDTH = 150  # of tables that go to a file or a pipe
#: Blanks in front of a command.
_COMMAND = re.compile(r"^ {4,}(?=\S)| {2,}(?=(?:\S*/)?(?:embershard|python[\d.]*|tensorboard|torchrun|pip) )")


class _Console(Console):
    """A console that goes quiet when nobody reads it any more, where rich would end the process."""

    @property  # type: ignore[misc]  # read only
    def file(self) -> IO[str]:
        """The file that is written to."""
        return cast(IO[str], _Output(super().file))

    def print(self, *objects: Any, **options: Any) -> None:
        with naming_file("standard output"):  # a file, perhaps, on a full disk
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()


class _Output:
    """A file for which a terminal that was closed is what a pipe without a reader is: no error of a disk."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        with self._as_pipe():
            return self._file.write(printable(text))

    def flush(self) -> None:
        with self._as_pipe():
            self._file.flush()

    @contextmanager
    def _as_pipe(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno != errno.EIO or not is_device(self._file.fileno()):
                raise
            leave_closed_terminal()
            raise BrokenPipeError from error


def plain_console(**options: Any) -> Console:
    """Return a console that shows texts as they are: `[/x]` or `:smile:` in a path is no markup.

    It goes quiet when the reader of its pipe has ended (`| head`; Ctrl-C ends `tee`, too), or its terminal was closed:
    the command goes on.
    """
    return _Console(markup=False, emoji=False, **options)


class JsonLines(_Console):
    """A console for programs, which read a line of JSON each: texts have the kind "message"."""

    def print(self, *objects: Any, **_: Any) -> None:
        for text in map(str, objects):
            self.show({"kind": "message", "time": time_now(), "text": text})

    def show(self, values: Mapping[str, Any]) -> None:
        """Print values as a line."""
        super().print(json.dumps(values), soft_wrap=True, highlight=False, markup=False, emoji=False)


def time_now() -> str:
    """Return the time, in UTC, as RFC 3339 has it: `2026-11-23T10:24:05.125Z`."""
    return f"{datetime.now(timezone.utc).replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"


def wide_console() -> Console:
    """Return a console that is wide enough for our tables where no terminal sets its width."""
    console = plain_console()
    return console if console.is_terminal else plain_console(width=_WIDTH)


def say(console: Console, *lines: str) -> None:
    """Print lines without colours, with commands as the program was called; a terminal breaks them between words."""
    breaks = console.is_terminal and not isinstance(console, JsonLines)
    for line in map(as_called, lines):
        console.print(broken(line, console.width) if breaks else line, soft_wrap=True, highlight=False)


def complain(text: str) -> None:
    """Print an error of a command, with commands as the program was called."""
    said = as_called(f"embershard: {text}")
    if sys.stderr.isatty():
        said = broken(said, shutil.get_terminal_size().columns)
    print(said, file=sys.stderr)


def broken(text: str, width: int) -> str:
    """Return a text in lines that a terminal of `width` characters shows whole, broken between words. A command behind
    several blanks has a line of its own, however long, so that it can be copied.

    >>> print(broken("Written. Train with it:  embershard train --config run.toml", 20))
    Written. Train with
    it:
        embershard train --config run.toml
    """
    lines = []
    for line in text.split("\n"):
        found = _COMMAND.search(line)
        words, command = (line, "") if found is None else (line[: found.start()], line[found.end() :])
        lines += textwrap.wrap(words, width, replace_whitespace=False, break_long_words=False, break_on_hyphens=False)
        lines += [f"    {command}"] if command else [] if words.strip() else [""]
    return "\n".join(lines)


def make_table(title: str, left: Sequence[str], right: Sequence[str], **style: Any) -> Table:
    """Return a table with left-aligned columns, then right-aligned ones; `style` goes to `rich.table.Table`."""
    table = Table(*left, title=title, title_justify="left", pad_edge=False, **style)
    for name in right:
        table.add_column(name, justify="right")
    return table


@contextmanager
def progress_bar(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal, elsewhere nothing. Yields a function of the number done and the number to do."""
    columns = (TextColumn(what), MofNCompleteColumn(), BarColumn(bar_width=20), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def save_figure(figure: Any, path: Path) -> None:
    """Write a picture of matplotlib.

    Raises:
        DataError: the file cannot be written, or its ending names no format of pictures.
    """
    try:
        with naming_file(path):
            figure.savefig(path, dpi=120)
    except ValueError as error:
        raise DataError(f"{path}: cannot be drawn ({error}); give a file that ends in .png") from error


def silence_libraries() -> None:
    """Drop the warnings of TorchRec and FBGEMM that appear on every start and no user can act on; errors still show.
    Warnings of kinds of our own are shown without the place in the code."""
    shown = warnings.formatwarning

    def format_warning(message: Warning | str, category: type[Warning], *place: Any) -> str:
        is_ours = category.__module__.startswith("embershard.")
        return f"embershard: warning: {message}\n" if is_ours else shown(message, category, *place)

    warnings.formatwarning = format_warning  # type: ignore[assignment]  # the place is handed on
    warnings.filterwarnings("ignore", module=r"(torchrec|fbgemm_gpu|torch)(\.|$)")
    for name in ("torchrec", "fbgemm_gpu", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)
