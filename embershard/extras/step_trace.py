"""`StepTrace`: torch's profiler around some steps of a run, with the stages of a step named."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from embershard.errors import naming_file
from embershard.stages import PREFIX, STAGES_ENDING, stages_recorded
from embershard.training.parts.part import Part, Training
from embershard.training.reports import Report
from embershard.whole_file import whole_file

_TRACE_ENDING = ".json.gz"


@dataclass(frozen=True)
class Span:
    """A stage's work in one thread, from `start` to `end` in microseconds."""

    name: str
    thread: int
    start: float
    end: float


class StepTrace(Part):
    """A trace of the steps `first` to `last`, numbered from 1, on this rank. Perfetto and Chrome show it.

    Args:
        folder: for `rank_R.json.gz`, the trace, and `rank_R.stages.json`, the mean time of each stage.
    """

    def __init__(self, run: Training, first: int, last: int, folder: Path) -> None:
        super().__init__(run)
        self.first, self.last, self._num_begun = first, last, run.steps
        self._folder, self._rank = folder, run.ranks.rank
        self._running: ExitStack | None = None
        self._profile: Any = None
        self._steps, self._began = 0, 0.0
        self.path: Path | None = None

    def before_batch(self) -> Iterable[Report]:
        """Begin or end the trace, as the next step is about to begin. A batch that is skipped counts as a step."""
        self._num_begun += 1
        if self._running is not None:
            self._steps += 1
            if self._num_begun > self.last:
                self.close()
        elif self.path is None and self.first <= self._num_begun <= self.last:
            kinds = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                kinds.append(ProfilerActivity.CUDA)
            all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # the worker plans beside
            self._running = ExitStack()
            self._running.enter_context(stages_recorded())
            self._profile = self._running.enter_context(profile(activities=kinds, experimental_config=all_threads))
            self._began = time.perf_counter()
        return ()

    def close(self) -> None:
        """Write the trace, if it was begun: at the end of training, perhaps before `last`."""
        if self._running is None:
            return
        running, self._running = self._running, None
        seconds = time.perf_counter() - self._began
        running.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank_{self._rank}{_TRACE_ENDING}"
        with naming_file(path):
            self._profile.export_chrome_trace(str(path))
        spans = [
            Span(event.name.removeprefix(PREFIX), event.thread, event.time_range.start, event.time_range.end)
            for event in self._profile.events()
            if event.name.startswith((PREFIX, "gloo:", "nccl:"))
        ]
        stages = mean_stages(spans, self._steps, seconds, training_thread=None)
        with whole_file(self._folder / f"rank_{self._rank}{STAGES_ENDING}") as unnamed:
            unnamed.write_text(json.dumps({"rank": self._rank, "steps": self._steps, **stages}, indent=1))
        self.path, self._profile = path, None

    def describe(self) -> str:
        """Return where the trace is, as a sentence."""
        if self.path is None:
            return f"No step from {self.first} to {self.last} was trained here, so nothing was traced."
        return f"Traced {self._steps} steps: {self.path} (of each rank one), to be opened at https://ui.perfetto.dev."


def mean_stages(
    spans: Iterable[Span], steps: int, seconds: float, training_thread: int | None
) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a step by stage, without those of the stages inside: `training`, those of the thread
    that trains, with what is left of the step as "other"; `beside`, those of other threads; and `between_ranks`, the
    collectives from their start to their end, as the backend notes them. These overlap with the stages.

    Args:
        seconds: wall time of all `steps`.
        training_thread: None: that of the stage "forward".

    >>> spans = [Span("forward", 1, 0, 5000), Span("lookup", 1, 1000, 3000), Span("plan", 2, 0, 4000)]
    >>> found = mean_stages(spans, steps=2, seconds=0.006, training_thread=None)
    >>> found["training"], found["beside"]
    ({'forward': 1.5, 'lookup': 1.0, 'other': 0.5}, {'plan': 2.0})
    """
    spans = sorted(spans, key=lambda span: (span.thread, span.start, -span.end))
    if training_thread is None:
        training_thread = next((span.thread for span in spans if span.name == "forward"), None)
    found: dict[str, dict[str, float]] = {name: defaultdict(float) for name in ("training", "beside", "between_ranks")}
    open_spans: list[tuple[Span, dict[str, float]]] = []
    for span in spans:
        milliseconds = (span.end - span.start) / 1e3 / max(steps, 1)
        if span.name.startswith(("gloo:", "nccl:")):
            found["between_ranks"][span.name] += milliseconds
            continue
        while open_spans and (open_spans[-1][0].thread != span.thread or open_spans[-1][0].end <= span.start):
            open_spans.pop()
        if open_spans:
            outer, times = open_spans[-1]
            times[outer.name] -= milliseconds
        times = found["training" if span.thread == training_thread else "beside"]
        times[span.name] += milliseconds
        open_spans.append((span, times))
    wall = seconds * 1e3 / max(steps, 1)
    found["training"]["other"] = max(0.0, wall - sum(found["training"].values()))
    return {kind: dict(times) for kind, times in found.items()}
