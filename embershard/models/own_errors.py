"""Errors in a user's own model: the lines of it that failed, without those of torch and of embershard."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from typing import Any

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
