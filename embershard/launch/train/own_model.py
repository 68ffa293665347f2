"""What `embershard train --dry-run` says of a model of one's own."""

from __future__ import annotations

from typing import Any

import torch

from embershard.data import schema_of
from embershard.models import build_model
from embershard.models.tables import collections_of, tables_in
from embershard.training.config import RunConfig


def describe_own(config: RunConfig) -> str:
    """Build the model of `model.build`, without memory for its tables; return what would be trained, as comments of
    TOML.

    Raises:
        ConfigError: the function is not found, fails, or returns something else than a model.
    """
    model: Any = build_model(config.model, schema_of(config.data), torch.device("cpu"))
    tables, lines = list(tables_in(model)), [f"{config.model.build} makes a model that fits the data:"]
    for path, module in collections_of(model):
        own = [table for table in tables if table.module == path]
        rows = sum(table.num_rows for table in own)
        name = path.partition(".")[2] or "the model itself"
        lines.append(f"  {name}: {type(module).__name__}, {len(own)} tables with {rows:,} rows")
        for table in own:
            what = table.pooling or "sequences"
            lines.append(f"    {table.name}: {table.num_rows:,} x {table.dim}, {what} of {', '.join(table.features)}")
    for name, module in model.model.named_children():
        weights = sum(each.numel() for each in module.parameters() if each.device.type != "meta")
        if weights:
            lines.append(f"  {name}: {type(module).__name__}, {weights:,} dense weights")
    own_weights = sum(each.numel() for each in model.model.parameters(recurse=False))
    if own_weights:
        lines.append(f"  parameters of its own: {own_weights:,} dense weights")
    return "\n".join(f"# {line}" for line in lines)
