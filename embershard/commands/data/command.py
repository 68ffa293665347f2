"""`embershard data`: its actions.

Here are `validate`, which says what training would do with a data set; `events`, which makes windows to train on of a
log of events; and `sessions`, which generates such a log. `ids` is in start_ids.py, `yambda` in yambda.py.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embershard.commands.data.columns import add_convert, add_inspect
from embershard.commands.data.start_ids import add_ids
from embershard.commands.data.yambda import add_yambda, new_folder
from embershard.errors import ConfigError, naming_file
from embershard.launch.arguments import add_settings, help_parts, make_parser, positive, whole
from embershard.launch.screen import make_table, plain_console, progress_bar, say, wide_console
from embershard.settings.decoding import to_toml
from embershard.whole_file import whole_file

if TYPE_CHECKING:  # it loads torch, and --help must answer at once
    from embershard.commands.data.scan import DataScan
    from embershard.data.sources.events import Windows


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
    from embershard.commands.data.scan import scan_data, verdict
    from embershard.commands.profile.command import run_config
    from embershard.data import open_source
    from embershard.data.sources.source import FileSource

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
    from embershard.commands.data.scan import reasons_of

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
    add_settings(action)
    action.add_argument("--workers", type=positive, metavar="N", help="threads that parse (default: cores)")
    action.set_defaults(run=validate)
    add_events(actions)
    add_yambda(actions)
    add_ids(actions)
    return parser


_EVENTS_HELP = """Make samples of a log of events: a window of a user's history, and the item that came next (label 1)
or one of a random event (label 0). Each user's last event is held out.

FILE is CSV without a header: user,item,category,behaviour,time (Alibaba's UserBehavior.csv). Written are train.parquet,
eval.parquet and run.toml, which trains a DIN on them.

  embershard data events UserBehavior.csv -o windows
  embershard train --config windows/run.toml
"""
_SESSIONS_HELP = """Generate a log of events, to try models of sequences: users with favourite categories that drift, in
sessions of one interest each.

  embershard data sessions -o log.csv --users 20000
  embershard data events log.csv -o windows
"""
_EVENTS_NOTE = """# Samples that `embershard data events` made of {log}: {train:,} to train on, {eval:,} held out.
# model.arch = "tbsm" is the other model with attention over the history; "dlrm" takes it as bags (then without target
# and history). `embershard train --help` explains every setting.

"""


def add_events(actions: Any) -> None:
    """Add both actions to `embershard data`."""
    text = "make samples of a log of events: histories, and what came next"
    action = actions.add_parser("events", help=text, **help_parts(_EVENTS_HELP))
    action.add_argument("log", type=Path, metavar="FILE", help="the log, plain or gzip")
    action.add_argument("-o", dest="output", type=Path, required=True, metavar="DIR", help="the new folder")
    action.add_argument("--history", type=positive, default=50, metavar="N", help="most events of a history (50)")
    action.add_argument("--negatives", type=whole, default=1, metavar="N", help="samples with another item, each (1)")
    action.add_argument("--seed", type=whole, default=0, metavar="N", help="of the other items (0)")
    action.set_defaults(run=events)

    action = actions.add_parser("sessions", help="generate a log of events", **help_parts(_SESSIONS_HELP))
    action.add_argument("-o", dest="output", type=Path, required=True, metavar="FILE", help="the log to write")
    action.add_argument("--users", type=positive, default=10_000, metavar="N", help="users (10000)")
    action.add_argument("--items", type=positive, default=5_000, metavar="N", help="items (5000)")
    action.add_argument("--categories", type=positive, default=50, metavar="N", help="categories (50)")
    action.add_argument(
        "--drift", type=float, default=0.1, metavar="SHARE", help="of the sessions begin with a new favourite (0.1)"
    )
    action.add_argument("--seed", type=whole, default=0, metavar="N", help="of everything (0)")
    action.set_defaults(run=sessions)


def events(arguments: argparse.Namespace) -> int:
    """Run `embershard data events`; return 0.

    Raises:
        EmbershardError: a file cannot be read or written, or the log is none of events.
    """
    from embershard.data.sources.events import WindowOptions, write_windows

    folder: Path = arguments.output
    options = WindowOptions(arguments.history, arguments.negatives, arguments.seed)
    with new_folder(folder) as partial:
        windows = write_windows(arguments.log, partial, options)
        with naming_file(folder):
            (partial / "run.toml").write_text(_settings(arguments.log, folder.absolute(), windows), encoding="utf-8")
    say(
        plain_console(),
        f"{windows.num_events:,} events of {windows.num_users:,} users: {windows.num_train:,} samples to train on, "
        f"{windows.num_eval:,} held out, in {folder}.",
        f"Train on them: embershard train --config {folder / 'run.toml'}",
    )
    return 0


def _settings(log: Path, folder: Path, windows: Windows) -> str:
    from embershard.data.sources.events import DENSE, SPARSE

    sparse = list(SPARSE)
    data = {
        "kind": "parquet",
        "path": str(folder / "train.parquet"),
        "eval_path": str(folder / "eval.parquet"),
        "parquet": {
            "dense": list(DENSE),
            "sparse": sparse,
            "num_rows": [windows.num_rows[name] for name in sparse],
            "id_mapping": windows.id_mapping,
            "dense_transform": "log1p",
        },
    }
    model = {
        "arch": "din",
        "embedding_dim": 16,
        "dense_arch_layer_sizes": [16],
        "over_arch_layer_sizes": [64, 32, 1],
        "target": ["item", "category"],
        "history": ["hist_item", "hist_category"],
    }
    rest = {"cache": {"ratio": 0.2}, "train": {"batch_size": 256, "epochs": 1}}
    note = _EVENTS_NOTE.format(log=log.name, train=windows.num_train, eval=windows.num_eval)
    return note + to_toml({"data": data, "model": model, **rest})


def sessions(arguments: argparse.Namespace) -> int:
    """Run `embershard data sessions`; return 0.

    Raises:
        EmbershardError: an option is out of its range, or the file cannot be written.
    """
    from embershard.data.sources.sessions import SessionOptions, session_log

    options = SessionOptions(
        arguments.users, arguments.items, arguments.categories, drift=arguments.drift, seed=arguments.seed
    )
    with whole_file(arguments.output) as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(session_log(options))
    say(plain_console(), f"{arguments.output}: the events of {arguments.users:,} users.")
    return 0
