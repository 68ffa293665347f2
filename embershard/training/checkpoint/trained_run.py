"""`TrainedRun`: what a run has trained: its settings, and its newest valid checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from embershard.cache import CacheConfig
from embershard.data.sources.kinds import schema_of
from embershard.distributed import Ranks, complete_checkpoints, verify_checkpoint
from embershard.distributed.checkpoint.load import newest_valid
from embershard.earlier_settings import with_current_names
from embershard.errors import CheckpointError, InvalidCheckpointError
from embershard.frequency.config import ProfileConfig
from embershard.sharding.config import ShardingConfig
from embershard.training.checkpoint.identity import LABELS, changes, labels_change, meaning_of, tables_of
from embershard.training.checkpoint.saved_run import SavedRun
from embershard.training.config import RunConfig
from embershard.training.optimizers import EmbeddingOptimizerConfig


@dataclass(frozen=True)
class TrainedRun:
    """A trained model and the settings to use it with.

    Attributes:
        config: settings of the run; data may be others.
        checkpoint: the newest valid one, or that of the step that was asked for.
        saved: its scalars.
        skipped: why newer checkpoints were not used, as sentences without a full stop.
    """

    config: RunConfig
    checkpoint: Path
    saved: SavedRun
    skipped: tuple[str, ...] = ()


def open_trained(config: RunConfig, checkpoints: Path, ranks: Ranks, step: int | None = None) -> TrainedRun:
    """Verify and return the newest valid checkpoint, or that of `step`. Collective, with the same result everywhere.

    Args:
        config: of the run, perhaps with other data.
        checkpoints: folder of the run's checkpoints.

    Raises:
        InvalidCheckpointError: no checkpoint is valid, or that of `step` is not.
        CheckpointError: there is none (of `step`), or the samples of `config` are no samples for this model.
    """
    found = ranks.from_first(lambda: complete_checkpoints(checkpoints))
    candidates = [path for path in found if step is None or path.name == f"step_{step}"]
    if not candidates:
        there = f"; there is {', '.join(path.name for path in found)}" if found else ""
        of = "" if step is None else f" of step {step}"
        raise CheckpointError(f"{checkpoints}: no complete checkpoint{of}{there}.")

    def read(checkpoint: Path) -> SavedRun:
        verify_checkpoint(checkpoint, ranks)
        return ranks.from_first(lambda: SavedRun.read(checkpoint))

    used, skipped = newest_valid(candidates, read)
    if used is None:
        raise InvalidCheckpointError(f"No checkpoint to use is valid: {'; '.join(skipped)}. Train the run again.")
    _check_meaning(config, *used)
    return TrainedRun(config, *used, tuple(skipped))


def for_scoring(config: RunConfig, device: str) -> RunConfig:
    """Return the settings with which a trained model scores on a "cpu" or "cuda": nothing is trained, no rounded
    numbers are exchanged, no optimizer state takes memory, and no profile is needed. On a CPU, a cache would only copy
    rows within the same memory.

    >>> for_scoring(RunConfig(), "cpu").cache.enabled
    False
    """
    cache = config.cache
    policy = "lfu" if cache.policy in ("frequency", "static") else cache.policy
    is_cached = cache.enabled and device != "cpu"
    return replace(
        config,
        cache=replace(cache, policy=policy, warmup=None) if is_cached else CacheConfig(enabled=False),
        profile=ProfileConfig(),
        sharding=ShardingConfig(),
        embedding_optimizer=EmbeddingOptimizerConfig(kind="sgd"),
        train=replace(config.train, eval_every=None),
    )


def _check_meaning(config: RunConfig, checkpoint: Path, saved: SavedRun) -> None:
    """Raise unless samples of `config` mean to the model what those that it was trained on meant."""
    before, now = with_current_names(saved.identity), meaning_of(config)
    if not labels_change(before, now):
        now.pop(LABELS, None)
    different = changes(before, now)
    if different:
        first = different[0]
        raise CheckpointError(
            f"{checkpoint} was trained with {first.key} = {first.saved}, and {first.now} was asked for: the model "
            f"cannot score such data. Leave {first.key} as it was."
        )
    saved.check_tables(checkpoint, tables_of(config, schema_of(config.data)))
