"""One training run on one rank: build, step, evaluate, save."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from array import array
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.data import Batch, BatchStream, StreamState, open_source
from embershard.distributed import (
    Ranks,
    check_disk,
    load_tensors,
    rng_state,
    save_checkpoint,
    set_rng_state,
    verify_checkpoint,
    without_empty,
)
from embershard.distributed.traffic import counted_as_other
from embershard.errors import CheckpointError, FailedSaveError
from embershard.models.dense_size import DenseSize
from embershard.pipeline import LookAheadPipeline
from embershard.sharding.sizes import TableSize
from embershard.training.build import build_sharded_model, find_plan, find_profile
from embershard.training.cache_report import CacheReader
from embershard.training.config import RunConfig
from embershard.training.loss_monitor import LossMonitor
from embershard.training.metrics import PredictionBuffer
from embershard.training.optimizers import set_learning_rate
from embershard.training.reports import EvalReport, FailedSaveReport, Report, SaveReport, TrainReport
from embershard.training.saved_run import SavedRun
from embershard.training.steps import Steps
from embershard.training.traffic_report import TrafficReader

#: Newest samples per rank that count for the AUC in the progress line.
WINDOW_SAMPLES = 16_384


class Trainer:
    """Trains one model. All ranks call its methods in the same order.

    Args:
        checkpoints: folder for the checkpoints, shared by all ranks; None: save none.
    """

    def __init__(self, config: RunConfig, ranks: Ranks, checkpoints: Path | None = None) -> None:
        self.config, self.ranks, self.checkpoints = config, ranks, checkpoints
        self.plan = find_plan(config, ranks)
        self.source = open_source(config.data)
        self.stream = self._open_stream(StreamState(seed=config.data.seed))
        self._check_disk()
        profile = find_profile(config, self.source)
        self.model = build_sharded_model(config, self.plan, profile, self.source.schema, ranks)
        self.dense_parameters = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.dense_optimizer = config.dense_optimizer.build(self.dense_parameters)
        self._upcoming: Steps | None = None
        self.loss_monitor = LossMonitor(ranks)
        self.window = PredictionBuffer(WINDOW_SAMPLES)
        self.cache_reader = CacheReader(self.model, ranks)
        self.traffic_reader = TrafficReader(ranks)
        self.steps = self.samples = 0
        self.step_seconds = array("d")
        self._reported_steps = 0
        self._learning_rate_factor: float | None = None
        self.run_id = ranks.from_first(lambda: uuid.uuid4().hex)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, those before a resume included."""
        limits = [self.config.train.max_steps]
        if self.config.train.num_epochs is not None:
            limits.append(self.config.train.num_epochs * self.stream.steps_per_epoch)
        return min(limit for limit in limits if limit is not None)

    def train(self) -> Iterator[Report]:
        """Train to the end of the run, and yield reports on the way."""
        evaluated = saved = -1
        config = self.config

        def every(steps: int | None) -> bool:
            return steps is not None and self.steps % steps == 0

        while self.steps < self.total_steps:
            started = time.perf_counter()
            try:
                upcoming = self.upcoming.next()
            except StopIteration:  # a resumed run with another batch size has fewer steps left than planned
                break
            with upcoming as batch:
                self.step(batch)
            self.step_seconds.append(time.perf_counter() - started)
            if every(config.train.log_every) or self.steps == self.total_steps:
                yield self.report()
            if every(config.train.eval_every):
                evaluated = self.steps
                yield self.evaluate()
            if self.checkpoints and every(config.checkpoint.every_steps):
                report = self._try_to_save()
                saved = self.steps if isinstance(report, SaveReport) else saved
                yield report
        if self.steps > self._reported_steps:
            yield self.report()
        if config.holds_out and evaluated != self.steps:
            yield self.evaluate()
        if self.checkpoints and config.checkpoint.at_end and saved != self.steps and len(self.step_seconds):
            yield self.save()

    @property
    def upcoming(self) -> Steps:
        """The steps that are left."""
        if self._upcoming is None:
            depths, device = self.config.look_ahead, self.ranks.device
            pipeline = None
            if self.config.lookahead:
                pipeline = LookAheadPipeline(
                    self.model, self.dense_optimizer, device, depths.lookahead, depths.prefetch
                )
            self._upcoming = Steps(self.stream, self.total_steps - self.steps, device, pipeline)
        return self._upcoming

    def step(self, batch: Batch) -> None:
        """Train one step, on the rank's batch on its device. Nothing in it waits for a GPU."""
        self._set_learning_rates()
        self.dense_optimizer.zero_grad()
        with self._autocast():
            loss, (_, logits, labels) = self.model(batch)
        self.loss_monitor.add(self.steps + 1, loss)
        loss.backward()  # trains the embedding rows too
        if self.config.dense_optimizer.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.dense_parameters.values(), self.config.dense_optimizer.clip_norm)
        self.dense_optimizer.step()
        self.window.add(logits, labels)
        self.steps += 1
        self.samples += batch.num_samples * self.ranks.world_size

    def report(self) -> TrainReport:
        """Return loss, AUC, speed, hit rate and bytes between ranks since the last report."""
        seconds = self.step_seconds[self._reported_steps - self.steps :]
        global_batch = self.config.train.rank_batch_size(self.ranks.world_size) * self.ranks.world_size
        self._reported_steps = self.steps
        hits = self.cache_reader.since_last()
        return TrainReport(
            step=self.steps,
            epoch=self.upcoming.state.epoch,
            samples=self.samples,
            loss=self.loss_monitor.mean(),
            auc=self.window.quality(self.ranks).auc,
            samples_per_second=len(seconds) * global_batch / sum(seconds),
            hit_rate_unique=hits.hit_rate_unique,
            hit_rate_lookups=hits.hit_rate_lookups,
            learning_rate_factor=self._learning_rate_factor or 1.0,
            sent_bytes=self.traffic_reader.since_last().over(len(seconds) * self.ranks.world_size),
        )

    @torch.no_grad()
    @counted_as_other()
    def evaluate(self) -> EvalReport:
        """Return the quality on the held-out part: each sample counts once, with any number of ranks."""
        started = time.perf_counter()
        predictions = PredictionBuffer()
        self.model.eval()
        with self._open_stream(None) as stream:
            for batch in stream:
                count = batch.num_samples
                batch = _never_empty(batch).to(self.ranks.device, non_blocking=True)
                with self._autocast():
                    _, (_, logits, labels) = self.model(batch)
                predictions.add(logits[:count], labels[:count])
        self.model.train()
        return EvalReport(self.steps, predictions.quality(self.ranks), time.perf_counter() - started)

    def save(self) -> SaveReport:
        """Write a checkpoint of all state that the rest of the run depends on.

        Raises:
            CheckpointError: one of this step exists, or the run has no folder for checkpoints.
            FailedSaveError: it could not be written.
        """
        started = time.perf_counter()
        if self.checkpoints is None:
            raise CheckpointError("This run has no folder for checkpoints; make the trainer with one.")
        scalars = {
            "samples": self.samples,
            "stream": self.upcoming.state.to_dict(),
            "tables": self._tables(),
            "settings": self._settings(),
            "world_size": self.ranks.world_size,
            "rng": self.ranks.all_gather_objects(rng_state(self.ranks.device)),
        }
        tensors, keep_last = without_empty(self._tensors()), self.config.checkpoint.keep_last
        path = save_checkpoint(
            self.checkpoints, self.steps, tensors, scalars, self.ranks, keep_last=keep_last, run_id=self.run_id
        )
        return SaveReport(self.steps, path, time.perf_counter() - started)

    def _try_to_save(self) -> SaveReport | FailedSaveReport:
        try:
            return self.save()
        except FailedSaveError as error:
            if self.config.checkpoint.on_failed_save == "stop":
                raise
            return FailedSaveReport(self.steps, str(error))

    def resume(self, checkpoint: Path, *, allow_unverified: bool = False) -> bool:
        """Continue from `checkpoint`, with any number of ranks, as the run would have continued.

        Args:
            allow_unverified: also take a checkpoint without a manifest, of which nothing can be verified.

        Returns:
            True if the checkpoint was verified.

        Raises:
            InvalidCheckpointError: the checkpoint is incomplete or damaged; the run is as it was before.
            CheckpointError: it is of a model with other tables, or with other settings.
            ConfigError: it was written with another `data.seed`.
        """
        manifest = verify_checkpoint(checkpoint, self.ranks, allow_unverified=allow_unverified)
        saved = self.ranks.from_first(lambda: SavedRun.read(checkpoint))
        saved.check_fits(checkpoint, self._tables(), self._settings())
        saved.check_position(checkpoint, self.stream.num_samples)
        if self._upcoming is not None:
            self._upcoming.close()
            self._upcoming = None
        self.dense_optimizer.init_state()  # its tensors must exist to be loaded into
        self.dense_optimizer.zero_grad()
        tensors = self._tensors()
        load_tensors(checkpoint, without_empty(tensors))
        self.model.load_state_dict(tensors["model"])
        self.model.fused_optimizer.load_state_dict({"state": tensors["embedding_optimizer"]})
        self.dense_optimizer.load_state_dict({"state": tensors["dense_optimizer"]})
        self.steps, self.samples = saved.step, saved.samples
        if self.config.embedding_optimizer.counts_steps:
            self.model.fused_optimizer.set_optimizer_step(self.steps)
        self._reported_steps = self.steps
        self.loss_monitor, self.window = LossMonitor(self.ranks), PredictionBuffer(WINDOW_SAMPLES)
        self.stream.close()
        self.stream = self._open_stream(saved.stream)
        if saved.world_size == self.ranks.world_size:
            set_rng_state(saved.rng[self.ranks.rank], self.ranks.device)
        if manifest is not None:
            self.run_id = manifest.run_id
        return manifest is not None

    def close(self) -> None:
        """End the threads that parse ahead."""
        self.stream.close()
        if self._upcoming is not None:
            self._upcoming.close()

    def _tensors(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "embedding_optimizer": self.model.fused_optimizer.state_dict()["state"],
            "dense_optimizer": self.dense_optimizer.state_dict()["state"],
        }

    def _check_disk(self) -> None:
        """Raise unless the checkpoints of the whole run can be written: before the model is built."""
        config, schema = self.config, self.source.schema
        num_saves = config.checkpoint.num_saves(self.total_steps)
        if self.checkpoints is None or not num_saves:
            return
        dense = DenseSize.of(config.model, schema.num_dense, len(schema.sparse)).parameter_bytes
        save_bytes = dense * config.dense_optimizer.num_states  # gradients are not saved, parameters are
        for name, (rows, dim) in self._tables().items():
            size = TableSize(name, rows, dim, config.model.table_dtype, *config.embedding_optimizer.state_bytes)
            save_bytes += rows * size.row_bytes()
        check_disk(self.checkpoints, save_bytes, num_saves, config.checkpoint.keep_last, self.ranks)

    def _tables(self) -> dict[str, tuple[int, int]]:
        dim = self.config.model.embedding_dim
        return {feature.name: (feature.num_rows, dim) for feature in self.source.schema.sparse}

    def _settings(self) -> dict[str, Any]:
        """Settings under which other values of the tensors would load without an error."""
        config = self.config
        settings = {f"model.{key}": value for key, value in asdict(config.model).items()}
        settings["embedding_optimizer.kind"] = config.embedding_optimizer.kind
        settings["dense_optimizer.kind"] = config.dense_optimizer.kind
        return json.loads(json.dumps(settings))  # as a checkpoint holds them

    def _open_stream(self, state: StreamState | None) -> BatchStream:
        """Open the training stream at `state`, or with None the held-out part."""
        train = self.config.train
        return BatchStream(
            self.source,
            batch_size=train.rank_batch_size(self.ranks.world_size),
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            split="eval" if state is None else "train",
            epochs=1 if state is None else train.num_epochs,
            config=self.config.data,
            state=state,
            pin_memory=self.ranks.device.type == "cuda",
        )

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        enabled = self.config.train.precision == "bf16"
        return torch.autocast(self.ranks.device.type, dtype=torch.bfloat16, enabled=enabled)

    def _set_learning_rates(self) -> None:
        factor = self.config.schedule.factor(self.steps)
        if factor == self._learning_rate_factor:
            return
        self._learning_rate_factor = factor
        set_learning_rate(self.dense_optimizer, self.config.dense_optimizer.lr * factor)
        set_learning_rate(self.model.fused_optimizer, self.config.embedding_optimizer.lr * factor)
        self.model.fused_optimizer.step()  # only hands the rate to the kernels


def _never_empty(batch: Batch) -> Batch:
    """Return the batch, or one placeholder for an empty one: some layers cannot run without a sample."""
    if batch.num_samples:
        return batch
    sparse = batch.sparse_features
    return Batch(
        batch.dense_features.new_zeros(1, batch.dense_features.shape[1]),
        KeyedJaggedTensor(
            sparse.keys(), sparse.values().new_empty(0), lengths=sparse.lengths().new_zeros(len(sparse.keys()))
        ),
        batch.labels.new_zeros(1),
    )
