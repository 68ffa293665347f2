"""`ModelTable`: an embedding table of a model, as a value. The built-in models are built over these, and their tables
are known without TorchRec, which takes seconds to import."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from embershard.data.schema import Schema, SparseFeature
from embershard.errors import ConfigError
from embershard.models.config import WITH_HISTORY, ModelConfig
from embershard.models.schema import check_schema, table_name

#: Paths of the collections in the built-in models.
_BAGS = "model.sparse_arch.embedding_bag_collection"
_SEQUENCES, _BAGS_BESIDE = "model.embeddings.sequences", "model.embeddings.bags"


@dataclass(frozen=True)
class ModelTable:
    """An embedding table of a model.

    Attributes:
        features: names of the sparse features whose ids it looks up.
        module: path of its collection in the model.
        pooling: of its collection's bags, "sum" or "mean"; "" for sequences.
        init_range: its rows begin uniform in +- this; None: in +-1 / sqrt(rows). Not read from a module.

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
    init_range: float | None = field(default=None, compare=False)

    @property
    def is_sequence(self) -> bool:
        """True for a table of an `EmbeddingCollection`."""
        return not self.pooling

    @property
    def tensor(self) -> str:
        """Name of its weights in the model's state dict."""
        return f"{self.module}.{'embeddings' if self.is_sequence else 'embedding_bags'}.{self.name}.weight"


def built_in_tables(config: ModelConfig, schema: Schema) -> tuple[ModelTable, ...]:
    """Return the tables of a built-in model, in the order of its modules. It is built from them. Errors as then."""
    target = schema.target
    config.check_target(target)
    if config.arch not in WITH_HISTORY:
        check_schema(schema)
        return tuple(_bags(config, schema.sparse, _BAGS))
    rows = {feature.name: feature.num_rows for feature in schema.sparse}
    _check_events(config, schema, rows)
    pairs = zip(config.target, config.history, strict=False)
    shared = [_table(config, item, rows[item], (item, past), _SEQUENCES, "") for item, past in pairs]
    shared += [
        _table(config, past, rows[past], (past,), _SEQUENCES, "") for past in config.history[len(config.target) :]
    ]
    events = config.event_features
    others = _bags(config, [feature for feature in schema.sparse if feature.name not in events], _BAGS_BESIDE)
    return (*shared, *others)


def _bags(config: ModelConfig, features: Sequence[SparseFeature], module: str) -> Iterator[ModelTable]:
    """Yield the tables of bags that `features` look up, in the order of each table's first feature."""
    by_table: dict[str, list[SparseFeature]] = {}
    for feature in features:
        by_table.setdefault(feature.table or feature.name, []).append(feature)
    for name, sharing in by_table.items():
        names, pooling = tuple(feature.name for feature in sharing), sharing[0].pooling
        yield _table(config, name, sharing[0].num_rows, names, module, pooling)


def _table(
    config: ModelConfig, name: str, num_rows: int, features: tuple[str, ...], module: str, pooling: str
) -> ModelTable:
    sizes = table_name(name), num_rows, config.embedding_dim, config.dtype_of(table_name(name))
    return ModelTable(*sizes, features, module, pooling, config.init_range)


def _check_events(config: ModelConfig, schema: Schema, rows: Mapping[str, int]) -> None:
    """Raise unless the features of target and history are in the schema, once, fit each other, and have no settings of
    tables and poolings of their own."""
    settings = {"target": config.target, "history": config.history, f"{config.arch}.times": config.times}
    named = [(setting, name) for setting, names in settings.items() for name in names]
    for number, (setting, name) in enumerate(named):
        if name not in rows:
            raise ConfigError(
                f"model.{setting}: got {name!r}, needed a sparse feature of the data, which have {', '.join(rows)}."
            )
        if name in [other for _, other in named[:number]]:
            raise ConfigError(f"model.{setting}: {name!r} is in target and history twice; needed each feature once.")
    for item, past in zip(config.target, config.history, strict=False):
        if rows[item] != rows[past]:
            raise ConfigError(
                f"model.target {item!r} has {rows[item]} rows and model.history {past!r} has {rows[past]}: they share "
                "a table. Give both the same number of rows in the data's settings."
            )
    events = config.event_features
    for feature in schema.sparse:
        if feature.name in events and (feature.table is not None or feature.pooling != "sum"):
            raise ConfigError(
                f"data.table.features.{feature.name}: table and pooling have no effect on a feature of model.target or "
                "model.history (each pair shares a table of sequences), or of times. Leave them out."
            )
        if feature.name not in events and feature.table in events:
            raise ConfigError(
                f"data.table.features.{feature.name}: table {feature.table!r} is that of a feature of model.target or "
                "model.history, which is of sequences. Leave table out."
            )
