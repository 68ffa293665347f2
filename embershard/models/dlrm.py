"""Builds TorchRec's DLRM, DLRM-DCNv2 and DeepFM for a data set's schema."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from embershard.models.config import ModelConfig
from embershard.models.schema import SchemaLike, check_schema, table_name

#: Defaults of the cross network, which one architecture has.
DCN_NUM_LAYERS = 3
DCN_LOW_RANK_DIM = 32


def build_dlrm(config: ModelConfig, schema: SchemaLike, device: torch.device) -> DLRMTrain:
    """Build a DLRM, DLRM-DCNv2 or DeepFM: see `build_model`."""
    collection = EmbeddingBagCollection(tables=embedding_tables(config, schema), device=torch.device("meta"))
    layers = (list(config.dense_arch_layer_sizes), list(config.over_arch_layer_sizes))
    with device:
        if config.arch == "deepfm":
            return DLRMTrain(_deepfm(config, collection, len(schema.dense)))
        if config.arch == "dlrm":
            return DLRMTrain(DLRM(collection, len(schema.dense), *layers, dense_device=device))
        num_layers = config.dcn_num_layers or DCN_NUM_LAYERS
        rank = config.dcn_low_rank_dim or DCN_LOW_RANK_DIM
        return DLRMTrain(DLRM_DCN(collection, len(schema.dense), *layers, num_layers, rank, dense_device=device))


def _deepfm(config: ModelConfig, collection: EmbeddingBagCollection, num_dense: int) -> SimpleDeepFMNN:
    """Return TorchRec's DeepFM without the sigmoid at its end: the loss takes logits."""
    model = SimpleDeepFMNN(num_dense, collection, config.dense_arch_layer_sizes[0], config.over_arch_layer_sizes[0])
    layers = [layer for layer in model.over_arch.model.children() if not isinstance(layer, nn.Sigmoid)]
    model.over_arch.model = nn.Sequential(*layers)
    return model


def embedding_tables(config: ModelConfig, schema: SchemaLike) -> list[EmbeddingBagConfig]:
    """Return one table per sparse feature, in the schema's order. Errors as in `build_model`."""
    check_schema(schema)
    dtype = DataType.FP16 if config.table_dtype == "fp16" else DataType.FP32
    return [
        EmbeddingBagConfig(
            name=table_name(feature.name),
            num_embeddings=feature.num_rows,
            embedding_dim=config.embedding_dim,
            feature_names=[feature.name],
            data_type=dtype,
        )
        for feature in schema.sparse
    ]
