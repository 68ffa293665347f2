"""Settings of small trainings on made-up samples, which tests of several rooms start from."""

from __future__ import annotations

from typing import Any

from embershard.cache import CacheConfig
from embershard.data import DataConfig
from embershard.data.config import SyntheticConfig
from embershard.models import ModelConfig
from embershard.training.config import RunConfig


def small_data(num_samples: int = 1000, scale: float = 0.0001, **changes: Any) -> DataConfig:
    return DataConfig(synthetic=SyntheticConfig(num_samples=num_samples, scale=scale), num_workers=0, **changes)


def small_model(dim: int = 4) -> ModelConfig:
    return ModelConfig(embedding_dim=dim, dense_arch_layer_sizes=(8, dim), over_arch_layer_sizes=(8, 1))


def small_run(**changes: Any) -> RunConfig:
    """A run over 26 tables whose caches evict rows, with other sections in place of its own."""
    return RunConfig(**{"data": small_data(), "model": small_model(), "cache": CacheConfig(ratio=0.3), **changes})
