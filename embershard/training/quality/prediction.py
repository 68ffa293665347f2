"""Predictions of a model for batches that it does not train on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.data import Batch, Target
from embershard.distributed import Ranks, Supervision
from embershard.training.config import TrainConfig
from embershard.training.quality.metrics import Predicted, PredictionBuffer

#: An evaluation asks so often whether a rank must stop.
_BATCHES_BETWEEN_STOPS = 16


def until_stopped(batches: Iterable[Batch], supervision: Supervision, ranks: Ranks) -> Iterator[Batch]:
    """Yield batches until a rank is asked to stop. Collective."""
    for number, batch in enumerate(batches, start=1):
        if number % _BATCHES_BETWEEN_STOPS == 0 and supervision.agree(ranks):
            return
        yield batch
        supervision.beat()


def autocast(settings: TrainConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a forward, in the precision of the settings."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=settings.precision == "bf16")


@torch.no_grad()
def predicted_of(
    model: nn.Module,
    batches: Iterable[Batch],
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Iterator[Predicted]:
    """Yield what the model says of each batch; the model trains again afterwards, however it ends. Collective.

    Args:
        batches: as many on every rank; some may be empty.
        autocast: returns the context of each forward.
    """
    model.eval()
    try:
        for batch in batches:
            count = batch.num_samples
            batch = _never_empty(batch).to(device, non_blocking=True)
            with autocast():
                _, (_, outputs, labels) = model(batch)
            weights = None if batch.weights is None else batch.weights[:count]
            yield Predicted(outputs[:count], labels[:count], weights)
    finally:
        model.train()


def predict(
    model: nn.Module,
    target: Target,
    batches: Iterable[Batch],
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> PredictionBuffer:
    """Return the predictions of all batches; see `predicted_of`."""
    predictions = PredictionBuffer(target)
    for predicted in predicted_of(model, batches, device, autocast):
        predictions.add(predicted)
    return predictions


def _never_empty(batch: Batch) -> Batch:
    """Return the batch, or one placeholder for an empty one: some layers cannot run without a sample."""
    if batch.num_samples:
        return batch
    sparse = batch.sparse_features
    return Batch(
        batch.dense_features.new_zeros(1, batch.dense_features.shape[1]),
        KeyedJaggedTensor(
            sparse.keys(), sparse.values().new_empty(0), lengths=sparse.lengths().new_zeros(len(sparse.keys()))
        ),
        batch.labels.new_zeros(1, *batch.labels.shape[1:]),
        weights=None if batch.weights is None else batch.weights.new_ones(1),
    )
