"""From a run's settings and a profile of its data to what a plan is asked for."""

from __future__ import annotations

from typing import Literal

from embershard.data import DataConfig, schema_of
from embershard.errors import ConfigError
from embershard.frequency import DataStatistics
from embershard.models import table_name
from embershard.models.dlrm import DCN_LOW_RANK_DIM, DCN_NUM_LAYERS
from embershard.planning.cost import work
from embershard.planning.request import Budget
from embershard.planning.simulate.replay import ReplaySettings
from embershard.planning.workload import RunShape, Workload
from embershard.sharding.sizes import ModelSize, TableSize
from embershard.training.build import CacheSettings, counted_samples
from embershard.training.config import RunConfig

#: Bytes of optimizer state per row, and per column of a row, by `embedding_optimizer.kind` (FBGEMM's layouts).
STATE_BYTES: dict[str, tuple[int, int]] = {
    "sgd": (0, 0),
    "rowwise_adagrad": (4, 0),
    "adagrad": (0, 4),
    "adam": (0, 8),
    "partial_rowwise_adam": (4, 4),
    "lamb": (0, 8),
    "partial_rowwise_lamb": (4, 4),
}
#: States as large as the parameters that the dense optimizer keeps, the gradients among them.
_DENSE_STATES = {"sgd": 1, "adagrad": 2, "adam": 3, "adamw": 3}


def make_workload(
    config: RunConfig,
    data: DataStatistics,
    *,
    world_size: int,
    ranks_per_node: int,
    device: Literal["cpu", "cuda"],
    batch_size: int | None = None,
) -> Workload:
    """The model, data and run of a config on so many ranks."""
    batch_size = batch_size or config.train.batch_size
    has_profile = config.cache.profile is not None or config.cache.counts_a_profile
    shape = RunShape(
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        batch_size=batch_size,
        device=device,
        cache=replay_settings(config.cache, config.data, has_profile, _training_samples(data), device),
        num_steps=_num_steps(config, data, batch_size * world_size),
        pooled_number_bytes=config.sharding.pooled_number_bytes,
        slot_map=config.cache.slot_map,
    )
    return Workload(model_size(config, data), data, shape)


def replay_settings(
    cache: CacheSettings, data: DataConfig, has_profile: bool, training_samples: int, device: Literal["cpu", "cuda"]
) -> ReplaySettings:
    """How the caches of a run choose rows, and how its epochs differ. On a CPU a run holds one batch ahead, and more
    only where its steps wait: that is not predicted."""
    counted = None if cache.profile is not None else counted_samples(cache, training_samples)
    return ReplaySettings(
        policy=cache.policy_for(has_profile),
        lookahead=cache.lookahead,
        prefetch=cache.prefetch if device == "cuda" else 1,
        profile_samples=counted if has_profile else 0,
        shuffle_window=data.chunk_rows * data.shuffle_window if data.shuffle else 0,
    )


def model_size(config: RunConfig, data: DataStatistics) -> ModelSize:
    """How large the config's model is over the profile's tables."""
    per_row, per_column = STATE_BYTES[config.embedding_optimizer.kind]
    model = config.model
    tables = tuple(
        TableSize(name, table.num_rows, model.embedding_dim, model.table_dtype, per_row, per_column)
        for name, table in data.tables.items()
    )
    dense = dense_size(config, len(tables))
    parameter_bytes = work.dense_parameter_bytes(dense)
    return ModelSize(
        tables=tables,
        dense_flops_per_sample=work.dense_flops(dense, 1),
        dense_parameter_bytes=parameter_bytes,
        dense_state_bytes=parameter_bytes * _DENSE_STATES[config.dense_optimizer.kind],
        activation_bytes_per_sample=work.activation_bytes(dense, 1),
    )


def budget(config: RunConfig, device_bytes: int | None, host_bytes: int | None, ratio: float | None = None) -> Budget:
    """Memory as the command line says, or else as the config does. Where the device has a limit, caches take what it
    leaves, unless a ratio was asked for."""
    if ratio is not None or device_bytes is not None:
        return Budget(device_bytes=device_bytes, host_bytes=host_bytes, ratio=ratio)
    if config.cache.device_bytes is not None:
        return Budget(cache_bytes=config.cache.device_bytes, host_bytes=host_bytes)
    return Budget(ratio=config.cache.slot_ratio, host_bytes=host_bytes)


def check_tables(config: RunConfig, data: DataStatistics) -> None:
    """The profile's tables must be those that the config's data have.

    Raises:
        ConfigError: naming the first difference.
    """
    expected = {table_name(feature.name): feature.num_rows for feature in schema_of(config.data).sparse}
    for name in [*expected, *data.tables]:
        known = data.tables[name].num_rows if name in data.tables else None
        if known != expected.get(name):
            sides = [f"{rows:,} rows" if rows is not None else "no such table" for rows in (expected.get(name), known)]
            raise ConfigError(
                f"table {name!r}: the config's data have {sides[0]}, the profile has {sides[1]}; make the profile with "
                "embershard profile --config and this config"
            )


def _training_samples(data: DataStatistics) -> int:
    """Samples of an epoch."""
    return round(data.num_samples / max(data.share_of_samples, 1e-12))


def _num_steps(config: RunConfig, data: DataStatistics, global_batch_size: int) -> int | None:
    """Steps of the run; None where it has no end."""
    limits = [config.train.max_steps]
    if config.train.num_epochs is not None:
        limits.append(config.train.num_epochs * max(1, _training_samples(data) // global_batch_size))
    return min((limit for limit in limits if limit is not None), default=None)


def dense_size(config: RunConfig, num_tables: int) -> work.DenseSize:
    """The dense part of the config's model over so many tables."""
    model = config.model
    is_dcn = model.arch == "dlrm_dcn"
    return work.DenseSize(
        arch=model.arch,
        num_dense=schema_of(config.data).num_dense,
        num_tables=num_tables,
        dim=model.embedding_dim,
        dense_layers=model.dense_arch_layer_sizes,
        over_layers=model.over_arch_layer_sizes,
        cross_layers=(model.dcn_num_layers or DCN_NUM_LAYERS) if is_dcn else 0,
        cross_rank=(model.dcn_low_rank_dim or DCN_LOW_RANK_DIM) if is_dcn else 0,
    )
