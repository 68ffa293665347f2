"""Looking ahead: a batch's way from the iterator to the step that trains it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embershard.lazy_names import lazy_names

if TYPE_CHECKING:
    from embershard.pipeline.look_ahead import LookAheadPipeline, LookAheadStats
else:
    __getattr__ = lazy_names(__name__)

__all__ = ["LookAheadPipeline", "LookAheadStats"]
