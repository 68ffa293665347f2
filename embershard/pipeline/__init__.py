"""Looking ahead: a batch's way from the iterator to the step that trains it."""

from typing import TYPE_CHECKING

from embershard.lazy_names import lazy_names

if TYPE_CHECKING:
    from embershard.pipeline.look_ahead import LookAheadPipeline as LookAheadPipeline
    from embershard.pipeline.look_ahead import LookAheadStats as LookAheadStats
else:
    __getattr__, __all__ = lazy_names(__name__)
