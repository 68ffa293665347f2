"""TorchRec's collections of tables: found in a model and read as `ModelTable`, and built from such values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from embershard.errors import ConfigError
from embershard.models.tables import ModelTable

_DTYPES: dict[DataType, Literal["fp32", "fp16"]] = {DataType.FP32: "fp32", DataType.FP16: "fp16"}


def collections_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield path and module of every collection of tables in a model that is not sharded."""
    for path, module in model.named_modules():
        if type(module) in (EmbeddingBagCollection, EmbeddingCollection):  # what TorchRec's sharders take
            yield path, module


def tables_in(model: nn.Module) -> Iterator[ModelTable]:
    """Yield the tables of a model that is not sharded, in the order of its modules.

    Raises:
        ConfigError: a table is of another number type than fp32 and fp16.
    """
    for path, module in collections_of(model):
        is_bag = isinstance(module, EmbeddingBagCollection)
        for table in module.embedding_bag_configs() if is_bag else module.embedding_configs():
            if table.data_type not in _DTYPES:
                raise ConfigError(f"table {table.name!r} has data_type={table.data_type}; needed FP32 or FP16.")
            yield ModelTable(
                name=table.name,
                num_rows=table.num_embeddings,
                dim=table.embedding_dim,
                dtype=_DTYPES[table.data_type],
                features=tuple(table.feature_names),
                module=path,
                pooling=table.pooling.value.lower() if is_bag else "",
            )


def bags_of(tables: Sequence[ModelTable]) -> EmbeddingBagCollection:
    """Return a collection of these bags, on the meta device."""
    configs = [EmbeddingBagConfig(**_arguments(table), pooling=PoolingType(table.pooling.upper())) for table in tables]
    return EmbeddingBagCollection(tables=configs, device=torch.device("meta"))


def sequences_of(tables: Sequence[ModelTable]) -> EmbeddingCollection:
    """Return a collection of these tables of sequences, on the meta device."""
    configs = [EmbeddingConfig(**_arguments(table)) for table in tables]
    return EmbeddingCollection(tables=configs, device=torch.device("meta"))


def _arguments(table: ModelTable) -> dict[str, Any]:
    return {
        "name": table.name,
        "num_embeddings": table.num_rows,
        "embedding_dim": table.dim,
        "feature_names": list(table.features),
        "data_type": DataType.FP16 if table.dtype == "fp16" else DataType.FP32,
        "weight_init_min": None if table.init_range is None else -table.init_range,
        "weight_init_max": table.init_range,
    }
