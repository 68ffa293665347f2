"""Programs with little memory: a control group of Linux that limits them, with the pages of their files.

A limit of address space or of data (`resource.setrlimit`) does not see pages of files. A control group counts them: it
takes them away when they are too many, and ends a program whose own memory is too large (exit code -9).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_JOIN = 'echo $$ > "$0" && exec "$@"'


@dataclass(frozen=True)
class MemoryGroup:
    """A control group.

    Attributes:
        folder: of its files.
        peak_file: among them, the one with the most bytes that it held.
    """

    folder: Path
    peak_file: str

    def run(self, command: Sequence[str], **arguments: Any) -> subprocess.CompletedProcess[str]:
        """Run a command in the group, from its first page on; `arguments` are those of `subprocess.run`."""
        words = ["sh", "-c", _JOIN, str(self.folder / "cgroup.procs"), *command]
        return subprocess.run(words, **{"capture_output": True, "text": True, "check": False, **arguments})

    def enter(self) -> None:
        """Move this process into the group until the group is removed. What it has so far is not counted."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def peak_bytes(self) -> int:
        """The most memory that the group held so far, in bytes."""
        return int((self.folder / self.peak_file).read_text())


class NoMemoryGroupError(Exception):
    """No control group can be made here; the message says why."""


@contextlib.contextmanager
def limited_memory(num_bytes: int, root: Path = Path("/")) -> Iterator[MemoryGroup]:
    """Make a control group below one's own with so much memory and no swap, and remove it afterwards.

    Version 2 where it has a memory controller, else version 1. In version 2 a group with processes has no groups with
    limits below it, so there it is made below the next one above that may have some.

    Args:
        root: folder with `proc` and `sys`; for tests.

    Raises:
        NoMemoryGroupError: none can be made.
    """
    above, limits, peak = _place(root)
    try:
        folder = Path(tempfile.mkdtemp(prefix="embershard_", dir=above))
    except OSError as error:
        raise NoMemoryGroupError(f"no control group can be made in {above}: {error}") from error
    try:
        for name, limit in limits.items():
            with contextlib.suppress(FileNotFoundError):  # a system that does not count swap
                (folder / name).write_text(str(num_bytes if limit is None else limit))
        yield MemoryGroup(folder, peak)
    finally:
        if str(os.getpid()) in (folder / "cgroup.procs").read_text().split():
            (above / "cgroup.procs").write_text(str(os.getpid()))
        folder.rmdir()


def _place(root: Path) -> tuple[Path, dict[str, int | None], str]:
    """Return the group to make one in; the files of its limits, with their values (None: the bytes); and the peak's."""
    mount, own = root / "sys/fs/cgroup", _own_groups(root)
    for top in (mount, mount / "unified"):
        folder = top / own.get("", "").lstrip("/")
        while "" in own and folder != top.parent:
            if "memory" in _words(folder / "cgroup.subtree_control"):
                return folder, {"memory.max": None, "memory.swap.max": 0}, "memory.peak"
            folder = folder.parent
    first = mount / "memory"
    if "memory" in own and (first / "memory.limit_in_bytes").exists():
        folder = first / own["memory"].lstrip("/")
        limits = {"memory.limit_in_bytes": None, "memory.memsw.limit_in_bytes": None}
        return folder if folder.is_dir() else first, limits, "memory.max_usage_in_bytes"
    raise NoMemoryGroupError(
        f"{mount} has no control group with a memory controller: neither version 2, with memory in the "
        "cgroup.subtree_control of a group above this process, nor version 1"
    )


def _own_groups(root: Path) -> dict[str, str]:
    """Return the paths of this process's groups by controller; that of version 2 by ""."""
    lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    found = [line.split(":", 2) for line in lines]
    return {name: path for _, controllers, path in found for name in controllers.split(",")}


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split()
    except OSError:
        return []
