"""Everything that a run is told: one dataclass per part, each beside its owner, gathered here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from embershard.data import DataConfig
from embershard.distributed import CheckpointConfig
from embershard.errors import ConfigError
from embershard.models import ModelConfig
from embershard.sharding.config import ShardingConfig
from embershard.training.build import CacheSettings
from embershard.training.optimizers import DenseOptimizerConfig, EmbeddingOptimizerConfig, ScheduleConfig


@dataclass(frozen=True)
class TrainConfig:
    """How long to train, on what, and how often to look."""

    batch_size: int = 1024
    """Samples per rank and step."""

    epochs: int | None = None
    """Passes over the training data. 1 when neither this nor `max_steps` is given."""

    max_steps: int | None = None
    """Steps after which training ends, if the epochs have not ended it before."""

    eval_every: int | None = None
    """Steps between evaluations on the held-out part; only at the end when absent."""

    log_every: int = 20
    """Steps between two lines of progress, and of metrics.jsonl."""

    seed: int = 0
    """Fixes the initial weights. The order of the data has its own: data.seed."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Number format of the dense layers' arithmetic: "bf16" is automatic mixed precision."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; "auto" is the GPUs, if there are any."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "max_steps", "eval_every", "log_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"train.{name}: got {value}, needed at least 1.")
        if self.precision not in ("fp32", "bf16"):
            raise ConfigError(f"train.precision: got {self.precision!r}, needed 'fp32' or 'bf16'.")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"train.device: got {self.device!r}, needed 'auto', 'cpu' or 'cuda'.")

    @property
    def num_epochs(self) -> int | None:
        """Epochs to run; None: without end, until `max_steps`."""
        return 1 if self.epochs is None and self.max_steps is None else self.epochs


@dataclass(frozen=True)
class RunConfig:
    """Everything a run is made of."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheSettings = field(default_factory=CacheSettings)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    embedding_optimizer: EmbeddingOptimizerConfig = field(default_factory=EmbeddingOptimizerConfig)
    dense_optimizer: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        if self.train.eval_every is not None and not self.holds_out:
            raise ConfigError("train.eval_every has no effect: nothing is held out (data.eval_fraction is 0).")

    @property
    def holds_out(self) -> bool:
        """Whether there is a held-out part to evaluate on."""
        return self.data.eval_path is not None or self.data.eval_fraction > 0

    @property
    def predicted_from(self) -> dict[str, Any]:
        """The settings that a plan's prediction depends on, by name, besides the data."""
        cache = (
            "profile",
            "warmup",
            "profile_samples",
            "lookahead",
            "prefetch",
            "decay",
            "host",
            "slot_map",
        )
        model = [f.name for f in dataclasses.fields(self.model)]
        found = {f"cache.{name}": getattr(self.cache, name) for name in cache}
        found |= {f"model.{name}": getattr(self.model, name) for name in model}
        return {
            **found,
            "cache.policy": self.cache.policy or "lookahead",
            "embedding_optimizer.kind": self.embedding_optimizer.kind,
            "dense_optimizer.kind": self.dense_optimizer.kind,
            "train.batch_size": self.train.batch_size,
            "train.precision": self.train.precision,
            "sharding.forward_dtype": self.sharding.forward_dtype,
            "sharding.backward_dtype": self.sharding.backward_dtype,
        }
