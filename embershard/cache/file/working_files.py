"""Files without a name, as working storage of one process: the system frees them with it, however it ends."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from embershard.errors import ConfigError, os_problem
from embershard.units import size

_DIRECT: int = getattr(os, "O_DIRECT", 0)


def check_room(folder: str, num_bytes: int) -> None:
    """Make a folder, and compare the free space of its disk with what is needed.

    Raises:
        ConfigError: the folder cannot be made, or the disk has less.

    >>> check_room(".", 1000)
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cache.host_dir={folder!r} cannot be made: {os_problem(error)}") from error
    free_bytes = shutil.disk_usage(folder).free
    if num_bytes > free_bytes:
        raise ConfigError(
            f"cache.host_dir={folder!r} has {size(free_bytes)} free, {size(num_bytes)} are needed on this rank; choose "
            "another disk, or more ranks"
        )


def open_working_file(folder: str, num_bytes: int) -> int:
    """Return a new file without a name, open to be read and written, whose disk space is taken already: a disk that
    fills up later would end the process, or lose rows.

    Raises:
        ConfigError: the space could not be taken.

    >>> file = open_working_file(".", 4096)
    >>> os.fstat(file).st_size
    4096
    """
    file = None
    try:
        file, path = tempfile.mkstemp(prefix="embershard-", suffix=".rows", dir=folder)
        os.unlink(path)  # before the space is taken, which may take long: a process that is killed leaves nothing
        if num_bytes:
            os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        if file is not None:
            os.close(file)
        raise ConfigError(
            f"cache.host_dir={folder!r}: {size(num_bytes)} could not be taken: {error}. Choose another folder"
        ) from error
    return file


def without_page_cache(file: int) -> tuple[int, bool]:
    """Return the file, opened again so that the system keeps no copies of its pages in memory, and True; itself and
    False where the file system cannot.

    >>> file, is_direct = without_page_cache(open_working_file(".", 4096))
    """
    try:
        direct = os.open(f"/proc/self/fd/{file}", os.O_RDWR | _DIRECT)
    except OSError:
        return file, False
    os.close(file)
    return direct, bool(_DIRECT)
