"""`embershard data events`, which makes windows to train on of a log of events; and `sessions`, which generates such a
log."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from embershard.errors import naming_file
from embershard.extras.event_logs.sessions import SessionOptions, session_log
from embershard.extras.event_logs.windows import DENSE, SPARSE, WindowOptions, Windows, write_windows
from embershard.launch.arguments import as_called, check_new_folder
from embershard.launch.screen import plain_console, say
from embershard.settings.decoding import to_toml
from embershard.whole_file import whole_file, whole_folder

_EVENTS_NOTE = """# Samples that `embershard data events` made of {log}: {train:,} to train on, {eval:,} held out.
# model.arch = "tbsm" is the other model with attention over the history; "dlrm" takes it as bags (then without target
# and history). `embershard settings` explains every setting. Train on them:
#   embershard train --config {file}

"""


def events(arguments: argparse.Namespace) -> int:
    """Run `embershard data events`; return 0.

    Raises:
        EmbershardError: a file cannot be read or written, or the log is none of events.
    """
    folder: Path = arguments.output
    options = WindowOptions(arguments.history, arguments.negatives, arguments.seed)
    check_new_folder(folder)
    with whole_folder(folder) as partial:
        windows = write_windows(arguments.log, partial, options)
        with naming_file(folder):
            (partial / "run.toml").write_text(_settings(arguments.log, folder, windows), encoding="utf-8")
    say(
        plain_console(),
        f"{windows.num_events:,} events of {windows.num_users:,} users: {windows.num_train:,} samples to train on, "
        f"{windows.num_eval:,} held out, in {folder}."
        + (f" The log's times are in {windows.time_unit}." if windows.time_unit != "seconds" else ""),
        f"Train on them: embershard train --config {shlex.quote(str(folder / 'run.toml'))}",
    )
    return 0


def _settings(log: Path, folder: Path, windows: Windows) -> str:
    sparse = list(SPARSE)
    data = {
        "kind": "parquet",
        "path": str(folder.absolute() / "train.parquet"),
        "eval_path": str(folder.absolute() / "eval.parquet"),
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
    file = shlex.quote(str(folder / "run.toml"))
    note = as_called(_EVENTS_NOTE.format(log=log.name, train=windows.num_train, eval=windows.num_eval, file=file))
    return note + to_toml({"data": data, "model": model, **rest})


def sessions(arguments: argparse.Namespace) -> int:
    """Run `embershard data sessions`; return 0.

    Raises:
        EmbershardError: an option is out of its range, or the file cannot be written.
    """
    options = SessionOptions(
        arguments.users, arguments.items, arguments.categories, drift=arguments.drift, seed=arguments.seed
    )
    with whole_file(arguments.output) as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(session_log(options))
    say(plain_console(), f"{arguments.output}: the events of {arguments.users:,} users.")
    return 0
