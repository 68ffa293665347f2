"""A sample's schema: what is predicted of it, its columns, and the rows of their tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from embershard.errors import ConfigError

Task = Literal["binary", "regression"]
Pooling = Literal["sum", "mean"]


@dataclass(frozen=True)
class Target:
    """What is predicted of a sample: T labels.

    >>> Target(("click", "buy"), label_weights=(1.0, 2.0)).task
    'binary'

    Attributes:
        labels: names of their columns.
        task: "binary": labels are 0 or 1; "regression": any numbers.
        label_weights: factor of each label's loss; empty: 1 each.
        weight: column of the samples' weights; None: 1 each.
    """

    labels: tuple[str, ...] = ("label",)
    task: Task = "binary"
    label_weights: tuple[float, ...] = ()
    weight: str | None = None


@dataclass(frozen=True)
class SparseFeature:
    """One categorical column and the rows of its embedding table, of which row 0 stands for a missing value.

    A table of one row has no other: all its ids are row 0.

    >>> SparseFeature("user", num_rows=1000).name
    'user'
    """

    name: str
    num_rows: int

    def __post_init__(self) -> None:
        if not self.name or any(c in "./\\" or not c.isprintable() for c in self.name):
            raise ConfigError(
                f"sparse feature {self.name!r}: needed a name without dot, slash, backslash and control characters, "
                "since modules, tensors and files are named after it; rename the column"
            )
        if self.num_rows < 1:
            raise ConfigError(f"sparse feature {self.name!r} has num_rows={self.num_rows}; needed at least 1")


@dataclass(frozen=True)
class Schema:
    """The columns of a sample, in order.

    >>> schema = Schema(dense=("age",), sparse=(SparseFeature("user", 1000), SparseFeature("item", 50)))
    >>> schema.keys, schema.num_dense
    (['user', 'item'], 1)

    Raises:
        ConfigError: two columns have the same name, or there is no sparse column.
    """

    dense: tuple[str, ...]
    sparse: tuple[SparseFeature, ...]
    target: Target = Target()

    def __post_init__(self) -> None:
        names = [*self.dense, *self.keys, *self.target.labels]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"the schema has columns twice: {', '.join(twice)}; every name must be unique")
        if not self.sparse:
            raise ConfigError("the schema has no sparse column; a recommendation model needs at least one")

    @property
    def keys(self) -> list[str]:
        """Names of the sparse features: the keys of every batch's KeyedJaggedTensor."""
        return [feature.name for feature in self.sparse]

    @property
    def num_dense(self) -> int:
        return len(self.dense)
