"""What must be the same when a run goes on from a checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from embershard.data import Schema
from embershard.training.config import RunConfig


def tables_of(config: RunConfig, schema: Schema) -> dict[str, tuple[int, int]]:
    """Return the rows and the dim of every sparse feature's table."""
    return {feature.name: (feature.num_rows, config.model.embedding_dim) for feature in schema.sparse}


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return the settings under which other values of the tensors would load without an error."""
    settings = {f"model.{key}": value for key, value in asdict(config.model).items()}
    settings["embedding_optimizer.kind"] = config.embedding_optimizer.kind
    settings["dense_optimizer.kind"] = config.dense_optimizer.kind
    settings_as_saved: dict[str, Any] = json.loads(json.dumps(settings))
    return settings_as_saved
