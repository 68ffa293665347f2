"""Small models over made-up columns, whose features tests rename, add and drop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embershard.cache import CacheConfig
from embershard.data import DataConfig
from embershard.data.config import TableConfig, TableFeature
from embershard.models import ModelConfig
from embershard.settings.decoding import to_toml
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.optimizers import DenseOptimizerConfig, EmbeddingOptimizerConfig

DIM = 8
FEATURES = {"age": "dense", "price": "dense", "user": 60, "item": 40, "shop": 30}
NUM_SAMPLES = 240


def features(**changes: Any) -> dict[str, TableFeature]:
    """`FEATURES` with changes: "dense", a number of rows, a feature, or None for no such feature."""
    found = {**FEATURES, **changes}
    return {name: _feature(each) for name, each in found.items() if each is not None}


def _feature(given: Any) -> TableFeature:
    if isinstance(given, TableFeature):
        return given
    return TableFeature(kind="dense") if given == "dense" else sparse(given)


def sparse(num_rows: int, mapping: str = "none", **settings: Any) -> TableFeature:
    return TableFeature(kind="sparse", num_rows=num_rows, mapping=mapping, **settings)  # type: ignore[arg-type]


def run_of(
    path: Path | str,
    of_features: dict[str, TableFeature] | None = None,
    *,
    arch: str = "dlrm",
    steps: int = 4,
    label: str = "label",
    kind: str = "rowwise_adagrad",
    dense: str = "adam",
    seed: int = 0,
    model: dict[str, Any] | None = None,
    **sections: Any,
) -> RunConfig:
    """A run of some steps over samples at `path`."""
    layers: dict[str, Any] = {} if arch in ("fm", "deepfm", "wide_deep") else {"dense_arch_layer_sizes": (6, DIM)}
    layers |= {} if arch == "fm" else {"over_arch_layer_sizes": (6, 1)}
    config = ModelConfig(**{"arch": arch, "embedding_dim": DIM, **layers, **(model or {})})
    columns = TableConfig(label=label, features=features() if of_features is None else of_features)
    parts: dict[str, Any] = {
        "data": DataConfig(kind="table", path=str(path), num_workers=0, eval_fraction=0.0, table=columns),
        "model": config,
        "cache": CacheConfig(ratio=0.65),
        "embedding_optimizer": EmbeddingOptimizerConfig(kind=kind, lr=0.1),  # type: ignore[arg-type]
        "dense_optimizer": DenseOptimizerConfig(kind=dense, lr=0.01),  # type: ignore[arg-type]
        "train": TrainConfig(batch_size=30, max_steps=steps, device="cpu", log_every=1, seed=seed),
    }
    return RunConfig(**{**parts, **sections})


def write_samples(path: Path, seed: int = 3) -> Path:
    """Samples with columns for all features that tests have."""
    random = np.random.default_rng(seed)
    rows = {"user": 60, "item": 40, "shop": 30, "day": 7, "product": 40}
    columns: dict[str, Any] = {name: random.integers(0, count, NUM_SAMPLES) for name, count in rows.items()}
    columns["product"] = columns["item"]
    columns |= {name: random.random(NUM_SAMPLES) for name in ("age", "price", "stars")}
    columns["label"] = (columns["user"] + columns["item"]) % 2
    pq.write_table(pa.table(columns), path, row_group_size=60)
    return path


def record(config: RunConfig, folder: Path) -> None:
    """Write what a run's folder has of its settings."""
    (folder / "config.toml").write_text(to_toml(config))
