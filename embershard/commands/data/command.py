"""`embershard data`: the arguments of its actions. `run` of the arguments names the function that does one, which loads
torch or pyarrow: --help must answer at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from embershard.data.text_form import is_encoding
from embershard.launch.arguments import add_action, add_settings, make_parser, positive, step_or_last, whole
from embershard.lazy_names import named

_HELP = """Look at data, convert them, and check them before training.

  embershard data inspect clicks.csv -o run.toml
  embershard data convert clicks.csv --join users.csv -o clicks.parquet
  embershard data events UserBehavior.csv -o windows
  embershard data validate --config run.toml
"""
_INSPECT_HELP = """Look at the columns of CSV, TSV, JSON lines or Parquet files, and write a run's settings for them.

  embershard data inspect clicks.parquet -o run.toml
  embershard train --config run.toml
  embershard data inspect ratings.txt --columns user,item,rating,time --label 'rating>=4'
  embershard data inspect log.csv --category 'C*' --list tags:, --time day:%d.%m.%Y --drop row -o run.toml
"""
_CONVERT_HELP = """Write text or Parquet files as one Parquet file, with the columns of other files joined to each row.

A joined file must have one column in common with what is there before it, with each value once in it. All rows of the
first file stay, in their order; the columns of a row without a partner are missing. Joined files may be larger than the
memory: their rows are on disk meanwhile.

  embershard data convert clicks.csv -o clicks.parquet
  embershard data convert ratings.csv --join users.csv --join items.csv -o all.parquet
  embershard data convert u.data --columns user,item,rating,time --join u.user:user,age,job -o all.parquet
"""
_VALIDATE_HELP = """Read every row of a data set, without training: count bad rows by reason, show what columns hold.

Exit codes: 0 when training would read all of it, 1 when it would stop, 2 for wrong usage, settings or files.
  embershard data validate --config run.toml
  embershard data validate /data/criteo --set data.bad_rows=0.001
"""
_EVENTS_HELP = """Make samples of a log of events: a window of a user's history, and the item that came next (label 1)
or one of a random event (label 0). Each user's last event is held out.

FILE is CSV without a header: user,item,category,behaviour,time (Alibaba's UserBehavior.csv), times in seconds since
1970, or in milliseconds; or JSON lines or Parquet with columns of these names. Written are train.parquet, eval.parquet
and run.toml, which trains a DIN on them.

  embershard data events UserBehavior.csv -o windows
  embershard train --config windows/run.toml
"""
_SESSIONS_HELP = """Generate a log of events, to try models of sequences: users with favourite categories that drift, in
sessions of one interest each.

  embershard data sessions -o log.csv --users 20000
  embershard data events log.csv -o windows
"""
_IDS_HELP = """Start a run with tables of ids from one whose tables have hashed rows.

Each id of the new run's samples, the most frequent ones first, gets a row, with the weights and optimizer states of the
row that it was hashed onto. Rows that ids without one share begin with the mean of the old table. The rest of the model
is copied. See docs/ids.md.

  embershard data ids runs/hashed --config ids.toml -o runs/ids
  embershard train --config ids.toml --run-dir runs/ids --resume
"""
_EVENT_LOGS = "embershard.extras.event_logs.commands"


def main(argv: Sequence[str]) -> int:
    """Run `embershard data`; return the exit code.

    Raises:
        EmbershardError: the settings are wrong, or a file cannot be opened, read or written.
    """
    arguments = parser().parse_args(argv)
    code: int = named(arguments.run)(arguments)
    return code


def parser() -> argparse.ArgumentParser:
    """Return the parser of the actions."""
    found = make_parser("data", _HELP)
    actions = found.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_inspect(actions)
    _add_convert(actions)
    text = "read all rows, and say what training would do with them"
    action = add_action(actions, "validate", text, _VALIDATE_HELP, run="embershard.commands.data.scan:validate")
    action.add_argument("data", nargs="?", metavar="DATA", help="file or folder; default: that of the settings")
    add_settings(action)
    action.add_argument("--workers", type=positive, metavar="N", help="threads that parse (default: cores)")
    _add_events(actions)
    text = "start a run with tables of ids from one with hashed rows"
    action = add_action(actions, "ids", text, _IDS_HELP, run="embershard.commands.data.start_ids:start_ids")
    action.add_argument("run_dir", type=Path, metavar="RUN", help="folder of the run with hashed rows")
    add_settings(action)
    action.add_argument("-o", dest="output", type=Path, required=True, metavar="DIR", help="folder of the new run")
    action.add_argument("--step", type=step_or_last, metavar="N|last", help="as `embershard export` takes it")
    return found


def _add_inspect(actions: Any) -> None:
    text = "look at the columns of files, and write a run's settings for them"
    action = add_action(actions, "inspect", text, _INSPECT_HELP, run="embershard.extras.judging.inspect_files:inspect")
    action.add_argument("data", type=Path, metavar="FILE_OR_FOLDER", help="CSV, TSV, JSON lines or Parquet")
    action.add_argument("-o", dest="output", type=Path, metavar="FILE", help="TOML file for the settings")
    add_choices(action)


def add_choices(action: argparse.ArgumentParser, *, is_brief: bool = False) -> None:
    """Add the arguments that say what columns are, and how text files are to be read.

    Args:
        is_brief: the help shows `--label` alone.
    """
    shown = (lambda _: argparse.SUPPRESS) if is_brief else str
    text, metavar = "of data: the column to predict", "COL[=TEXT]"
    if not is_brief:
        text = (
            "column to predict (default: the one that looks like it); a label is 1 where its cell is yes, or at least 4"
        )
        metavar = "COL[=yes|>=4]"
    action.add_argument("--label", action=_OneLabel, metavar=metavar, help=text)
    text = "a column of results known before the label: others are left out; may be repeated"
    action.add_argument("--feature", action="append", default=[], metavar="COL", help=shown(text))
    for kind, metavar, text in (
        ("category", "COL,...", "columns that are categories, whatever they look like; 'C*' is all that begin with C"),
        ("number", "COL,...", "columns that are numbers"),
        ("list", "COL[:SEP]", "a column whose cells have several values, with SEP between; [,] for lists in brackets"),
        ("time", "COL[:FORMAT]", "a column of times, as strptime's %%d.%%m.%%Y, or ms since 1970"),
        ("drop", "COL,...", "columns that are no features"),
    ):
        help_text = shown(f"{text}; may be repeated")
        action.add_argument(f"--{kind}", action="append", default=[], metavar=metavar, help=help_text)
    text = "settings may leave up to this share of the rows out that cannot be read (default: %(default)s)"
    action.add_argument("--bad-rows", type=_share, default=0.05, metavar="SHARE", help=shown(text))
    _add_form(action, shown)


def choice_words(arguments: argparse.Namespace) -> list[str]:
    """Return the words of a command with the same options of `add_choices`.

    >>> given = ["inspect", "a.csv", "--label", "sold=yes", "--drop", "row", "--drop", "id", "--header"]
    >>> choice_words(parser().parse_args(given))
    ['--label', 'sold=yes', '--drop', 'row', '--drop', 'id', '--header']
    """
    own = argparse.ArgumentParser(add_help=False)
    add_choices(own)
    words: list[str] = []
    for name, default in vars(own.parse_args([])).items():
        value, option = getattr(arguments, name), f"--{name.replace('_', '-')}"
        if value == default:
            continue
        values = value if isinstance(value, list) else [value]
        words += [option] if value is True else [word for each in values for word in (option, str(each))]
    return words


class _OneLabel(argparse.Action):
    """Stores the label, and refuses a second one, which would become a feature."""

    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[no-untyped-def]
        before = getattr(namespace, self.dest)
        if before is not None:
            parser.error(
                f"got --label {before} and --label {values}; give one. For several, write label = "
                f'["{before}", "{values}"] in the TOML file, and leave {values} out of its features'
            )
        setattr(namespace, self.dest, values)


def _add_convert(actions: Any) -> None:
    text = "write text files as Parquet, with other files joined to them"
    action = add_action(actions, "convert", text, _CONVERT_HELP, run="embershard.extras.convert:convert")
    action.add_argument("data", type=Path, metavar="FILE_OR_FOLDER", help="CSV, TSV, JSON lines or Parquet")
    action.add_argument("-o", dest="output", type=Path, required=True, metavar="FILE", help="the new Parquet file")
    text = "a file to join, with the names of its columns if it has no header; may be repeated"
    action.add_argument("--join", action="append", default=[], metavar="FILE[:NAME,...]", help=text)
    text = "rows of a row group (default: %(default)s)"
    action.add_argument("--rows", type=positive, default=100_000, metavar="N", help=text)
    action.add_argument(
        "--bad-rows",
        type=lambda text: text if text == "stop" else _share(text, '"stop", or '),
        default="stop",
        metavar="stop|SHARE",
        help="leave rows out, up to this share, that are none or have a cell of another type, and list them in "
        "FILE.bad_rows.jsonl (default: %(default)s)",
    )
    _add_form(action)


def _share(text: str, needed: str = "") -> float:
    with suppress(ValueError):
        if 0 < float(text) < 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"got {text}; needed {needed}a share in (0, 1), for instance 0.001")


def _encoding(text: str) -> str:
    if not is_encoding(text):
        raise argparse.ArgumentTypeError(f'got {text}; needed an encoding, for instance "latin-1"')
    return text


def _add_form(action: argparse.ArgumentParser, shown: Callable[[str], str] = str) -> None:
    """Add the arguments that say how text files are to be read."""
    header = action.add_mutually_exclusive_group()
    text = "names of the columns of text files without a header"
    header.add_argument("--columns", metavar="NAME,...", help=shown(text))
    text = "the first line names the columns, whatever it looks like"
    header.add_argument("--header", action="store_true", help=shown(text))
    text = "of a folder, the files whose names fit, as 'part*' (default: what looks like data); may be repeated"
    action.add_argument("--files", action="append", default=[], metavar="PATTERN", help=shown(text))
    text = "between the cells of a line (default: what fits most lines)"
    action.add_argument("--separator", metavar="TEXT", help=shown(text))
    text = "of text files (default: UTF-8, or UTF-16 if it is)"
    action.add_argument("--encoding", type=_encoding, help=shown(text))
    text = "lines before the header, or before the first row (default: those of another number of cells)"
    action.add_argument("--skip-lines", type=whole, metavar="N", help=shown(text))
    text = "a cell that is a missing value; may be repeated"
    action.add_argument("--null", action="append", default=[], metavar="TEXT", help=shown(text))
    quotes = action.add_mutually_exclusive_group()
    quotes.add_argument("--no-quotes", action="store_true", help=shown("quotes in text files are text"))
    quotes.add_argument("--line-breaks", action="store_true", help=shown("cells in quotes have line breaks in them"))


def _add_events(actions: Any) -> None:
    text = "make samples of a log of events: histories, and what came next"
    action = add_action(actions, "events", text, _EVENTS_HELP, run=f"{_EVENT_LOGS}:events")
    action.add_argument("log", type=Path, metavar="FILE", help="the log, plain or gzip")
    action.add_argument("-o", dest="output", type=Path, required=True, metavar="DIR", help="the new folder")
    action.add_argument("--history", type=positive, default=50, metavar="N", help="most events of a history (50)")
    action.add_argument("--negatives", type=whole, default=1, metavar="N", help="samples with another item, each (1)")
    action.add_argument("--seed", type=whole, default=0, metavar="N", help="of the other items (0)")

    action = add_action(
        actions,
        "sessions",
        "generate a log of events",
        _SESSIONS_HELP,
        run=f"{_EVENT_LOGS}:sessions",
    )
    action.add_argument("-o", dest="output", type=Path, required=True, metavar="FILE", help="the log to write")
    action.add_argument("--users", type=positive, default=10_000, metavar="N", help="users (10000)")
    action.add_argument("--items", type=positive, default=5_000, metavar="N", help="items (5000)")
    action.add_argument("--categories", type=positive, default=50, metavar="N", help="categories (50)")
    text = "of the sessions begin with a new favourite (0.1)"
    action.add_argument("--drift", type=float, default=0.1, metavar="SHARE", help=text)
    action.add_argument("--seed", type=whole, default=0, metavar="N", help="of everything (0)")
