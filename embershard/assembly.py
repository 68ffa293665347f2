"""Puts a run's parts together: model, tables' optimizer, cache, sharding plan, data parallelism."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ModuleSharder, ShardingEnv

from embershard.cache import CacheConfig, FrequencyProfile
from embershard.data import BatchStream, DataConfig, Schema, Source
from embershard.distributed import Ranks
from embershard.errors import ConfigError
from embershard.models import ModelConfig, build_model, table_name
from embershard.optimizers import EmbeddingOptimizerConfig
from embershard.sharding.torchrec import (
    CachedEmbeddingBagCollectionSharder,
    StockEmbeddingBagCollectionSharder,
    plan_sharding,
)

#: Samples that are counted for a profile when a policy needs one and none is given.
DEFAULT_PROFILE_SAMPLES = 200_000
_PROFILE_BATCH = 1024


@dataclass(frozen=True)
class CacheSettings(CacheConfig):
    """The device cache of a run: on or off, how large, which rows stay."""

    enabled: bool = True
    """False trains with stock TorchRec, all rows on the device. The losses are the same, bit for bit."""

    profile: str | None = None
    """File of a frequency profile. Without it, one is counted from the training data if `policy` needs it."""

    profile_samples: int | None = None
    """Samples to count for a profile; 200000 when one is needed. Not together with `profile`."""

    lookahead: int = 64
    """Batches whose ids are known ahead of the one in training; 0 looks at no batch before its step."""

    prefetch: int = 2
    """Batches whose rows are on the device ahead of the one in training; fewer where they do not fit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lookahead < 0 or self.prefetch < 1:
            raise ConfigError(
                f"cache.lookahead={self.lookahead}, cache.prefetch={self.prefetch}: needed 0 or more, and at least 1."
            )
        if 0 < self.lookahead < self.prefetch:
            raise ConfigError(
                f"cache.prefetch={self.prefetch} is more than cache.lookahead={self.lookahead}: rows can only be "
                "brought in for batches that are known. Lower the one or raise the other."
            )
        if self.profile is not None and self.profile_samples is not None:
            raise ConfigError("cache.profile and cache.profile_samples are both set; a profile is read or counted.")
        if self.profile_samples is not None and self.profile_samples < 1:
            raise ConfigError(f"cache.profile_samples: got {self.profile_samples}, needed at least 1.")
        if self.profile_samples is not None and not self._uses_a_profile:
            raise ConfigError(
                f"cache.profile_samples={self.profile_samples} has no effect with policy={self.policy!r} and "
                'no warmup; set cache.policy = "frequency" or cache.warmup = true, or remove it.'
            )

    @property
    def counts_a_profile(self) -> bool:
        """Whether a profile has to be counted before training."""
        needed = self.policy == "frequency" or self.warmup is True or self.profile_samples is not None
        return self.enabled and self.profile is None and needed

    @property
    def _uses_a_profile(self) -> bool:
        return self.policy in (None, "lookahead", "frequency") or self.warmup is True

    def cache_config(self) -> CacheConfig:
        """The part that the sharder takes."""
        names = [field.name for field in dataclasses.fields(CacheConfig)]
        return CacheConfig(**{name: getattr(self, name) for name in names})


def find_profile(settings: CacheSettings, data: DataConfig, source: Source) -> FrequencyProfile | None:
    """The frequency profile of a run, or None where it needs none; the same on every rank.

    Each rank counts the same first `profile_samples` samples of the training order by itself, without
    talking to the others, so the profile does not depend on the number of ranks.
    """
    if not settings.enabled:
        return None
    if settings.profile is not None:
        return FrequencyProfile.load(settings.profile)
    if not settings.counts_a_profile:
        return None
    samples = settings.profile_samples or DEFAULT_PROFILE_SAMPLES
    rows = {table_name(feature.name): feature.num_rows for feature in source.schema.sparse}
    return FrequencyProfile.count(_ids_by_table(data, source, samples), rows)


def build_sharded_model(
    model_config: ModelConfig,
    optimizer: EmbeddingOptimizerConfig,
    cache: CacheSettings,
    profile: FrequencyProfile | None,
    schema: Schema,
    ranks: Ranks,
    *,
    batch_size: int,
    seed: int,
) -> DistributedModelParallel:
    """The model of a run on this rank: tables sharded over the ranks, dense layers replicated under DDP.

    Raises:
        ConfigError: the model, the optimizer or the cache does not fit the data or the device.
        ShardingError: no plan fits.
    """
    torch.manual_seed(seed)
    model = build_model(model_config, schema, ranks.device)
    optimizer.apply(model.model.sparse_arch, ranks.device)
    sharder = _sharder(cache, profile)
    # Planned once: ranks with different plans would wait for each other for ever.
    plan = ranks.from_first(
        lambda: plan_sharding(
            model,
            [sharder],
            world_size=ranks.world_size,
            local_world_size=ranks.local_world_size,
            device=ranks.device,
            batch_size=batch_size,
        )
    )
    torch.manual_seed(seed + 1 + ranks.rank)  # the shards of a table must not start as copies of each other
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=ranks.device,
        plan=plan,
        sharders=[sharder],
    )


def _sharder(cache: CacheSettings, profile: FrequencyProfile | None) -> ModuleSharder:
    if cache.enabled:
        return CachedEmbeddingBagCollectionSharder(cache=cache.cache_config(), profile=profile)
    return StockEmbeddingBagCollectionSharder()


def _ids_by_table(data: DataConfig, source: Source, num_samples: int) -> Iterator[Mapping[str, torch.Tensor]]:
    left = num_samples
    batch_size = min(_PROFILE_BATCH, num_samples, source.chunks("train").num_samples)
    with BatchStream(
        source, batch_size=batch_size, rank=0, world_size=1, split="train", epochs=1, config=data
    ) as stream:
        for batch in stream:
            yield {table_name(key): ids.values() for key, ids in batch.sparse_features.to_dict().items()}
            left -= batch.num_samples
            if left <= 0:
                return
