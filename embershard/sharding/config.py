"""Settings of the placement of tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from embershard.cache.config import CacheConfig
from embershard.errors import ConfigError

CommDtype = Literal["fp32", "fp16", "bf16"]
ExchangeChoice = Literal["pooled", "rows", "auto"]
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class ShardingConfig:
    """Places of the tables, sizes of the caches, and number types between ranks."""

    plan: str | None = None
    """File of a plan that `embershard plan` made. It decides where every table is and how many slots every cache has;
    `cache.ratio`, `cache.device_bytes` and `sharding.exchange` are for planning then. Without it, TorchRec's planner
    places the tables."""

    forward_dtype: CommDtype = "fp32"
    """Type of pooled embeddings between ranks. "fp16" and "bf16" halve the bytes and round: training then differs from
    that in fp32, alike with and without a cache. "bf16" on GPUs only."""

    backward_dtype: CommDtype = "fp32"
    """The same for their gradients."""

    exchange: ExchangeChoice = "pooled"
    """What travels between ranks. "pooled": one embedding per sample and feature, as in TorchRec. "rows": each distinct
    row once per rank and batch; it is pooled where the samples are. "rows" moves fewer bytes where bags are short and
    rows repeat in a batch, more where bags are long. It rounds sums in another order. "auto", for planning only, takes
    for each table what moves fewer bytes by the profile. Without a cache, all tables exchange pooled embeddings."""

    def __post_init__(self) -> None:
        if self.exchange not in get_args(ExchangeChoice):
            choices = ", ".join(get_args(ExchangeChoice))
            raise ConfigError(f"sharding.exchange: got {self.exchange!r}, needed one of {choices}.")
        for name in ("forward_dtype", "backward_dtype"):
            value = getattr(self, name)
            if value not in get_args(CommDtype):
                raise ConfigError(f"sharding.{name}: got {value!r}, needed one of {', '.join(get_args(CommDtype))}.")

    @property
    def number_bytes(self) -> tuple[int, int]:
        """Bytes of an embedding's number between ranks, and of its gradient's."""
        return _BYTES[self.forward_dtype], _BYTES[self.backward_dtype]


def check_no_size(cache: CacheConfig) -> None:
    """Raise `ConfigError` when the settings give the cache a size beside a plan's."""
    for name in ("ratio", "device_bytes"):
        value = getattr(cache, name)
        if value is not None:
            raise ConfigError(
                f"cache.{name}={value} has no effect with a plan, which gives every cache its slots. Remove one."
            )
