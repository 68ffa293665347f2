"""One training run on one rank: build, step, evaluate, save."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from embershard.data import Batch, BatchStream, Source, StreamState, Target, open_source
from embershard.data.sources.source import WindowAhead, windows_between
from embershard.distributed import Ranks, Supervision, shortest, verify_checkpoint
from embershard.distributed.checkpoint.folder import checkpoint_at
from embershard.distributed.traffic import counted_as_other
from embershard.errors import CheckpointError, FailedSaveError
from embershard.metrics.evaluation import Evaluation, Evaluator
from embershard.metrics.predictions import Predicted, PredictionBuffer, predicted_of, until_stopped
from embershard.models.dropout import seed_masks
from embershard.pipeline import LookAheadPipeline
from embershard.sharding.torchrec import cancel_forward
from embershard.stages import stage
from embershard.training.arithmetic import arithmetic, autocast, check_process
from embershard.training.build import build_sharded_model, divided_once, features_of, find_plan, find_profile
from embershard.training.checkpoint.identity import global_batch
from embershard.training.checkpoint.run_state import PreparedSave, RunState
from embershard.training.checkpoint.saved_run import SettingsComparison
from embershard.training.config import RunConfig
from embershard.training.fit.machine_limits import check_disk_for_publications, check_disk_for_run
from embershard.training.fit.machines import check_machines
from embershard.training.fit.memory_check import check_memory_for_run
from embershard.training.fit.model_size import tables_of_run
from embershard.training.optimizers import Optimizers
from embershard.training.parts.best import BestModel
from embershard.training.parts.counts import StepMetrics
from embershard.training.parts.following import FolderFollower
from embershard.training.parts.hot_cold import find_hot_set
from embershard.training.parts.loss_monitor import KeptBatches, LossMonitor, in_float64, label_sums
from embershard.training.parts.publishing import Export, Publisher
from embershard.training.parts.saves import Saves
from embershard.training.reports import (
    BadRowsReport,
    EvalReport,
    FailedSaveReport,
    PublicationReport,
    Report,
    SaveReport,
    SkippedBatchReport,
    StopReport,
    TrainReport,
    WindowReport,
)
from embershard.training.steps import BadRowCount, InputFailure, Steps, open_stream

#: The journal of a followed folder's files, in the run's folder.
FOLLOWED = "files.jsonl"
#: Batches between those that are parsed and those that are known, at most.
_ENTERING = 8


class Trainer:
    """Trains one model. All ranks call its methods in the same order, in a process group (`embershard.process_group`).

    >>> from embershard import process_group  # examples/own_script.py is a whole program
    >>> with process_group("cpu") as ranks:
    ...     trainer = Trainer(RunConfig(), ranks)
    ...     trainer.close()

    Args:
        checkpoints: folder for the checkpoints, shared by all ranks; None: save none.
        supervision: asks for the end of the training, and is told of each step.
        export: writes the base of publications; needed with `publish.folder`.

    Raises:
        ConfigError: a machine lacks memory (`memory_warning`: what may not fit later), or differs in settings or files.
    """

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        checkpoints: Path | None = None,
        supervision: Supervision | None = None,
        export: Export | None = None,
    ) -> None:
        self.config, self.ranks, self.checkpoints = config, ranks, checkpoints
        self.supervision = supervision or Supervision()
        check_process(config.train, ranks.device)
        check_machines(config, ranks, checkpoints and checkpoints.parent)
        self.plan = find_plan(config, ranks)
        self.following: FolderFollower | None = None
        if config.data.follow:
            journal = checkpoints and checkpoints.parent / FOLLOWED
            self.following = FolderFollower(config.data, journal, ranks, config.metrics.columns)
            self.source: Source = self.following.source
        else:
            self.source = open_source(config.data, share=ranks.from_first)
        self._evaluator = Evaluator(self.target, config.metrics, self.source, ranks)
        self.best = BestModel(config, self.target, checkpoints, ranks)
        self.memory_warning = check_memory_for_run(config, self.plan, ranks)  # before the model is built
        profile = find_profile(config, self.source)
        self.hot = find_hot_set(config, profile, self.source, ranks, checkpoints and checkpoints.parent)
        self.steps = self.samples = 0
        self._first_step = 0  # of this process: it may go on from a checkpoint
        self._evaluated: int | None = None  # the step of the last evaluation of this process
        self._next_window = 1  # that this process may have to evaluate
        self._has_ended = False  # no file came for data.idle_seconds
        self.stream = self._open_stream(StreamState(seed=config.data.seed))
        self._upcoming: Steps | None = None
        if checkpoints is not None:
            check_disk_for_run(config, self.plan, checkpoints, self.total_steps, ranks)
        check_disk_for_publications(config, ranks)
        self.model = build_sharded_model(config, self.plan, profile, self.source.schema, ranks, self.hot)
        self.optimizers = Optimizers(self.model, config.embedding_optimizer, config.dense_optimizer, config.schedule)
        self.state = RunState(config, self.source, self.model, self.optimizers, ranks, self.hot)
        self._saves = Saves(config.checkpoint, ranks)
        self.publisher: Publisher | None = None
        if config.publish.folder is not None:
            where = (ranks, checkpoints, export)
            self.publisher = Publisher(config.publish, self.model, tables_of_run(config), *where)
        self._input_failure = InputFailure()
        self.bad_rows = BadRowCount(config.data.bad_rows, ranks)
        self.loss_monitor = self._make_loss_monitor()
        self.metrics = StepMetrics(self.model, self.target, ranks)
        self._arithmetic = ExitStack()  # until `close`: threads beside the training compute, too
        self._arithmetic.enter_context(arithmetic(config.train, ranks.device))

    @property
    def target(self) -> Target:
        """What is predicted of a sample."""
        return self.source.schema.target

    @property
    def step_seconds(self) -> Sequence[float]:
        """Seconds of each step that this process has trained."""
        return self.metrics.step_seconds

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, those before a resume included; None: nobody knows yet."""
        left = self.stream.num_steps
        limits = [self.config.train.max_steps, None if left is None else self._first_step + left]
        return self.steps if self._has_ended else min((limit for limit in limits if limit is not None), default=None)

    @property
    def is_over(self) -> bool:
        """True after the last step of the whole run, which may be an earlier one than planned."""
        return self._is_last or bool(self.best.stop_reason)

    @property
    def _is_last(self) -> bool:
        return self.total_steps is not None and self.steps >= self.total_steps

    def train(self) -> Iterator[Report]:
        """Train to the end of the run, or until a rank is asked to stop, and yield reports on the way.

        Where the input fails, save, then raise.
        """
        first = self.steps
        with self._saves:
            try:
                for report in chain(self._begin_publishing(), self._train_steps(), self._end()):
                    if isinstance(report, SaveReport | FailedSaveReport):
                        self.best.note_save(report.step, is_complete=isinstance(report, SaveReport))
                    yield report
            except Exception as error:
                if error is self._input_failure.error and self.checkpoints and self.steps > first:
                    yield from self._saves.at_failure(self.steps, self._prepare_save)
                raise

    def _train_steps(self) -> Iterator[Report]:
        judges = self.config.judges
        if judges and not self.is_over and self.best.progress.step != self.steps:
            yield from self._evaluate_if_due()  # the run before was stopped in this evaluation
        while not self.is_over and not self.supervision.must_stop:
            yield from self._take_files()
            yield from self._evaluate_windows()
            if self.supervision.must_stop:
                break
            started = time.perf_counter()
            try:
                upcoming = self.upcoming.next()
            except StopIteration:
                if self.following is None:
                    break
                yield from self._wait_for_files(self.following)
                continue
            with upcoming as batch:
                skipped = self.step(batch)
            self.supervision.beat()
            if skipped is not None:
                behind = self.upcoming.replace_one()
                yield replace(skipped, epoch=behind.epoch, sample=behind.global_sample)
                if judges:  # it may have been the last batch of an epoch
                    yield from self._evaluate_if_due()
                continue
            self.metrics.add_seconds(time.perf_counter() - started)
            is_last = self._is_last
            if is_last or self.steps % self.config.train.log_every == 0:
                yield self.report()
                yield from self._count_bad_rows()
            yield from self._publish_if_due()
            if judges:  # the checkpoint of this step has what the evaluation shows
                yield from self._evaluate_if_due()
            if self._must_save and not is_last:
                yield from self._saves.start(self.steps, self._prepare_save)
                self.supervision.agree(self.ranks)  # a step more would need another save
            if not judges:  # the save first: in an evaluation a rank may die
                yield from self._evaluate_if_due()
            yield from self._saves.finished()

    def _take_files(self) -> Iterator[Report]:
        """Take the next file of a folder that is followed, before look-ahead runs out of samples."""
        if self.following is not None:
            batches = self.config.lookahead + self.config.data.prefetch_batches + _ENTERING
            ahead = batches * global_batch(self.config, self.ranks.world_size)
            with self._input_failure.noting():
                self.following.take(self.position.global_sample, ahead)
            yield from self.following.reports(self.steps)

    def _wait_for_files(self, following: FolderFollower) -> Iterator[Report]:
        """No batch is whole yet: wait a moment, and do what is due meanwhile."""
        yield from self._publish_if_due()
        yield from self._saves.finished()
        left = following.source.num_samples - self.position.global_sample
        if left < global_batch(self.config, self.ranks.world_size):  # else a file was just taken
            with self._input_failure.noting():
                self._has_ended = not following.wait()
            yield from following.reports(self.steps)
        self.supervision.beat()
        self.supervision.agree(self.ranks)

    def _begin_publishing(self) -> Iterator[PublicationReport]:
        if self.publisher is not None:

            def prepare(folder: Path) -> PreparedSave:
                done = (self.steps, self.samples, self.position, self.best.progress)
                return self.state.prepare_save(folder, *done, copy_bytes=0)

            self.state.run_id = self.publisher.begin(self.state.run_id, self.steps, prepare)
            yield from self.publisher.reports()

    def _publish_if_due(self) -> Iterator[PublicationReport]:
        if self.publisher is not None:
            if self.publisher.is_due(self.steps):
                self.publisher.cut(self.steps)
            yield from self.publisher.reports()

    def _publish_at_end(self) -> Iterator[PublicationReport]:
        if self.publisher is not None:
            yield from self.publisher.end(self.steps)

    def _evaluate_if_due(self) -> Iterator[EvalReport]:
        every = self.config.train.eval_every
        is_due = self.steps % every == 0 if every else self.config.judges and self.stream.ends_epoch(self.position)
        if is_due and self.steps > 0 and not self._is_last and self._evaluated != self.steps:
            yield from self._evaluate()

    def _evaluate(self) -> Iterator[EvalReport]:
        """Evaluate, and note whether it is the best so far; nothing where a rank was asked to stop."""
        self._evaluated = self.steps
        if (report := self.evaluate()) is None:
            return
        is_best = self.best.add(report)
        if self.steps in (self._saves.saved_step, self._first_step or None):
            self.best.note_save(self.steps)
        yield replace(report, is_best=is_best and self.config.judges)

    def _evaluate_windows(self) -> Iterator[WindowReport]:
        """In time order, evaluate the windows whose first sample is in the next global batch, none of which has
        trained; those that are left where a rank was asked to stop are evaluated by the run that goes on."""
        for window in self._windows_due():
            started = time.perf_counter()
            if (found := self._evaluation_of(window.source)) is None:
                return
            self._next_window = window.number + 1
            what = (self.steps, window.number, window.start, window.late, found.quality)
            yield WindowReport(*what, time.perf_counter() - started, found.slices)

    def _windows_due(self) -> list[WindowAhead]:
        if not self.config.data.is_in_time_order:
            return []
        position = self.position.global_sample
        place = position, position + global_batch(self.config, self.ranks.world_size)
        if self.following is None:
            found = windows_between(self.source, *place)
        else:
            with self._input_failure.noting():
                found = iter(self.following.windows_between(*place))
        return [window for window in found if window.number >= self._next_window]

    @property
    def _must_save(self) -> bool:
        is_due = self._saves.is_due(self.steps) or self.best.awaits(self.steps)
        return self.checkpoints is not None and is_due

    def _end(self) -> Iterator[Report]:
        """Report, save and evaluate the last step, as far as that was not done."""
        if self.following is not None:
            self.following.end()
            yield from self.following.reports(self.steps)
        yield from self._publish_at_end()
        yield from self._saves.last()
        if self.metrics.has_unreported:
            yield self.report()
        try:
            yield from self._save_at_end()  # before the evaluation, in which a rank may die
        except FailedSaveError:
            if self.config.checkpoint.on_failed_save == "continue":
                yield from self._evaluate_at_end()
            raise
        yield from self._evaluate_at_end()
        yield from self._save_at_end()  # where a signal that came meanwhile asks for it, or the best one is kept
        yield from self._publish_at_end()  # again, where it failed
        if self.supervision.must_stop:
            path = checkpoint_at(self.checkpoints, self.steps) if self.checkpoints else None
            yield StopReport(self.steps, path if path and path.exists() else None)

    def _save_at_end(self) -> Iterator[SaveReport]:
        is_due = self._saves.is_due_at_end(self.steps, self.supervision.must_stop) or self.best.awaits(self.steps)
        if self.checkpoints and is_due and self.step_seconds:
            yield self.save()

    def _evaluate_at_end(self) -> Iterator[Report]:
        if not self.supervision.must_stop:
            yield from self._evaluate_windows()
        if self.config.holds_out and self._evaluated != self.steps:
            yield from self._evaluate()
        yield from self._count_bad_rows()

    def _count_bad_rows(self) -> Iterator[BadRowsReport]:
        return self._input_failure.watch(self.bad_rows.count(self.stream, self.steps))

    @property
    def position(self) -> StreamState:
        """Position in the training data behind the last trained batch."""
        return self.upcoming.state

    @property
    def upcoming(self) -> Steps:
        """The steps that are left."""
        if self._upcoming is None:
            depths, device = self.config.look_ahead, self.ranks.device
            pipeline = None
            if self.config.lookahead:
                args = (self.model, self.optimizers.dense, device, depths.lookahead, depths.prefetch)
                pipeline = LookAheadPipeline(*args, features=features_of(self.model))
            left = None if self.total_steps is None else self.total_steps - self.steps
            self._upcoming = Steps(self.stream, left, device, pipeline, self._input_failure)
        return self._upcoming

    def step(self, batch: Batch) -> SkippedBatchReport | None:
        """Train one step, on the rank's batch on its device; or skip the batch, as `train.on_non_finite` says.

        Nothing in it waits for a GPU, unless batches may be skipped.
        """
        with divided_once(self.config, self.plan):
            self.optimizers.begin_step(self.steps)
            if self.config.model.drops:
                seed_masks(self.config.train.seed, self.steps, self.ranks.rank)
            with stage("forward"), self._autocast():
                loss, (_, outputs, labels) = self.model(batch)
            predicted = Predicted(outputs, labels, batch.weights)
            if problem := self._check_loss(loss, predicted, batch):
                cancel_forward(self.model)
                self.optimizers.set_num_steps(self.steps)
                return SkippedBatchReport(self.steps, problem)
            with stage("backward"):
                loss.backward()  # trains the embedding rows too
            with stage("optimizer"):
                self.optimizers.step()
        self.metrics.add_predicted(predicted)
        self.steps += 1
        self.samples += batch.num_samples * self.ranks.world_size
        return None

    def _check_loss(self, loss: Tensor, predicted: Predicted, batch: Batch) -> str:
        """Return why the batch must be skipped; empty where it trains. Ranks learn here which of them must stop."""
        learns_weights = self.config.model.label_weighting != "fixed"
        exact = loss if learns_weights else in_float64(self.target, loss, *predicted)
        sums = label_sums(self.target, *predicted)
        problem = self.loss_monitor.add(self.steps + 1, exact, batch, signal=self.supervision.signal, sums=sums)
        self.supervision.note_agreed(self.loss_monitor.signal)
        return problem

    def report(self) -> TrainReport:
        """Return loss, AUC, speed, and what caches and links moved, since the last report."""
        schedule = self.stream.schedule
        return self.metrics.report(
            step=self.steps,
            epoch=self.position.epoch,
            samples=self.samples,
            global_batch=global_batch(self.config, self.ranks.world_size),
            loss=self.loss_monitor.mean(),
            label_losses=dict(zip(self.target.heads, self.loss_monitor.label_means(), strict=False)),
            batches=None if schedule is None else dict(schedule.num_trained),
            learning_rate_factor=self.optimizers.factor or 1.0,
        )

    def evaluate(self) -> EvalReport | None:
        """Return the quality on the held-out part: each sample counts once, with any number of ranks.

        None: a rank was asked to stop meanwhile.
        """
        started = time.perf_counter()
        if (found := self._evaluation_of(self.source)) is None:
            return None
        seconds = time.perf_counter() - started
        return EvalReport(self.steps, found.quality, seconds, slices=found.slices, curves=found.curves)

    @counted_as_other()
    def _evaluation_of(self, source: Source) -> Evaluation | None:
        """Return what the held-out samples of a source say; None: a rank was asked to stop meanwhile."""
        with open_stream(self.config, source, self.ranks, None, None) as stream:
            batches = self._input_failure.watch(shortest(stream, self.ranks.device))
            batches = until_stopped(batches, self.supervision, self.ranks)
            predictions = PredictionBuffer(self.target)
            for predicted in predicted_of(self.model, batches, self.ranks.device, self._autocast):
                predictions.add(predicted)
            if source is self.source:  # bad rows of windows count when they train
                self.bad_rows.add(stream, "eval")
        return None if self.supervision.agree(self.ranks) else self._evaluator.judge(predictions, source)

    def save(self) -> SaveReport:
        """Write a checkpoint of all state that the rest of the run depends on, and wait until it is complete.

        Raises:
            CheckpointError: one of this step exists, or the run has no folder for checkpoints.
            FailedSaveError: it could not be written.
            NotFiniteError: a step since the last checkpoint had a loss that is not finite, or left such a parameter.
        """
        return self._saves.write(self.steps, self._prepare_save)

    def _prepare_save(self, copy_bytes: int) -> PreparedSave:
        if self.checkpoints is None:
            raise CheckpointError("This run has no folder for checkpoints; make the trainer with one.")
        self.loss_monitor.check_before_save(self.steps, self.optimizers.dense_parameters)
        done = (self.steps, self.samples, self.position, self.best.progress)
        if self.publisher is None:
            return self.state.prepare_save(self.checkpoints, *done, copy_bytes)
        published, ready = self.publisher.before_save(self.steps)
        return replace(self.state.prepare_save(self.checkpoints, *done, copy_bytes, published), ready=ready)

    def resume(
        self, checkpoint: Path, *, allow_unverified: bool = False, allow_changes: Collection[str] = ()
    ) -> tuple[bool, SettingsComparison]:
        """Continue from `checkpoint` as the run would have continued, with any number of ranks, any plan and any cache.

        Args:
            allow_unverified: also take a checkpoint without a manifest, of which nothing can be verified.
            allow_changes: settings that may have other values than in the checkpoint.

        Returns:
            True if the checkpoint was verified; its settings beside those of this run.

        Raises:
            InvalidCheckpointError: the checkpoint is incomplete or damaged; the run is as it was before.
            CheckpointError: it is of a model with other tables, or of a run with other settings or data; the run is as
                it was before.
        """
        self._saves.forget()
        manifest = verify_checkpoint(checkpoint, self.ranks, allow_unverified=allow_unverified)
        saved, comparison = self.state.read(checkpoint, allow_changes)
        if self._upcoming is not None:
            self._upcoming.close()
            self._upcoming = None
        self.state.load(checkpoint, saved, comparison)
        self.config = comparison.config
        self.steps = self._first_step = saved.step
        self.samples = saved.samples
        self._evaluated, self._next_window = None, 1
        is_same_data = not any(change.key.startswith("data.") for change in comparison.changes)
        self.best.resume(saved.evaluations, saved.step, is_same_data=is_same_data)
        self.loss_monitor = self._make_loss_monitor()
        self.metrics.forget()
        self.stream.close()
        if self.following is not None:
            self.following.start_at(comparison.stream.global_sample)
        self.stream = self._open_stream(comparison.stream)
        if manifest is not None:
            self.state.run_id = manifest.run_id
        if self.publisher is not None:
            self.publisher.resume((saved.published or {}).get("token"), is_changed=bool(comparison.changes))
        return manifest is not None, comparison

    def close(self) -> None:
        """End the threads that parse ahead, wait for a save, and let the process compute as before."""
        self.stream.close()
        if self.following is not None:
            self.following.close()
        if self._upcoming is not None:
            self._upcoming.close()
        self._saves.forget()
        if self.publisher is not None:
            self.publisher.close()
        self._arithmetic.close()

    def _open_stream(self, state: StreamState) -> BatchStream:
        """Open the training stream at `state`."""
        return open_stream(self.config, self.source, self.ranks, state, self.hot)

    def _make_loss_monitor(self) -> LossMonitor:
        kept = None if self.checkpoints is None else KeptBatches(self.checkpoints, self.ranks)
        skips = self.config.train.on_non_finite == "skip"
        return LossMonitor(self.ranks, skips=skips, kept=kept, before_stop=self._saves.wait, observe=self._observe)

    def _autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.config.train, self.ranks.device)

    def _observe(self, loss: float) -> None:
        self.stream.observe(loss)  # the stream that is open by then
