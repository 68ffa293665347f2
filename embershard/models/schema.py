"""What a model needs to know of the data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from embershard.errors import ConfigError


class SparseFeatureLike(Protocol):
    """One sparse feature of a schema."""

    @property
    def name(self) -> str: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def table(self) -> str | None: ...

    @property
    def pooling(self) -> str: ...


class TargetLike(Protocol):
    """What is predicted of a sample, as `embershard.data.Target` has it."""

    @property
    def labels(self) -> Sequence[str]: ...

    @property
    def tasks(self) -> Sequence[str]: ...

    @property
    def label_weights(self) -> Sequence[float]: ...

    @property
    def weight(self) -> str | None: ...

    @property
    def may_be_missing(self) -> bool: ...

    @property
    def label_means(self) -> Sequence[float]: ...

    @property
    def heads(self) -> Mapping[str, range]: ...


class SchemaLike(Protocol):
    """The features of a data set, as `embershard.data.Schema` has them."""

    @property
    def dense(self) -> Sequence[str]: ...

    @property
    def sparse(self) -> Sequence[SparseFeatureLike]: ...

    @property
    def target(self) -> TargetLike: ...


def table_name(feature: str) -> str:
    """Return the name of a feature's table.

    >>> table_name("C3")
    't_C3'
    """
    return f"t_{feature}"


def check_schema(schema: SchemaLike) -> None:
    """Raise unless a model without a history can take the features.

    Raises:
        ConfigError: the schema has no dense or no sparse feature, a name twice, or a table without rows.
    """
    for kind, names in (("dense", list(schema.dense)), ("sparse", [f.name for f in schema.sparse])):
        if not names:
            raise ConfigError(f"The schema has no {kind} features; the model needs at least one.")
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice:
            raise ConfigError(f"The schema names {kind} feature {twice[0]!r} more than once; names must be unique.")
    for feature in schema.sparse:
        if feature.num_rows < 1:
            raise ConfigError(
                f"Sparse feature {feature.name!r}: its table has {feature.num_rows} rows, needed at least 1."
            )
