"""`model_tables` and `num_parameters`: what is known of a built-in model is what the built model has."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, get_args

import pytest
import torch

from embershard.data import Schema, SparseFeature, Target
from embershard.errors import ConfigError
from embershard.models import ModelConfig, build_model, model_tables, num_parameters
from embershard.models.config import FACTORIZED, WITH_HISTORY, WITH_TOWERS, Arch
from embershard.models.hstu_config import HstuConfig
from embershard.models.table_modules import collections_of, tables_in
from embershard.sharding.torchrec.counter_init import CounterInit

PLAIN = (
    SparseFeature("seen", 30, table="liked", pooling="mean"),
    SparseFeature("user", 10),
    SparseFeature("liked", 30, pooling="mean"),
)
EVENTS = tuple(
    SparseFeature(name, rows) for name, rows in (("item", 40), ("past_item", 40), ("shop", 7), ("past_shop", 7))
)
OF_HISTORY = {"target": ("item", "shop"), "history": ("past_item", "past_shop")}
TWO_LABELS = Target(labels=("click", "buy"), label_weights=(1.0, 1.0))
LEARNED = Target(labels=("click", "buy"))  # their weights


def settings_of(arch: str, **changes: object) -> ModelConfig:
    of_history = OF_HISTORY if arch in WITH_HISTORY else {}
    layers = {} if arch == "fm" else {"over_arch_layer_sizes": (12, 1)}
    return ModelConfig(arch=arch, **layers, **of_history, **changes)  # type: ignore[arg-type]


def schema_of(arch: str, *, dense: int = 3, target: Target | None = None) -> Schema:
    sparse = (*EVENTS[:2], PLAIN[1], *EVENTS[2:], PLAIN[0], PLAIN[2]) if arch in WITH_HISTORY else PLAIN
    return Schema(
        tuple(f"d{i}" for i in range(dense)), sparse, target or (TWO_LABELS if arch in WITH_TOWERS else Target())
    )


@pytest.mark.parametrize(
    "changes", [{}, {"table_dtype": "fp16", "table_dtypes": {"t_user": "fp32"}, "embedding_dim": 8}]
)
@pytest.mark.parametrize("arch", get_args(Arch))
def test_tables_are_those_of_the_built_model(arch, changes):
    layers = {"dense_arch_layer_sizes": (9, 8)} if changes and arch not in FACTORIZED else {}
    config, schema = settings_of(arch, **changes, **layers), schema_of(arch)
    built = tables_in(build_model(config, schema, torch.device("cpu")))
    tables = model_tables(config, schema)
    assert tables == tuple(built)
    half = {table.name for table in built if table.dtype == "fp16"}
    assert half == ({table.name for table in built} - {"t_user"} if changes else set())
    assert {feature for table in tables for feature in table.features} == {each.name for each in schema.sparse}
    assert {table.is_sequence for table in tables} == ({True, False} if arch in WITH_HISTORY else {False})


@pytest.mark.parametrize("init_range", [None, 0.01])
@pytest.mark.parametrize("arch", ["deepfm", "din"])
def test_rows_begin_in_the_range_of_the_settings(arch, init_range):
    """The tables have it, so TorchRec's own init knows it, too."""
    config, schema = settings_of(arch, init_range=init_range), schema_of(arch)
    rows = {table.name: table.num_rows for table in model_tables(config, schema)}
    model = build_model(config, schema, torch.device("cpu"))
    for _, collection in collections_of(model):
        for name, (least, most) in CounterInit.of_module(collection, seed=0).ranges.items():
            assert (-least, most) == pytest.approx((init_range or rows[name] ** -0.5,) * 2)


@pytest.mark.parametrize("target", [None, TWO_LABELS, LEARNED], ids=["least", "two", "learned"])
@pytest.mark.parametrize("dense", [3, 0])
@pytest.mark.parametrize("arch", get_args(Arch))
def test_parameters_are_those_of_the_built_model(arch, dense, target):
    if not dense and arch not in WITH_HISTORY:
        return
    learned = {"label_weighting": "uncertainty"} if target is LEARNED else {}
    config, schema = settings_of(arch, **learned), schema_of(arch, dense=dense, target=target)
    model = build_model(config, schema, torch.device("cpu"))
    built = sum(each.numel() for each in model.parameters() if each.device.type != "meta")
    assert num_parameters(config, schema) == built


@pytest.mark.parametrize("arch", WITH_HISTORY)
def test_a_history_alone(arch):
    own: dict[str, Any] = {"history_layer_sizes": (5, 6), **({"activation": "prelu"} if arch == "din" else {})}
    own = {"hstu": HstuConfig(times=("time", "past_time"))} if arch == "hstu" else own
    times = tuple(SparseFeature(name, 99) for name in ("time", "past_time") if arch == "hstu")
    config, schema = settings_of(arch, **own), Schema((), (*EVENTS, *times))
    model = build_model(config, schema, torch.device("cpu"))
    assert model_tables(config, schema) == tuple(tables_in(model))
    built = sum(each.numel() for each in model.parameters() if each.device.type != "meta")
    assert num_parameters(config, schema) == built


def test_features_are_checked_without_building():
    with pytest.raises(ConfigError, match="no dense features"):
        model_tables(ModelConfig(), Schema((), PLAIN))


@pytest.mark.slow
def test_neither_needs_torch():
    code = f"""
import sys
from embershard.data.schema import Schema, SparseFeature, Target
from embershard.models import ModelConfig, model_tables, num_parameters
schema = Schema(("d",), tuple(SparseFeature(name, 30) for name in ("item", "past", "user")),
                Target(("click", "buy")))
for arch in {get_args(Arch)}:
    events = dict(target=("item",), history=("past",)) if arch in {WITH_HISTORY} else dict()
    config = ModelConfig(arch=arch, **events)
    print(len(model_tables(config, schema)), num_parameters(config, schema) > 0)
    if "torch" in sys.modules:
        sys.exit(f"{{arch}} imports torch")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.stderr, set(ran.stdout.split()[1::2])) == ("", {"True"})
