"""Files and folders that get their names when they are complete, and names that outlast a crash."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from embershard.errors import naming_file


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Return a context with another name to write to. At its end the file is synced and gets the name `path`, in place
    of an earlier one; after an exception it is removed.

    >>> with whole_file(Path("out.txt")) as partial:
    ...     _ = partial.write_text("all")
    >>> Path("out.txt").read_text(), partial.exists()
    ('all', False)

    Raises:
        OSError: with a file's name, where a write fails.
    """
    partial = path.with_name(f"{path.name}.partial")
    with naming_file(path):
        try:
            yield partial
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Return a context with another folder to write into. At its end it gets the name `path`; after an exception it is
    removed.

    Raises:
        OSError: with the folder's name, where it cannot be made.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        with naming_file(partial):
            partial.mkdir(exist_ok=True)
        yield partial
        with naming_file(path):
            partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
