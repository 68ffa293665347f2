"""HSTU's attention by FBGEMM's kernel for GPUs (the package fbgemm_gpu_hstu), which computes nothing for padding.

Of its documentation: with tokens [N, H, d] of all samples in a row, causal, with context and targets, it gives
silu(q k^T + rab) v / scaling_seqlen, by tensor cores in bf16 or fp16; older versions divide by max_seqlen_q. No GPU has
run it here. So its first call is compared with torch's attention, gradients included, and what gives other numbers is
refused.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from embershard.errors import SetupError

_LEAVE = "Or leave the attention to torch: --set model.hstu.kernel=torch."
_MOST_ERROR = 0.03  # of the largest number: bf16 has 8 bits, and sums are of a few terms
_SHAPE = (3, 2, 7, 1)  # of the comparison: samples, contextual tokens, most events, scored items

#: What computes the attention: see `attend`.
Attention = Callable[..., Tensor]


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, lengths: Tensor, num_tokens: tuple[int, int, int],
    divisor: int, *, instead: Attention,
) -> Tensor:  # fmt: skip
    """Return what `instead` returns, torch's attention without a window, for the tokens that are not padding, and zeros
    for the others: [B, H, S, d].

    Args:
        queries: [B, H, S, d], scaled, as are keys and values without the scaling.
        bias: [B, S, S].
        lengths: events of each sample, [B].
        num_tokens: C contextual tokens, L events and K scored items, S together.

    Raises:
        SetupError: the kernel is missing, does not work here, or gives other numbers.
    """
    _, heads, _, dim = queries.shape
    kernel = _checked_kernel(queries.device, queries.dtype, heads, dim, instead)
    return _call(kernel, queries, keys, values, bias, lengths, num_tokens, divisor)


def _call(
    kernel: Any, queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, lengths: Tensor,
    num_tokens: tuple[int, int, int], divisor: int,
) -> Tensor:  # fmt: skip
    """Pack tokens, call the kernel, and put its results back. A GPU's host does not wait."""
    contexts, events, scored = num_tokens
    size, _, width, _ = queries.shape
    place = torch.arange(width, device=lengths.device)
    exists = (place < (lengths + contexts).unsqueeze(1)) | (place >= contexts + events)
    # Tokens that exist come first, in their order; of each sample, and of all.
    of_sample, of_all = (absent.argsort(dim=-1, stable=True) for absent in (~exists, ~exists.flatten()))

    def packed(tokens: Tensor) -> Tensor:
        rows = torch.where(exists[:, None, :, None], tokens, 0.0).transpose(1, 2).flatten(0, 1)
        return rows.index_select(0, of_all)

    by_rows = bias.gather(1, of_sample.unsqueeze(2).expand(-1, -1, width))
    rab = by_rows.gather(2, of_sample.unsqueeze(1).expand(-1, width, -1)).unsqueeze(1)
    ends = torch.nn.functional.pad((lengths + contexts + scored).cumsum(0), (1, 0)).to(torch.int32)
    count = torch.ones_like(lengths, dtype=torch.int32)
    given: dict[str, Any] = {
        **dict(zip("qkv", map(packed, (queries, keys, values)), strict=True)),
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ends),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), width),
        "num_contexts": count * contexts,
        "num_targets": count * scored,
        "window_size": (-1, 0),
        "rab": rab.to(values.dtype).contiguous(),
        "has_drab": torch.is_grad_enabled() and rab.requires_grad,
    }
    has_divisor = "scaling_seqlen" in inspect.signature(kernel).parameters
    found = kernel(**given, **({"scaling_seqlen": divisor} if has_divisor else {}))
    rows = found.index_select(0, of_all.argsort()).unflatten(0, (size, width)).transpose(1, 2)
    rows = torch.where(exists[:, None, :, None], rows, 0.0)
    return rows if has_divisor else rows * (width / divisor)


@functools.cache
def _checked_kernel(device: torch.device, dtype: torch.dtype, heads: int, dim: int, instead: Attention) -> Any:
    """Return the kernel, if it gives what `instead` does."""
    try:
        kernel = importlib.import_module("hstu").hstu_attn_varlen_func
    except (ImportError, AttributeError, OSError) as error:
        raise SetupError(
            f'model.hstu.kernel = "fbgemm" needs the package fbgemm_gpu_hstu, which cannot be imported: {error}. '
            "Install it for this GPU and this torch (github.com/pytorch/FBGEMM, fbgemm_gpu/experimental/hstu). "
            f"{_LEAVE}"
        ) from error
    try:
        off = _largest_error(functools.partial(_call, kernel), instead, device, dtype, heads, dim)
    except Exception as problem:
        raise SetupError(
            f"the kernel of fbgemm_gpu_hstu does not run for {heads} heads of {dim} in {dtype} on {device}: {problem}. "
            f"It knows heads of 32, 64, 128 and 256 in bf16: --set train.precision=bf16. {_LEAVE}"
        ) from problem
    if not off < _MOST_ERROR:
        raise SetupError(
            f"the kernel of fbgemm_gpu_hstu gives other numbers than torch for {heads} heads of {dim} in {dtype} on "
            f"{device}: off by {off:.2g} of the largest, needed below {_MOST_ERROR}. Another version of it may mean "
            f"other things by its arguments. {_LEAVE}"
        )
    return kernel


def _largest_error(
    attention: Attention, instead: Attention, device: torch.device, dtype: torch.dtype, heads: int, dim: int
) -> float:
    """Return the largest difference of outputs and gradients of a small batch, relative to the largest number."""
    samples, contexts, events, scored = _SHAPE
    width, draw = contexts + events + scored, torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 0, events], device=device)
    place = torch.arange(width, device=device)
    exists = (place < (lengths + contexts).unsqueeze(1)) | (place >= contexts + events)

    def results(attention: Attention, inputs: list[Tensor]) -> list[Tensor]:
        inputs = [each.detach().requires_grad_() for each in inputs]
        found = attention(*inputs, lengths, (contexts, events, scored), events)
        found = torch.where(exists[:, None, :, None], found, 0.0)
        return [found.detach(), *torch.autograd.grad((found.float() * factors).sum(), inputs)]

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(device)

    factors = random(samples, heads, width, dim)
    inputs = [
        *(random(samples, heads, width, dim).to(dtype) / dim**0.25 for _ in range(3)),
        random(samples, width, width),
    ]
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        pairs = zip(results(attention, inputs), results(instead, inputs), strict=True)
        return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
