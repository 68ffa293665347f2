"""`embershard train FILE.csv`: looks at data as `embershard data inspect` does, and trains on what that suggests."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from pathlib import Path

from embershard.commands.data.command import choice_words
from embershard.data.config import DATA_FILES
from embershard.data.sources.folder import Listing, fits
from embershard.errors import ConfigError
from embershard.launch.run_dir import check_run_dir, default_run_dir
from embershard.lazy_names import named

#: Of files that are data, besides those of `data.table.files`.
_MORE_DATA = ("*.json", "*.jsonl", "*.dat", "*.data", "*.rating", "*.zst", "*.bz2", "*.xz", "*.zip")
#: Files that no command reads, and of which `data inspect` says what reads them.
_OTHERS_DATA = ("*.xls", "*.xlsx", "*.ods", "*.avro", "*.orc", "*.feather", "*.tfrecord", "*.tar", "*.tgz", "*.libsvm")
_WRITTEN = "inspected.toml"


def is_data(path: Path | None) -> bool:
    """Return whether a path is a file of data, and not of settings; or a folder of what may be data."""
    if path is None or not path.exists():
        return False
    if path.is_dir():
        found = Listing.of(path, DATA_FILES, "table")
        return bool(found.files or found.left_out) and not (path / "config.toml").exists()
    return fits(path.name, (*DATA_FILES, *_MORE_DATA, *_OTHERS_DATA))


def check_no_choices(arguments: argparse.Namespace) -> None:
    """Raise `ConfigError` where options say what columns are, and settings are given, which say that themselves."""
    if words := choice_words(arguments):
        raise ConfigError(
            f"{words[0]} is of data, and {arguments.config} has settings: say it by them (embershard settings "
            "data.table), or give the data in place of the settings."
        )


def with_settings(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments of a training with settings in place of data: those that `embershard data inspect` writes,
    with the same options, which are shown, and kept in the run's folder.

    Raises:
        ConfigError, DataError: as `embershard data inspect`; or a run that is resumed began with other options.
    """
    from embershard.launch.screen import plain_console, say

    inspected = named("embershard.extras.judging.inspect_files:Inspected")
    data: Path = arguments.config
    changed = vars(arguments) | {"run_dir": arguments.run_dir or default_run_dir(data)}
    is_new, is_dry = arguments.resume is None, arguments.dry_run
    folder = Path(tempfile.mkdtemp()) if is_new and is_dry else changed["run_dir"]
    written = folder / _WRITTEN
    inspect = argparse.Namespace(**changed | {"data": data, "label": arguments.label or _label_set(arguments)})
    command = f"embershard data inspect {shlex.join([str(data), *choice_words(inspect)])}"
    if is_new or not written.exists():
        check_run_dir(changed["run_dir"], resume=not is_new or is_dry)
        found = inspected.of(inspect, needs_label=True)
        found.check_bad_rows(arguments.bad_rows)
        text = found.settings()
        folder.mkdir(parents=True, exist_ok=True)
        written.write_text(f"# {command}\n{text}", encoding="utf-8")
        if arguments.log_format == "text":  # a program reads JSON alone
            found.show_uses()
            say(plain_console(), f"Assumed, and kept in {written}. Options change it: embershard data inspect --help")
    elif choice_words(arguments) and f"# {command}\n" not in written.read_text(encoding="utf-8"):
        raise ConfigError(
            f"{choice_words(arguments)[0]}: the run began with other options of columns, which are in the first line "
            f"of {written}. Leave them out to go on; for others, begin a run in a new --run-dir."
        )
    return argparse.Namespace(**changed | {"config": written})


def _label_set(arguments: argparse.Namespace) -> str | None:
    """Return the label that `--set` names, as `--label` does."""
    given = dict(override.split("=", 1) for override in arguments.overrides if "=" in override)
    label, text, least = (given.get(f"data.table.{name}") for name in ("label", "label_is", "label_at_least"))
    if label is None:
        return None
    label = label.strip("\"'")
    return f"{label}={text}" if text else f"{label}>={least}" if least else label
