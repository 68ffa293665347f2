"""`Interactions` beside TorchRec's `InteractionArch`, bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torchrec.models.dlrm import InteractionArch

from embershard.data import Schema, SparseFeature
from embershard.models import ModelConfig, build_model
from embershard.models.interactions import Interactions


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def run(arch: nn.Module, dense: Tensor, rows: Tensor, gradient: Tensor) -> list[Tensor]:
    """Output, and gradients of dense features and rows."""
    given = [each.clone().requires_grad_() for each in (dense, rows)]
    output = arch(*given)
    output.backward(gradient)
    return [bits(each) for each in (output.detach(), *(part.grad for part in given))]


@pytest.mark.parametrize(("samples", "features", "dim"), [(1, 1, 4), (5, 2, 3), (64, 26, 16), (33, 7, 1), (0, 3, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradients_are_torchrec_s(samples: int, features: int, dim: int, dtype: torch.dtype):
    torch.manual_seed(samples)
    dense, rows = torch.randn(samples, dim, dtype=dtype), torch.randn(samples, features, dim, dtype=dtype)
    rows[: samples // 2, 0] = 0.0  # products that are zeros
    gradient = torch.randn(samples, dim + features * (features + 1) // 2, dtype=dtype)
    gradient[:, ::3] = -0.0
    gradient[samples // 2 :, 1] = torch.inf
    expected = run(InteractionArch(features), dense, rows, gradient)
    found = run(Interactions(features), dense, rows, gradient)
    assert all(map(torch.equal, found, expected))


def test_another_order_of_pairs_is_noticed():
    """Control."""
    torch.manual_seed(1)
    dense, rows, gradient = torch.randn(4, 8), torch.randn(4, 3, 8), torch.randn(4, 14)
    other = Interactions(3)
    other.pairs = other.pairs.flip(0)
    different = [
        not torch.equal(*pair)
        for pair in zip(run(other, dense, rows, gradient), run(InteractionArch(3), dense, rows, gradient), strict=True)
    ]
    assert different == [True] * 3


def test_a_dlrm_has_it_and_saves_nothing_of_it():
    schema = Schema(dense=("I1",), sparse=(SparseFeature("C1", 10), SparseFeature("C2", 10)))
    model = build_model(ModelConfig(), schema, torch.device("cpu"))
    assert type(model.model.inter_arch) is Interactions
    assert not any("inter_arch" in name for name in model.state_dict())
