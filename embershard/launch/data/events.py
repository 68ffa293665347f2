"""`embershard data events`: windows to train on, of a log of events. `embershard data sessions`: generates a log."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embershard.decoding import to_toml
from embershard.errors import ConfigError, naming_file
from embershard.launch.arguments import help_parts, positive, whole
from embershard.launch.screen import plain_console, say
from embershard.whole_file import whole_file

if TYPE_CHECKING:
    from embershard.data.sources.events import Windows

_EVENTS = """Make samples of a log of events: a window of a user's history, and the item that came next (label 1)
or one of a random event (label 0). Each user's last event is held out.

FILE is CSV without a header: user,item,category,behaviour,time (Alibaba's UserBehavior.csv). Written are train.parquet,
eval.parquet and run.toml, which trains a DIN on them.

  embershard data events UserBehavior.csv -o windows
  embershard train --config windows/run.toml
"""
_SESSIONS = """Generate a log of events, to try models of sequences: users with favourite categories that drift, in
sessions of one interest each.

  embershard data sessions -o log.csv --users 20000
  embershard data events log.csv -o windows
"""
_NOTE = """# Samples that `embershard data events` made of {log}: {train:,} to train on, {eval:,} held out.
# model.arch = "tbsm" is the other model with attention over the history; "dlrm" takes it as bags (then without target
# and history). `embershard train --help` explains every setting.

"""


def add_events(actions: Any) -> None:
    """Add both actions to `embershard data`."""
    text = "make samples of a log of events: histories, and what came next"
    action = actions.add_parser("events", help=text, **help_parts(_EVENTS))
    action.add_argument("log", type=Path, metavar="FILE", help="the log, plain or gzip")
    action.add_argument("-o", dest="output", type=Path, required=True, metavar="DIR", help="the new folder")
    action.add_argument("--history", type=positive, default=50, metavar="N", help="most events of a history (50)")
    action.add_argument("--negatives", type=whole, default=1, metavar="N", help="samples with another item, each (1)")
    action.add_argument("--seed", type=whole, default=0, metavar="N", help="of the other items (0)")
    action.set_defaults(run=events)

    action = actions.add_parser("sessions", help="generate a log of events", **help_parts(_SESSIONS))
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
    folder: Path = arguments.output
    if folder.exists() or not folder.absolute().parent.is_dir():
        problem = "exists" if folder.exists() else "is in a folder that does not exist"
        raise ConfigError(f"{folder} {problem}; give the name of a new folder in a folder that exists.")
    from embershard.data.sources.events import WindowOptions, write_windows

    options = WindowOptions(arguments.history, arguments.negatives, arguments.seed)
    partial = folder.with_name(folder.name + ".partial")
    try:
        with naming_file(partial):
            partial.mkdir(exist_ok=True)
        windows = write_windows(arguments.log, partial, options)
        with naming_file(folder):
            (partial / "run.toml").write_text(_settings(arguments.log, folder.absolute(), windows), encoding="utf-8")
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(
        plain_console(),
        f"{windows.num_events:,} events of {windows.num_users:,} users: {windows.num_train:,} samples to train on, "
        f"{windows.num_eval:,} held out, in {folder}.",
        f"Train on them: embershard train --config {folder / 'run.toml'}",
    )
    return 0


def _settings(log: Path, folder: Path, windows: Windows) -> str:
    """Return the settings of a DIN on the windows, as TOML."""
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
    note = _NOTE.format(log=log.name, train=windows.num_train, eval=windows.num_eval)
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
