"""`embershard data`: its actions; and `validate`, which says what training would do with a data set."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from embershard.errors import ConfigError
from embershard.launch.arguments import add_settings, help_parts, make_parser, positive
from embershard.launch.data.convert import add_convert
from embershard.launch.data.events import add_events
from embershard.launch.data.inspect import add_inspect
from embershard.launch.screen import make_table, plain_console, progress_bar, say, wide_console

if TYPE_CHECKING:  # it loads torch, and --help must answer at once
    from embershard.launch.data.scan import DataScan

_HELP = """Look at data, convert them, and check them before training.

  embershard data inspect clicks.csv -o run.toml
  embershard data convert clicks.csv --join users.csv -o clicks.parquet
  embershard data events UserBehavior.csv -o windows
  embershard data validate --config run.toml
"""
_VALIDATE_HELP = """Read every row of a data set, without training: count bad rows by reason, show what columns hold.

Exit codes: 0 when training would read all of it, 1 when it would stop, 2 for wrong usage, settings or files.
  embershard data validate --config run.toml
  embershard data validate /data/criteo --set data.bad_rows=0.001
"""


def main(argv: Sequence[str]) -> int:
    """Run `embershard data`; return the exit code.

    Raises:
        EmbershardError: the settings are wrong, or a file cannot be opened.
    """
    arguments = _parser().parse_args(argv)
    code: int = arguments.run(arguments)
    return code


def validate(arguments: argparse.Namespace) -> int:
    """Run `embershard data validate`; return the exit code.

    Raises:
        ConfigError: there is nothing to validate.
    """
    if arguments.data is None and arguments.config is None:
        raise ConfigError("what is to be validated? Give DATA (a file or a folder), or --config.")
    from embershard.data import open_source
    from embershard.data.sources.source import FileSource
    from embershard.launch.data.scan import scan_data, verdict
    from embershard.launch.profile.command import run_config

    config = run_config(
        arguments.data, arguments.config, arguments.overrides, trust_code=True
    ).data  # no model is built
    source, began = open_source(config), time.monotonic()
    if not isinstance(source, FileSource):
        raise ConfigError(f'data.kind = "{config.kind}" reads no file: there is nothing to validate.')
    console = plain_console()
    with progress_bar(console, "chunks") as on_progress:
        found = scan_data(source, arguments.workers or len(os.sched_getaffinity(0)), on_progress)
    seconds, num_rows = time.monotonic() - began, found.num_train + found.num_held_out
    say(
        console,
        f"{num_rows:,} rows in {seconds:.1f} s: {found.num_train:,} to train on, {found.num_held_out:,} held out; "
        f"{found.num_bad:,} bad.",
        *source.notes,
    )
    _show(found)
    say(console, *(f"damaged: {each}" for each in found.damage[:10]))
    goes_on, sentence = verdict(found, config.bad_rows)
    say(console, sentence)
    return 0 if goes_on else 1


def _show(found: DataScan) -> None:
    from embershard.launch.data.scan import reasons_of

    columns = make_table("columns, as the model gets them", ["column"], ["values", "zeros", "least", "largest", "most"])
    for name, column in found.columns.items():
        zeros = f"{column.zeros / column.count:.2%}" if column.count else "n/a"
        columns.add_row(
            name, f"{column.count:,}", zeros, f"{column.least:g}", f"{column.largest:g}", f"{column.most:,}"
        )
    if found.columns:
        wide_console().print(columns)
    if found.num_bad:
        reasons = make_table("bad rows", ["column", "needed", "first"], ["rows"])
        for name, reason, rows, first in reasons_of(found)[:20]:
            reasons.add_row(name, reason, first, f"{rows:,}")
        wide_console().print(reasons)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("data", _HELP)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add_inspect(actions)
    add_convert(actions)
    text = "read all rows, and say what training would do with them"
    action = actions.add_parser("validate", help=text, **help_parts(_VALIDATE_HELP))
    action.add_argument("data", nargs="?", metavar="DATA", help="file or folder; default: that of the settings")
    add_settings(action, required=False)
    action.add_argument("--workers", type=positive, metavar="N", help="threads that parse (default: cores)")
    action.set_defaults(run=validate)
    add_events(actions)
    return parser
