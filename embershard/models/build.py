"""`build_model`: the model of a run's settings for a data set's schema. The models know no rank."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import nn

from embershard.models.config import WITH_HISTORY, ModelConfig
from embershard.models.dlrm import build_dlrm
from embershard.models.history import build_with_history
from embershard.models.own_model import build_own
from embershard.models.schema import SchemaLike
from embershard.models.tables import ModelTable, tables_in


def build_model(config: ModelConfig, schema: SchemaLike, device: torch.device) -> nn.Module:
    """Build a model with its tables on the meta device (sharding gives them memory and values).

    Args:
        config: sizes and architecture, or where one's own model is.
        schema: dense and sparse features, with the number of rows of each table.
        device: of the dense layers.

    Returns:
        A module from a batch with `dense_features` [B, num_dense], `sparse_features`, `labels` [B] ([B, T] of several)
        and `weights` [B] or None to `(loss [], (loss [], outputs, labels))`; the outputs have the labels' shape.

    Raises:
        ConfigError: the schema has no dense or no sparse feature, a name twice, or a table without rows; or the model
            does not fit the schema.

    >>> from embershard.data import Schema, SparseFeature
    >>> schema = Schema(dense=("I1",), sparse=(SparseFeature("C1", 100),))
    >>> model = build_model(ModelConfig(), schema, torch.device("cpu"))
    >>> [table.name for table in model.model.sparse_arch.embedding_bag_collection.embedding_bag_configs()]
    ['t_C1']
    """
    if config.build is not None:
        return build_own(config, schema, device)
    if config.arch in WITH_HISTORY:
        return build_with_history(config, schema, device)
    return build_dlrm(config, schema, device)


def model_tables(config: ModelConfig, schema: Any) -> tuple[ModelTable, ...]:
    """Return the tables of the model that `build_model` builds. Errors as there.

    >>> from embershard.data import Schema, SparseFeature
    >>> schema = Schema(dense=("I1",), sparse=(SparseFeature("C1", 100),))
    >>> [(table.name, table.num_rows, table.features) for table in model_tables(ModelConfig(), schema)]
    [('t_C1', 100, ('C1',))]
    """
    return _outline(config, schema)[0]


def num_parameters(config: ModelConfig, schema: Any) -> int:
    """Return the number of weights and biases of the dense layers of the model that `build_model` builds.

    >>> from embershard.data import Schema, SparseFeature
    >>> schema = Schema(dense=("I1",), sparse=(SparseFeature("C1", 100),))
    >>> num_parameters(ModelConfig(dense_arch_layer_sizes=(32, 16), over_arch_layer_sizes=(8, 1)), schema)
    745
    """
    return _outline(config, schema)[1]


@lru_cache(maxsize=16)
def _outline(config: ModelConfig, schema: Any) -> tuple[tuple[ModelTable, ...], int]:
    """Return the tables and the dense parameters of a model, which is built for it and thrown away."""
    with torch.random.fork_rng(devices=[]):
        model = build_model(config, schema, torch.device("cpu"))
    dense = sum(parameter.numel() for parameter in model.parameters() if parameter.device.type != "meta")
    return tuple(tables_in(model)), dense
