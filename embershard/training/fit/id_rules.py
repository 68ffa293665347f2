"""`id_rules`: which tables of a run's model take any id, by which rules, from its settings alone; `refuse_ids`."""

from __future__ import annotations

from embershard.cache.ids.config import Buckets, IdTable
from embershard.data import DataConfig, schema_of
from embershard.errors import ConfigError
from embershard.models import model_tables
from embershard.training.config import RunConfig

_ALL = "*"


def id_rules(config: RunConfig) -> dict[str, IdTable]:
    """Return the rules of the tables that take any id, by name.

    >>> id_rules(RunConfig())
    {}

    Raises:
        ConfigError: a table's features do not all take ids; rules are for none of them, or given twice; or a capacity
            cannot be cut into buckets.
    """
    if not config.data.has_ids:
        return {}
    schema = schema_of(config.data)
    takes_ids = {feature.name: feature.takes_ids for feature in schema.sparse}
    for feature in config.ids:
        if feature != _ALL and not takes_ids.get(feature, False):
            named = ", ".join(name for name, takes in takes_ids.items() if takes)
            raise ConfigError(f"ids.{feature}: got no feature whose table takes any id, needed one of {named}, or *.")
    found = {}
    for table in model_tables(config.model, schema):
        features = [feature for feature in table.features if takes_ids[feature]]
        if not features:
            continue
        if len(features) < len(table.features):
            other = next(feature for feature in table.features if not takes_ids[feature])
            raise ConfigError(
                f"{features[0]!r} and {other!r} share table {table.name!r}: got ids of one and rows of the other. Give "
                "both features the same mapping."
            )
        given = [feature for feature in features if feature in config.ids]
        if len(given) > 1:
            raise ConfigError(
                f"ids.{given[0]} and ids.{given[1]}: both features share table {table.name!r}. Remove one of the two."
            )
        found[table.name] = config.ids[given[0] if given else _ALL] if given or _ALL in config.ids else IdTable()
        found[table.name].buckets_of(table.name, table.num_rows)
    return found


def buckets_of_run(config: RunConfig) -> dict[str, Buckets]:
    """Return the buckets of the tables that take any id, by name."""
    rules = id_rules(config)
    tables = model_tables(config.model, schema_of(config.data)) if rules else ()
    return {each.name: rules[each.name].buckets_of(each.name, each.num_rows) for each in tables if each.name in rules}


def refuse_ids(data: DataConfig, why: str) -> None:
    """Raise where tables take any id, for something that needs rows with ids of their own for good.

    Raises:
        ConfigError: with settings by which ids share rows.
    """
    if not data.has_ids:
        return
    changes = ["data.synthetic.id_rows=none", "data.synthetic.id_turnover=0"]
    if data.kind != "synthetic":
        changes = [
            f"data.table.features.{name}.mapping={'hash' if feature.mapping == 'ids' else 'text'}"
            for name, feature in data.table.features.items()
            if feature.takes_ids
        ]
    settings = " ".join(f"--set {change}" for change in changes)
    raise ConfigError(f"{why}, and tables of this run take any id. As an estimate, let ids share rows: {settings}")
