"""The benchmark of types between ranks: what it rounds at random, and what it notes. `tests/ranks/test_wire_types.py`
runs it."""

from __future__ import annotations

import pytest
import torch

from benchmarks import wire_types
from embershard.extras.wire_types.encoding import WIRE_TYPES

pytestmark = pytest.mark.extra


def at_random(kind: str, numbers: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return wire_types.AtRandom(kind, seed).rounded(numbers.clone()).float()


@pytest.mark.parametrize(("kind", "largest"), [("int8", 127.0), ("fp8", 448.0)])
def test_rounding_at_random_takes_a_neighbour_and_has_the_right_mean(ranks, kind, largest):
    numbers = torch.cat([torch.linspace(-largest, largest, 1999), torch.linspace(-0.05, 0.05, 999)])
    nearest = WIRE_TYPES[kind].rounded(numbers.clone()).float()  # type: ignore[attr-defined]
    step = torch.ones_like(numbers)
    if kind == "fp8":
        step = 2.0 ** (torch.frexp(numbers).exponent.clamp(min=-5) - 4).float()
    drawn = torch.stack([at_random(kind, numbers, seed) for seed in range(400)])
    assert ((drawn - numbers).abs() < step * (1 + 1e-6)).all()
    assert torch.equal(drawn, drawn.to(torch.int8 if kind == "int8" else torch.float8_e4m3fn).float())
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], at_random(kind, numbers, 0))
    bias = ((drawn.mean(dim=0) - numbers) / step).abs()
    assert bias.max() < 0.5 / 400**0.5 * 5  # five standard errors
    assert ((nearest - numbers) / step).abs().max() > 0.45


def test_a_recorder_sends_what_it_gets_and_notes_what_others_would_lose():
    recorder, rows = wire_types.Recorder(), torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(10):
        assert torch.equal(recorder.decode(recorder.encode(rows)), rows)
    noted = recorder.summary()
    for kind in ("fp16", "int8", "fp8"):
        error = (WIRE_TYPES[kind].decode(WIRE_TYPES[kind].encode(rows)) - rows).abs()
        assert noted[kind]["largest"] == pytest.approx(error.max().item())
        assert noted[kind]["mean_relative"] == pytest.approx((error.sum() / rows.abs().sum()).item(), rel=1e-5)
