"""Code of one's own: finds the function that a setting names as "module:function", and the lines of it that failed."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from embershard.errors import ConfigError

#: Set to show whole tracebacks.
TRACEBACK_VARIABLE = "EMBERSHARD_TRACEBACK"
_LIBRARIES = ("embershard", "torch", "torchrec", "fbgemm_gpu")


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error's traceback that are of no library that calls a model, outermost first.

    >>> try:
    ...     [].pop()
    ... except IndexError as error:
    ...     own_frames(error)  # a doctest has no file
    []
    """
    folders = tuple(
        os.path.dirname(file) + os.sep
        for name in _LIBRARIES
        if (file := getattr(sys.modules.get(name), "__file__", None)) is not None
    )
    standard, installed = sysconfig.get_path("stdlib") + os.sep, ("site-packages", "dist-packages")

    def is_own(file: str) -> bool:
        is_standard = file.startswith(standard) and not any(name in file for name in installed)
        return not file.startswith(("<", *folders)) and not is_standard

    return [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]


def place_of(error: BaseException) -> str:
    """Return file and line of the last own frame; of the last one where there is none."""
    frames = own_frames(error) or traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "no line"


def names_function(value: object) -> bool:
    """Return whether a setting's value has the form "module:function".

    >>> names_function("my_policy:make"), names_function("lfu")
    (True, False)
    """
    module, _, function = (value if isinstance(value, str) else "").partition(":")
    return function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def load_function(setting: str, value: str, folder: str | None) -> Callable[..., Any]:
    """Return the function that a setting names as "module:function", from a folder too.

    Raises:
        ConfigError: it is not found, or its module fails.
    """
    module_name, _, name = value.partition(":")
    module = _module(setting, module_name, folder)
    function = getattr(module, name, None)
    if not callable(function):
        there = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise ConfigError(
            f"{setting} = {value!r}: {module.__file__} has no function {name!r}; it has {', '.join(there) or 'none'}."
        )
    return function


def _module(setting: str, name: str, folder: str | None) -> Any:
    """Import a module, from the settings' folder too."""
    here = None if folder is None else Path(folder).absolute()
    if here is not None and str(here) not in sys.path:
        sys.path.append(str(here))  # last: no file there hides an installed package
        importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{setting}: {name!r} imports {error.name!r}, which is not installed. Install it."
            ) from error
        where = "on the Python path" if here is None else f"in {here} or on the Python path"
        raise ConfigError(f"{setting}: no module {name!r} {where}. Name a file there without .py.") from error
    except Exception as error:
        raise ConfigError(
            f"{setting}: importing {name!r} failed: {type(error).__name__}: {error} ({place_of(error)})."
        ) from error
    top, found = name.partition(".")[0], Path(getattr(module, "__file__", None) or "")
    candidates = [] if here is None else [here / f"{top}.py", here / top]
    if any(path.exists() for path in candidates) and here is not None and here.resolve() not in found.resolve().parents:
        raise ConfigError(
            f"{setting}: {name!r} is {found}, and there is another one in {here}. Give that another name."
        )
    return module


def note_batch(error: BaseException, batch: Any) -> None:
    """Note in an error what the model was given."""
    ids = batch.sparse_features
    error.__dict__["embershard_batch"] = (
        f"dense_features {_kind(batch.dense_features)}, labels {_kind(batch.labels)}, and sparse_features with ids "
        f"{_kind(ids.values())} of {len(ids.keys())} features"
    )


def message_for_user(error: BaseException) -> str | None:
    """Return the message of an error in a model of one's own: its lines and its batch. None for other errors."""
    frames, batch = own_frames(error), error.__dict__.get("embershard_batch")
    if batch is None or not frames or os.environ.get(TRACEBACK_VARIABLE):
        return None
    return "\n".join(
        [
            f"{type(error).__name__}: {error}",
            *(f"  {frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}" for frame in frames),
            f"  The batch: {batch}.",
            f"  {TRACEBACK_VARIABLE}=1 shows the frames of torch and embershard, too.",
        ]
    )


def _kind(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
