"""`model_size`: the sizes of a run's model, from its settings alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from embershard.data import schema_of
from embershard.errors import ConfigError
from embershard.models import ModelTable, model_tables, num_parameters
from embershard.models.dense_size import DenseSize
from embershard.sharding.shards import groups_of
from embershard.sharding.sizes import ModelSize, TableSize
from embershard.training.config import RunConfig
from embershard.training.fit.host_types import host_type
from embershard.training.fit.id_rules import id_rules

_FLOAT_BYTES = 4
_FLOPS_PER_PARAMETER = 6  # a multiply-add in the forward, two in the backward


def tables_of_run(config: RunConfig) -> tuple[ModelTable, ...]:
    """Return the tables of a run's model, from its settings alone.

    >>> tables_of_run(RunConfig())[0].features
    ('C1',)
    """
    return model_tables(config.model, schema_of(config.data))


def table_groups(config: RunConfig) -> dict[str, str]:
    """Return the group of each table, by its name: see `groups_of`."""
    ids = id_rules(config)
    suffix = config.cache.group_suffix if config.cache.enabled else lambda _: ""
    places = {
        table.name: (table.module, table.pooling + suffix(table.name), table.name in ids)
        for table in tables_of_run(config)
    }
    return groups_of(places)


def named_tables(setting: str, names: Iterable[str], tables: Iterable[ModelTable]) -> dict[str, str]:
    """Return the names of the tables that a setting names, each with the name that it was given.

    >>> table = ModelTable("t_item", 100, 8, "fp32", ("item", "clicked"), "model.ebc", "sum")
    >>> named_tables("model.frozen", ["clicked"], [table])
    {'t_item': 'clicked'}

    Raises:
        ConfigError: there is no such table, or one is named twice.
    """
    known = {table.name: table for table in tables}
    found: dict[str, str] = {}
    for name in names:
        table = known.get(name) or next((each for each in known.values() if name in each.features), None)
        if table is None:
            raise ConfigError(f"{setting}: got {name!r}, needed a table or a feature of one: {', '.join(known)}.")
        if table.name in found:
            raise ConfigError(
                f"{setting}: {found[table.name]!r} and {name!r} are one table, {table.name!r}. Remove one."
            )
        found[table.name] = name
    return found


def check_tables(config: RunConfig) -> None:
    """Raise `ConfigError` where the model does not fit the features and labels of the data, the rules of ids do not fit
    the tables, or a setting names a table that is none of them."""
    id_rules(config)
    tables = tables_of_run(config)
    for setting, given in (("frozen", config.model.frozen), ("pretrained", config.model.pretrained)):
        named_tables(f"model.{setting}", given, tables)
    check_typed(config, [table.name for table in tables])


def check_typed(config: RunConfig, tables: Sequence[str]) -> None:
    """Raise `ConfigError` where a setting gives a type to a table that is none of these."""
    given = {"cache.host_dtypes": {*config.cache.host_dtypes}, "model.table_dtypes": {*config.model.table_dtypes}}
    for setting, names in given.items():
        if other := sorted(names - set(tables)):
            raise ConfigError(f"{setting}: got no table {other[0]!r}, needed some of {', '.join(tables)}.")


def table_rows(config: RunConfig) -> dict[str, int]:
    """Return the rows of each table, by its name.

    >>> table_rows(RunConfig())["t_C1"]
    15
    """
    return {table.name: table.num_rows for table in tables_of_run(config)}


def model_size(config: RunConfig, rows: Mapping[str, int]) -> ModelSize:
    """Return the size of the config's model over tables with these rows.

    The dense part of a model with a history, or of one's own, is estimated from its parameters: what a sample
    computes and keeps depends on the lengths of its sequences. Of an `ArchSection`, it is for full histories.

    >>> model_size(RunConfig(), table_rows(RunConfig())).num_rows
    337648
    """
    schema = schema_of(config.data)
    flops, parameters, activations, products, passes = _dense_part(config)
    return ModelSize(
        tables=table_sizes(config, rows),
        dense_flops_per_sample=flops,
        dense_parameter_bytes=parameters,
        dense_state_bytes=parameters * config.num_dense_states,
        activation_bytes_per_sample=activations,
        input_bytes_per_sample=_FLOAT_BYTES * (schema.num_dense + len(schema.target.labels)),
        products=products,
        passes=passes,
    )


def step_flops(config: RunConfig, world_size: int) -> float:
    """Return the floating-point operations of a rank's step, on so many ranks, in the dense layers."""
    samples = config.train.rank_batch_size(world_size)
    return model_size(config, table_rows(config)).dense_flops_per_sample * samples


def table_sizes(config: RunConfig, rows: Mapping[str, int]) -> tuple[TableSize, ...]:
    """Return the sizes of the config's tables with these rows.

    >>> table_sizes(RunConfig(), {"t_C1": 15})
    (TableSize(table='t_C1', rows=15, dim=16, ...),)
    """
    tables, groups, ids = {table.name: table for table in tables_of_run(config)}, table_groups(config), id_rules(config)
    check_tables(config)
    return tuple(
        TableSize(
            name,
            count,
            tables[name].dim,
            tables[name].dtype,
            *config.embedding_optimizer.state_bytes,
            group=groups[name],
            is_sequence=tables[name].is_sequence,
            num_features=len(tables[name].features),
            buckets=ids[name].buckets_of(name, count).num_buckets if name in ids else 0,
            id_map_bytes=ids[name].row_bytes if name in ids else 0,
            **host_type(config.cache, name, count),
        )
        for name, count in rows.items()
    )


#: Operations of a sample, bytes of the parameters, bytes that a sample's forward keeps, and a GPU's kernels, as in
#: `ModelSize`.
DensePart = tuple[float, int, float, tuple[tuple[int, int], ...], tuple[float, ...]]


def _dense_part(config: RunConfig) -> DensePart:
    schema = schema_of(config.data)
    if config.model.has_one_collection:
        widths = [*map(len, schema.target.heads.values())]
        return dense_part_over_bags(config, schema.num_dense, len(schema.sparse), widths)
    parameters = num_parameters(config.model, schema)
    kept = 4.0 * sum(table.dim * len(table.features) for table in tables_of_run(config))
    flops = float(_FLOPS_PER_PARAMETER * parameters)
    if (section := config.model.section) is not None:
        num_contexts = len(schema.sparse) - len(config.model.event_features) + (schema.num_dense > 0)
        batch_size = config.train.batch_size or config.train.rank_batch_size(1)
        flops, kept = section.sample_cost(
            len(config.model.history), config.model.embedding_dim, num_contexts, batch_size
        )
    return flops, _FLOAT_BYTES * parameters, _FLOAT_BYTES * kept, (), ()


def dense_part_over_bags(
    config: RunConfig, num_dense: int, num_features: int, widths: Sequence[int] = (1,)
) -> DensePart:
    """Return the dense part of layers over one collection of bags, of so many features; `widths`: outputs of each
    label."""
    number_bytes = 8 if config.train.precision == "fp64" else 4
    dense = DenseSize.of(config.model, num_dense, num_features, number_bytes, widths)
    kept = dense.activation_bytes_per_sample
    return dense.flops_per_sample, dense.parameter_bytes, kept, dense.products, dense.passes
