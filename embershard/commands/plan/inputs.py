"""What a plan is made from: a run's settings, with a profile of its data, or with tables as numbers (`--tables`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from embershard.data import schema_of
from embershard.errors import ConfigError
from embershard.frequency import DataStatistics
from embershard.frequency.assumed import AssumedTable, assumed_statistics
from embershard.lazy_names import named
from embershard.models.config import WITH_TOWERS
from embershard.planning.request import Budget
from embershard.planning.workload import Workload
from embershard.settings.files import load_config
from embershard.sharding.home_sizes import home_sizes
from embershard.sharding.run_shape import ReplaySettings, RunShape
from embershard.sharding.sizes import ModelSize, TableSize
from embershard.training.config import RunConfig
from embershard.training.fit.host_types import host_type
from embershard.training.fit.model_size import check_typed, dense_part_over_bags, model_size, table_rows

#: Of a number that dense layers pass on, by `train.precision`; 4 of the others.
_ACTIVATION_BYTES = {"bf16": 2, "fp64": 8}


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
    """Return the model, data and run of a config on `world_size` ranks: of one of its groups.

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
        **_group(config, world_size, ranks_per_node, cores_per_node),
        batch_size=batch_size,
        device=device,
        cache=replay_settings(config, config.has_profile, _training_samples(data), device),
        num_steps=_num_steps(config, data, batch_size * world_size),
        number_bytes=config.sharding.number_bytes,
        slot_map=config.cache.slot_map,
        exchange=config.sharding.exchange if config.cache.enabled else "pooled",
        mode_memory=config.sharding.mode_memory,
        reserve_bytes=reserve_bytes,
        accumulate=config.train.accumulate,
        activation_bytes=_ACTIVATION_BYTES.get(config.train.precision, 4),
        home=home_sizes(config.cache),
    )
    rows = {name: table.num_rows for name, table in data.tables.items()}
    drawn = None
    if config.model.section is not None:
        drawn = named("embershard.extras.length_groups.drawn:drawn_layers")(config, data, shape)
    return Workload(model_size(config, rows) if model is None else model, data, shape, drawn)


def _group(config: RunConfig, world_size: int, ranks_per_node: int, cores_per_node: int | None) -> dict[str, Any]:
    """Return what a `RunShape` says of one group of the ranks, and of the others."""
    of_group, in_node = config.sharding.group_shape(world_size, ranks_per_node)
    per_node = max(1, ranks_per_node // of_group)
    return {
        "world_size": of_group,
        "ranks_per_node": in_node,
        "groups": config.sharding.groups,
        "groups_per_node": per_node,
        "sync_every": config.sharding.sync_every,
        "sync_number_bytes": 2 if config.sharding.sync_dtype == "fp16" else 4,
        "cores_per_node": cores_per_node and max(1, cores_per_node // per_node),
    }


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


def budget(
    config: RunConfig,
    device_bytes: int | None,
    host_bytes: int | None,
    ratio: float | None = None,
    by_rank: Sequence[int] = (),
) -> Budget:
    """Return the memory budget: the command line's, else the config's. A limit on the device leaves its rest to the
    caches, unless a ratio was asked for. `by_rank`: limits on the ranks' devices, where they differ; `device_bytes` is
    the largest."""
    if ratio is not None or device_bytes is not None:
        less = tuple((device_bytes or 0) - limit for limit in by_rank)
        return Budget(device_bytes=device_bytes, host_bytes=host_bytes, ratio=ratio, less_bytes=less)
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


@dataclass(frozen=True)
class TableNumbers:
    """One table, or several equal ones."""

    rows: int | None = None
    """Rows of the table; those of the run's settings, where they are given."""
    dim: int | None = None
    """Columns; `model.embedding_dim` if it is not given."""
    lookups: int = 1
    """Lookups of a sample."""
    zipf: float = 1.0
    """The j-th most popular row gets lookups in proportion to `j ** -zipf`; 0: all rows get equally many."""
    count: int = 1
    """So many tables of this kind."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for what cannot be; rows, lookups and exponents are checked where they are assumed."""
        if self.count < 1 or (self.dim is not None and (self.dim < 4 or self.dim % 4)):
            raise ConfigError(
                f"got count = {self.count} and dim = {self.dim}; needed at least 1 table, and a multiple of 4 columns."
            )


@dataclass(frozen=True)
class AssumedTables:
    """Tables as numbers, for a plan without data."""

    samples: int = 1_000_000_000
    """Samples of an epoch."""
    tables: dict[str, TableNumbers] = field(default_factory=dict)
    """The tables, by name."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` without tables."""
        if not self.tables or self.samples < 1:
            raise ConfigError(
                f"got {len(self.tables)} tables and samples = {self.samples}; needed at least one of each: "
                "[tables.item] with rows = 400_000_000, for instance."
            )
        if len(self.named) < sum(each.count for each in self.tables.values()):
            raise ConfigError(
                f"tables: got {', '.join(self.tables)}, of which two come to the same name once `count` numbers them "
                "(item with count = 2 is item_0 and item_1); needed other names."
            )

    @property
    def named(self) -> dict[str, TableNumbers]:
        """All tables by name: of several equal ones, the names have numbers."""
        return {
            name if each.count == 1 else f"{name}_{number}": each
            for name, each in self.tables.items()
            for number in range(each.count)
        }

    def statistics(self, rows: Mapping[str, int]) -> DataStatistics:
        """Return the assumed frequencies of the rows of tables that have so many."""
        assumed = [AssumedTable(name, rows[name], each.zipf, each.lookups) for name, each in self.named.items()]
        return assumed_statistics(assumed, self.samples)

    @property
    def note(self) -> str:
        """What is assumed, as sentences."""
        return (
            "No data were read: each table's rows are assumed to be looked up by Zipf's law with the exponent in the "
            "file, independently of other samples. Hit rates and the time of copies follow from that; the memory does "
            "not. A profile of the data (embershard profile) replaces the assumption."
        )


@dataclass(frozen=True)
class TablesFile(AssumedTables, RunConfig):
    """Settings of a run, and its tables as numbers in place of data."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` without tables, or with a model whose dense part is not known without data."""
        RunConfig.__post_init__(self)
        AssumedTables.__post_init__(self)
        if without := [name for name, each in self.named.items() if each.rows is None]:
            raise ConfigError(
                f"tables.{without[0]}.rows is missing: give it, or the run's settings: --config RUN.toml."
            )
        if not self.model.has_one_collection or self.model.arch in WITH_TOWERS:
            raise ConfigError(
                f"model.arch: got {self.model.title!r}, needed dlrm, dlrm_dcn, fm, deepfm or wide_deep: others' "
                "dense part is not known without the run's settings of data. Give these, too: --config RUN.toml."
            )


def read_tables(path: Path, overrides: list[str], trust_code: bool) -> tuple[TablesFile, DataStatistics, ModelSize]:
    """Return the settings in a file of tables, the assumed frequencies of rows, and the size of the model.

    Raises:
        ConfigError: the file is wrong.
    """
    config = load_config(TablesFile, path, overrides, trust_code=trust_code)
    check_typed(config, list(config.named))
    rows = {name: each.rows or 0 for name, each in config.named.items()}
    dim, state_bytes = config.model.embedding_dim, config.embedding_optimizer.state_bytes
    tables = tuple(
        TableSize(
            name,
            rows[name],
            each.dim or dim,
            config.model.dtype_of(name),
            *state_bytes,
            group=config.cache.group_suffix(name),
            **host_type(config.cache, name, rows[name]),
        )
        for name, each in config.named.items()
    )
    schema = schema_of(config.data)
    flops, parameters, kept, products, passes = dense_part_over_bags(config, schema.num_dense, len(tables))
    size = ModelSize(
        tables=tables,
        dense_flops_per_sample=flops,
        dense_parameter_bytes=parameters,
        dense_state_bytes=parameters * config.num_dense_states,
        activation_bytes_per_sample=kept,
        input_bytes_per_sample=4 * (schema.num_dense + 1),
        products=products,
        passes=passes,
    )
    return config, config.statistics(rows), size


def read_lookups(path: Path, config: RunConfig) -> tuple[AssumedTables, DataStatistics, ModelSize]:
    """Return the tables in a file that has them alone, for a run whose settings say what they are.

    Raises:
        ConfigError: the file is wrong, or names other tables than the run has.
    """
    assumed, rows = load_config(AssumedTables, path, []), table_rows(config)
    for name in [*rows, *assumed.named]:
        given = assumed.named.get(name)
        if given is None or name not in rows:
            raise ConfigError(f"{path}: table {name!r} is {'not in the file' if name in rows else 'none of the run'}; "
                              f"needed those of its settings: {', '.join(rows)}.")  # fmt: skip
        if given.rows not in (None, rows[name]) or given.dim not in (None, config.model.embedding_dim):
            raise ConfigError(f"{path}: tables.{name} has rows or dim other than the run's settings; leave them out.")
    return assumed, assumed.statistics(rows), model_size(config, rows)
