"""Files and folders that the system does not let a command read or write."""

import bz2
import functools
import os
from pathlib import Path
from typing import Any
from unittest import mock

from tests.unit.troubleshooting.case import Case, Outcome, Prepare, Provoke, command, rank

TITLE = "Files and folders"
_FORBIDDEN = "Permission denied. Change its permissions, or choose another path."
_FULL = "No space left on device. The disk is full: free some space, or choose another disk."
_CHANGE = "Change the permissions (`ls -l` shows them), or use another path."
_TINY = """
[data.synthetic]
num_samples = 300
scale = 0.0001
[model]
embedding_dim = 4
dense_arch_layer_sizes = [8, 4]
over_arch_layer_sizes = [8, 1]
[train]
batch_size = 10
max_steps = 2
log_every = 1
device = "cpu"
"""
_FILES = {"run.toml": _TINY}
_PROFILE = ("profile", "--config", "run.toml", "--workers", "1")


def _forbid(*names: str, mode: int = 0) -> Prepare:
    return functools.partial(_chmod, names, mode)


def _chmod(names: tuple[str, ...], mode: int) -> None:
    for name in names:
        Path(name).chmod(mode)


def _read_only_folder() -> None:
    Path("kept").mkdir(mode=0o555)


def _full_disk() -> None:
    Path("full").symlink_to("/dev/full")


def _full_run() -> None:
    Path("mine").mkdir()
    Path("mine/config.toml.partial").symlink_to("/dev/full")  # it gets its name when it is whole


def _without_copies(provoke: Provoke) -> Provoke:
    def run() -> Outcome:
        with mock.patch.dict(os.environ, EMBERSHARD_COPIES="kept/copies"):
            return provoke()

    return run


_TABLE = """
[data]
kind = "table"
path = "clicks.csv.bz2"
[data.table]
label = "click"
features.user = {kind = "sparse", mapping = "text", num_rows = 9}
"""
_PACKED = {"run.toml": _TABLE, "clicks.csv.bz2": bz2.compress(b"click,user\n0,a\n1,b\n")}


def _case(cause: str, words: tuple[str, ...], message: str, remedy: str, **given: Any) -> Case:
    return Case(cause, command(*words, **given), f"embershard: {message}", remedy)


CASES = [
    _case(
        "The settings file cannot be read",
        ("train", "--config", "run.toml"),
        "run.toml: cannot be read (Permission denied). Give an existing file.",
        _CHANGE,
        files=_FILES,
        prepare=_forbid("run.toml"),
    ),
    _case(
        "A folder is given as the settings file",
        ("train", "--config", "."),
        ".: cannot be read (Is a directory). Give an existing file.",
        "Give the file, not its folder.",
    ),
    _case(
        "The data cannot be read",
        ("data", "validate", "logs"),
        f"logs/day_0: {_FORBIDDEN}",
        _CHANGE,
        files={"logs/day_0": "x"},
        prepare=_forbid("logs/day_0"),
    ),
    _case(
        "The folder of the data cannot be read",
        ("data", "validate", "logs"),
        f"logs: {_FORBIDDEN}",
        _CHANGE,
        files={"logs/day_0": "x"},
        prepare=_forbid("logs"),
    ),
    _case(
        "An output cannot be written: its folder may only be read",
        (*_PROFILE, "-o", "kept/profile.npz"),
        f"kept/profile.npz: {_FORBIDDEN}",
        _CHANGE,
        files=_FILES,
        prepare=_read_only_folder,
    ),
    _case(
        "An output cannot be written: the disk is full",
        (*_PROFILE, "-o", "full"),
        f"full: {_FULL}",
        "Free some space, or write to another disk. What was there before may be gone.",
        files=_FILES,
        prepare=_full_disk,
    ),
    Case(
        "A compressed file is read from a copy as plain text, and the folder of copies may only be read",
        _without_copies(command("data", "validate", "--config", "run.toml", files=_PACKED, prepare=_read_only_folder)),
        "embershard: clicks.csv.bz2 is read from a copy as plain text, which cannot be written: <path>: "
        f"{_FORBIDDEN} The folder of such copies is kept/copies; set EMBERSHARD_COPIES to one on a disk with room.",
        "`export EMBERSHARD_COPIES=FOLDER` on a disk with as much room as the text. See [own_data.md](own_data.md).",
    ),
    _case(
        "A profile cannot be read",
        ("profile", "show", "profile.npz"),
        f"profile.npz: {_FORBIDDEN}",
        _CHANGE,
        files={"profile.npz": ""},
        prepare=_forbid("profile.npz"),
    ),
    _case(
        "A plan cannot be read",
        ("train", "--config", "run.toml", "--plan", "plan.json"),
        "plan.json: cannot be read (Permission denied). Give a file that embershard plan wrote.",
        _CHANGE,
        files={**_FILES, "plan.json": "{}"},
        prepare=_forbid("plan.json"),
    ),
    _case(
        "The folder of a run is not there, or its run has not ended",
        ("report", "nowhere"),
        "nowhere/result.json: not found; there is no such folder. Give the folder of a run that ended.",
        "Check the path; wait for the end of the run.",
    ),
    _case(
        "The folder of a run cannot be read",
        ("report", "mine"),
        f"mine/result.json: {_FORBIDDEN}",
        _CHANGE,
        files={"mine/result.json": "{}"},
        prepare=_forbid("mine"),
    ),
    _case(
        "The folder of checkpoints cannot be read",
        ("ckpt", "ls", "mine"),
        f"mine/checkpoints: {_FORBIDDEN}",
        _CHANGE,
        files={"mine/checkpoints/step_1/x": ""},
        prepare=_forbid("mine"),
    ),
    Case(
        "The folder of the run may only be read",
        rank("--config", "run.toml", "--run-dir", "kept", files=_FILES, prepare=_read_only_folder),
        "[rank<number>]: ConfigError: kept cannot be written (Permission denied). Use another --run-dir.",
        _CHANGE,
        code=1,
    ),
    Case(
        "A file of the run cannot be written: the disk is full",
        rank("--config", "run.toml", "--run-dir", "mine", files=_FILES, prepare=_full_run),
        f"[rank<number>]: OSError: mine/config.toml: {_FULL}",
        "Free some space, then go on with `--resume`.",
        code=1,
    ),
]
