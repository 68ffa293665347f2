"""`EvaluatedWindows`: in time order, each window of time is evaluated before any sample of it trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from embershard.data.sources.source import WindowAhead, windows_between
from embershard.training.checkpoint.identity import global_batch
from embershard.training.checkpoint.saved_run import SavedRun, SettingsComparison
from embershard.training.parts.evaluations import Evaluations
from embershard.training.parts.part import Part, Training
from embershard.training.reports import Report, WindowReport


class EvaluatedWindows(Part):
    """Evaluates the windows whose first sample is in the next global batch, none of which has trained; those that are
    left where a rank was asked to stop are evaluated by the run that goes on.

    Args:
        find: the windows whose first sample is at one of the positions [start, stop), where the source cannot tell.
    """

    _next = 1  # that this process may have to evaluate

    def __init__(
        self, run: Training, evaluations: Evaluations, find: Callable[[int, int], list[WindowAhead]] | None = None
    ) -> None:
        super().__init__(run)
        self._evaluations, self._find = evaluations, find
        if find is None:  # else more windows come
            self.stream_options = {"epochs": 1}

    def before_batch(self) -> Iterator[Report]:
        run = self.run
        position = run.position.global_sample
        place = position, position + global_batch(run.config, run.ranks.world_size)
        found = windows_between(run.source, *place) if self._find is None else self._find(*place)
        for window in [window for window in found if window.number >= self._next]:
            started = time.perf_counter()
            if (evaluation := self._evaluations.of(window.source)) is None:
                return
            self._next = window.number + 1
            what = (run.steps, window.number, window.start, window.late, evaluation.quality)
            yield WindowReport(*what, time.perf_counter() - started, evaluation.slices)

    def evaluate_at_end(self) -> Iterator[Report]:
        """Evaluate those that the samples after the last whole batch begin."""
        if not self.run.supervision.must_stop:
            yield from self.before_batch()

    def read_state(self, saved: SavedRun, comparison: SettingsComparison) -> None:
        self._next = 1
