"""Tables that settings name, as themselves or by a feature."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from embershard.errors import ConfigError
from embershard.models import ModelTable
from embershard.training.config import RunConfig
from embershard.training.fit.model_size import tables_of_run


def named_tables(setting: str, names: Iterable[str], tables: Iterable[ModelTable]) -> dict[str, str]:
    """Return the names of the tables that a setting names, each with the name that it was given.

    >>> table = ModelTable("t_item", 100, 8, "fp32", ("item", "clicked"), "model.ebc", "sum")
    >>> named_tables("model.frozen", ["clicked"], [table])
    {'t_item': 'clicked'}

    Raises:
        ConfigError: there is no such table, or one is named twice.
    """
    known = {table.name: table for table in tables}
    found: dict[str, str] = {}
    for name in names:
        table = known.get(name) or next((each for each in known.values() if name in each.features), None)
        if table is None:
            raise ConfigError(f"{setting}: got {name!r}, needed a table or a feature of one: {', '.join(known)}.")
        if table.name in found:
            raise ConfigError(
                f"{setting}: {found[table.name]!r} and {name!r} are one table, {table.name!r}. Remove one."
            )
        found[table.name] = name
    return found


def freeze_tables(model: nn.Module, config: RunConfig) -> None:
    """Let the tables in `model.frozen` need no gradient: the cached sharders then do not train them.

    Args:
        model: not sharded, with optimizers attached to its tables.

    Raises:
        ConfigError: there is no such table, or the settings train tables in a way that freezes none.
    """
    if not config.model.frozen:
        return
    tables = tables_of_run(config)
    names = named_tables("model.frozen", config.model.frozen, tables)
    problems = {
        "cache.enabled = false": not config.cache.enabled,
        f'sharding.mode = "{config.sharding.mode}"': config.sharding.mode != "sharded",
        f'sharding.exchange = "{config.sharding.exchange}"': config.sharding.exchange != "pooled",
        "sharding.plan, whose pools are of tables that are trained": config.sharding.plan is not None,
    }
    if problem := next((text for text, holds in problems.items() if holds), None):
        raise ConfigError(
            f'model.frozen: got {problem}; needed cached tables in the mode "sharded" with the exchange "pooled", '
            "without a plan: no other way of training leaves rows as they are. Change it, or train the tables."
        )
    for table in tables:
        if table.name in names:
            model.get_parameter(table.tensor).requires_grad_(False)
