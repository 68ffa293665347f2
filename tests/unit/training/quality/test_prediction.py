"""The model trains again after predictions, however they end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.data import Batch, Target
from embershard.errors import DataError
from embershard.training.quality.metrics import predict, predicted_of

CPU = torch.device("cpu")


class Constant(nn.Module):
    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        assert not self.training
        loss = batch.labels.sum()
        return loss, (loss, torch.zeros_like(batch.labels), batch.labels)


def batches(*, fail: bool) -> Iterator[Batch]:
    for _ in range(3):
        yield Batch(torch.zeros(2, 1), KeyedJaggedTensor([], torch.zeros(0), lengths=torch.zeros(0)), torch.zeros(2))
    if fail:
        raise DataError("line 7 is bad")


def test_after_all_batches() -> None:
    model = Constant()
    predict(model, Target(), batches(fail=False), CPU, contextlib.nullcontext)
    assert model.training


def test_after_an_input_that_fails() -> None:
    model = Constant()
    with pytest.raises(DataError, match="line 7"):
        predict(model, Target(), batches(fail=True), CPU, contextlib.nullcontext)
    assert model.training


def test_after_a_caller_that_wants_no_more() -> None:
    model = Constant()
    found = predicted_of(model, batches(fail=False), CPU, contextlib.nullcontext)
    next(found)
    found.close()  # type: ignore[attr-defined]
    assert model.training
