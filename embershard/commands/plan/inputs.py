"""From a run's settings and a profile of its data to the workload and the budget of a plan."""

from __future__ import annotations

from typing import Literal

from embershard.errors import ConfigError
from embershard.frequency import DataStatistics
from embershard.planning.request import Budget, Workload
from embershard.sharding.run_shape import ReplaySettings, RunShape
from embershard.sharding.sizes import ModelSize
from embershard.training.config import RunConfig
from embershard.training.fit.model_size import model_size, table_rows


def make_workload(
    config: RunConfig,
    data: DataStatistics,
    world_size: int,
    *,
    ranks_per_node: int,
    device: Literal["cpu", "cuda"],
    batch_size: int | None = None,
    cores_per_node: int | None = None,
    reserve_bytes: int = 0,
    model: ModelSize | None = None,
) -> Workload:
    """Return the model, data and run of a config on `world_size` ranks.

    Args:
        model: where the config's data have other tables than the model.

    Raises:
        ConfigError: its mode places no tables.
    """
    if config.sharding.mode == "data_parallel":
        raise ConfigError(
            "sharding.mode='data_parallel' takes no plan: every rank has all tables. Train without a plan, or "
            "plan with --set sharding.mode=sharded."
        )
    batch_size = batch_size or config.train.rank_batch_size(world_size)
    shape = RunShape(
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        batch_size=batch_size,
        device=device,
        cache=replay_settings(config, config.has_profile, _training_samples(data), device),
        num_steps=_num_steps(config, data, batch_size * world_size),
        number_bytes=config.sharding.number_bytes,
        slot_map=config.cache.slot_map,
        exchange=config.sharding.exchange if config.cache.enabled else "pooled",
        hot_bytes=config.sharding.hot_bytes or 0,
        cores_per_node=cores_per_node,
        reserve_bytes=reserve_bytes,
    )
    rows = {name: table.num_rows for name, table in data.tables.items()}
    return Workload(model_size(config, rows) if model is None else model, data, shape)


def replay_settings(
    config: RunConfig, has_profile: bool, training_samples: int, device: Literal["cpu", "cuda"]
) -> ReplaySettings:
    """Return the settings of a replay that chooses rows and orders epochs as the run. On a CPU a run holds one batch
    ahead, and more only where its steps wait: that is not predicted."""
    counted = None if config.profile.path is not None else config.profile.num_counted(training_samples)
    data = config.data
    return ReplaySettings(
        policy=config.cache.policy_for(has_profile),
        lookahead=config.look_ahead.lookahead,
        prefetch=config.look_ahead.prefetch if device == "cuda" else 1,
        profile_samples=counted if has_profile else 0,
        shuffle_window=data.chunk_rows * data.shuffle_window if data.shuffle else 0,
    )


def budget(config: RunConfig, device_bytes: int | None, host_bytes: int | None, ratio: float | None = None) -> Budget:
    """Return the memory budget: the command line's, else the config's. A limit on the device leaves its rest to the
    caches, unless a ratio was asked for."""
    if ratio is not None or device_bytes is not None:
        return Budget(device_bytes=device_bytes, host_bytes=host_bytes, ratio=ratio)
    if config.cache.device_bytes is not None:
        return Budget(cache_bytes=config.cache.device_bytes, host_bytes=host_bytes)
    return Budget(ratio=config.cache.slot_ratio, host_bytes=host_bytes)


def check_tables(config: RunConfig, data: DataStatistics) -> None:
    """Raise unless the profile has the tables of the config's data.

    Raises:
        ConfigError: naming the first difference.
    """
    expected = table_rows(config)
    for name in [*expected, *data.tables]:
        known = data.tables[name].num_rows if name in data.tables else None
        if known != expected.get(name):
            sides = [f"{rows:,} rows" if rows is not None else "no such table" for rows in (expected.get(name), known)]
            raise ConfigError(
                f"table {name!r}: the config's data have {sides[0]}, the profile has {sides[1]}; make the profile with "
                "embershard profile --config and this config"
            )


def _training_samples(data: DataStatistics) -> int:
    """Return the samples of an epoch."""
    return round(data.num_samples / max(data.share_of_samples, 1e-12))


def _num_steps(config: RunConfig, data: DataStatistics, global_batch_size: int) -> int | None:
    """Return the steps of the run; None where it has no end."""
    limits = [config.train.max_steps]
    if config.train.num_epochs is not None:
        limits.append(config.train.num_epochs * max(1, _training_samples(data) // global_batch_size))
    return min((limit for limit in limits if limit is not None), default=None)
