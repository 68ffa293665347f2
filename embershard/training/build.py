"""Puts a run's parts together: model, tables' optimizer, cache, sharding plan, data parallelism."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan

from embershard.cache import CacheConfig
from embershard.data import BatchStream, DataConfig, Schema, Source
from embershard.distributed import Ranks
from embershard.errors import ConfigError, ShardingError
from embershard.frequency import FrequencyProfile
from embershard.models import ModelConfig, build_model, table_name
from embershard.sharding.config import ShardingConfig
from embershard.sharding.plan import Plan
from embershard.sharding.torchrec import (
    CachedEmbeddingBagCollectionSharder,
    StockEmbeddingBagCollectionSharder,
    plan_sharding,
)
from embershard.sharding.torchrec.communication import comm_codecs
from embershard.sharding.torchrec.placement import check_built, torchrec_plan
from embershard.training.optimizers import DenseOptimizerConfig, EmbeddingOptimizerConfig

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
    """The most batches whose rows are on the device ahead of the one in training. On a CPU as few as keep steps from
    waiting, from 1 on; fewer where they do not fit."""

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
    samples = counted_samples(settings, source.chunks("train").num_samples)
    rows = {table_name(feature.name): feature.num_rows for feature in source.schema.sparse}
    return FrequencyProfile.count(_ids_by_table(data, source, samples), rows)


def find_plan(
    settings: ShardingConfig,
    embedding_optimizer: EmbeddingOptimizerConfig,
    dense_optimizer: DenseOptimizerConfig,
    ranks: Ranks,
) -> Plan | None:
    """The plan of a run, or None where it has none; the same on every rank. Collective.

    Raises:
        ShardingError: the file is no plan, or one for other ranks.
        ConfigError: the optimizers cannot train its replicated tables.
    """
    if settings.plan is None:
        return None
    path = settings.plan
    plan = ranks.from_first(lambda: Plan.load(path))  # read once: files may differ between machines
    for ranks_per_node in sorted(set(ranks.all_gather_objects(ranks.local_world_size))):
        plan.check_ranks(ranks.world_size, ranks_per_node)
    _check_replicated(plan, embedding_optimizer, dense_optimizer)
    return plan


def _check_replicated(plan: Plan, embedding: EmbeddingOptimizerConfig, dense: DenseOptimizerConfig) -> None:
    """TorchRec trains replicated tables with the dense optimizer, which must do what the embeddings' one would."""
    replicated = [table.table for table in plan.tables if table.kernel == "replicated"]
    only_scale = dense.clip_norm is None and dense.weight_decay is None
    if replicated and not (embedding.kind == dense.kind == "sgd" and embedding.lr == dense.lr and only_scale):
        raise ConfigError(
            f"The plan replicates the tables {replicated[:5]}, and replicated tables are trained by the dense "
            f"optimizer: got embedding_optimizer {embedding.kind!r} with lr={embedding.lr}, and dense_optimizer "
            f"{dense.kind!r} with lr={dense.lr}, clip_norm={dense.clip_norm}, weight_decay={dense.weight_decay}; "
            "needed 'sgd' for both, with one lr and neither clipping nor weight decay. Or plan these tables with "
            'kernel "device".'
        )


def counted_samples(settings: CacheSettings, available: int) -> int:
    """Samples that are counted for a run without a profile of its own, of those ``available``: whole batches."""
    samples = settings.profile_samples or DEFAULT_PROFILE_SAMPLES
    batch = max(1, min(_PROFILE_BATCH, samples, available))
    return min(-(-samples // batch), available // batch) * batch


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
    plan: Plan | None = None,
    sharding: ShardingConfig | None = None,
) -> DistributedModelParallel:
    """The model of a run on this rank: tables sharded over the ranks, dense layers replicated under DDP. Collective.

    Args:
        plan: obeyed exactly; where it is None, TorchRec's planner places the tables. Without a cache its cached tables
            are whole on the device, at the same places.
        sharding: in which types embeddings travel; its plan is the one given.

    Raises:
        ConfigError: the model, the optimizer or the cache does not fit the data or the device.
        ShardingError: no plan fits, or the given one is for another model.
    """
    torch.manual_seed(seed)
    model = build_model(model_config, schema, ranks.device)
    optimizer.apply(model.model.sparse_arch, ranks.device)
    sharder = _sharder(cache, profile, plan, comm_codecs(sharding or ShardingConfig(), ranks.device))

    def placement() -> ShardingPlan:
        if plan is not None:
            return torchrec_plan(plan, model, [sharder], ranks.device, cached=cache.enabled)
        return plan_sharding(
            model,
            [sharder],
            world_size=ranks.world_size,
            local_world_size=ranks.local_world_size,
            device=ranks.device,
            batch_size=batch_size,
        )

    placed = ranks.from_first(placement)  # once: ranks with different plans would wait for each other for ever
    torch.manual_seed(seed + 1 + ranks.rank)  # the shards of a table must not start as copies of each other
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=ranks.device,
        plan=placed,
        sharders=[sharder],
    )
    if plan is not None:
        _check_obeyed(sharded, plan, ranks, cached=cache.enabled)
    return sharded


def _sharder(cache: CacheSettings, profile: FrequencyProfile | None, plan: Plan | None, codecs: Any) -> ModuleSharder:
    if cache.enabled:
        config = cache.cache_config()
        if plan is not None:  # which was made for the size in the settings, or for a budget instead of it
            config = dataclasses.replace(config, ratio=None, device_bytes=None)
        return CachedEmbeddingBagCollectionSharder(config, profile, qcomm_codecs_registry=codecs, plan=plan)
    return StockEmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs)


def _check_obeyed(model: DistributedModelParallel, plan: Plan, ranks: Ranks, cached: bool) -> None:
    """Raises on every rank when one is not built as planned, so that nobody waits for it."""
    problem = None
    try:
        check_built(model, plan, ranks.rank, cached=cached)
    except ShardingError as error:
        problem = str(error)
    problems = [found for found in ranks.all_gather_objects(problem) if found]
    if problems:
        raise ShardingError(problems[0])


def _ids_by_table(data: DataConfig, source: Source, num_samples: int) -> Iterator[Mapping[str, torch.Tensor]]:
    left, batch_size = num_samples, max(1, min(_PROFILE_BATCH, num_samples))
    with BatchStream(
        source, batch_size=batch_size, rank=0, world_size=1, split="train", epochs=1, config=data
    ) as stream:
        for batch in stream:
            yield {table_name(key): ids.values() for key, ids in batch.sparse_features.to_dict().items()}
            left -= batch.num_samples
            if left <= 0:
                return
