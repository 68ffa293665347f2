"""Writing on after a terminal was closed. Without rich, which takes a moment to import: signals ask for it, too."""

from __future__ import annotations

import os
import stat


def leave_closed_terminal() -> None:
    """Write to nowhere from now on where standard output or standard error is a terminal that was closed: at its end,
    Python would fail with what it could not write."""
    for descriptor in (1, 2):
        try:
            if is_device(descriptor):
                os.write(descriptor, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def is_device(descriptor: int) -> bool:
    """Return whether it is a terminal, or another device, and no file on a disk."""
    return stat.S_ISCHR(os.fstat(descriptor).st_mode)
