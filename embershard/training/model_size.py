"""`model_size`: the sizes of a run's model, from its settings alone."""

from __future__ import annotations

from collections.abc import Mapping

from embershard.data import schema_of
from embershard.models import table_name
from embershard.models.dense_size import DenseSize
from embershard.sharding.sizes import ModelSize, TableSize
from embershard.training.config import RunConfig


def table_rows(config: RunConfig) -> dict[str, int]:
    """Return the rows of each table, by its name.

    >>> table_rows(RunConfig())["t_C1"]
    15
    """
    return {table_name(feature.name): feature.num_rows for feature in schema_of(config.data).sparse}


def model_size(config: RunConfig, rows: Mapping[str, int]) -> ModelSize:
    """Return the size of the config's model over tables with these rows.

    >>> model_size(RunConfig(), table_rows(RunConfig())).num_rows
    337648
    """
    model, state_bytes = config.model, config.embedding_optimizer.state_bytes
    number_bytes = 8 if config.train.precision == "fp64" else 4
    dense = DenseSize.of(model, schema_of(config.data).num_dense, len(rows), number_bytes)
    return ModelSize(
        tables=tuple(
            TableSize(name, count, model.embedding_dim, model.table_dtype, *state_bytes) for name, count in rows.items()
        ),
        dense_flops_per_sample=dense.flops_per_sample,
        dense_parameter_bytes=dense.parameter_bytes,
        dense_state_bytes=dense.parameter_bytes * config.dense_optimizer.num_states,
        activation_bytes_per_sample=dense.activation_bytes_per_sample,
    )
