"""Looking ahead: a batch's way from the iterator to the step that trains it."""

from embershard.pipeline.look_ahead import LookAheadPipeline
from embershard.pipeline.stats import LookAheadStats

__all__ = ["LookAheadPipeline", "LookAheadStats"]
