"""One training run on one rank: build, step, evaluate, save."""

from __future__ import annotations

import functools
import time
import uuid
from array import array
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from torchrec.optim.optimizers import in_backward_optimizer_filter

from embershard.data import Batch, BatchStream, StreamState, open_source
from embershard.distributed import Ranks, Supervision, shortest, verify_checkpoint
from embershard.distributed.traffic import counted_as_other
from embershard.errors import CheckpointError, FailedSaveError
from embershard.pipeline import LookAheadPipeline
from embershard.sharding.torchrec import cached_embeddings
from embershard.stages import stage
from embershard.training.build import build_sharded_model, features_of, find_plan, find_profile
from embershard.training.checkpoint.comparison import Comparison
from embershard.training.checkpoint.identity import global_batch
from embershard.training.checkpoint.kept_batches import KeptBatches
from embershard.training.checkpoint.run_state import PreparedSave, RunState
from embershard.training.checkpoint.saves import Saves
from embershard.training.config import RunConfig
from embershard.training.fit.disk_needs import check_disk_for_run
from embershard.training.fit.machines import check_machines
from embershard.training.fit.memory_check import check_memory_for_run
from embershard.training.float64 import divided_once
from embershard.training.hot_cold import find_hot_set
from embershard.training.optimizers import LearningRates
from embershard.training.quality.bad_rows import BadRowCount
from embershard.training.quality.cache_report import CacheReader
from embershard.training.quality.loss_monitor import LossMonitor, in_float64
from embershard.training.quality.metrics import Predicted, PredictionBuffer
from embershard.training.quality.prediction import autocast, predict, until_stopped
from embershard.training.quality.reports import (
    EvalReport,
    FailedSaveReport,
    Report,
    SaveReport,
    SkippedBatchReport,
    StopReport,
    TrainReport,
)
from embershard.training.quality.traffic_report import TrafficReader
from embershard.training.steps import InputFailure, Steps, open_stream

#: Newest samples per rank that count for the AUC in the progress line.
WINDOW_SAMPLES = 16_384


class Trainer:
    """Trains one model. All ranks call its methods in the same order, in a process group (`embershard.process_group`).

    >>> from embershard import process_group  # examples/own_script.py is a whole program
    >>> with process_group("cpu") as ranks:
    ...     trainer = Trainer(RunConfig(), ranks)
    ...     trainer.close()

    Args:
        checkpoints: folder for the checkpoints, shared by all ranks; None: save none.
        supervision: asks for the end of the training, and is told of each step.

    Raises:
        ConfigError: a machine lacks memory (`memory_warning`: what may not fit later), or differs in settings or files.
    """

    def __init__(
        self, config: RunConfig, ranks: Ranks, checkpoints: Path | None = None, supervision: Supervision | None = None
    ) -> None:
        self.config, self.ranks, self.checkpoints = config, ranks, checkpoints
        self.supervision = supervision or Supervision()
        check_machines(config, ranks, checkpoints and checkpoints.parent)
        self.plan = find_plan(config, ranks)
        self.source = open_source(config.data)
        self.target = self.source.schema.target
        self._first_step = 0  # of this process: it may go on from a checkpoint
        self.memory_warning = check_memory_for_run(config, self.plan, ranks)  # before the model is built
        profile = find_profile(config, self.source)
        self.hot = find_hot_set(config, profile, self.source, ranks, checkpoints and checkpoints.parent)
        self.stream = self._open_stream(StreamState(seed=config.data.seed))
        if checkpoints is not None:
            check_disk_for_run(config, self.plan, checkpoints, self.total_steps, ranks)
        self.model = build_sharded_model(config, self.plan, profile, self.source.schema, ranks, self.hot)
        self.dense_parameters = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.dense_optimizer = config.dense_optimizer.build(self.dense_parameters)
        self.state = RunState(config, self.source, self.model, self.dense_optimizer, ranks, self.hot)
        self._upcoming: Steps | None = None
        self._input_failure = InputFailure()
        self.bad_rows = BadRowCount(config.data.bad_rows, ranks)
        self._saves = Saves(config.checkpoint, ranks)
        self.loss_monitor = self._make_loss_monitor()
        self.window = PredictionBuffer(self.target, WINDOW_SAMPLES)
        self.cache_reader = CacheReader(self.model, ranks)
        self.traffic_reader = TrafficReader(ranks)
        self.steps = self.samples = 0
        self.step_seconds = array("d")
        self._reported_steps = 0
        self._autocast = functools.partial(autocast, config.train, ranks.device)
        fused = (self.model.fused_optimizer, config.embedding_optimizer.lr)
        self._learning_rates = LearningRates(config.schedule, fused, (self.dense_optimizer, config.dense_optimizer.lr))
        self.run_id = ranks.from_first(lambda: uuid.uuid4().hex)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, those before a resume included."""
        left = self.stream.num_steps
        limits = [self.config.train.max_steps, None if left is None else self._first_step + left]
        return min(limit for limit in limits if limit is not None)

    def train(self) -> Iterator[Report]:
        """Train to the end of the run, or until a rank is asked to stop, and yield reports on the way.

        Where the input fails, save, then raise.
        """
        first = self.steps
        with self._saves:
            try:
                yield from self._train()
            except Exception as error:
                if error is self._input_failure.error and self.checkpoints and self.steps > first:
                    yield from self._save_at_failure()
                raise

    def _train(self) -> Iterator[Report]:
        evaluated = -1
        config = self.config

        def every(steps: int | None) -> bool:
            return steps is not None and self.steps % steps == 0

        while self.steps < self.total_steps and not self.supervision.must_stop:
            started = time.perf_counter()
            try:
                upcoming = self.upcoming.next()
            except StopIteration:
                break
            with upcoming as batch:
                skipped = self.step(batch)
            self.supervision.beat()
            if skipped is not None:
                self.upcoming.replace_one()
                behind = self.upcoming.state
                yield replace(skipped, epoch=behind.epoch, sample=behind.global_sample)
                continue
            self.step_seconds.append(time.perf_counter() - started)
            is_last = self.steps == self.total_steps
            if every(config.train.log_every) or is_last:
                yield self.report()
                yield from self._input_failure.watch(self.bad_rows.count(self.stream, self.steps))
            if self.checkpoints and every(config.checkpoint.every_steps) and not is_last:
                yield from self._saves.start(self.steps, self._prepare_save)
                self.supervision.agree(self.ranks)  # a step more would need another save
            if every(config.train.eval_every) and not is_last:
                evaluated = self.steps
                yield from filter(None, [self.evaluate()])
            yield from self._saves.finished()
        yield from self._saves.last()
        if self.steps > self._reported_steps:
            yield self.report()
        try:
            yield from self._save_at_end()  # before the evaluation, in which a rank may die
        except FailedSaveError:
            if config.checkpoint.on_failed_save == "continue":
                yield from self._last_evaluation(evaluated)
            raise
        yield from self._last_evaluation(evaluated)
        yield from self._save_at_end()  # where a signal that came meanwhile asks for it
        if self.supervision.must_stop:
            path = self.checkpoints / f"step_{self.steps}" if self.checkpoints else None
            yield StopReport(self.steps, path if path and path.exists() else None)

    def _last_evaluation(self, evaluated: int) -> Iterator[Report]:
        if self.config.holds_out and evaluated != self.steps:
            yield from filter(None, [self.evaluate()])
        yield from self._input_failure.watch(self.bad_rows.count(self.stream, self.steps))

    def _save_at_end(self) -> Iterator[SaveReport]:
        is_due = self.config.checkpoint.saves_last(self.steps, self.supervision.must_stop)
        if self.checkpoints and is_due and self._saves.saved_step != self.steps and self.step_seconds:
            yield self.save()

    @property
    def upcoming(self) -> Steps:
        """The steps that are left."""
        if self._upcoming is None:
            depths, device = self.config.look_ahead, self.ranks.device
            pipeline = None
            if self.config.lookahead:
                args = (self.model, self.dense_optimizer, device, depths.lookahead, depths.prefetch)
                pipeline = LookAheadPipeline(*args, features=features_of(self.model))
            self._upcoming = Steps(self.stream, self.total_steps - self.steps, device, pipeline, self._input_failure)
        return self._upcoming

    def step(self, batch: Batch) -> SkippedBatchReport | None:
        """Train one step, on the rank's batch on its device; or skip the batch, as `train.on_non_finite` says.

        Nothing in it waits for a GPU, unless batches may be skipped.
        """
        with divided_once(self.config, self.plan):
            return self._step(batch)

    def _step(self, batch: Batch) -> SkippedBatchReport | None:
        self._learning_rates.set(self.steps)
        self.dense_optimizer.zero_grad()
        with stage("forward"), self._autocast():
            loss, (_, outputs, labels) = self.model(batch)
        predicted = Predicted(outputs, labels, batch.weights)
        exact = in_float64(self.target, loss, *predicted)
        problem = self.loss_monitor.add(self.steps + 1, exact, batch, signal=self.supervision.signal)
        self.supervision.note_agreed(self.loss_monitor.signal)
        if problem:
            for pool in cached_embeddings(self.model):  # between ranks, autograd may keep the forward, and its pins
                pool.cache.cancel(forwarded=True)
            if self.config.embedding_optimizer.counts_steps:  # the forward counted one
                self.model.fused_optimizer.set_optimizer_step(self.steps)
            return SkippedBatchReport(self.steps, problem)
        with stage("backward"):
            loss.backward()  # trains the embedding rows too
        with stage("optimizer"):
            self.config.dense_optimizer.clip(self.dense_parameters.values())
            self.dense_optimizer.step()
        self.window.add(predicted)
        self.steps += 1
        self.samples += batch.num_samples * self.ranks.world_size
        return None

    def report(self) -> TrainReport:
        """Return loss, AUC, speed, and what caches and links moved, since the last report."""
        seconds = self.step_seconds[self._reported_steps - self.steps :]
        self._reported_steps = self.steps
        parts = len(seconds) * self.ranks.world_size  # steps of ranks
        cached = self.cache_reader.since_last()
        return TrainReport(
            step=self.steps,
            epoch=self.upcoming.state.epoch,
            samples=self.samples,
            loss=self.loss_monitor.mean(),
            batches=None if (schedule := self.stream.schedule) is None else dict(schedule.num_trained),
            quality=self.window.quality(self.ranks),
            samples_per_second=len(seconds) * global_batch(self.config, self.ranks.world_size) / sum(seconds),
            hit_rate_unique=cached.hit_rate_unique,
            hit_rate_lookups=cached.hit_rate_lookups,
            fills=cached.fills / parts,
            write_backs=cached.write_backs / parts,
            learning_rate_factor=self._learning_rates.factor or 1.0,
            sent_bytes=self.traffic_reader.since_last().over(parts),
        )

    @counted_as_other()
    def evaluate(self) -> EvalReport | None:
        """Return the quality on the held-out part: each sample counts once, with any number of ranks.

        None: a rank was asked to stop meanwhile.
        """
        started = time.perf_counter()
        with self._open_stream(None) as stream:
            batches = self._input_failure.watch(shortest(stream, self.ranks.device))
            batches = until_stopped(batches, self.supervision, self.ranks)
            predictions = predict(self.model, self.target, batches, self.ranks.device, self._autocast)
            self.bad_rows.add(stream, "eval")
        if self.supervision.agree(self.ranks):
            return None
        return EvalReport(self.steps, predictions.quality(self.ranks), time.perf_counter() - started)

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
        self.loss_monitor.check_before_save(self.steps, self.dense_parameters)
        return self.state.prepare_save(
            self.checkpoints, self.run_id, self.steps, self.samples, self.upcoming.state, copy_bytes
        )

    def _save_at_failure(self) -> Iterator[Report]:
        own: list[SaveReport | FailedSaveReport] = []
        try:
            own = [self.save()]
        except FailedSaveError as error:
            own = [FailedSaveReport(self.steps, str(error))]
        except CheckpointError:  # this step is saved already
            pass
        for report in [*self._saves.ended(), *own]:
            yield replace(report, run_ends=True) if isinstance(report, FailedSaveReport) else report

    def resume(
        self, checkpoint: Path, *, allow_unverified: bool = False, allow_changes: Collection[str] = ()
    ) -> tuple[bool, Comparison]:
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
        self.steps, self.samples = saved.step, saved.samples
        self._first_step = self._reported_steps = saved.step
        self.loss_monitor, self.window = self._make_loss_monitor(), PredictionBuffer(self.target, WINDOW_SAMPLES)
        self.stream.close()
        self.stream = self._open_stream(comparison.stream)
        if manifest is not None:
            self.run_id = manifest.run_id
        return manifest is not None, comparison

    def close(self) -> None:
        """End the threads that parse ahead, and wait for a save."""
        self.stream.close()
        if self._upcoming is not None:
            self._upcoming.close()
        self._saves.forget()

    def _open_stream(self, state: StreamState | None) -> BatchStream:
        """Open the training stream at `state`, or with None the held-out part."""
        return open_stream(self.config, self.source, self.ranks, state, self.hot)

    def _make_loss_monitor(self) -> LossMonitor:
        kept = None if self.checkpoints is None else KeptBatches(self.checkpoints, self.ranks)
        skips = self.config.train.on_non_finite == "skip"
        return LossMonitor(self.ranks, skips=skips, kept=kept, before_stop=self._saves.wait, observe=self._observe)

    def _observe(self, loss: float) -> None:
        self.stream.observe(loss)  # the stream that is open by then
