"""Permissions that hold for root, too: tests often run as root, whom no mode of a file keeps out."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_VERSION = 0x20080522  # of the structs below: _LINUX_CAPABILITY_VERSION_3
_OVERRIDES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Data(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextmanager
def modes_hold() -> Iterator[None]:
    """Make this thread obey the modes of files inside of the context."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = _Header(_VERSION, 0), (_Data * 2)()

    def call(name: str) -> None:
        if getattr(libc, name)(ctypes.byref(header), ctypes.byref(data)):
            raise OSError(ctypes.get_errno(), name)

    call("capget")
    before = data[0].effective
    data[0].effective = before & ~_OVERRIDES
    call("capset")
    try:
        yield
    finally:
        data[0].effective = before
        call("capset")
