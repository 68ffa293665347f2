"""TorchRec's collections of tables: found in a model and read as `ModelTable`, built from such values, and the layer
that puts a model's pooled rows in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchrec.models.dlrm import SparseArch
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

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


class PooledRows(SparseArch):
    """TorchRec's `SparseArch`, from sparse features to pooled rows [B, F, D]. That cuts the collection's output into a
    part per feature, and puts the parts beside each other; here, one operation or none puts them in order."""

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the rows [B, F, D] of F features in the order of the tables."""
        names, collection = self.sparse_feature_names, self.embedding_bag_collection
        if getattr(collection, "feature_order", names) is not names:  # a sharded one puts them so by itself
            collection.feature_order = names
        return _by_feature(collection(features), names, self.D)


@torch.fx.wrap  # pipelines trace the model
def _by_feature(pooled: Any, names: list[str], dim: int) -> Tensor:
    keys, rows = pooled.keys(), pooled.values().view(-1, len(names), dim)
    return rows if keys == names else _InOrder.apply(rows, *_order(tuple(keys), tuple(names), rows.device))


@lru_cache(maxsize=16)
def _order(keys: tuple[str, ...], names: tuple[str, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the place of each name among the keys, and of each key among the names."""
    order, inverse = [keys.index(name) for name in names], [names.index(key) for key in keys]
    return torch.tensor(order, device=device), torch.tensor(inverse, device=device)


class _InOrder(torch.autograd.Function):
    """Rows [B, F, D] with their features by an order; gradients are those that cutting and joining would give."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:  # type: ignore[override]
        ctx.inverse = inverse
        return rows.index_select(1, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return gradient.index_select(1, ctx.inverse), None, None


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
