"""Labels with a task each: masks against training on the samples that have a label, learned weights against the
formula, towers and experts against their equations, one at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.data import Batch, Schema, SparseFeature, Target
from embershard.errors import ConfigError
from embershard.extras.networks.tasks import PLE, MMoE, logit_of_both
from embershard.models import ModelConfig, build_model
from embershard.models.config import WITH_TOWERS
from embershard.models.loss import class_logits, label_losses, loss_of
from embershard.models.table_modules import collections_of

CPU = torch.device("cpu")
SIZE = 40
#: Clicks; and stars of a third of the samples, of which each has one of three numbers.
GRADED = Target(("click", "stars"), ("binary", "multiclass"), (), None, (), True).with_classes({"stars": (1, 2.5, 4)})
MIXED = Target(("click", "stars"), ("binary", "regression"), may_be_missing=True)
SCHEMA = Schema(("d",), (SparseFeature("a", 30), SparseFeature("b", 30)), MIXED)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(*, missing: bool = True) -> Tensor:
    """Clicks, and stars of a third of the samples."""
    found = torch.stack([(numbers(SIZE, seed=1) > 0).float(), numbers(SIZE, seed=2) + 3], dim=1)
    if missing:
        found[torch.arange(SIZE) % 3 != 0, 1] = float("nan")
    return found


def small(arch: str, target: Target, **changes: object) -> torch.nn.Module:
    """A model over tables with memory."""
    torch.manual_seed(0)
    sizes = {"dense_arch_layer_sizes": (8,), "over_arch_layer_sizes": (6, 1)}
    sizes |= {"expert_layer_sizes": (7, 5)} if arch in WITH_TOWERS else {}
    config = ModelConfig(arch, 8, **{**sizes, **changes})  # type: ignore[arg-type]
    model = build_model(config, Schema(SCHEMA.dense, SCHEMA.sparse, target), CPU)
    for _, collection in collections_of(model):
        collection.to_empty(device=CPU)
        for number, table in enumerate(collection.parameters()):
            table.data.copy_(numbers(*table.shape, seed=number))
    return model


def batch(of: Tensor, rows: Tensor | None = None) -> Batch:
    rows = torch.arange(SIZE) if rows is None else rows
    ids = torch.arange(2 * SIZE).reshape(2, SIZE)[:, rows] % 30
    features = KeyedJaggedTensor(["a", "b"], ids.flatten(), lengths=torch.ones(ids.numel()).int())
    return Batch(numbers(SIZE, 1, seed=3)[rows], features, of[rows])


@pytest.mark.parametrize("weights", [None, numbers(SIZE, seed=5).abs()], ids=["plain", "weighted"])
def test_a_masked_loss_is_that_of_the_samples_with_the_label(weights):
    """The gradient of the second label is that of training it alone on its samples, by their share of the batch."""
    outputs = numbers(SIZE, 2).requires_grad_()
    masked = labels()
    there = ~masked[:, 1].isnan()
    (found,) = torch.autograd.grad(loss_of(MIXED, outputs, masked, weights), outputs)
    assert (found[~there, 1] == 0).all()
    own = None if weights is None else weights[there]
    alone = loss_of(Target(("stars",), "regression"), outputs[there, 1], masked[there, 1], own) * there.sum() / SIZE
    (expected,) = torch.autograd.grad(alone, outputs)
    assert torch.allclose(found[:, 1], expected[:, 1], rtol=1e-6, atol=0)
    first = loss_of(Target(("click",)), outputs[:, 0], masked[:, 0], weights)
    assert torch.equal(found[:, 0], torch.autograd.grad(first, outputs)[0][:, 0])


def test_masks_that_leave_out_nothing_change_no_bit():
    outputs, whole = numbers(SIZE, 2), labels(missing=False)
    plain = Target(MIXED.labels, MIXED.task)
    assert torch.equal(loss_of(MIXED, outputs, whole, None), loss_of(plain, outputs, whole, None))
    assert loss_of(plain, outputs, labels(), None).isnan(), "without masks, nothing hides a missing label"


@pytest.mark.parametrize("arch", ["dlrm", *WITH_TOWERS])
def test_gradients_of_a_model_are_the_sum_of_those_of_its_labels(arch):
    """Each label is trained alone by a factor near 0 of the other one, on the samples that have it."""
    model, masked = small(arch, MIXED), labels()
    model(batch(masked))[0].backward()
    whole = [each.grad.clone() for each in model.parameters()]
    parts = [torch.zeros_like(each) for each in whole]
    for place in range(2):
        rows = torch.nonzero(~masked[:, place].isnan()).squeeze(1)
        model.zero_grad()
        outputs = model.model(batch(masked, rows).dense_features, batch(masked, rows).sparse_features)
        alone = Target((MIXED.labels[place],), MIXED.tasks[place])
        (loss_of(alone, outputs[:, place], masked[rows, place], None) * len(rows) / SIZE).backward()
        for part, each in zip(parts, model.parameters(), strict=True):
            part += 0 if each.grad is None else each.grad
    for part, each in zip(parts, whole, strict=True):
        assert torch.allclose(part, each, rtol=1e-4, atol=1e-6)
    if arch != "dlrm":
        return
    model.zero_grad()
    model(batch(labels(missing=False)))[0].backward()
    assert not all(torch.allclose(a.grad, b, rtol=1e-2) for a, b in zip(model.parameters(), whole, strict=True))


def test_learned_weights_follow_the_formula():
    """And at their optimum a regression's variance is its mean squared distance, whatever share has the label."""
    outputs, masked, s = numbers(SIZE, 2), labels(), torch.tensor([0.3, -0.2], requires_grad=True)
    there = ~masked[:, 1].isnan()
    entropy = torch.nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], masked[:, 0])
    squared = ((outputs[there, 1] - masked[there, 1]) ** 2).mean()
    share = there.float().mean()
    expected = (-s[0]).exp() * entropy + s[0] / 2 + share * ((-s[1]).exp() * squared / 2 + s[1] / 2)
    found = loss_of(MIXED, outputs, masked, None, s).detach()
    assert found == pytest.approx(float(expected), rel=1e-6)
    best = torch.tensor([0.0, squared.log()], requires_grad=True)
    (slope,) = torch.autograd.grad(loss_of(MIXED, outputs, masked, None, best), best)
    assert abs(float(slope[1])) < 1e-6
    assert abs(float(slope[0])) > 1e-2, "the control"


def graded() -> Tensor:
    """Labels of `GRADED`, [B, 4]."""
    found, chosen = labels(), torch.arange(SIZE) % 7 % 3
    stars = torch.nn.functional.one_hot(chosen, 3).float()
    stars[found[:, 1].isnan()] = float("nan")
    return torch.cat([found[:, :1], stars], dim=1)


@pytest.mark.parametrize("weights", [None, numbers(SIZE, seed=5).abs()], ids=["plain", "weighted"])
@pytest.mark.parametrize("scale", [1.0, 60.0], ids=["usual", "large"])
def test_classes_have_the_softmax_and_its_loss(weights, scale):
    """Scores are the softmax's probabilities; values and gradients are those of torch's cross entropy."""
    raw, masked = (scale * numbers(SIZE, 4)).requires_grad_(), graded()
    outputs, there = class_logits(GRADED, raw), ~masked[:, 1].isnan()
    assert torch.equal(outputs[:, 0], raw[:, 0])
    assert torch.allclose(outputs[:, 1:].sigmoid(), raw[:, 1:].softmax(dim=1), rtol=1e-4, atol=1e-7)
    whole = loss_of(GRADED, outputs, masked, weights)
    clicks = loss_of(Target(), raw[:, 0], masked[:, 0], weights)
    each = cross_entropy(raw[there, 1:], masked[there, 1:], reduction="none")
    expected = clicks + (each if weights is None else each * weights[there]).sum() / SIZE
    assert torch.allclose(whole, expected, rtol=1e-5)
    found, wanted = (torch.autograd.grad(loss, raw)[0] for loss in (whole, expected))
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-7)
    assert (found[~there, 1:] == 0).all()
    binary = loss_of(Target(GRADED.labels, may_be_missing=True), outputs, masked, weights)
    assert binary > whole + 0.1, "the control: a binary loss counts the classes that a sample has not, too"


def test_all_classes_of_a_label_share_a_learned_weight():
    outputs, masked = class_logits(GRADED, numbers(SIZE, 4)), graded()
    s = torch.tensor([0.3, -0.2])
    click, *stars = label_losses(GRADED, outputs, masked, None)
    share = (~masked[:, 1].isnan()).float().mean()
    expected = (-s[0]).exp() * click + s[0] / 2 + (-s[1]).exp() * sum(stars) + share * s[1] / 2
    assert loss_of(GRADED, outputs, masked, None, s) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("arch", WITH_TOWERS)
def test_a_label_with_classes_has_one_tower(arch):
    model = small(arch, GRADED, label_weighting="uncertainty")
    loss, (_, outputs, _) = model(batch(graded()))
    assert [tower.out_features for tower in model.model.over_arch.last_layers] == [1, 3]
    assert torch.allclose(outputs[:, 1:].sigmoid().sum(dim=1), torch.ones(SIZE))
    loss.backward()
    assert all(each.grad is not None for each in model.parameters())


@pytest.mark.extra
@pytest.mark.parametrize("arch", WITH_TOWERS)
@pytest.mark.parametrize("interaction", ["dlrm", "dlrm_dcn"])
def test_all_parameters_train(arch, interaction):
    """Data parallelism waits for each of them."""
    model = small(arch, MIXED, interaction=interaction, label_weighting="uncertainty")
    model(batch(labels()))[0].backward()
    assert all(each.grad is not None for each in model.parameters())


def test_mmoe_is_its_equation():
    torch.manual_seed(0)
    mmoe, x = MMoE(5, [4, 3], num_experts=3, num_labels=2), numbers(6, 5)
    for gate, found in zip(mmoe.gates, mmoe(x), strict=True):
        shares = torch.softmax(x @ gate.weight.T + gate.bias, dim=1)
        expected = sum(shares[:, i, None] * expert(x) for i, expert in enumerate(mmoe.experts))
        assert torch.allclose(found, expected, atol=1e-6)


def test_ple_is_its_equations():
    torch.manual_seed(0)
    ple, x = PLE(5, [4, 3], num_experts=2, num_label_experts=1, num_levels=2, num_labels=2), numbers(6, 5)

    def mixed(gate, inputs, outputs):
        shares = torch.softmax(inputs @ gate.weight.T + gate.bias, dim=1)
        return sum(shares[:, i, None] * output for i, output in enumerate(outputs))

    first, last = ple.levels
    shared, own = [e(x) for e in first.shared], [[e(x) for e in mine] for mine in first.of_labels]
    of_labels = [mixed(first.gates[k], x, [*own[k], *shared]) for k in range(2)]
    of_shared = mixed(first.shared_gate, x, [*own[0], *own[1], *shared])
    shared = [e(of_shared) for e in last.shared]
    for k, found in enumerate(ple(x)):
        expected = mixed(last.gates[k], of_labels[k], [*[e(of_labels[k]) for e in last.of_labels[k]], *shared])
        assert torch.allclose(found, expected, atol=1e-6)
    assert last.shared_gate is None


def test_a_funnel_multiplies_probabilities():
    a, b = torch.tensor([0.3, -40.0, 40.0, -3.0]), torch.tensor([-1.0, 2.0, 40.0, 90.0])
    found = logit_of_both(a, b).double()
    expected = torch.sigmoid(a.double()) * torch.sigmoid(b.double())
    assert torch.allclose(torch.sigmoid(found), expected, rtol=1e-5, atol=0)
    labels = Target(("click", "cart", "buy"))
    plain, model = (small("shared_bottom", labels, funnel=f) for f in ((), ("click", "cart", "buy")))
    model.load_state_dict(plain.state_dict())
    own, found = (m(batch(torch.zeros(SIZE, 3)))[1][1].sigmoid() for m in (plain, model))
    assert torch.allclose(found, own.cumprod(dim=1), rtol=1e-5)


@pytest.mark.extra
@pytest.mark.parametrize("arch", WITH_TOWERS)
def test_outputs_of_regressions_start_at_their_means(arch):
    target = Target(("click", "stars", "price"), ("binary", "regression", "regression"), label_means=(3.0, 500.0))
    for each in (arch, "dlrm"):
        model = small(each, target)
        _, (_, outputs, _) = model(batch(torch.zeros(SIZE, 3)))
        assert (outputs.mean(dim=0) - torch.tensor([0.0, 3.0, 500.0])).abs().max() < 4


@pytest.mark.parametrize(
    ("settings", "target", "said"),
    [
        ({"arch": "mmoe"}, Target(), r"model.arch = 'mmoe' needs several labels, .* 'label' alone"),
        ({"label_weighting": "uncertainty"}, Target(), "label_weighting = 'uncertainty' needs several labels"),
        (
            {"label_weighting": "uncertainty"},
            Target(("x", "y"), label_weights=(1.0, 2.0)),
            r"label_weights = \[1.0, 2.0\] has no effect",
        ),
        ({"arch": "ple", "funnel": ("x", "z")}, Target(("x", "y")), "'z': no such label; needed binary .* x, y"),
        ({"arch": "ple", "funnel": ("x", "y")}, Target(("x", "y"), ("binary", "regression")), "'y': its task is"),
        ({"arch": "ple", "funnel": ("click", "stars")}, GRADED, "'stars': its task is 'multiclass'"),
        ({"arch": "ple", "funnel": ("click", "stars=4")}, GRADED, "'stars=4': no such label; .* among click, stars"),
        ({"arch": "mmoe"}, Target(("x=1", "x=2"), widths=(2,)), "needs several labels, the data have 'x' alone"),
    ],
)
def test_what_does_not_fit_the_labels_is_refused(settings, target, said):
    with pytest.raises(ConfigError, match=said):
        build_model(ModelConfig(**settings), Schema(SCHEMA.dense, SCHEMA.sparse, target), CPU)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_experts": 3}, r"num_experts: got 3 with arch='dlrm', .* 'mmoe' or 'ple'"),
        ({"arch": "shared_bottom", "num_experts": 3}, "no effect"),
        ({"arch": "mmoe", "num_levels": 3}, "'ple'"),
        ({"arch": "mmoe", "num_experts": 0}, "at least 1"),
        ({"interaction": "dlrm"}, "no effect"),
        ({"arch": "mmoe", "interaction": "deepfm"}, "'dlrm_dcn'"),
        ({"arch": "mmoe", "dcn_num_layers": 2}, "no effect"),
        ({"arch": "mmoe", "expert_layer_sizes": (0,)}, "width 1 or more"),
        ({"arch": "mmoe", "expert_layer_sizes": ()}, "width 1 or more"),
        ({"arch": "mmoe", "funnel": ("click",)}, "two labels or more"),
        ({"label_weighting": "gradnorm"}, "'uncertainty'"),
        ({"funnel": ("a", "b")}, "no effect"),
    ],
)
def test_settings_of_towers_are_checked(settings, said):
    with pytest.raises(ConfigError, match=said):
        ModelConfig(**settings)
