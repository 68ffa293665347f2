"""Optimizer and schedule settings: what has no effect is an error, the schedule is a function of the step."""

from __future__ import annotations

import contextlib
from typing import Any, get_args, get_type_hints
from unittest import mock

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import nn
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from embershard.errors import ConfigError
from embershard.training import optimizers
from embershard.training.optimizers import DenseOptimizerConfig, EmbeddingOptimizerConfig, ScheduleConfig
from tests.ranks.parity import OPTIMIZERS


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: EmbeddingOptimizerConfig(kind="sgd", eps=1e-6), "eps has no effect"),
        (lambda: EmbeddingOptimizerConfig(kind="sgd", weight_decay=0.1), "weight_decay has no effect"),
        (lambda: EmbeddingOptimizerConfig(kind="adagrad", weight_decay=0.1), "weight_decay has no effect"),
        (lambda: EmbeddingOptimizerConfig(weight_decay=0.1), "weight_decay has no effect with kind='rowwise_adagrad'"),
        (lambda: EmbeddingOptimizerConfig(betas=(0.9, 0.99)), "betas has no effect"),
        (lambda: EmbeddingOptimizerConfig(lr=0.0), "needed more than 0"),
        (lambda: EmbeddingOptimizerConfig(lr=float("nan")), "needed more than 0"),
        (lambda: EmbeddingOptimizerConfig(kind="ftrl"), "rowwise_adagrad"),
        (lambda: DenseOptimizerConfig(kind="sgd", betas=(0.9, 0.99)), "betas has no effect"),
        (lambda: DenseOptimizerConfig(clip_norm=-1.0), "clip_norm"),
        (lambda: ScheduleConfig(warmup_steps=-1), "0 or more"),
        (lambda: ScheduleConfig(decay_steps=5), "no effect without"),
        (lambda: ScheduleConfig(floor=0.5), "no effect without"),
        (lambda: ScheduleConfig(decay="linear"), "needs 1 or more"),
        (lambda: ScheduleConfig(decay="linear", decay_steps=5, warmup_steps=4, decay_start=3), "warmup_steps=4"),
        (lambda: ScheduleConfig(decay="cosine", decay_steps=5, floor=2.0), "from 0 to 1"),
    ],
)
def test_settings_that_cannot_be_meant(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


KINDS = get_args(get_type_hints(EmbeddingOptimizerConfig)["kind"])
WITHOUT_DECAY = ("sgd", "rowwise_adagrad", "adagrad")


def test_the_size_of_every_kind_is_known():
    assert all(len(EmbeddingOptimizerConfig(kind=kind).state_bytes) == 2 for kind in KINDS)


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"sgd", "rowwise_adagrad", "adagrad"}))
def test_gpu_only_optimizer_on_the_cpu(kind):
    with pytest.raises(ConfigError, match=f"got '{kind}', which FBGEMM has on GPUs only; on the CPU it has sgd"):
        EmbeddingOptimizerConfig(kind=kind).apply(nn.Linear(2, 2), torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_becomes_fbgemm_s_own(kind):
    """With its settings: TorchRec hands both to the table."""
    tables = [EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"])]
    collection = EmbeddingBagCollection(tables, device=torch.device("meta"))
    decay = {} if kind in WITHOUT_DECAY else {"weight_decay": 0.125}
    EmbeddingOptimizerConfig(kind=kind, lr=0.5, **decay).apply(collection, torch.device("cuda"))
    (parameter,) = collection.parameters()
    assert [optimizer_type_to_emb_opt_type(found) for found in parameter._optimizer_classes] == [OPTIMIZERS[kind]]
    assert parameter._optimizer_kwargs == [{"lr": 0.5, **decay}]


def trained_on_cpu(kind: str, features: list[int], decay: float, mode: WeightDecayMode) -> list[torch.Tensor]:
    """Weights and states after a step of FBGEMM's; all features are looked up in one table, but only the first has an
    id."""
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(4, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        feature_table_map=features,
        optimizer=OPTIMIZERS[kind],
        learning_rate=0.5,
        weight_decay=decay,
        weight_decay_mode=mode,
    )
    table.split_embedding_weights()[0].fill_(0.5)
    pooled = table(torch.tensor([1]), torch.tensor([0, *[1] * len(features)]))
    pooled.backward(torch.full_like(pooled, 2.0))
    states = [] if kind == "sgd" else [state for of_table in table.split_optimizer_states() for state in of_table]
    return [table.split_embedding_weights()[0].clone(), *states]


@pytest.mark.parametrize("kind", WITHOUT_DECAY)
def test_fbgemm_ignores_the_weight_decay_that_is_refused(kind):
    """By default everywhere; with a mode, too, on a CPU in tables of one feature."""
    for features, mode in (([0], WeightDecayMode.NONE), ([0, 0], WeightDecayMode.NONE), ([0], WeightDecayMode.L2)):
        plain, decayed = (trained_on_cpu(kind, features, decay, mode) for decay in (0.0, 0.25))
        assert all(torch.equal(a, b) for a, b in zip(plain, decayed, strict=True)), (features, mode)


def test_a_weight_decay_with_effect_would_be_seen():
    plain, decayed = (trained_on_cpu("rowwise_adagrad", [0, 0], decay, WeightDecayMode.L2) for decay in (0.0, 0.25))
    assert not torch.equal(plain[1], decayed[1])


def test_schedule_rises_holds_falls_and_stays():
    schedule = ScheduleConfig(warmup_steps=4, decay="linear", decay_start=6, decay_steps=4, floor=0.2)
    got = [round(schedule.factor(step), 6) for step in range(12)]
    assert got == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]


@pytest.mark.parametrize(("decay", "half"), [("linear", 0.5), ("quadratic", 0.25), ("cosine", 0.5)])
def test_decay_shapes(decay, half):
    schedule = ScheduleConfig(decay=decay, decay_steps=10)
    assert schedule.factor(0) == pytest.approx(1.0)
    assert schedule.factor(5) == pytest.approx(half)
    assert schedule.factor(10) == pytest.approx(0.0, abs=1e-12)


def test_dense_state_is_keyed_by_parameter_name():
    layer = nn.Linear(3, 1)
    optimizer = DenseOptimizerConfig(kind="adamw", betas=(0.8, 0.9), weight_decay=0.1).build(
        dict(layer.named_parameters())
    )
    optimizer.init_state()
    assert set(optimizer.state_dict()["state"]) == {"weight", "bias"}
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)


class OnGpu(nn.Parameter):
    """Says that it is on a GPU."""

    device = torch.device("cuda", 0)


DENSE_KINDS = get_args(get_type_hints(DenseOptimizerConfig)["kind"])


@pytest.mark.parametrize("kind", DENSE_KINDS)
def test_dense_kernels_are_fused_on_gpus_alone(kind) -> None:
    config, host = DenseOptimizerConfig(kind=kind), nn.Parameter(torch.zeros(2))
    given: list[dict[str, Any]] = []
    with mock.patch.object(torch.optim, optimizers._DENSE[kind], lambda params, **arguments: given.append(arguments)):
        for parameters in ({"a": OnGpu(torch.zeros(2))}, {"a": host}, {"a": host, "b": OnGpu(torch.zeros(2))}):
            with contextlib.suppress(AttributeError):  # there is no optimizer to wrap
                config.build(parameters)
    at_once = {optimizers._AT_ONCE[kind]: True} if kind in optimizers._AT_ONCE else {}
    assert given == [{"lr": 0.001, "fused": True}, {"lr": 0.001, **at_once}, {"lr": 0.001}]


@pytest.mark.parametrize("kind", optimizers._AT_ONCE)
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.01}, {"clip_norm": 0.5}])
def test_parameters_of_a_cpu_train_at_once_with_the_bits_of_the_loop(kind, settings, monkeypatch) -> None:
    at_once = trained_dense(kind, False, monkeypatch, **settings)
    monkeypatch.setattr(optimizers, "_AT_ONCE", {})
    assert torch.equal(at_once, trained_dense(kind, False, monkeypatch, **settings))


def trained_dense(kind: str, on_gpu: bool, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> torch.Tensor:
    """The weights of a layer after 12 steps whose learning rate falls, on a CPU."""
    monkeypatch.setattr(optimizers, "_are_on_gpu", lambda parameters: on_gpu)
    torch.manual_seed(0)
    layer, config = nn.Linear(40, 30), DenseOptimizerConfig(kind=kind, lr=0.01, **settings)  # type: ignore[arg-type]
    dense = config.build(dict(layer.named_parameters()))
    for step in range(12):
        dense.zero_grad()
        layer(torch.randn(8, 40)).square().sum().backward()
        dense.param_groups[0]["lr"] = 0.01 / (step + 1)  # type: ignore[index]
        config.clip(layer.parameters())
        dense.step()
    return layer.weight.detach().clone()


@pytest.mark.parametrize("kind", DENSE_KINDS)
def test_fused_dense_kernels_differ_by_rounding(kind, monkeypatch) -> None:
    """With clipped gradients, decay and a schedule, by torch's fused kernels for CPUs."""
    settings = {"clip_norm": 0.5, "weight_decay": 0.01}
    fused, plain = (trained_dense(kind, on_gpu, monkeypatch, **settings) for on_gpu in (True, False))
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(fused, trained_dense(kind, True, monkeypatch, weight_decay=0.01), rtol=1e-5, atol=1e-7)
