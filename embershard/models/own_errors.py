"""Errors in a user's own model: the lines of it that failed, without those of torch and of embershard."""

from __future__ import annotations

import os
from typing import Any

from embershard.own_code import own_frames

#: Set to show whole tracebacks.
TRACEBACK_VARIABLE = "EMBERSHARD_TRACEBACK"


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
