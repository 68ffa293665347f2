"""The checkpoints of a run while it trains: written at once, or beside the steps that follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from embershard.distributed import CheckpointConfig, Ranks
from embershard.errors import ConfigError, FailedSaveError
from embershard.training.checkpoint.background_save import BackgroundSave
from embershard.training.checkpoint.run_state import PreparedSave
from embershard.training.quality.reports import FailedSaveReport, SaveReport

#: Most bytes of dense parameters, small tables and their optimizer states that are copied when a save starts. What is
#: above is written before training goes on.
_COPY_BYTES = 256 << 20

#: Prepares the checkpoint of a step, and copies up to this many bytes.
Prepare = Callable[[int], PreparedSave]


class Saves:
    """Saves of a run, one at a time. All ranks call its methods in the same steps.

    Used as a context manager around training, it gives up the save that is still being written when an error ends the
    run.

    Args:
        config: settings.
        ranks: the calling process's place.

    Attributes:
        saved_step: the step of the newest checkpoint.

    Raises:
        ConfigError: saves beside training were asked for, and the rows are on a GPU.
    """

    def __init__(self, config: CheckpointConfig, ranks: Ranks) -> None:
        on_gpu = ranks.device.type == "cuda"
        if config.asynchronous and on_gpu:
            raise ConfigError(
                "checkpoint.asynchronous = true: got training on a GPU, which may write rows to host memory unseen by "
                "the CPU; needed training on the CPU. Leave the setting out."
            )
        self._config, self._ranks = config, ranks
        self._asynchronous = not on_gpu if config.asynchronous is None else config.asynchronous
        self._own_group: Ranks | None = None
        self._running: BackgroundSave | None = None
        self._stall_seconds = 0.0
        self._ended: list[SaveReport | FailedSaveReport] = []  # of saves beside training, not yielded yet
        self.saved_step: int | None = None

    def write(self, step: int, prepare: Prepare) -> SaveReport:
        """Save the step now. A save that is being written ends before. It counts if it is of this step; otherwise its
        report, or its error, comes with those of `finished`, `last` or `ended`.

        Args:
            step: steps trained so far.
            prepare: prepares the checkpoint, and copies up to this many bytes.

        Raises:
            FailedSaveError: it could not be written.
        """
        self.wait()
        ended = self._ended.pop() if self._ended and self._ended[-1].step == step else None
        if isinstance(ended, SaveReport):  # one that failed is tried again
            return ended
        started = time.perf_counter()
        path = prepare(0).write(self._ranks)
        self.saved_step, seconds = step, time.perf_counter() - started
        return SaveReport(step, path, seconds, seconds)

    def start(self, step: int, prepare: Prepare) -> Iterator[SaveReport | FailedSaveReport]:
        """Save the step, beside those that follow where the settings say so. Yield the reports of saves that ended.

        Raises:
            FailedSaveError: a save failed, and the settings say that the run ends then.
        """
        yield from self.last()
        if not self._asynchronous:
            yield self._allowed(self._written(step, lambda: self.write(step, prepare)))
            return
        started = time.perf_counter()
        if self._own_group is None:
            self._own_group = self._ranks.with_own_group()
        self._running = BackgroundSave(prepare(_COPY_BYTES), self._own_group)
        self._stall_seconds = time.perf_counter() - started

    def finished(self) -> Iterator[SaveReport | FailedSaveReport]:
        """Yield the report of the save beside training, in the step in which it has ended on all ranks.

        Raises:
            FailedSaveError: as `start`.
        """
        if self._ended or (
            self._running is not None and self._ranks.all_gather(torch.tensor(self._running.is_done)).all()
        ):
            yield from self.last()

    def last(self) -> Iterator[SaveReport | FailedSaveReport]:
        """Wait for the save beside training, if there is one, and yield its report.

        Raises:
            FailedSaveError: as `start`.
        """
        self.wait()
        yield from map(self._allowed, self.ended())

    def ended(self) -> Iterator[SaveReport | FailedSaveReport]:
        """Yield the reports of saves beside training that ended, whatever became of them: the run ends anyway."""
        while self._ended:
            yield self._ended.pop(0)

    def wait(self) -> None:
        """Wait for the save beside training, whatever becomes of it."""
        running, started = self._running, time.perf_counter()
        if running is None:
            return
        running.wait()  # an interrupt here leaves a save that can be given up
        self._running = None
        self._stall_seconds += time.perf_counter() - started
        self._ended.append(self._written(running.step, lambda: self._result(running)))

    def forget(self) -> None:
        """Do what `wait` does, and forget which step was saved last, and reports that were not yielded."""
        self.wait()
        self._ended.clear()
        self.saved_step = None

    def __enter__(self) -> Saves:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind not in (None, GeneratorExit) and self._running is not None:
            self._running.give_up()

    def _result(self, running: BackgroundSave) -> SaveReport:
        path, self.saved_step = running.result(), running.step
        return SaveReport(running.step, path, running.seconds, self._stall_seconds)

    @staticmethod
    def _written(step: int, save: Callable[[], SaveReport]) -> SaveReport | FailedSaveReport:
        try:
            return save()
        except FailedSaveError as error:
            return FailedSaveReport(step, str(error))

    def _allowed(self, report: SaveReport | FailedSaveReport) -> SaveReport | FailedSaveReport:
        """Return the report, or raise its failure where the run ends with it."""
        if isinstance(report, FailedSaveReport) and self._config.on_failed_save == "stop":
            raise FailedSaveError(report.reason)
        return report
