"""`build_model`: the model of a run's settings for a data set's schema. The models know no rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.models.dlrm import DLRM, DLRM_DCN

from embershard.data.schema import Schema
from embershard.lazy_names import named
from embershard.models.config import (
    DCN_LOW_RANK_DIM,
    DCN_NUM_LAYERS,
    FACTORIZED,
    WITH_HISTORY,
    WITH_TOWERS,
    ModelConfig,
)
from embershard.models.dropout import add_dropout
from embershard.models.interactions import Interactions
from embershard.models.loss import WithLoss
from embershard.models.table_modules import PooledRows, bags_of
from embershard.models.tables import built_in_tables

#: What builds one's own model, a DLRM or towers over one, and the architectures that are none: a function as
#: `build_dlrm`, imported when it is asked for.
_OWN, _DLRM = "embershard.models.own_model:build_own", "embershard.models.build:build_dlrm"
_BUILDERS = {
    **dict.fromkeys(WITH_HISTORY, "embershard.models.history:build_with_history"),
    **dict.fromkeys(FACTORIZED, "embershard.extras.networks.factorization:build_factorized"),
}


def build_model(config: ModelConfig, schema: Schema, device: torch.device) -> nn.Module:
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
    place = _OWN if config.build is not None else _BUILDERS.get(config.arch, _DLRM)
    model: nn.Module = named(place)(config, schema, device)
    return model


def build_dlrm(config: ModelConfig, schema: Schema, device: torch.device) -> WithLoss:
    """Build a DLRM or DLRM-DCNv2, or towers over one of them: see `build_model`."""
    collection = bags_of(built_in_tables(config, schema))
    num_labels, has_towers = len(schema.target.labels), config.arch in WITH_TOWERS
    layers = list(config.dense_arch_layer_sizes), [1, 1] if has_towers else list(config.over_layers(num_labels))
    with device:
        if config.crossing == "dlrm":
            model: Any = DLRM(collection, len(schema.dense), *layers, dense_device=device)
            model.inter_arch = Interactions(len(model.sparse_arch.sparse_feature_names))
        else:
            cross = config.dcn_num_layers or DCN_NUM_LAYERS, config.dcn_low_rank_dim or DCN_LOW_RANK_DIM
            model = DLRM_DCN(collection, len(schema.dense), *layers, *cross, dense_device=device)
        model.sparse_arch = PooledRows(collection)
        if has_towers:
            build_towers = named("embershard.extras.networks.tasks:build_towers")
            width = next(each.in_features for each in model.over_arch.modules() if isinstance(each, nn.Linear))
            model.over_arch = build_towers(config, width, schema.target.heads)
        add_dropout(model.over_arch, config.dropout)
        return WithLoss(model, schema.target, config.label_weighting)
