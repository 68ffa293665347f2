"""FM, DeepFM and Wide & Deep: outputs and gradients are those of the papers' formulas, written as loops in float64."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.data import Batch, Schema, SparseFeature, Target
from embershard.errors import ConfigError
from embershard.models import ModelConfig, build_model
from embershard.models.config import FACTORIZED

pytestmark = pytest.mark.extra

DIM = 8
#: Bags of several ids, of one, of the same id twice, and of none; two features share a table of means.
SPARSE = (
    SparseFeature("user", 10),
    SparseFeature("seen", 30, table="item", pooling="mean"),
    SparseFeature("item", 30, pooling="mean"),
)
BAGS: dict[str, list[list[int]]] = {
    "user": [[3], [0, 7, 7], [], [9]],
    "seen": [[4, 5, 6], [], [29, 29], [1]],
    "item": [[4], [8], [0], []],
}
DENSE = torch.tensor([[0.5, -2.0], [0.0, 1.0], [3.0, 0.25], [0.0, 0.0]])


def make_model(arch: Any, labels: tuple[str, ...] = ("click",)) -> Any:
    torch.manual_seed(0)
    sizes = {} if arch == "fm" else {"over_arch_layer_sizes": (6, 5, 1)}
    config = ModelConfig(arch, DIM, **sizes)  # type: ignore[arg-type]
    model: Any = build_model(config, Schema(("age", "price"), SPARSE, Target(labels)), torch.device("cpu"))
    model.model.sparse_arch.embedding_bag_collection.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def batch(num_labels: int = 1) -> Batch:
    ids = [one for bags in BAGS.values() for bag in bags for one in bag]
    lengths = [len(bag) for bags in BAGS.values() for bag in bags]
    labels = torch.tensor([[0.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 1.0]])[:, :num_labels]
    features = KeyedJaggedTensor([*BAGS], torch.tensor(ids), lengths=torch.tensor(lengths))
    return Batch(DENSE, features, labels.squeeze(1))


def plain_mlp(wide: dict[str, Tensor], inputs: Tensor) -> Tensor:
    for layer in range(2):
        name = f"deep.0._mlp.{layer}._linear"
        inputs = (wide[f"{name}.weight"] @ inputs + wide[f"{name}.bias"]).clamp(min=0)
    return wide["deep.1.weight"] @ inputs + wide["deep.1.bias"]


def plain_output(arch: str, weights: dict[str, Tensor], sample: int, num_outputs: int) -> Tensor:
    """One sample's outputs [T], from float64 weights, by loops over fields and pairs of them."""
    own = {name.removeprefix("model.network."): each for name, each in weights.items()}
    own |= {name.removeprefix("fm."): each for name, each in own.items()}
    fields: list[Tensor] = []
    for feature in SPARSE:
        table = next(each for name, each in weights.items() if f"t_{feature.table or feature.name}." in name)
        bag = BAGS[feature.name][sample]
        row = torch.zeros(DIM, dtype=torch.float64)
        for one in bag:
            row = row + table[one] / (len(bag) if feature.pooling == "mean" else 1)
        fields.append(row)
    numbers = DENSE[sample].double()
    of_factors = DIM - num_outputs
    if arch == "wide_deep":
        found = sum((field[of_factors:] for field in fields), torch.zeros(num_outputs, dtype=torch.float64))
        for x, weight in zip(numbers, own["wide"], strict=True):
            found = found + x * weight
        return found + plain_mlp(own, torch.cat([numbers, *(field[:of_factors] for field in fields)]))
    fields = [*(x * row for x, row in zip(numbers, own["dense_rows"], strict=True)), *fields]
    outputs = []
    for t in range(num_outputs):
        y = own["bias"][t] if arch == "fm" else torch.zeros((), dtype=torch.float64)
        for field in fields:
            y = y + field[of_factors + t]
        for one, other in combinations(fields, 2):
            for k in range(of_factors):
                y = y + one[k] * other[k] * (own["mix"][t, k] if num_outputs > 1 else 1)
        outputs.append(y)
    found, embeddings = torch.stack(outputs), [field[:of_factors] for field in fields[len(numbers) :]]
    return found + plain_mlp(own, torch.cat([numbers, *embeddings])) if arch == "deepfm" else found


@pytest.mark.smoke
@pytest.mark.parametrize("labels", [("click",), ("click", "buy", "like")], ids=["one", "three"])
@pytest.mark.parametrize("arch", FACTORIZED)
def test_outputs_and_gradients_are_the_formulas(arch, labels):
    model, given = make_model(arch, labels), batch(len(labels))
    weights = {name: each.detach().double().requires_grad_() for name, each in model.named_parameters()}
    expected = torch.stack([plain_output(arch, weights, sample, len(labels)) for sample in range(4)])
    loss, (_, outputs, _) = model(given)
    assert outputs.reshape(4, -1).double().numpy() == pytest.approx(expected.detach().numpy(), rel=1e-4, abs=1e-4)
    loss.backward()
    targets = given.labels.double().reshape(4, -1)
    means = torch.nn.functional.binary_cross_entropy_with_logits(expected, targets, reduction="none").mean(dim=0)
    means.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.any(), name
        there = weights[name].grad
        assert parameter.grad.double().numpy() == pytest.approx(there.numpy(), rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("arch", ["fm", "deepfm"])
def test_pairs_are_of_fields(arch):
    """Two equal embeddings give their dot product; one feature alone, whatever its bag has, gives no pair."""
    model = make_model(arch)
    factorization = model.model.network if arch == "fm" else model.model.network.fm
    same = torch.tensor([1.0, -1, 2, -2, 0, 0, 0])
    nothing, first = torch.zeros(7), torch.zeros(1, 3, 1)

    def pairs(*fields: Tensor) -> float:
        bias = 0 if factorization.bias is None else factorization.bias
        return (factorization.outputs(torch.stack(fields)[None], first) - bias).item()

    assert pairs(nothing, same, same) == pytest.approx(10, abs=1e-6)
    assert pairs(nothing, same, nothing) == pytest.approx(0, abs=1e-6)
    assert pairs(torch.eye(7)[0], torch.eye(7)[1], nothing) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("arch", FACTORIZED)
def test_every_id_has_a_weight_of_its_own(arch):
    """That an id's last number grows by 1 adds 1 to the logit of its samples, and changes nothing else."""
    model = make_model(arch)
    tables = model.model.sparse_arch.embedding_bag_collection.embedding_bags
    before = model(batch())[1][1]
    with torch.no_grad():
        tables["t_user"].weight[7, -1] += 1
    assert (model(batch())[1][1] - before).tolist() == pytest.approx([0, 2, 0, 0], abs=1e-5)


@pytest.mark.parametrize("arch", FACTORIZED)
def test_rows_need_a_number_for_each_output(arch):
    labels = tuple(f"l{number}" for number in range(DIM))
    config, schema = ModelConfig(arch, DIM), Schema(("age",), SPARSE, Target(labels))
    with pytest.raises(ConfigError, match=rf"embedding_dim: got 8 with arch='{arch}' and 8 outputs.*at least 12"):
        build_model(config, schema, torch.device("cpu"))
