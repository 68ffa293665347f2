"""All exceptions that embershard raises on purpose, and one line about those of the operating system.

::

    EmbershardError
    ├── ConfigError (ValueError)            a setting is wrong, missing, or has no effect
    ├── DataError (ValueError)              the input is malformed: file, row and column are named
    │   ├── IdOutOfRangeError (IndexError)  an id is not a row of its table
    │   └── NoRowsError                     a file has no rows
    ├── CacheError (RuntimeError)           the cache cannot do what was asked
    │   └── CacheOverflowError              one batch needs more rows than there are slots
    ├── ShardingError (ValueError)          a plan cannot be made, or does not fit the model
    ├── StepError (RuntimeError)            a rank left a training step that the others are in
    ├── NotFiniteError (ArithmeticError)    a loss or a parameter is NaN or infinite
    ├── CheckpointError (RuntimeError)      a checkpoint is missing, or belongs to another model
    │   ├── InvalidCheckpointError          it is damaged, incomplete, or cannot be verified
    │   └── FailedSaveError                 it could not be written: a full disk, a folder that cannot be written
    ├── FailedPublicationError (RuntimeError)  the last state of a run could not be published
    └── SetupError (RuntimeError)           versions, devices or process groups do not fit together

A message names what it got, what it needed, and how to fix it.

>>> issubclass(IdOutOfRangeError, IndexError)
True
"""

from __future__ import annotations

import difflib
import errno
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class EmbershardError(Exception):
    """Base of all errors that embershard raises on purpose.

    Attributes:
        is_shown_elsewhere: another rank raised it with the same message, and shows it.
    """

    is_shown_elsewhere = False


class ConfigError(EmbershardError, ValueError):
    """A setting is wrong, missing, contradicts another one, or would have no effect."""


class DataError(EmbershardError, ValueError):
    """The input data are malformed."""


class IdOutOfRangeError(DataError, IndexError):
    """A sparse id is negative, or not smaller than its table's number of rows."""


class NoRowsError(DataError):
    """A file has no rows."""


class CacheError(EmbershardError, RuntimeError):
    """The cache cannot do what was asked of it."""


class CacheOverflowError(CacheError):
    """One batch needs more rows at a time than the cache has slots, and `overflow="raise"`."""


class ShardingError(EmbershardError, ValueError):
    """A sharding plan cannot be made, or does not fit the model."""


class StepError(EmbershardError, RuntimeError):
    """A rank left a training step that the other ranks are in."""


class NotFiniteError(EmbershardError, ArithmeticError):
    """A rank's loss, or a dense parameter, is NaN or infinite."""


class CheckpointError(EmbershardError, RuntimeError):
    """A checkpoint is missing, or was written by a model of another shape."""


class InvalidCheckpointError(CheckpointError):
    """A checkpoint is damaged, incomplete, or cannot be verified. An older one may be valid."""


class FailedSaveError(CheckpointError):
    """A checkpoint could not be written. Earlier ones are as they were."""


class FailedPublicationError(EmbershardError, RuntimeError):
    """The last state of a run could not be published: replicas have an earlier one. The run itself is whole."""


class SetupError(EmbershardError, RuntimeError):
    """Versions, devices or process groups do not fit together."""


_REMEDIES = {
    errno.ENOENT: "Check the path; a relative one starts from the current folder",
    errno.EACCES: "Change its permissions, or choose another path",
    errno.EPERM: "Change its permissions, or choose another path",
    errno.EROFS: "Choose a path on a disk that can be written",
    errno.EISDIR: "Give a file, not a folder",
    errno.ENOTDIR: "A part of the path is a file; check the path",
    errno.EEXIST: "Choose a path where nothing is",
    errno.ENOSPC: "The disk is full: free some space, or choose another disk",
    errno.EDQUOT: "The quota is used up: free some space, or choose another disk",
    errno.EMFILE: "Raise the limit of open files: ulimit -n",
    errno.ENAMETOOLONG: "Choose a shorter path",
    errno.EIO: "The disk or its connection fails: look at the system's log",
}


def os_problem(error: OSError, path: Path | str | None = None) -> str:
    """Return one line about an error of the operating system: the path, what happened, and what to do.

    >>> os_problem(FileNotFoundError(2, "No such file or directory", "run.toml"))
    'run.toml: No such file or directory. Check the path; a relative one starts from the current folder.'

    Args:
        path: where the error does not name one.
    """
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
    where = " -> ".join(names) or (str(path) if path is not None else "")
    near = near_file(Path(where)) if error.errno == errno.ENOENT and len(names) < 2 else ""
    what = error.strerror or str(error) or type(error).__name__
    remedy = _REMEDIES.get(error.errno or 0)
    return " ".join(f"{where}{': ' if where else ''}{what}.{f' {remedy}.' if remedy else ''}{near[1:]}".split())


def did_you_mean(word: str, known: Iterable[str], *, end: str = "", least: float = 0.6) -> str:
    """Return a question about a word that is not known, to stand behind a message; `end` where nothing comes close.

    >>> did_you_mean("trian", ["train", "plan"])
    '. Did you mean train?'

    Args:
        least: how close a known word must come, at most 1.
    """
    near = difflib.get_close_matches(word, list(known), n=2, cutoff=least)
    return f". Did you mean {' or '.join(near)}?" if near else end


_MOST_NAMES = 10_000  # of a folder, that are compared


def near_file(path: Path) -> str:
    """Return a question as `did_you_mean`, with what stands beside a file that is not there and has almost its name."""
    try:
        with os.scandir(path.parent) as found:
            names = [each.name for each in itertools.islice(found, _MOST_NAMES)]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return str(printable(f". Did you mean {path.parent / near[0]}?")) if near else ""


def printable(value: Any) -> Any:
    r"""Return a text with what is no UTF-8 escaped, as a byte of a file's name; such texts in a tuple, too; and other
    values as they are.

    >>> printable("a\udcff.parquet")
    'a\\xff.parquet'
    """
    if isinstance(value, tuple):
        return tuple(map(printable, value))
    if not isinstance(value, str):
        return value
    shown = value.encode("utf-8", "backslashreplace").decode()
    return re.sub(r"\\udc([89a-f][0-9a-f])", r"\\x\1", shown) if shown != value else value


@contextmanager
def naming_file(path: Path | str) -> Iterator[None]:
    """Give an `OSError` the name of the file, which it lacks where a write fails: on a full disk, for instance.

    >>> with naming_file("out.json"):
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
    OSError: [Errno 28] No space left on device: 'out.json'
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
