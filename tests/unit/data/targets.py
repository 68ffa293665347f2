"""A Parquet file with labels of several kinds, weights, features that share a table; and settings to train on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embershard.cache import CacheConfig
from embershard.data import DataConfig
from embershard.data.config import TableConfig, TableFeature
from embershard.models import ModelConfig
from embershard.pipeline.config import LookAheadConfig
from embershard.training.config import RunConfig, TrainConfig

ROWS = 1200
FEATURES = {
    "price": TableFeature("dense", scale="log1p"),
    "seen": TableFeature("sparse", num_rows=300, mapping="modulo", table="item", pooling="mean"),
    "user": TableFeature("sparse", num_rows=200, mapping="hash"),
    "item": TableFeature("sparse", num_rows=300, mapping="modulo", pooling="mean"),
    "tags": TableFeature("sparse", num_rows=50, pooling="sum"),
}
#: Settings of `TableConfig` for each kind of target.
TARGETS: dict[str, dict[str, Any]] = {
    "plain": {"label": "click"},
    "ones": {"label": "click", "weight": "one"},
    "regression": {"label": "stars", "task": "regression"},
    "weighted regression": {"label": "stars", "task": "regression", "weight": "weight"},
    "weighted": {"label": "click", "weight": "weight"},
    "several": {"label": ("click", "buy"), "label_weights": (1.0, 0.5), "weight": "weight"},
    "several numbers": {"label": ("stars", "price"), "task": "regression"},
    "tasks": {
        "label": ("click", "bought", "rated"),
        "task": ("binary", "binary", "regression"),
        "label_masks": ("", "click", ""),
        "missing_labels": "masked",
    },
    "classes": {
        "label": ("click", "grade", "rated"),
        "task": ("binary", "multiclass", "regression"),
        "classes": {"grade": (0, 2.5, 1)},
        "missing_labels": "masked",
        "label_weights": (1.0, 0.5, 1.0),
    },
}


def write_targets(path: Path, rows: int = ROWS) -> Path:
    """Write samples whose labels follow from user and item."""
    draw = np.random.default_rng(7)
    user, item = draw.integers(0, 150, rows), (draw.random(rows) ** 3 * 280).astype(int)
    taste = np.sin(user * 1.7) + np.cos(item * 0.9)
    seen = [draw.integers(0, 280, draw.integers(0, 4)).tolist() for _ in range(rows)]
    table = pa.table(
        {
            "click": (taste + draw.normal(0, 0.5, rows) > 0).astype(np.int8),
            "buy": (taste + draw.normal(0, 0.5, rows) > 1).astype(np.int8),
            "stars": 3 + taste + draw.normal(0, 0.2, rows),
            "weight": draw.gamma(2.0, 0.5, rows),
            "one": np.ones(rows, np.int8),
            "price": draw.gamma(2.0, 3.0, rows),
            "user": user,
            "item": item,
            "seen": seen,
            "tags": [[f"t{n}" for n in draw.integers(0, 40, draw.integers(1, 3))] for _ in range(rows)],
        }
    )
    # Bought is missing without a click, or by chance; rated in every other sixteen rows; the grade in one of five rows.
    rows_of = np.arange(rows)
    grades = np.choose(np.digitize(table["stars"].to_numpy(), (2.5, 3.5)), (0, 1, 2.5))
    table = table.append_column("grade", pa.array(grades, mask=rows_of % 5 == 0))
    is_bought = (table["click"].to_numpy() == 1) & (rows_of % 7 > 0)
    for name, source, is_there in (("bought", "buy", is_bought), ("rated", "stars", rows_of // 16 % 2 == 1)):
        table = table.append_column(name, pa.array(table[source].to_numpy(), mask=~is_there))
    pq.write_table(table, path, row_group_size=100, write_page_checksum=True)
    return path


def target_config(path: Path, target: str, **changes: Any) -> RunConfig:
    """The settings of a small run on the file, for one of `TARGETS`; its caches evict rows."""
    parts: dict[str, Any] = {
        "data": DataConfig("table", str(path), num_workers=0, table=TableConfig(FEATURES, **TARGETS[target])),
        "model": ModelConfig(embedding_dim=8, dense_arch_layer_sizes=(8,), over_arch_layer_sizes=(8, 1)),
        "cache": CacheConfig(ratio=0.4),
        "look_ahead": LookAheadConfig(lookahead=4, prefetch=1),
        "train": TrainConfig(batch_size=16, max_steps=12, log_every=1, device="cpu", init="counter"),
    }
    return replace(RunConfig(), **{**parts, **changes})
