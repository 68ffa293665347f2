"""FBGEMM's attention of HSTU: what is packed for a kernel that behaves as documented, and kernels that are refused."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from embershard.errors import ConfigError, SetupError
from embershard.extras import hstu_fbgemm
from embershard.extras.hstu import HSTU, attend_to_all
from embershard.models.hstu_config import HstuConfig

pytestmark = pytest.mark.extra

LENGTHS, TOKENS = torch.tensor([3, 0, 5, 1]), (2, 6, 2)  # a place more than the longest history
SIZE, HEADS, WIDTH, DIM = len(LENGTHS), 2, sum(TOKENS), 4


def documented(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    num_contexts: Tensor, num_targets: Tensor, target_group_size: int = 1, window_size: tuple[int, int] = (-1, -1),
    alpha: float = 1.0, rab: Any = None, has_drab: bool = False,
) -> Tensor:  # fmt: skip
    """The kernel by loops over samples, as its documentation describes it; garbage behind the last token."""
    assert window_size == (-1, 0)
    assert cu_seqlens_q.dtype == num_contexts.dtype == num_targets.dtype == torch.int32
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert has_drab == rab.requires_grad
    parts = []
    for sample, (begin, end) in enumerate(zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True)):
        count, contexts, targets = end - begin, int(num_contexts[sample]), int(num_targets[sample])
        sees = torch.ones(count, count).tril().bool()
        sees[:contexts, : count - targets] = True
        sees[count - targets :, count - targets :] = torch.eye(targets).bool()
        own = (each[begin:end].transpose(0, 1) for each in (q, k, v))
        of_queries, of_keys, of_values = own
        scores = alpha * of_queries @ of_keys.transpose(1, 2) + rab[sample, :, :count, :count]
        weights = torch.nn.functional.silu(scores) * sees / max_seqlen_q
        parts.append((weights @ of_values).transpose(0, 1))
    return torch.cat([*parts, torch.full_like(q[int(cu_seqlens_q[-1]) :], torch.nan)])


def newer(*, scaling_seqlen: int, max_seqlen_q: int, **given: Any) -> Tensor:
    return documented(max_seqlen_q=scaling_seqlen, **given)


def by_the_batch(max_seqlen_q: int, **given: Any) -> Tensor:
    return documented(max_seqlen_q=max_seqlen_q + 1, **given)


def without_biases(rab: Tensor, **given: Any) -> Tensor:
    return documented(rab=rab * 0, **given)


def broken(**given: Any) -> Tensor:
    raise RuntimeError("no kernel image is available")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    def installed(kernel: Any) -> None:
        hstu_fbgemm._checked_kernel.cache_clear()
        module = None if kernel is None else SimpleNamespace(hstu_attn_varlen_func=kernel)
        monkeypatch.setitem(sys.modules, "hstu", module)

    yield installed
    hstu_fbgemm._checked_kernel.cache_clear()


def inputs(dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    shapes = [*[(SIZE, HEADS, WIDTH, DIM)] * 3, (SIZE, WIDTH, WIDTH)]
    return [torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.smoke
@pytest.mark.parametrize("kernel", [documented, newer])
def test_it_gives_what_torch_gives(kernel, install):
    """Outputs of tokens and gradients of all inputs; what is padded gives zeros, and gets no gradient."""
    install(kernel)
    place = torch.arange(WIDTH)
    exists = (place < (LENGTHS + TOKENS[0]).unsqueeze(1)) | (place >= TOKENS[0] + TOKENS[1])
    given, results = inputs(torch.float64), []
    for attention in (lambda *x: hstu_fbgemm.attend(*x, instead=attend_to_all), attend_to_all):
        found = attention(*given, LENGTHS, TOKENS, 9)
        kept = torch.where(exists[:, None, :, None], found, 0.0)
        results.append([kept, *torch.autograd.grad((kept * torch.linspace(-1, 1, DIM)).sum(), given)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert not hstu_fbgemm.attend(*given, LENGTHS, TOKENS, 9, instead=attend_to_all).transpose(1, 2)[~exists].any()


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (None, r"needs the package fbgemm_gpu_hstu, which cannot be imported.*model.hstu.kernel=torch"),
        (broken, r"does not run for 2 heads of 4 in torch.float32 on cpu: no kernel image.*train.precision=bf16"),
        (by_the_batch, r"gives other numbers than torch .*: off by 0\.\d+ of the largest, needed below 0.03"),
        (without_biases, "gives other numbers"),
    ],
)
def test_a_kernel_that_is_missing_or_wrong_is_refused(kernel, said, install):
    install(kernel)
    with pytest.raises(SetupError, match=said):
        hstu_fbgemm.attend(*inputs(torch.float32), LENGTHS, TOKENS, 9, instead=attend_to_all)


def test_on_a_cpu_it_is_torch_and_a_window_is_refused(install):
    install(None)
    networks = []
    for kernel in ("torch", "fbgemm"):
        torch.manual_seed(0)
        networks.append(HSTU(1, 4, HstuConfig(1, 2, 4, 9, kernel=kernel), [8, 1]))
    given = torch.ones(2, 1, 4), torch.ones(2, 3, 1, 4), torch.ones(2, 3).bool(), torch.ones(2, 1, 4)
    assert torch.equal(*(network(*given) for network in networks))
    with pytest.raises(ConfigError, match=r'model.hstu.kernel: got "fbgemm" and window = 3'):
        HstuConfig(kernel="fbgemm", window=3)
