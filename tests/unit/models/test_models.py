"""Models: sizes are checked before anything is built, tables are named after their features."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torchrec.models.dlrm import DLRM, DLRM_DCN

from embershard.data import Target
from embershard.errors import ConfigError
from embershard.models import ModelConfig, build_model
from embershard.models.config import FACTORIZED


@dataclass(frozen=True)
class Feature:
    name: str
    num_rows: int
    table: str | None = None
    pooling: str = "sum"


@dataclass(frozen=True)
class SchemaStub:
    dense: tuple[str, ...] = ("d0", "d1", "d2")
    sparse: tuple[Feature, ...] = (Feature("a", 10), Feature("b", 20))
    target: Target = field(default_factory=Target)


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"embedding_dim": 6, "dense_arch_layer_sizes": (6,)}, "The next one is 8"),
        ({"embedding_dim": 0}, "The next one is 4"),
        ({"dense_arch_layer_sizes": (64, 32)}, r"needed 16 .*\[64, 16\]"),
        ({"dense_arch_layer_sizes": ()}, "at least one layer"),
        ({"over_arch_layer_sizes": (8, 2)}, "one logit"),
        ({"over_arch_layer_sizes": (0, 1)}, "width 1 or more"),
        ({"arch": "wide"}, "'dlrm_dcn'"),
        ({"table_dtype": "fp8"}, "'fp16'"),
        ({"table_dtypes": {"t_a": "int8"}}, "model.table_dtypes.t_a: got 'int8', needed 'fp32' or 'fp16'"),
        ({"init_range": 0.0}, "init_range: got 0.0, needed a number above 0"),
        ({"init_range": float("nan")}, "needed a number above 0"),
        ({"dcn_num_layers": 2}, "no effect"),
        ({"arch": "dlrm_dcn", "dcn_low_rank_dim": 0}, "at least 1"),
        *(
            ({"arch": arch, **settings}, f"{next(iter(settings))}: got .*'{arch}', where it has no effect")
            for arch in FACTORIZED
            for settings in ({"dense_arch_layer_sizes": (32, 16)}, {"dcn_num_layers": 2}, {"activation": "prelu"})
        ),
        ({"arch": "deepfm", "dense_arch_layer_sizes": (16, 16)}, "was TorchRec's SimpleDeepFMNN"),
        ({"arch": "fm", "over_arch_layer_sizes": (8, 1)}, r"'fm', where it has no effect.*which is \[64, 32, 1\]"),
        ({"arch": "din", "target": ("a",), "history": ("b",), "activation": "dice"}, "needed 'relu' or 'prelu'"),
    ],
)
def test_config_says_what_is_wrong_and_what_is_needed(settings, said):
    with pytest.raises(ConfigError, match=said):
        ModelConfig(**settings)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (SchemaStub(sparse=(Feature("a", 10), Feature("a", 20))), "'a' more than once"),
        (SchemaStub(dense=("x", "x")), "'x' more than once"),
        (SchemaStub(sparse=(Feature("a", 0),)), "'a': its table has 0 rows"),
        (SchemaStub(sparse=()), "no sparse features"),
        (SchemaStub(dense=()), "no dense features"),
    ],
)
def test_schema_is_checked(schema, said):
    with pytest.raises(ConfigError, match=said):
        build_model(ModelConfig(), schema, CPU)


def test_dlrm_has_meta_tables_named_after_features_and_real_dense_layers():
    model = build_model(ModelConfig(table_dtype="fp16"), SchemaStub(), CPU)
    assert type(model.model) is DLRM
    collection = model.model.sparse_arch.embedding_bag_collection
    tables = {c.name: (c.num_embeddings, c.feature_names) for c in collection.embedding_bag_configs()}
    assert tables == {"t_a": (10, ["a"]), "t_b": (20, ["b"])}
    assert {p.device.type for p in collection.parameters()} == {"meta"}
    assert {p.dtype for p in collection.parameters()} == {torch.float16}
    assert {p.device.type for p in model.model.over_arch.parameters()} == {"cpu"}


def test_dcn_takes_its_settings():
    config = ModelConfig(arch="dlrm_dcn", dcn_num_layers=2, dcn_low_rank_dim=5)
    model = build_model(config, SchemaStub(), CPU)
    assert type(model.model) is DLRM_DCN
    crossnet = model.model.inter_arch.crossnet
    assert len(crossnet.W_kernels) == 2
    assert crossnet.W_kernels[0].shape == (3 * 16, 5)


def test_same_seed_gives_the_same_dense_layers():
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(build_model(ModelConfig(), SchemaStub(), CPU))
    for a, b in zip(models[0].model.over_arch.parameters(), models[1].model.over_arch.parameters(), strict=True):
        assert torch.equal(a, b)
