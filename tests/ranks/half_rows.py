"""Training whose distinct rows travel as fp16, and one whose rows travel whole and are rounded by hand."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, autograd

from embershard import cache_stats
from embershard.sharding.torchrec.modes.rows_exchange import RowsOutput
from tests.ranks import parity
from tests.ranks.rows_exchange import Case, train_linear


def by_hand(rows: Tensor) -> Tensor:
    """What arrives of rows."""
    return torch.from_numpy(rows.detach().numpy().astype(np.float16).astype(np.float32))


class _Rounded(autograd.Function):
    """Rows before they leave, and their gradients where they arrive, where these are divided by the ranks already."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sides: tuple[bool, bool]) -> Tensor:  # type: ignore[override]
        ctx.is_backward = sides[1]
        return by_hand(rows) if sides[0] else rows.clone()

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ranks = dist.get_world_size()
        return (by_hand(gradients * ranks) / ranks if ctx.is_backward else gradients), None


@contextlib.contextmanager
def rounded_by_hand(sides: tuple[bool, bool]) -> Any:
    """A context in which rows and gradients of distinct rows are rounded, each if so."""
    send = RowsOutput.forward

    def forward(self: Any, rows: Tensor, context: Any) -> Any:
        return send(self, _Rounded.apply(rows, sides), context)

    with mock.patch.object(RowsOutput, "forward", forward):
        yield


@dataclass(frozen=True)
class Outcome:
    """What differs on a rank from what each kind of rounding by hand gives."""

    different: dict[str, list[str]]
    evictions: int


SIDES = {"both": (True, True), "rows alone": (True, False), "gradients alone": (False, True), "neither": (False, False)}


def compare(case: Case, half: tuple[bool, bool]) -> Outcome:
    """Rows, gradients or both as fp16 by the settings, and each kind of rounding by hand."""
    comm = tuple("fp16" if is_half else "fp32" for is_half in half)
    model = parity.build(dataclasses.replace(case, comm=comm), cached=True)
    losses = parity.train(model, case)
    ours, different = parity.snapshot(model), {}
    for name, sides in SIDES.items():
        other = parity.build(case, cached=True)
        with rounded_by_hand(sides):
            found = parity.train(other, case)
        unequal = [f"loss {step}" for step, pair in enumerate(zip(losses, found, strict=True)) if pair[0] != pair[1]]
        different[name] = unequal + parity.differences(ours, parity.snapshot(other))
    return Outcome(different, sum(each.evictions for each in cache_stats(model)))


def known_ahead(case: Case) -> Outcome:
    """What differs where batches are known ahead."""
    trained = []
    for each in (dataclasses.replace(case, lookahead=0), case):
        model = parity.build(each, True, parity.LinearModel)
        train_linear(model, each)
        trained.append(parity.snapshot(model))
    return Outcome({"": parity.differences(*trained)}, sum(each.evictions for each in cache_stats(model)))
