"""Tables and size of a model that is not built yet: of a built-in one from its settings, without torch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from embershard.models.config import ModelConfig
from embershard.models.dense_size import built_in_parameters
from embershard.models.tables import ModelTable, built_in_tables


def model_tables(config: ModelConfig, schema: Any) -> tuple[ModelTable, ...]:
    """Return the tables of the model that `build_model` builds, in the order of its modules. Errors as there.

    >>> from embershard.data import Schema, SparseFeature
    >>> schema = Schema(dense=("I1",), sparse=(SparseFeature("C1", 100),))
    >>> [(table.name, table.num_rows, table.features) for table in model_tables(ModelConfig(), schema)]
    [('t_C1', 100, ('C1',))]
    """
    return built_in_tables(config, schema) if config.build is None else _of_own(config, schema)[0]


def num_parameters(config: ModelConfig, schema: Any) -> int:
    """Return the number of weights and biases of the dense layers of the model that `build_model` builds.

    >>> from embershard.data import Schema, SparseFeature
    >>> schema = Schema(dense=("I1",), sparse=(SparseFeature("C1", 100),))
    >>> num_parameters(ModelConfig(dense_arch_layer_sizes=(32, 16), over_arch_layer_sizes=(8, 1)), schema)
    745
    """
    return built_in_parameters(config, schema) if config.build is None else _of_own(config, schema)[1]


@lru_cache(maxsize=16)
def _of_own(config: ModelConfig, schema: Any) -> tuple[tuple[ModelTable, ...], int]:
    """Return the tables and the dense parameters of a model of one's own, which is built for it and thrown away."""
    import torch

    from embershard.models.build import build_model
    from embershard.models.table_modules import tables_in

    with torch.random.fork_rng(devices=[]):
        model = build_model(config, schema, torch.device("cpu"))
    dense = sum(parameter.numel() for parameter in model.parameters() if parameter.device.type != "meta")
    return tuple(tables_in(model)), dense
