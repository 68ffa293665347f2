"""Models: sizes are checked before anything is built, tables are named after their features."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.data import Target
from embershard.errors import ConfigError
from embershard.models import ModelConfig, build_model


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
        ({"dcn_num_layers": 2}, "no effect"),
        ({"arch": "dlrm_dcn", "dcn_low_rank_dim": 0}, "at least 1"),
        ({"arch": "deepfm"}, r"over_arch_layer_sizes: got \[64, 32, 1\].*needs two layers: \[64, 1\]"),
        ({"arch": "deepfm", "dense_arch_layer_sizes": (16,)}, r"dense_arch_layer_sizes: .*two layers: \[16, 16\]"),
        ({"arch": "deepfm", "over_arch_layer_sizes": (8, 1), "dcn_num_layers": 2}, "no effect"),
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


def test_deepfm_gives_the_logits_of_torchrecs():
    """The same weights in TorchRec's model give the sigmoid of our logits; and no other number of names."""
    torch.manual_seed(0)
    built = build_model(ModelConfig(arch="deepfm", over_arch_layer_sizes=(6, 1)), SchemaStub(), CPU).model
    tables = [EmbeddingBagConfig(rows, 16, f"t_{n}", feature_names=[n]) for n, rows in (("a", 10), ("b", 20))]
    stock = SimpleDeepFMNN(3, EmbeddingBagCollection(tables), hidden_layer_size=64, deep_fm_dimension=6)
    collection = built.sparse_arch.embedding_bag_collection
    collection.to_empty(device=CPU)
    built.load_state_dict(stock.state_dict())
    dense, ids = torch.randn(5, 3), torch.randint(10, (10,))
    features = KeyedJaggedTensor(["a", "b"], ids, lengths=torch.ones(10, dtype=torch.int64))
    logits = built(dense, features)
    assert torch.equal(logits.sigmoid(), stock(dense, features))
    assert not torch.equal(logits, stock(dense, features))


def test_same_seed_gives_the_same_dense_layers():
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(build_model(ModelConfig(), SchemaStub(), CPU))
    for a, b in zip(models[0].model.over_arch.parameters(), models[1].model.over_arch.parameters(), strict=True):
        assert torch.equal(a, b)
