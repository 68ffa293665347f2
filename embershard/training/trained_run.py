"""`TrainedRun`: a run's settings and the checkpoint to use of it. `Scorer`: its model on the ranks, scoring samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from embershard.cache import CacheConfig
from embershard.data import Source, Target
from embershard.data.sources.kinds import schema_of
from embershard.distributed import (
    CheckpointConfig,
    Ranks,
    Supervision,
    shortest,
    verify_checkpoint,
)
from embershard.distributed.checkpoint.best import BestEvaluation
from embershard.distributed.checkpoint.folder import best_checkpoint, checkpoints_for
from embershard.distributed.checkpoint.load import load_served, newest_valid, without_known_warnings
from embershard.errors import CheckpointError, InvalidCheckpointError
from embershard.frequency.config import ProfileConfig
from embershard.metrics.evaluation import Evaluation, Evaluator
from embershard.metrics.predictions import Predicted, PredictionBuffer, predicted_of
from embershard.sharding.config import ShardingConfig
from embershard.training.arithmetic import arithmetic, autocast
from embershard.training.build import build_sharded_model
from embershard.training.checkpoint.identity import LABELS, changes, labels_change, meaning_of, tables_of
from embershard.training.checkpoint.saved_run import SavedRun
from embershard.training.config import RunConfig
from embershard.training.fit.memory_check import check_memory_for_run
from embershard.training.optimizers import EmbeddingOptimizerConfig
from embershard.training.steps import open_stream

#: Settings of a cache whose host rows are as the slots: a checkpoint has them so, and is read as memory.
_AS_SLOTS: dict[str, Any] = {"host_dtype": "fp32", "host_dtypes": {}, "full_rows": None, "host_bytes": None}


@dataclass(frozen=True)
class TrainedRun:
    """A trained model and the settings to use it with.

    Attributes:
        config: settings of the run; data may be others.
        checkpoint: that of the best evaluation, the newest valid one, or that of the step that was asked for.
        saved: its scalars.
        skipped: why others were not used, as sentences without a full stop.
        best: the best evaluation, where this is its checkpoint.
    """

    config: RunConfig
    checkpoint: Path
    saved: SavedRun
    skipped: tuple[str, ...] = ()
    best: BestEvaluation | None = None

    @property
    def title(self) -> str:
        """The checkpoint, and why this one."""
        why = "" if self.best is None else f", the best evaluation's ({self.best.title}; --step last: the newest)"
        return f"{self.checkpoint}{why}"


def open_trained(
    config: RunConfig, checkpoints: Path, ranks: Ranks, step: int | Literal["last"] | None = None
) -> TrainedRun:
    """Verify and return a checkpoint. Collective, with the same result everywhere.

    Args:
        config: of the run, perhaps with other data.
        checkpoints: folder of the run's checkpoints.
        step: that of this step, or the newest valid one; None: that of the best evaluation, else the newest valid one.

    Raises:
        InvalidCheckpointError: no checkpoint is valid, or that of `step` is not.
        CheckpointError: there is none (of `step`), or the samples of `config` are no samples for this model.
    """
    candidates = ranks.from_first(lambda: checkpoints_for(checkpoints, None if step == "last" else step))
    best, problem = ranks.from_first(lambda: best_checkpoint(checkpoints)) if step is None else (None, "")
    if best in candidates:
        candidates = [*(path for path in candidates if path != best), best]
    if not candidates:
        raise CheckpointError(f"{checkpoints}: no complete checkpoint.")

    def read(checkpoint: Path) -> SavedRun:
        verify_checkpoint(checkpoint, ranks)
        return ranks.from_first(lambda: SavedRun.read(checkpoint))

    used, skipped = newest_valid(candidates, read)
    if used is None:
        raise InvalidCheckpointError(f"No checkpoint to use is valid: {'; '.join(skipped)}. Train the run again.")
    before, now = used[1].identity, meaning_of(config)
    if not labels_change(before, now):
        now.pop(LABELS, None)
    if different := changes(before, now):
        first = different[0]
        raise CheckpointError(
            f"{used[0]} was trained with {first.key} = {first.saved}, and {first.now} was asked for: the model cannot "
            f"score such data. Leave {first.key} as it was."
        )
    used[1].check_tables(used[0], tables_of(config, schema_of(config.data)))
    evaluation = ranks.from_first(lambda: BestEvaluation.find(checkpoints)) if used[0] == best else None
    return TrainedRun(config, *used, (*filter(None, [problem]), *skipped), evaluation)


def for_scoring(config: RunConfig, device: str) -> RunConfig:
    """Return the settings with which a trained model scores on a "cpu" or "cuda": nothing is trained, no rounded
    numbers are exchanged, no optimizer state takes memory, and no profile is needed. On a CPU, a cache would only copy
    rows within the same memory; but it knows which row an id has.

    >>> for_scoring(RunConfig(), "cpu").cache.enabled
    False
    """
    cache = config.cache
    policy = "lfu" if cache.policy in ("frequency", "static") or cache.has_own_policy else cache.policy
    in_file = cache.host == "file"
    is_cached = cache.enabled and (device != "cpu" or config.data.has_ids or in_file)
    host = "mmap" if in_file else cache.host
    return replace(
        config,
        cache=replace(cache, policy=policy, policy_folder=None, warmup=None, host=host, **_AS_SLOTS)
        if is_cached
        else CacheConfig(enabled=False),
        model=replace(config.model, frozen=()),  # nothing is trained; and frozen tables need a cache
        profile=ProfileConfig(),
        sharding=ShardingConfig(),
        embedding_optimizer=EmbeddingOptimizerConfig(kind="sgd"),
        train=replace(
            config.train,
            init=config.train.init if is_cached else "torchrec",  # which is made anyway; the checkpoint overwrites it
            eval_every=None,
            early_stopping=None,
            metric=None,
        ),
        checkpoint=CheckpointConfig(),
    )


class Scorer:
    """Scores the held-out samples of a source with a trained model. All ranks call its methods together.

    Args:
        trained: the model.
        source: of the samples.
        supervision: is told of each batch.

    Raises:
        ConfigError: the model does not fit the memory of a machine.
        CheckpointError: the checkpoint is of another model.
    """

    def __init__(self, trained: TrainedRun, source: Source, ranks: Ranks, supervision: Supervision) -> None:
        config = for_scoring(trained.config, ranks.device.type)
        self._config, self._source, self._ranks, self._supervision = config, source, ranks, supervision
        self.memory_warning = check_memory_for_run(config, None, ranks)
        self.model = build_sharded_model(config, None, None, source.schema, ranks)
        weights = self.model.state_dict()
        load_served(trained.checkpoint, weights)
        with without_known_warnings():
            self.model.load_state_dict(weights)

    @property
    def num_samples(self) -> int:
        """Samples to score, of all ranks."""
        return self._source.chunks("eval").num_samples

    @property
    def target(self) -> Target:
        """What is predicted of a sample."""
        return self._source.schema.target

    def scores(self) -> Iterator[Predicted]:
        """Yield what the model says of all samples in their order, float32 on the host: those of all ranks, a global
        batch at a time, the same on every rank. Collective."""
        for predicted in self._own():
            gathered = self._ranks.all_gather_rows(predicted.columns()).cpu()
            yield Predicted.of_columns(gathered, self.target)

    def evaluate(self) -> Evaluation:
        """Return what all samples say of the model. Collective, with the same result everywhere.

        Raises:
            ConfigError: the data have not the columns that `metrics` names.
        """
        evaluator = Evaluator(self.target, self._config.metrics, self._source, self._ranks)
        buffer = PredictionBuffer(self.target)
        for predicted in self._own():
            buffer.add(predicted)
        return evaluator.judge(buffer, self._source)

    def _own(self) -> Iterator[Predicted]:
        device, settings = self._ranks.device, self._config.train
        with (
            arithmetic(settings, device),
            open_stream(self._config, self._source, self._ranks, None) as stream,
        ):
            batches = shortest(stream, device)
            for found in predicted_of(self.model, batches, device, lambda: autocast(settings, device)):
                self._supervision.beat()
                yield found
