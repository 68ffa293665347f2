"""Builds TorchRec's DLRM, DLRM-DCNv2 and DeepFM for a data set's schema. The models know no rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from embershard.errors import ConfigError
from embershard.models.config import ModelConfig

#: Defaults of the cross network, which one architecture has.
DCN_NUM_LAYERS = 3
DCN_LOW_RANK_DIM = 32


class SparseFeatureLike(Protocol):
    """One sparse feature of a schema."""

    @property
    def name(self) -> str: ...

    @property
    def num_rows(self) -> int: ...


class SchemaLike(Protocol):
    """The features of a data set, as `embershard.data.Schema` has them."""

    @property
    def dense(self) -> Sequence[str]: ...

    @property
    def sparse(self) -> Sequence[SparseFeatureLike]: ...


def table_name(feature: str) -> str:
    """Return the name of a feature's table.

    >>> table_name("C3")
    't_C3'
    """
    return f"t_{feature}"


def build_model(config: ModelConfig, schema: SchemaLike, device: torch.device) -> DLRMTrain:
    """Build a model with its tables on the meta device (sharding gives them memory and values).

    Args:
        config: sizes and architecture.
        schema: dense and sparse features, with the number of rows of each table.
        device: of the dense layers.

    Returns:
        A module from a batch with `dense_features` [B, num_dense], `sparse_features` and `labels` [B] to
        `(loss [], (loss [], logits [B], labels [B]))`.

    Raises:
        ConfigError: the schema has no dense or no sparse feature, a name twice, or a table without rows.

    >>> from embershard.data import Schema, SparseFeature
    >>> schema = Schema(dense=("I1",), sparse=(SparseFeature("C1", 100),))
    >>> model = build_model(ModelConfig(), schema, torch.device("cpu"))
    >>> [table.name for table in model.model.sparse_arch.embedding_bag_collection.embedding_bag_configs()]
    ['t_C1']
    """
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
    _check_schema(schema)
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


def _check_schema(schema: SchemaLike) -> None:
    for kind, names in (("dense", list(schema.dense)), ("sparse", [f.name for f in schema.sparse])):
        if not names:
            raise ConfigError(f"The schema has no {kind} features; a DLRM needs at least one.")
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice:
            raise ConfigError(f"The schema names {kind} feature {twice[0]!r} more than once; names must be unique.")
    for feature in schema.sparse:
        if feature.num_rows < 1:
            raise ConfigError(
                f"Sparse feature {feature.name!r}: its table has {feature.num_rows} rows, needed at least 1."
            )
