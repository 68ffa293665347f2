"""`ModelShape`: the tables and dense layers of a model as values, of one that is saved and of one that begins."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from embershard.extras.warm_start.columns import LabelledDim, SeenFeatures, labelled_dims
from embershard.models.config import FACTORIZED, Arch

#: Group of the model's tensors in a checkpoint, which their names begin with.
MODEL = "model."
_TABLE = re.compile(r"(?P<module>.*)\.(?:embedding_bags|embeddings)\.(?P<table>.+)\.(?P<kind>weight|ids|id_candidates)")
_ROW_NUMBERS = "row numbers"


@dataclass(frozen=True)
class TableShape:
    """An embedding table.

    Attributes:
        tensor: name of its weights in a checkpoint.
        features: that look it up, where they are known.
        meaning: how values become its rows; None: unknown.
        has_ids: it takes any id, and a checkpoint says which id has which row.
        layout: what the columns of a row are, where they are more than an embedding.
    """

    name: str
    num_rows: int
    dim: int
    tensor: str
    features: tuple[str, ...] = ()
    meaning: str | None = None
    has_ids: bool = False
    layout: str = ""

    @property
    def size(self) -> str:
        """Its rows and columns, for a reader."""
        return f"{self.num_rows:,} x {self.dim}"

    @property
    def may_grow(self) -> bool:
        """More rows leave the old ones what they were: no value is mapped onto another one by their number."""
        return self.meaning in (None, _ROW_NUMBERS) or self.has_ids


@dataclass(frozen=True)
class LayerShape:
    """A parameter or a buffer of the dense layers.

    Attributes:
        name: in the model's state dict.
        dims: of each dimension its labels, or None; () where none has any.
    """

    name: str
    size: tuple[int, ...]
    dims: tuple[LabelledDim | None, ...] = ()

    def labels(self, dim: int) -> LabelledDim | None:
        """Return the labels of a dimension."""
        return self.dims[dim] if self.dims else None


@dataclass(frozen=True)
class ModelShape:
    """A model.

    Attributes:
        arch: of the settings; "": unknown.
        tables, layers: by name.
        dense: of each dense feature how its values are scaled, by name; empty: unknown.
        sparse: names of the sparse features; empty: unknown.
        scales: of dense features, numbers by which they are scaled.
    """

    tables: Mapping[str, TableShape]
    layers: Mapping[str, LayerShape]
    arch: str = ""
    dense: Mapping[str, str] = field(default_factory=dict)
    sparse: tuple[str, ...] = ()
    scales: Mapping[str, Any] = field(default_factory=dict)

    @property
    def features(self) -> set[str]:
        """Names of all features."""
        return {*self.dense, *self.sparse}

    def with_inputs(
        self, inputs: Mapping[str, Any], lookups: Iterable[tuple[str, str]], arch: str, outputs: Sequence[str]
    ) -> ModelShape:
        """Return the model with what is known of its features.

        Args:
            inputs: as `serving_inputs` returns them.
            lookups: feature and table of each lookup, in their order.
            arch: as `ModelConfig.title`.
            outputs: names of what is predicted.
        """
        mappings = {each["name"]: _meaning(each) for each in inputs["sparse"]}
        features: dict[str, list[str]] = {}
        for feature, table in lookups:
            features.setdefault(table, []).append(feature)
        tables = {
            name: replace(
                table,
                features=tuple(features.get(name, ())),
                meaning=next((mappings[each] for each in features.get(name, ()) if each in mappings), None),
                layout=_layout(arch, table.dim, len(outputs)),
            )
            for name, table in self.tables.items()
        }
        dense = {each["name"]: str(each["scale"]) for each in inputs["dense"]}
        layers = dict(self.layers)
        if arch in get_args(Arch) and tables:
            dim = next(iter(tables.values())).dim
            fields = tuple(each for of_table in features.values() for each in of_table)
            seen = SeenFeatures(arch, dim, tuple(dense), fields, tuple(outputs))  # type: ignore[arg-type]
            for name, dims in labelled_dims(seen, layers.keys()).items():
                sizes = [len(each.labels) if each else size for each, size in zip(dims, layers[name].size, strict=True)]
                if sizes == list(layers[name].size):  # else it is a layer of another kind under this name
                    layers[name] = replace(layers[name], dims=dims)
        scales = {
            each["name"]: {key: each[key] for key in ("mean", "std", "quantiles") if key in each}
            for each in inputs["dense"]
        }
        sparse = tuple(each["name"] for each in inputs["sparse"])
        return replace(self, tables=tables, layers=layers, arch=arch, dense=dense, sparse=sparse, scales=scales)


def shape_of(sizes: Mapping[str, Sequence[int]]) -> ModelShape:
    """Return the model of a checkpoint's tensors, of which nothing but names and sizes is known.

    Args:
        sizes: of all tensors, by their names in a checkpoint.

    >>> shape = shape_of({"model.ebc.embedding_bags.t_item.weight": (100, 8), "model.over.weight": (1, 8)})
    >>> shape.tables["t_item"].size, list(shape.layers)
    ('100 x 8', ['over.weight'])
    """
    tables: dict[str, TableShape] = {}
    layers: dict[str, LayerShape] = {}
    for name, size in sizes.items():
        found = _TABLE.fullmatch(name)
        if not name.startswith(MODEL) or (found and found["kind"] != "weight"):
            continue
        if found:
            has_ids = f"{name.removesuffix('weight')}ids" in sizes
            tables[found["table"]] = TableShape(found["table"], size[0], size[1], name, has_ids=has_ids)
        else:
            own = name.removeprefix(MODEL)
            layers[own] = LayerShape(own, tuple(size))
    return ModelShape(tables, layers)


def _meaning(feature: Mapping[str, Any]) -> str:
    """Return how the values of a sparse feature become rows. Equal ones give equal values equal rows."""
    mapping = feature["mapping"]
    if mapping == "none":
        return _ROW_NUMBERS
    base = "" if feature["id_base"] == 10 else f", base {feature['id_base']}"
    if mapping in ("ids", "text_ids", "hour", "weekday"):
        return f"{mapping}{base}"
    return f"{mapping} onto {feature['num_rows']:,} rows{base}"


def _layout(arch: str, dim: int, num_outputs: int) -> str:
    return f"{dim - num_outputs} factors, {num_outputs} weights" if arch in FACTORIZED else ""
