"""Builds TorchRec's DLRM, DLRM-DCNv2 and DeepFM for a data set's schema."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from embershard.models.config import ModelConfig
from embershard.models.loss import WithLoss
from embershard.models.schema import SchemaLike, SparseFeatureLike, check_schema, table_name

#: Defaults of the cross network, which one architecture has.
DCN_NUM_LAYERS = 3
DCN_LOW_RANK_DIM = 32


def build_dlrm(config: ModelConfig, schema: SchemaLike, device: torch.device) -> WithLoss:
    """Build a DLRM, DLRM-DCNv2 or DeepFM: see `build_model`."""
    check_schema(schema)
    collection = EmbeddingBagCollection(tables=embedding_tables(config, schema.sparse), device=torch.device("meta"))
    num_labels = len(schema.target.labels)
    layers = list(config.dense_arch_layer_sizes), list(config.over_layers(num_labels))
    with device:
        if config.arch == "deepfm":
            model: nn.Module = _deepfm(config, collection, len(schema.dense), num_labels)
        elif config.arch == "dlrm":
            model = DLRM(collection, len(schema.dense), *layers, dense_device=device)
        else:
            cross = config.dcn_num_layers or DCN_NUM_LAYERS, config.dcn_low_rank_dim or DCN_LOW_RANK_DIM
            model = DLRM_DCN(collection, len(schema.dense), *layers, *cross, dense_device=device)
        return WithLoss(model, schema.target)


def _deepfm(config: ModelConfig, collection: EmbeddingBagCollection, num_dense: int, num_labels: int) -> SimpleDeepFMNN:
    """Return TorchRec's DeepFM with an output per label, and without the sigmoid at its end: the loss takes logits."""
    model = SimpleDeepFMNN(num_dense, collection, config.dense_arch_layer_sizes[0], config.over_arch_layer_sizes[0])
    last = next(layer for layer in model.over_arch.model.children() if isinstance(layer, nn.Linear))
    if num_labels > 1:
        last = nn.Linear(last.in_features, num_labels)
    model.over_arch.model = nn.Sequential(last)
    return model


def embedding_tables(config: ModelConfig, features: Sequence[SparseFeatureLike]) -> list[EmbeddingBagConfig]:
    """Return the tables of bags that `features` look up, in the order of each table's first feature."""
    dtype = DataType.FP16 if config.table_dtype == "fp16" else DataType.FP32
    by_table: dict[str, list[SparseFeatureLike]] = {}
    for feature in features:
        by_table.setdefault(feature.table or feature.name, []).append(feature)
    return [
        EmbeddingBagConfig(
            name=table_name(name),
            num_embeddings=sharing[0].num_rows,
            embedding_dim=config.embedding_dim,
            feature_names=[feature.name for feature in sharing],
            data_type=dtype,
            pooling=PoolingType.MEAN if sharing[0].pooling == "mean" else PoolingType.SUM,
        )
        for name, sharing in by_table.items()
    ]
