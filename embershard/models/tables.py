"""`ModelTable`: an embedding table of a model, as a value, read from the model's TorchRec collections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from embershard.errors import ConfigError
from embershard.models.config import ModelConfig
from embershard.models.schema import SparseFeatureLike, table_name

_DTYPES: dict[DataType, Literal["fp32", "fp16"]] = {DataType.FP32: "fp32", DataType.FP16: "fp16"}


@dataclass(frozen=True)
class ModelTable:
    """An embedding table of a model.

    Attributes:
        features: names of the sparse features whose ids it looks up.
        module: path of its collection in the model.
        pooling: of its collection's bags, "sum" or "mean"; "" for sequences.

    >>> table = ModelTable("t_item", 100, 16, "fp32", ("item", "clicked"), "model.sequences", "")
    >>> table.is_sequence, table.tensor
    (True, 'model.sequences.embeddings.t_item.weight')
    """

    name: str
    num_rows: int
    dim: int
    dtype: Literal["fp32", "fp16"]
    features: tuple[str, ...]
    module: str
    pooling: str

    @property
    def is_sequence(self) -> bool:
        """True for a table of an `EmbeddingCollection`."""
        return not self.pooling

    @property
    def tensor(self) -> str:
        """Name of its weights in the model's state dict."""
        return f"{self.module}.{'embeddings' if self.is_sequence else 'embedding_bags'}.{self.name}.weight"


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
