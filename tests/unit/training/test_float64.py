"""Dense layers in float64: the weights' values stay, tables stay float32, gradients are divided once."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.cache import CacheConfig
from embershard.data import Batch, Schema, SparseFeature, Target
from embershard.models import ModelConfig, build_model
from embershard.models.config import WITH_HISTORY, WITH_TOWERS, Arch
from embershard.sharding.plan import TablePlacement
from embershard.training.build import compute_in_float64, divided_once
from embershard.training.config import RunConfig, TrainConfig
from tests.unit.sharding.plans import make_plan

SCHEMA = Schema(("x", "y"), (SparseFeature("a", 10), SparseFeature("b", 20)))
TWO_LABELS = Target(("first", "second"))
RANKS = 3
ARCHS = [arch for arch in get_args(Arch) if arch not in WITH_HISTORY]
IN_FP64 = RunConfig(train=TrainConfig(precision="fp64"))


def model_of(arch: Arch, *, wide: bool) -> Any:
    torch.manual_seed(0)
    schema = replace(SCHEMA, target=TWO_LABELS) if arch in WITH_TOWERS else SCHEMA
    model = build_model(ModelConfig(arch=arch), schema, torch.device("cpu"))
    for table in model.model.sparse_arch.embedding_bag_collection.to_empty(device="cpu").parameters():
        torch.nn.init.normal_(table)
    if wide:
        compute_in_float64(model, RANKS)
    return model


def batch(arch: Arch) -> Batch:
    features = KeyedJaggedTensor(["a", "b"], torch.arange(8), lengths=torch.ones(8, dtype=torch.int64))
    labels = torch.tensor([0.0, 1.0, 1.0, 0.0])
    if arch in WITH_TOWERS:
        labels = torch.stack([labels, 1 - labels], 1)
    return Batch(torch.arange(8.0).reshape(4, 2), features, labels)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_same_weights_give_closer_logits(arch: Arch) -> None:
    """Those in float32 are within rounding of them, and not equal."""
    narrow, wide = (model_of(arch, wide=each) for each in (False, True))
    tables = wide.model.sparse_arch.parameters()
    assert {p.dtype for p in tables} == {torch.float32}
    assert all(torch.equal(a, b.float()) for a, b in zip(narrow.parameters(), wide.parameters(), strict=True))
    logits, closer = (model(batch(arch))[1][1] for model in (narrow, wide))
    assert (logits.dtype, closer.dtype) == (torch.float32, torch.float64)
    assert torch.allclose(logits.double(), closer, atol=1e-5)
    assert not torch.equal(logits.double(), closer)


@pytest.mark.parametrize("arch", ARCHS)
def test_gradients_of_embeddings_are_divided_before_they_are_rounded(arch: Arch) -> None:
    model = model_of(arch, wide=True)
    gradients = []
    for config in (RunConfig(), IN_FP64):  # with the first, TorchRec divides; here by nothing: no table is sharded
        model.zero_grad()
        with divided_once(config, None):
            model(batch(arch))[0].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.model.sparse_arch.parameters()]))
    whole, divided = gradients
    assert torch.allclose(divided, whole / RANKS, rtol=1e-6, atol=0)
    assert not torch.equal(divided, whole / RANKS)  # which are rounded twice


def test_the_division_is_torchrecs_again_afterwards() -> None:
    with suppress(ValueError), divided_once(IN_FP64, None):
        assert not get_gradient_division()
        raise ValueError
    assert get_gradient_division()


def test_what_ddp_divides_is_not_divided_again() -> None:
    """Tables that are replicated without a cache."""
    plan = make_plan([TablePlacement("t_a", 10, 16, "fp32", "data_parallel", "replicated", ())], 2, 2)
    uncached = replace(IN_FP64, cache=CacheConfig(enabled=False))
    for config, divides in ((RunConfig(), True), (IN_FP64, False), (uncached, True)):
        with divided_once(config, plan):
            assert get_gradient_division() == divides
    with divided_once(uncached, None):
        assert not get_gradient_division()
