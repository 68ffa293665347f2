"""Compilation of loops over arrays, once per machine.

Numba checks nothing inside of a loop: an index out of range would read or overwrite other memory. The callers check.
Signatures have several parameters to a line (`# fmt: skip`), so that a loop is read on one screen.
"""

from __future__ import annotations

import functools
import hashlib
import typing
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NewType, TypeVar, cast

import numba
import numpy as np
from numba.core.caching import IndexDataCacheFile
from numba.core.errors import NumbaError
from numpy.typing import NDArray

from embershard.errors import CacheError
from embershard.interrupts import interrupts_wait

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
#: What cut Numba off while it compiled a loop, or loaded it.
_cuts: list[BaseException] = []


def compiled(loop: _Loop) -> _Loop:
    """Compile `loop` for its annotations, now; it releases Python's lock while it runs.

    Numba keeps the result beside the loop's file, or in the user's cache folder if that cannot be written to. Without
    either, the loop is compiled by every process, and a warning says so.

    A change of another file is not noticed: a loop must not use constants or other loops of another file.
    """
    arguments = typing.get_type_hints(loop)
    arguments.pop("return")
    return compiled_for([tuple(_TYPES[each] for each in arguments.values())])(loop)


def compiled_for(signatures: Sequence[tuple[Any, ...]]) -> Callable[[_Loop], _Loop]:
    """Do what `compiled` does, for Numba types of the arguments."""
    return functools.partial(_compile, signatures)


def compiled_when_called(**options: Any) -> Callable[[_Loop], _Loop]:
    """Do what `compiled` does, for the types of the arguments of each call, and options of `numba.njit`."""
    return functools.partial(_compile, (), **options)


def _compile(signatures: Sequence[tuple[Any, ...]], loop: _Loop, **options: Any) -> _Loop:
    found: Any = numba.njit(nogil=True, **options)(loop)
    try:
        found.enable_caching()
        numbered = found._cache._cache_file
        found._cache._cache_file = ResultFiles(
            numbered._cache_path, found._cache._impl.filename_base, numbered._source_stamp
        )
    except Exception as error:  # of any class: no folder, or a Numba that keeps its files in another way
        _warn_not_kept(error)
    found.compile = functools.partial(_as_a_whole, loop.__name__, found.compile)
    for signature in signatures:
        found.compile(signature)
    if signatures:
        found.disable_compile()
    return cast(_Loop, found)


def _as_a_whole(name: str, compile_for: Callable[[Any], Any], signature: Any) -> Any:
    """Compile or load a loop for a signature, while interrupts wait: Numba reads what it knows from generators that all
    loops share, and one that an exception ends stays so. From then on nothing is compiled, or loaded, in the process.

    Raises:
        CacheError: that has happened.
    """
    with interrupts_wait():
        try:
            return compile_for(signature)
        except NumbaError:  # of the loop, or of its arguments
            raise
        except Exception as error:
            if not _cuts and not isinstance(error.__cause__, StopIteration):
                _cuts.append(error)
                raise
            cut = f"{type(_cuts[0]).__name__} cut it off" if _cuts else "something cut it off"
            raise CacheError(
                f"the compiled loop {name!r} could not be loaded: Numba has been unable to load any in this process "
                f"since {cut} in the middle of another one. Start the process again, from the last checkpoint"
            ) from error
        except BaseException as error:
            _cuts.append(error)
            raise


def _warn_not_kept(error: Exception) -> None:
    if not _failures:
        warnings.warn(
            f"compiled loops of the cache cannot be kept ({type(error).__name__}: {error}), so every process takes "
            "seconds to compile them. Set NUMBA_CACHE_DIR to an empty folder that can be written to",
            RuntimeWarning,
            stacklevel=4,
        )
    _failures.append(error)


class ResultFiles(IndexDataCacheFile):  # type: ignore[misc]
    """Keeps each result of a compilation in a file that is named by its source and its types.

    Numba's own has numbered files and an index. Processes that compile at once, as ranks do after an installation,
    write both over each other, so that an entry can name the result of other types, or of the source before an edit:
    a loop then runs the wrong code (decision 0060).
    """

    def save(self, key: Any, data: Any) -> None:
        """Keep `data`, and remove the results of another source. A warning says if that is impossible."""
        try:
            for old in Path(self._cache_path).glob(f"{self._of_loop}.*"):
                if not old.name.startswith(f"{self._of_source}."):
                    old.unlink(missing_ok=True)
            self._save_data(self._name(key), data)
        except OSError as error:  # a full disk
            _warn_not_kept(error)

    def load(self, key: Any) -> Any:
        """Return what was kept for `key`; None if nothing was, or if the file is broken: it is written again."""
        try:
            return self._load_data(self._name(key))
        except Exception:  # of any class: that is how pickle says it
            return None

    @property
    def _of_loop(self) -> str:
        return self._index_name.removesuffix(".nbi")

    @property
    def _of_source(self) -> str:
        return f"{self._of_loop}.{_digest(self._source_stamp)}"

    def _name(self, key: Any) -> str:
        return f"{self._of_source}.{_digest((self._version, key))}.nbc"


def _digest(of: object) -> str:
    return hashlib.blake2b(repr(of).encode(), digest_size=8).hexdigest()
