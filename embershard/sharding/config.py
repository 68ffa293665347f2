"""What a user says about the placement of tables."""

from __future__ import annotations

from dataclasses import dataclass

from embershard.cache.config import CacheConfig
from embershard.errors import ConfigError


@dataclass(frozen=True)
class ShardingConfig:
    """Where the tables are, and how large every cache is."""

    plan: str | None = None
    """File of a plan that `embershard plan` made. It decides where every table is and how many slots every cache has;
    `cache.ratio` and `cache.device_bytes` are for planning then. Without it, TorchRec's planner places the tables."""


def check_no_size(cache: CacheConfig) -> None:
    """Raises when the cache's settings give it a size, too, though a plan does.

    Raises:
        ConfigError: naming the setting.
    """
    for name in ("ratio", "device_bytes"):
        value = getattr(cache, name)
        if value is not None:
            raise ConfigError(
                f"cache.{name}={value} has no effect with a plan, which gives every cache its slots. Remove one."
            )
