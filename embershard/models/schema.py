"""What a model needs to know of the data."""

from __future__ import annotations

from collections import Counter

from embershard.data.schema import Schema
from embershard.errors import ConfigError


def table_name(feature: str) -> str:
    """Return the name of a feature's table.

    >>> table_name("C3")
    't_C3'
    """
    return f"t_{feature}"


def check_schema(schema: Schema) -> None:
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
