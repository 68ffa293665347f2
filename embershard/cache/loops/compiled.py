"""Compilation of loops over arrays, once per machine.

Numba checks nothing inside of a loop: an index out of range would read or overwrite other memory. The callers check.
"""

from __future__ import annotations

import functools
import typing
import warnings
from collections.abc import Callable
from typing import Any, NewType, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]
Float32s = NDArray[np.float32]
Counters = NewType("Counters", NDArray[np.int64])  # [T, C]
_Loop = TypeVar("_Loop", bound=Callable[..., Any])

_TYPES = {
    Int64s: numba.int64[::1],
    Int32s: numba.int32[::1],
    Bools: numba.boolean[::1],
    Float32s: numba.float32[::1],
    Counters: numba.int64[:, ::1],
    int: numba.int64,
    float: numba.float32,
    bool: numba.boolean,
}
_failures: list[Exception] = []


def compiled(loop: _Loop) -> _Loop:
    """Compile `loop` for its annotations, now; it releases Python's lock while it runs.

    Numba keeps the result beside the loop's file, or in the user's cache folder if that cannot be written to. Without
    either, or if its files are broken, the loop is compiled by every process, and a warning says so.

    A change of another file is not noticed: a loop must not use constants or other loops of another file.
    """
    arguments = typing.get_type_hints(loop)
    arguments.pop("return")
    return compiled_for([tuple(_TYPES[each] for each in arguments.values())])(loop)


def compiled_for(signatures: list[tuple[Any, ...]]) -> Callable[[_Loop], _Loop]:
    """Do what `compiled` does, for Numba types of the arguments."""
    return functools.partial(_compile, signatures)


def _compile(signatures: list[tuple[Any, ...]], loop: _Loop) -> _Loop:
    try:
        return cast(_Loop, numba.njit(signatures, nogil=True, cache=True)(loop))
    except Exception as error:  # of any class: no folder, a full disk, a broken file
        found = cast(_Loop, numba.njit(signatures, nogil=True)(loop))  # raises if the loop is at fault
        if not _failures:
            warnings.warn(
                f"compiled loops of the cache cannot be kept ({type(error).__name__}: {error}), so every process takes "
                "seconds to compile them. Set NUMBA_CACHE_DIR to an empty folder that can be written to",
                RuntimeWarning,
                stacklevel=3,
            )
        _failures.append(error)
        return found
