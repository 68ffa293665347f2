"""`freeze_tables`: the tables in `model.frozen` do not train."""

from __future__ import annotations

from torch import nn

from embershard.errors import ConfigError
from embershard.models.table_modules import tables_in
from embershard.training.config import RunConfig
from embershard.training.fit.model_size import named_tables


def freeze_tables(model: nn.Module, config: RunConfig) -> None:
    """Let the tables in `model.frozen` need no gradient: the cached sharders then do not train them.

    Args:
        model: not sharded, with optimizers attached to its tables.

    Raises:
        ConfigError: there is no such table, or the settings train tables in a way that freezes none.
    """
    if not config.model.frozen:
        return
    tables = list(tables_in(model))
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
