"""The checkpoints of a run while it trains: written at once, or beside the steps that follow."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from embershard.distributed import Manifest, Ranks
from embershard.distributed.checkpoint.chain import Chain
from embershard.distributed.checkpoint.load import saved_tensors
from embershard.distributed.checkpoint.manifest import Parent
from embershard.distributed.ranks import keep_to_one_core
from embershard.errors import CheckpointError, ConfigError, FailedSaveError
from embershard.sharding.torchrec import without_flushes
from embershard.training.checkpoint.run_state import PreparedSave
from embershard.training.checkpoint.save_chain import SaveChain
from embershard.training.parts.evaluations import Evaluations
from embershard.training.parts.part import Part, Training
from embershard.training.reports import FailedSaveReport, SaveReport

_LOWEST_PRIORITY = 19  # "niceness"
_GIVEN_UP_SECONDS = 5.0
#: Pause before a block, as a multiple of the CPU time that the block before took.
_PAUSE = 3.0


#: Most bytes of dense parameters, small tables and their optimizer states that are copied when a save starts. What is
#: above is written before training goes on.
_COPY_BYTES = 256 << 20


class Saves(Part):
    """Saves of a run, one at a time. All ranks call its methods in the same steps.

    Used as a context manager around training, it gives up the save that is still being written when an error ends the
    run.

    Raises:
        ConfigError: saves beside training were asked for, and the rows are on a GPU.
    """

    def __init__(self, run: Training) -> None:
        super().__init__(run)
        config, ranks = run.config.checkpoint, run.ranks
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
        self._failure: FailedSaveError | None = None  # of the last step; raised once it is evaluated
        self._chain: SaveChain | None = None

    def after_build(self) -> None:
        """Track from now on what changes from save to save."""
        if self._config.full_every > 1 and self.run.checkpoints is not None:
            self._chain = SaveChain(self.run.model, self._ranks, self._config.full_every, self.run.state.is_replica)

    def go_on_from(self, checkpoint: Path, manifest: Manifest | None) -> None:
        """Let the next save follow the checkpoint whose state was loaded, where it can."""
        if self._chain is None:
            return
        num_deltas, sizes = 0, dict[str, torch.Size]()
        is_own = self.run.checkpoints is not None and checkpoint.absolute().parent == self.run.checkpoints.absolute()
        parent: Parent | str = f"{checkpoint.name} is {'in no chain' if is_own else 'of another folder'}"
        if is_own and manifest is not None and manifest.token:
            parent = Parent(manifest.step, manifest.token)
            num_deltas = self._ranks.from_first(lambda: len(Chain.of(checkpoint).links)) - 1
            sizes = {name: entry.size for name, entry in saved_tensors(checkpoint).items()}
        with without_flushes(self.run.model):  # references
            tensors = self.run.state.tensors()
        self._chain.go_on_from(parent, num_deltas, tensors, sizes)

    def before_batch(self) -> Iterator[SaveReport | FailedSaveReport]:
        """Report the save beside training, in the step in which it has ended on all ranks.

        Raises:
            FailedSaveError: as `start`.
        """
        if self._ended or (
            self._running is not None and self._ranks.all_gather(torch.tensor(self._running.is_done)).all()
        ):
            yield from self.last()

    def after_step(self) -> Iterator[SaveReport | FailedSaveReport]:
        run, every = self.run, self._config.every_steps
        is_due = self._is_wanted or (every is not None and run.steps % every == 0)
        if run.checkpoints is not None and self.is_time(is_due) and not run.is_last:
            yield from self.start()
            run.supervision.agree(run.ranks)  # a step more would need another save

    def at_end(self) -> Iterator[SaveReport | FailedSaveReport]:
        """Save the last step, before an evaluation."""
        yield from self.last()
        try:
            yield from self._save_at_end()
        except FailedSaveError as error:
            if self._config.on_failed_save == "stop":
                raise
            self._failure = error

    def finish(self) -> Iterator[SaveReport]:
        """Save where a signal that came meanwhile asks for it, or the best one is kept."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        yield from self._save_at_end()

    def _save_at_end(self) -> Iterator[SaveReport]:
        run = self.run
        is_left = self._config.saves_last(run.steps, run.supervision.must_stop) and run.saved_step != run.steps
        if run.checkpoints is not None and (is_left or self._is_wanted) and run.step_seconds:
            yield self.write()

    @property
    def _is_wanted(self) -> bool:
        evaluations = self.run.part(Evaluations)
        return evaluations is not None and evaluations.wants_save()

    def prepare(self, copy_bytes: int) -> PreparedSave:
        """Return the checkpoint of this step, with copies of up to this many bytes.

        Raises:
            CheckpointError: the run has no folder for checkpoints.
            NotFiniteError: a step since the last checkpoint had a loss that is not finite, or left such a parameter.
        """
        run = self.run
        if run.checkpoints is None:
            raise CheckpointError("This run has no folder for checkpoints; make the trainer with one.")
        waits = [wait for part in run.parts if (wait := part.before_save()) is not None]
        return replace(run.prepare_save(run.checkpoints, copy_bytes, self._chain), waits=waits)

    def write(self) -> SaveReport:
        """Save the step now. A save that is being written ends before. It counts if it is of this step; otherwise its
        report, or its error, comes with those of `before_batch`, `last` or `ended`.

        Raises:
            FailedSaveError: it could not be written.
        """
        step = self.run.steps
        self.wait()
        ended = self._ended.pop() if self._ended and self._ended[-1].step == step else None
        if isinstance(ended, SaveReport):  # one that failed is tried again
            return ended
        started = time.perf_counter()
        prepared = self.prepare(0)
        path = prepared.write(self._ranks)
        self.run.saved_step, seconds = step, time.perf_counter() - started
        return SaveReport(step, path, seconds, seconds, prepared.why_whole)

    def start(self) -> Iterator[SaveReport | FailedSaveReport]:
        """Save the step, beside those that follow where the settings say so. Yield the reports of saves that ended.

        Raises:
            FailedSaveError: a save failed, and the settings say that the run ends then.
        """
        yield from self.last()
        if not self._asynchronous:
            yield self._allowed(self._written(self.run.steps, self.write))
            return
        started = time.perf_counter()
        if self._own_group is None:
            self._own_group = self._ranks.with_own_group()
        self._running = BackgroundSave(self.prepare(_COPY_BYTES), self._own_group)
        self._stall_seconds = time.perf_counter() - started

    def last(self) -> Iterator[SaveReport | FailedSaveReport]:
        """Wait for the save beside training, if there is one, and yield its report.

        Raises:
            FailedSaveError: as `start`.
        """
        self.wait()
        yield from map(self._allowed, self.ended())

    def at_failure(self) -> Iterator[SaveReport | FailedSaveReport]:
        """Save the step if it is not saved yet, as the run ends by an error. Yield all reports; raise none of them."""
        own: list[SaveReport | FailedSaveReport] = []
        with contextlib.suppress(CheckpointError):  # this step is saved already
            own = [self._written(self.run.steps, self.write)]
        for report in [*self.ended(), *own]:
            yield replace(report, run_ends=True) if isinstance(report, FailedSaveReport) else report

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

    def close(self) -> None:
        """Do what `wait` does, and forget which step was saved last, and reports that were not yielded."""
        self.wait()
        self._ended.clear()
        self.run.saved_step = None

    def __enter__(self) -> Saves:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind not in (None, GeneratorExit) and self._running is not None:
            self._running.give_up()

    def _result(self, running: BackgroundSave) -> SaveReport:
        path, self.run.saved_step = running.result(), running.step
        return SaveReport(running.step, path, running.seconds, self._stall_seconds, running.why_whole)

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


class BackgroundSave:
    """Writes a prepared checkpoint in a thread. Its collectives need a group of their own: they come at any time.

    The constructor returns once training may go on: tensors that could not be copied are written then.

    Args:
        prepared: what to write.
        ranks: with a group that only background saves use.

    Attributes:
        step, why_whole: of the checkpoint.
        seconds: time since the constructor was called, until it was written.
    """

    def __init__(self, prepared: PreparedSave, ranks: Ranks) -> None:
        self.step, self.why_whole = prepared.step, prepared.why_whole
        self._prepared, self._ranks = prepared, ranks
        self._may_go_on, self._is_awaited = threading.Event(), threading.Event()
        self._cpu_seconds = 0.0  # of the thread, at the end of its last pause
        self._path: Path | None = None
        self._failure: BaseException | None = None
        self._started, self.seconds = time.perf_counter(), 0.0
        # A daemon: at the exit of a failed run nobody waits for ranks that are gone.
        self._thread = threading.Thread(target=self._write, name="embershard-save", daemon=True)
        threads = torch.get_num_threads()
        self._thread.start()
        self._may_go_on.wait()
        torch.set_num_threads(threads)  # `keep_to_one_core` also told MKL, which has one number for all threads

    @property
    def is_done(self) -> bool:
        """True if the checkpoint was written, or could not be."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end; the save makes no pauses any more, and has this thread's priority where the system allows
        it: one of the lowest priority gets little of cores that others keep busy."""
        self._is_awaited.set()
        if self._thread.native_id and not self.is_done:
            with contextlib.suppress(OSError):  # it has just ended, or only the superuser may
                os.setpriority(os.PRIO_PROCESS, self._thread.native_id, os.getpriority(os.PRIO_PROCESS, 0))
        self._thread.join()

    def result(self) -> Path:
        """Return the checkpoint, or raise what prevented it. The save is done. Called once: an error that is kept keeps
        this object, by its traceback."""
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure
        assert self._path is not None
        return self._path

    def give_up(self) -> None:
        """End the save without a checkpoint, after an error that ends the run. Waits a few seconds at most: other ranks
        may be gone."""
        self._prepared.close()
        self._thread.join(_GIVEN_UP_SECONDS)

    def _write(self) -> None:
        keep_to_one_core()
        try:
            if self._prepared.tensors.is_copied:
                self._go_on()
            self._path = self._prepared.write(self._ranks, self._before_block)
        except BaseException as error:  # raised by `result`
            self._failure = error
        finally:
            self.seconds = time.perf_counter() - self._started
            self._go_on()

    def _before_block(self) -> None:
        """Let training go on. Later, leave the cores to it for a while, unless it may soon wait for the save."""
        self._go_on()
        if not any(rows.is_filling for rows in self._prepared.frozen):
            self._is_awaited.wait(_PAUSE * (time.thread_time() - self._cpu_seconds))
        self._cpu_seconds = time.thread_time()

    def _go_on(self) -> None:
        if not self._may_go_on.is_set():
            with contextlib.suppress(OSError):  # a system that forbids it
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
            self._may_go_on.set()
