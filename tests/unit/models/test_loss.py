"""The loss of a task: a formula written out, weights that are all 1, and parts of a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torchrec.models.dlrm import DLRMTrain
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.data import Batch, Schema, SparseFeature, Target
from embershard.errors import ConfigError
from embershard.models import ModelConfig, build_model, model_tables
from embershard.models.config import FACTORIZED, WITH_HISTORY
from embershard.models.loss import loss_of
from embershard.models.table_modules import collections_of

CPU = torch.device("cpu")
SIZE = 37  # no power of two, so that dividing by it rounds
ROUNDING = 2 * SIZE * torch.finfo(torch.float32).eps  # of a sum of positive terms, two per sample


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def losses(task: str, outputs: Tensor, labels: Tensor) -> Tensor:
    if task == "regression":
        return (outputs - labels) ** 2
    p = torch.sigmoid(outputs)
    return -(labels * p.log() + (1 - labels) * (1 - p).log())


@pytest.mark.parametrize("task", ["binary", "regression"])
def test_against_a_formula_written_out(task):
    outputs, labels, weights = numbers(SIZE, 2), (numbers(SIZE, 2, seed=1) > 0).float(), numbers(SIZE, seed=2).abs()
    found = loss_of(Target(("a", "b"), task, (1.0, 3.0), "w"), outputs, labels, weights)
    each = losses(task, outputs, labels) * weights[:, None] * torch.tensor([1.0, 3.0])
    assert found == pytest.approx(float(each.sum() / SIZE), rel=ROUNDING)
    one = loss_of(Target(task=task), outputs[:, 0], labels[:, 0], None)
    assert one == pytest.approx(float(losses(task, outputs, labels)[:, 0].mean()), rel=ROUNDING)


@pytest.mark.parametrize("target", [Target(), Target(task="regression"), Target(("a", "b"))])
def test_weights_of_one_change_no_bit(target):
    shape = (SIZE,) if len(target.labels) == 1 else (SIZE, 2)
    labels, found = (numbers(*shape, seed=1) > 0).float(), []
    for weights in (None, torch.ones(SIZE), torch.full((SIZE,), 1.0001)):
        outputs = numbers(*shape).requires_grad_()
        loss = loss_of(target, outputs, labels, weights)
        loss.backward()
        found.append(torch.cat([loss.detach().reshape(1), outputs.grad.reshape(-1)]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_one_binary_label_is_torchrecs():
    schema = Schema(("d",), (SparseFeature("a", 10),))
    model = build_model(ModelConfig(), schema, CPU)
    outputs, labels = numbers(SIZE), (numbers(SIZE, seed=1) > 0).float()
    assert torch.equal(DLRMTrain(model.model).loss_fn(outputs, labels), loss_of(schema.target, outputs, labels, None))


@pytest.mark.parametrize("arch", ["dlrm", "dlrm_dcn"])
def test_an_output_for_each_label(arch):
    schema = Schema(("d",), (SparseFeature("a", 10),), Target(("x", "y", "z")))
    model = build_model(ModelConfig(arch, over_arch_layer_sizes=(8, 1)), schema, CPU)
    last = [each for each in model.modules() if isinstance(each, torch.nn.Linear)][-1]
    assert last.out_features == 3


@pytest.mark.parametrize("arch", ["dlrm", "dlrm_dcn", *FACTORIZED, *WITH_HISTORY])
def test_outputs_of_a_regression_start_at_the_mean_label(arch):
    history = {"target": ("item",), "history": ("past",)} if arch in WITH_HISTORY else {}
    layers = {} if arch == "fm" else {"over_arch_layer_sizes": (8, 1)}
    config = ModelConfig(arch, **layers, **history)
    sparse = tuple(SparseFeature(name, 30) for name in ("item", "past", "user"))
    target = Target(("x", "y"), "regression", label_means=(3.0, 500.0))
    torch.manual_seed(0)
    model = build_model(config, Schema(("d",), sparse, target), CPU)
    for _, collection in collections_of(model):
        collection.to_empty(device=CPU)
        for table in collection.parameters():
            torch.nn.init.zeros_(table)
    ids = KeyedJaggedTensor(["item", "past", "user"], torch.ones(6).long(), lengths=torch.ones(6).int())
    _, (_, outputs, _) = model(Batch(torch.zeros(2, 1), ids, torch.zeros(2, 2)))
    assert (outputs - torch.tensor([3.0, 500.0])).abs().max() < 2


SHARED = (
    SparseFeature("seen", 30, table="item", pooling="mean"),
    SparseFeature("user", 10),
    SparseFeature("item", 30, pooling="mean"),
)


def test_features_share_a_table():
    tables = model_tables(ModelConfig(), Schema(("d",), SHARED))
    assert [(each.name, each.features, each.pooling) for each in tables] == [
        ("t_item", ("seen", "item"), "mean"),
        ("t_user", ("user",), "sum"),
    ]


@pytest.mark.parametrize("changes", [{"num_rows": 31}, {"pooling": "sum"}])
def test_features_of_one_table_must_agree(changes):
    with pytest.raises(ConfigError, match=r"'seen' and 'item' share the table 'item'"):
        Schema(("d",), (replace(SHARED[0], **changes), *SHARED[1:]))


@pytest.mark.parametrize(("feature", "said"), [("item", "table of sequences"), ("user", "which is of sequences")])
def test_tables_of_a_history_are_shared_by_the_model(feature, said):
    names = [replace(SparseFeature(name, 30), table="item" if name == feature else None) for name in ("item", "past")]
    user = SparseFeature("user", 30, table="item" if feature == "user" else None)
    with pytest.raises(ConfigError, match=rf"data.table.features.{feature}: .*{said}"):
        model_tables(ModelConfig("din", target=("item",), history=("past",)), Schema(("d",), (*names, user)))
