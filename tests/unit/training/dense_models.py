"""Small runs of the models whose dense part is one call, and how many of their batches it computes."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from embershard.models import ModelConfig
from embershard.training.config import RunConfig
from embershard.training.dense_call import DenseCall
from embershard.training.optimizers import DenseOptimizerConfig
from tests.unit.data.targets import target_config, write_targets

LAYERS: dict[str, Any] = {"dense_arch_layer_sizes": (16, 8), "over_arch_layer_sizes": (16, 8, 1)}
TOWERS: dict[str, Any] = {**LAYERS, "expert_layer_sizes": (8, 6)}
ADAM, SGD = DenseOptimizerConfig("adam", lr=0.01), DenseOptimizerConfig("sgd", lr=0.1, clip_norm=0.5)
#: Architecture and its settings, kind of target, dense optimizer, precision.
MODELS: dict[str, tuple[str, dict[str, Any], str, DenseOptimizerConfig, Any]] = {
    "dlrm": ("dlrm", LAYERS, "plain", SGD, "fp32"),
    "dlrm, adam": ("dlrm", LAYERS, "weighted", ADAM, "fp32"),
    "dlrm, bf16": ("dlrm", LAYERS, "plain", ADAM, "bf16"),
    "dcn": ("dlrm_dcn", LAYERS, "regression", ADAM, "fp32"),
    "shared_bottom": ("shared_bottom", {**TOWERS, "funnel": ("click", "bought")}, "tasks", ADAM, "fp32"),
    "mmoe": ("mmoe", {**TOWERS, "interaction": "dlrm_dcn", "num_experts": 3}, "tasks", SGD, "fp32"),
    "ple": ("ple", {**TOWERS, "label_weighting": "uncertainty"}, "classes", ADAM, "fp32"),
    "fm": ("fm", {}, "several", SGD, "fp32"),
    "deepfm": ("deepfm", {"label_weighting": "uncertainty"}, "tasks", ADAM, "bf16"),
    "wide_deep": ("wide_deep", {"over_arch_layer_sizes": (6, 1)}, "plain", ADAM, "fp32"),
}


def config_of(name: str, samples: Path) -> RunConfig:
    arch, layers, target, optimizer, precision = MODELS[name]
    config = target_config(samples, target, model=ModelConfig(arch, 8, **layers), dense_optimizer=optimizer)  # type: ignore[arg-type]
    if layers.get("label_weighting") == "uncertainty":
        table = replace(config.data.table, label_weights=())
        config = replace(config, data=replace(config.data, table=table))
    return replace(config, train=replace(config.train, precision=precision))


def samples_in(folder: Path) -> Path:
    return write_targets(folder / "samples.parquet", 2400)


def counted(stack: ExitStack) -> list[int]:
    """Return a list that gets the number of samples of each batch that the call computes."""
    found, compute = list[int](), DenseCall.compute

    def count(self: DenseCall, rows: torch.Tensor, batch: Any) -> Any:
        found.append(len(rows))
        return compute(self, rows, batch)

    stack.enter_context(mock.patch.object(DenseCall, "compute", count))
    return found
