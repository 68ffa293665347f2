"""`EvaluatedWindows`: in time order, each window of time is evaluated before any sample of it trains."""

from __future__ import annotations

import time
from collections.abc import Iterator

from embershard.data.sources.source import GrowingSource, WindowAhead, windows_between
from embershard.errors import DataError
from embershard.frequency import FrequencyProfile
from embershard.training.checkpoint.identity import global_batch
from embershard.training.checkpoint.saved_run import SavedRun, SettingsComparison
from embershard.training.parts.evaluations import Evaluations
from embershard.training.parts.part import Part, Training
from embershard.training.reports import Report, WindowReport


class EvaluatedWindows(Part):
    """Evaluates the windows whose first sample is in the next global batch, none of which has trained; those that are
    left where a rank was asked to stop are evaluated by the run that goes on."""

    _next = 1  # that this process may have to evaluate

    def __init__(self, run: Training, evaluations: Evaluations) -> None:
        super().__init__(run)
        self._evaluations = evaluations

    def before_build(self, profile: FrequencyProfile | None) -> None:
        if not isinstance(self.run.source, GrowingSource):  # else more windows come
            self.stream_options = {"epochs": 1}

    def before_batch(self) -> Iterator[Report]:
        """Evaluate the windows that the next batch begins.

        Raises:
            DataError: on all ranks, where one cannot read a file of a growing source.
        """
        run = self.run
        position = run.position.global_sample
        place = position, position + global_batch(run.config, run.ranks.world_size)
        found, source = list[WindowAhead](), run.source
        if not isinstance(source, GrowingSource):
            found = list(windows_between(source, *place))
        elif source.has_window(*place):
            with run.input_failure.noting():
                found = run.ranks.together(lambda: list(source.windows_between(*place)), DataError)
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
