"""A sample's schema: what is predicted of it, its columns, and the rows of their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Literal

from embershard.errors import ConfigError

#: The last one is of settings: `Target.with_classes` makes it binary labels.
Task = Literal["binary", "regression", "multiclass"]
Pooling = Literal["sum", "mean"]


@dataclass(frozen=True)
class Target:
    """What is predicted of a sample: T labels.

    >>> Target(("click", "buy"), label_weights=(1.0, 2.0)).task
    'binary'

    Attributes:
        labels: names of their columns; of a label with classes, names as "stars=4".
        task: "binary": labels are 0 or 1; "regression": any numbers. One for all labels, or one each.
        label_weights: factor of each label's loss; empty: 1 each.
        weight: column of the samples' weights; None: 1 each.
        label_means: of each regression, where a model's outputs start; empty: at 0.
        may_be_missing: a sample's labels that are NaN are missing: they train nothing, and count in no figure.
        widths: how many of `labels` each label of the settings is: one, or one for each of its classes, of which a
            sample has one; empty: 1 each.
    """

    labels: tuple[str, ...] = ("label",)
    task: Task | tuple[Task, ...] = "binary"
    label_weights: tuple[float, ...] = ()
    weight: str | None = None
    label_means: tuple[float, ...] = ()
    may_be_missing: bool = False
    widths: tuple[int, ...] = ()

    def with_classes(self, classes: Mapping[str, Sequence[float]]) -> Target:
        """Return the target in which a label with classes is a binary label for each of them.

        >>> target = Target(("click", "stars"), ("binary", "multiclass")).with_classes({"stars": [1, 2.5]})
        >>> target.labels, target.widths
        (('click', 'stars=1', 'stars=2.5'), (1, 2))
        """
        if not classes:
            return self
        labels: list[str] = []
        tasks: list[Task] = []
        weights: list[float] = []
        widths = []
        for place, (label, task) in enumerate(zip(self.labels, self.tasks, strict=True)):
            own = [f"{label}={int(each) if each == int(each) else each}" for each in classes.get(label, ())] or [label]
            labels += own
            tasks += ["binary" if label in classes else task] * len(own)
            weights += self.label_weights[place : place + 1] * len(own)
            widths.append(len(own))
        return replace(
            self, labels=tuple(labels), task=tuple(tasks), label_weights=tuple(weights), widths=tuple(widths)
        )

    @property
    def heads(self) -> dict[str, range]:
        """Places of each label of the settings among `labels`, by its name.

        >>> Target(("click", "stars=1", "stars=2", "stars=3"), widths=(1, 3)).heads
        {'click': range(0, 1), 'stars': range(1, 4)}
        """
        return dict(_heads(self.labels, self.widths))

    @property
    def classes(self) -> dict[str, list[str]]:
        """The labels that are the classes of one, by its name.

        >>> Target(("click", "stars=1", "stars=2", "stars=3"), widths=(1, 3)).classes
        {'stars': ['stars=1', 'stars=2', 'stars=3']}
        """
        return {name: [self.labels[place] for place in head] for name, head in self.heads.items() if len(head) > 1}

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The task of each label."""
        return self.task if isinstance(self.task, tuple) else (self.task,) * len(self.labels)


@cache  # a forward asks for it
def _heads(labels: tuple[str, ...], widths: tuple[int, ...]) -> dict[str, range]:
    ends = accumulate(widths or (1,) * len(labels))
    places = [range(start, end) for start, end in pairwise([0, *ends])]
    first = [labels[each.start] for each in places]
    names = [name if len(each) == 1 else name.rpartition("=")[0] for name, each in zip(first, places, strict=True)]
    return dict(zip(names, places, strict=True))


@dataclass(frozen=True)
class SparseFeature:
    """One categorical column and the rows of its embedding table, of which row 0 stands for a missing value.

    A table of one row has no other: all its ids are row 0. One that takes any id has no such row.

    Attributes:
        num_rows: of the table; its capacity, where it takes any id.
        table: name of the table, which features share that name the same; None: the feature's name.
        pooling: what a bag's rows give: their sum, or their mean.
        takes_ids: values are any ids of 64 bits, not rows, and a missing one is `MISSING_ID`.

    >>> SparseFeature("user", num_rows=1000).name
    'user'
    """

    name: str
    num_rows: int
    table: str | None = None
    pooling: Pooling = "sum"
    takes_ids: bool = False

    def __post_init__(self) -> None:
        for name, what, of in ((self.name, "sparse feature", "the column"), (self.table or self.name, "table", "it")):
            if not name or any(c in "./\\" or not c.isprintable() for c in name):
                raise ConfigError(
                    f"{what} {name!r}: needed a name without dot, slash, backslash and control characters, since "
                    f"modules, tensors and files are named after it; rename {of}"
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
    target: Target = field(default_factory=Target)

    def __post_init__(self) -> None:
        names = [*self.dense, *self.keys, *dict.fromkeys([*self.target.labels, *self.target.heads])]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"the schema has columns twice: {', '.join(twice)}; every name must be unique")
        if not self.sparse:
            raise ConfigError("the schema has no sparse column; a recommendation model needs at least one")
        first: dict[str, SparseFeature] = {}
        for feature in self.sparse:
            other = first.setdefault(feature.table or feature.name, feature)
            if (other.num_rows, other.pooling) != (feature.num_rows, feature.pooling):
                raise ConfigError(
                    f"the features {other.name!r} and {feature.name!r} share the table {other.table or other.name!r}, "
                    f"and have num_rows {other.num_rows} and {feature.num_rows}, pooling {other.pooling!r} and "
                    f"{feature.pooling!r}; needed the same of both. Or give one of them a table of its own"
                )

    @property
    def keys(self) -> list[str]:
        """Names of the sparse features: the keys of every batch's KeyedJaggedTensor."""
        return [feature.name for feature in self.sparse]

    @property
    def num_dense(self) -> int:
        return len(self.dense)
