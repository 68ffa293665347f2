"""One training run on one rank: build, step, evaluate, save."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from embershard.data import Batch, BatchStream, Source, StreamState, open_source
from embershard.distributed import Ranks, Supervision, verify_checkpoint
from embershard.distributed.checkpoint.folder import checkpoint_at
from embershard.lazy_names import named
from embershard.metrics.predictions import Predicted
from embershard.models.dropout import seed_masks
from embershard.sharding.torchrec import cancel_forward
from embershard.stages import stage
from embershard.training.arithmetic import arithmetic, autocast, check_process
from embershard.training.build import build_sharded_model, divided_once, find_plan, find_profile
from embershard.training.checkpoint.run_state import RunState
from embershard.training.checkpoint.saved_run import SettingsComparison
from embershard.training.config import RunConfig
from embershard.training.dense_call import DenseCall
from embershard.training.fit.machine_limits import check_disk_for_run, disk_of
from embershard.training.fit.machines import check_machines
from embershard.training.fit.memory_check import check_memory_for_run
from embershard.training.optimizers import Optimizers
from embershard.training.parts.counts import StepMetrics
from embershard.training.parts.evaluations import Evaluations
from embershard.training.parts.loss_monitor import Losses
from embershard.training.parts.order import parts_of
from embershard.training.parts.part import Export, Part, Training
from embershard.training.parts.saves import Saves
from embershard.training.reports import EvalReport, Report, SaveReport, SkippedBatchReport, StopReport, TrainReport
from embershard.training.steps import MicroBatches, open_stream
from embershard.training.warm_start import WarmStart


class _SkippedError(Exception):
    """A batch trains nothing; why."""


class Trainer(Training):
    """Trains one model. All ranks call its methods in the same order, in a process group (`embershard.process_group`).

    >>> from embershard import process_group  # examples/own_script.py is a whole program
    >>> with process_group("cpu") as ranks:
    ...     trainer = Trainer(RunConfig(), ranks)
    ...     trainer.close()

    Args:
        checkpoints: folder for the checkpoints, shared by all ranks; None: save none.
        supervision: asks for the end of the training, and is told of each step.
        export: writes the base of publications; needed with `publish.folder`.
        start: what fills the model when training begins, unless the run is resumed; None: nothing is trained yet.

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
        start: WarmStart | None = None,
    ) -> None:
        super().__init__()
        self.config, self.ranks, self.checkpoints, self.export = config, ranks, checkpoints, export
        self.supervision = supervision or Supervision()
        if config.train.accumulate > 1:  # named before the model is built: it may have been taken out
            self._accumulating = named("embershard.extras.accumulation:accumulating")
        check_process(config.train, ranks.device)
        check_machines(config, ranks, checkpoints and checkpoints.parent)
        self.plan = find_plan(config, ranks)
        self._saves, self._evaluations = Saves(self), Evaluations(self)
        self.losses = Losses(self, before_stop=self._saves.wait)
        self.metrics = StepMetrics(self)
        self.parts = parts_of(self, self.losses, self.metrics, self._saves, self._evaluations, start)
        opened = [source for part in self.parts if (source := part.open_source()) is not None]
        self.source: Source = opened[0] if opened else open_source(config.data, share=ranks.from_first)
        for part in self.parts:
            part.check()
        self.memory_warning = check_memory_for_run(config, self.plan, ranks)  # before the model is built
        profile = find_profile(config, self.source)
        for part in self.parts:
            part.before_build(profile)
        self.stream = self._open_stream(StreamState(seed=config.data.seed))
        if checkpoints is not None:
            of_parts = sum(part.disk_bytes(disk_of(checkpoints)) for part in self.parts)
            check_disk_for_run(config, self.plan, checkpoints, self.total_steps, ranks, of_parts)
        options = self.of_parts(lambda part: part.sharder_options)
        self.model = build_sharded_model(config, self.plan, profile, self.source.schema, ranks, options)
        self.optimizers = Optimizers(self.model, config.row_optimizer, config.dense_optimizer, config.schedule)
        trained = self.optimizers.dense_parameters.values()
        self.dense_call = DenseCall(self.model, config, trained, self.losses.exact)
        identity = self.of_parts(lambda part: part.identity)
        self.state = RunState(config, self.source, self.model, self.optimizers, ranks, identity)
        for part in self.parts:
            part.after_build()
        self._draws_masks = config.model.drops
        self._arithmetic = ExitStack()  # until `close`: threads beside the training compute, too
        self._arithmetic.enter_context(arithmetic(config.train, ranks.device))

    def train(self) -> Iterator[Report]:
        """Train to the end of the run, or until a rank is asked to stop, and yield reports on the way.

        Where the input fails, save, then raise.
        """
        first = self.steps
        with self._saves:
            try:
                begin = self._each(lambda part: part.begin())
                for report in chain(begin, self._train_steps(), self._end()):
                    self._evaluations.note(report)
                    yield report
            except Exception as error:
                if error is self.input_failure.error and self.checkpoints and self.steps > first and self.is_settled:
                    yield from self._saves.at_failure()
                raise

    def _train_steps(self) -> Iterator[Report]:
        while self._goes_on:
            yield from self._each(lambda part: part.before_batch())
            if not self._goes_on:
                break
            started = time.perf_counter()
            try:
                upcoming = self.upcoming.next()
            except StopIteration:
                if not self.stream.waits:
                    break
                yield from self._each(lambda part: part.no_batch())
                self.supervision.beat()
                self.supervision.agree(self.ranks)
                continue
            with upcoming as batch:
                skipped = self.step(batch)
            self.supervision.beat()
            if skipped is not None:
                behind = self.upcoming.replace_one()
                yield replace(skipped, epoch=behind.epoch, sample=behind.global_sample)
                continue
            self.step_seconds.append(time.perf_counter() - started)
            yield from self._each(lambda part: part.after_step())

    @property
    def _goes_on(self) -> bool:
        return not self.is_over and not (self.supervision.must_stop and self.is_settled)

    def step(self, batch: Batch | MicroBatches) -> SkippedBatchReport | None:
        """Train one step, on the rank's batch on its device, whole or in micro-batches; or skip the batch, as
        `train.on_non_finite` says.

        Nothing in it waits for a GPU, unless batches may be skipped.
        """
        with divided_once(self.config, self.plan):
            self.optimizers.begin_step(self.steps)
            try:
                predicted = self._train_batch(batch) if isinstance(batch, Batch) else self._train_micro_batches(batch)
            except _SkippedError as skipped:
                cancel_forward(self.model)
                self.optimizers.set_num_steps(self.steps)
                return SkippedBatchReport(self.steps, str(skipped))
            with stage("optimizer"):
                self.optimizers.step()
        self.metrics.add_predicted(predicted)
        self.steps += 1
        self.samples += len(predicted.labels) * self.ranks.world_size
        return None

    def _train_batch(self, batch: Batch) -> Predicted:
        with self.dense_call.used():
            loss, predicted = self._forward(batch)
        if problem := self.losses.add(loss, predicted, batch, self.dense_call.exact):
            raise _SkippedError(problem)
        with stage("backward"):
            loss.backward()  # trains the embedding rows too
            self.dense_call.finish()
        return predicted

    def _train_micro_batches(self, micro_batches: MicroBatches) -> Predicted:
        """Train once for all micro-batches; a loss is a mean over samples, so that each has its share of it."""
        num_samples, losses, predictions = micro_batches.num_samples, list[Tensor](), list[Predicted]()
        with self._accumulating(self.model):
            for number, micro_batch in enumerate(micro_batches):
                loss, predicted = self._forward(micro_batch, number)
                losses.append(loss * (micro_batch.num_samples / num_samples))
                with stage("backward"):
                    losses[-1].backward()
                losses[-1] = losses[-1].detach()
                predictions.append(predicted.detached())
            whole = Predicted.joined(predictions)
            if problem := self.losses.add(torch.stack(losses).sum(), whole, micro_batches):
                raise _SkippedError(problem)  # within: then nothing trains
        return whole

    def _forward(self, batch: Batch, micro_batch: int = 0) -> tuple[Tensor, Predicted]:
        if self._draws_masks:
            seed_masks(self.config.train.seed, self.steps + self.optimizers.steps_before, self.ranks.rank, micro_batch)
        with stage("forward"), autocast(self.config.train, self.ranks.device):
            loss, (_, outputs, labels) = self.model(batch)
        return loss, Predicted(outputs, labels, batch.weights)

    def _end(self) -> Iterator[Report]:
        """Report, save and evaluate the last step, as far as that was not done."""
        yield from self._each(lambda part: part.at_end())
        yield from self._each(lambda part: part.evaluate_at_end())
        for part in reversed(self.parts):
            yield from part.finish()
        if self.supervision.must_stop:
            path = checkpoint_at(self.checkpoints, self.steps) if self.checkpoints else None
            yield StopReport(self.steps, path if path and path.exists() else None)

    def report(self) -> TrainReport:
        """Return loss, quality, speed, and what caches and links moved, since the last report. Collective."""
        return self.metrics.report()

    def evaluate(self) -> EvalReport | None:
        """Return the quality on the held-out part: each sample counts once, with any number of ranks.

        None: a rank was asked to stop meanwhile.
        """
        return self._evaluations.evaluate()

    @property
    def stop_reason(self) -> str:
        """Why the training ends before its last step: evaluations gave nothing better. Empty where it goes on."""
        return self._evaluations.stop_reason

    def save(self) -> SaveReport:
        """Write a checkpoint of all state that the rest of the run depends on, and wait until it is complete.

        Raises:
            CheckpointError: one of this step exists, or the run has no folder for checkpoints.
            FailedSaveError: it could not be written.
            NotFiniteError: a step since the last checkpoint had a loss that is not finite, or left such a parameter.
        """
        return self._saves.write()

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
        self._saves.close()
        manifest = verify_checkpoint(checkpoint, self.ranks, allow_unverified=allow_unverified)
        saved, comparison = self.state.read(checkpoint, allow_changes)
        if self._upcoming is not None:
            self._upcoming.close()
            self._upcoming = None
        self.state.load(checkpoint, saved, comparison)
        self.config = comparison.config
        self.steps = self.first_step = saved.step
        self.samples = saved.samples
        if manifest is not None:
            self.state.run_id = manifest.run_id
        self._saves.go_on_from(checkpoint, manifest)
        self.stream.close()
        for part in self.parts:
            part.read_tensors(checkpoint)
            part.read_state(saved, comparison)
        self.stream = self._open_stream(comparison.stream)
        return manifest is not None, comparison

    def close(self) -> None:
        """End the threads that parse ahead, wait for a save, and let the process compute as before."""
        self.stream.close()
        if self._upcoming is not None:
            self._upcoming.close()
        for part in reversed(self.parts):
            part.close()
        self._arithmetic.close()

    def _open_stream(self, state: StreamState) -> BatchStream:
        options = self.of_parts(lambda part: part.stream_options)
        return open_stream(self.config, self.source, self.ranks, state, **options)

    def _each(self, hook: Callable[[Part], Iterable[Report]]) -> Iterator[Report]:
        return chain.from_iterable(map(hook, self.parts))
