"""`embershard train FILE.csv`: looks at data as `embershard data inspect` does, and trains on what that suggests."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from fnmatch import fnmatch
from pathlib import Path

from embershard.data.config import TableConfig
from embershard.errors import ConfigError, DataError
from embershard.launch.run_dir import check_run_dir, default_run_dir

#: Of files that are data, besides those of `data.table.files`.
_MORE_DATA = ("*.json", "*.jsonl", "*.dat", "*.data", "*.rating", "*.zst", "*.bz2", "*.xz", "*.zip")
_WRITTEN = "inspected.toml"


def is_data(path: Path | None) -> bool:
    """Return whether a path is a file of data, or a folder of such files, and not of settings."""
    if path is None or not path.exists():
        return False
    patterns, names = TableConfig().files, [each.name for each in path.iterdir()] if path.is_dir() else [path.name]
    patterns += () if path.is_dir() else _MORE_DATA
    return any(fnmatch(name, pattern) for name in names for pattern in patterns)


def with_settings(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments of a training with settings in place of data: those that `embershard data inspect` writes,
    which are shown, and kept in the run's folder.

    Raises:
        ConfigError, DataError: as `embershard data inspect`, whose options say more of the columns.
    """
    from embershard.commands.data.command import parser  # these load pyarrow
    from embershard.commands.data.inspect_files import Inspected
    from embershard.launch.screen import plain_console, say

    data: Path = arguments.config
    changed = vars(arguments) | {"run_dir": arguments.run_dir or default_run_dir(data)}
    is_new, is_dry = arguments.resume is None, arguments.dry_run
    folder = Path(tempfile.mkdtemp()) if is_new and is_dry else changed["run_dir"]
    written = folder / _WRITTEN
    if is_new or not written.exists():
        check_run_dir(changed["run_dir"], resume=not is_new or is_dry)
        command = f"embershard data inspect {shlex.quote(str(data))}"
        try:
            found = Inspected.of(parser().parse_args(["inspect", str(data)]), needs_label=True)
            text = found.settings()
        except (ConfigError, DataError) as error:
            if isinstance(error, DataError) and " --" not in str(error):  # no option helps
                raise
            then = f"Options of inspect say what columns are; then train on its file: {command} -o run.toml"
            raise type(error)(f"{str(error).rstrip('.')}. {then}") from None
        folder.mkdir(parents=True, exist_ok=True)
        written.write_text(text, encoding="utf-8")
        if arguments.log_format == "text":  # a program reads JSON alone
            found.show_uses()
            say(plain_console(), f"Assumed, and kept in {written}. To change it: {command} --help")
    return argparse.Namespace(**changed | {"config": written})
