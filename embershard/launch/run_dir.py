"""The folder of a run: its default name, whether a run may use it, and its lock."""

from __future__ import annotations

import fcntl
import os
import re
from datetime import datetime
from pathlib import Path
from typing import TextIO

import psutil

from embershard.errors import ConfigError, naming_file
from embershard.settings.files import holds_run

_NO_ID = "none"  # torchrun's default
_RESUMED_BY = ".resumed_by"
_held_locks: list[TextIO] = []  # open for as long as the process lives


def default_run_dir(config: Path) -> Path:
    """Return `runs/<name of the config>-<time>`; under torchrun, its run id in place of the time: a restart must find
    the folder again.

    Raises:
        ConfigError: torchrun may restart the run, and gave it no identifier.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", _NO_ID)
    if run_id != _NO_ID:
        return Path("runs") / f"{config.stem}-{re.sub(r'[^A-Za-z0-9_-]', '_', run_id)}"
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise ConfigError(
            "torchrun may restart this run, which would then begin anew in another folder. Give --run-dir, or give "
            "torchrun --rdzv-id."
        )
    return Path("runs") / f"{config.stem}-{datetime.now():%Y%m%d-%H%M%S}"


def check_run_dir(folder: Path, *, resume: bool) -> None:
    """Raise `ConfigError` when `folder` holds a run, or its checkpoints, that the new one does not resume."""
    if not resume and holds_run(folder):
        raise ConfigError(f"{folder} holds a run already. Use another --run-dir, or --resume to continue it.")


def note_resume(folder: Path) -> None:
    """Note in `folder` that this torchrun job resumed it: newer checkpoints than the chosen one are its own now."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with naming_file(folder / _RESUMED_BY):
            (folder / _RESUMED_BY).write_text(_torchrun_job())


def was_resumed_by_this_job(folder: Path) -> bool:
    """Return whether `note_resume` was called before torchrun restarted the ranks.

    Where it does not know, as when the first rank is on another node now, it returns False.
    """
    try:
        return (folder / _RESUMED_BY).read_text() == _torchrun_job()
    except OSError:
        return False


def _torchrun_job() -> str:
    """Return what no other job is called: torchrun's process, which all restarts on a node have in common."""
    torchrun = psutil.Process(os.getppid())
    return f"{os.uname().nodename} {torchrun.pid} {torchrun.create_time()}"


def lock_run_dir(folder: Path, option: str = "--run-dir") -> None:
    """Reserve `folder` for this process until it ends; messages name the `option` that chose it.

    Raises:
        ConfigError: another process writes into the folder, or this one cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error.strerror}). Use another {option}.") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(
            f"{folder} is in use by another run. Wait for it, stop it, or use another {option}."
        ) from error
    _held_locks.append(file)
