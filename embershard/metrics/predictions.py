"""Predictions of a model for some batches, and their quality over the samples of all ranks.

Letters: B samples of a batch, N samples, T labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.data import Batch, Target
from embershard.data.schema import Task
from embershard.distributed import Ranks, Supervision
from embershard.metrics.figures import (
    AnyQuality,
    ClassesQuality,
    LabelQualities,
    Quality,
    RegressionQuality,
)
from embershard.metrics.ranking import by_group

#: Least distance of a prediction from 0 and 1 in logarithms, as in TorchRec's metrics.
ETA = 1e-12


class Predicted(NamedTuple):
    """What a model says of some samples.

    Attributes:
        outputs: [B], or [B, T] of several labels.
        labels: of the same shape.
        weights: [B], of the samples, or [B, T] of each label; None: 1 each.
    """

    outputs: Tensor
    labels: Tensor
    weights: Tensor | None = None

    def columns(self) -> Tensor:
        """Return outputs, labels and weights beside each other, float32 [B, 2 T] or [B, 2 T + 1]."""
        parts = [self.outputs, self.labels, *([] if self.weights is None else [self.weights])]
        wide = [part.unsqueeze(1) if part.dim() == 1 else part for part in parts]
        return torch.cat([part.detach().float() for part in wide], dim=1)

    @staticmethod
    def of_columns(columns: Tensor, target: Target) -> Predicted:
        """Return what `columns` made, with outputs and labels [N], or [N, T] of several."""
        count = len(target.labels)
        outputs, labels = columns[:, :count], columns[:, count : 2 * count]
        weights = None if target.weight is None else columns[:, 2 * count]
        if count == 1:
            outputs, labels = outputs.squeeze(1), labels.squeeze(1)
        return Predicted(outputs, labels, weights)

    def take(self, rows: Tensor | slice) -> Predicted:
        """Return some of the samples, by their numbers, as a mask or as a slice."""
        return Predicted(*(None if each is None else each[rows] for each in self))  # type: ignore[arg-type]

    def by_label(self, target: Target) -> dict[str, Predicted]:
        """Return what is said of each label, [B]."""
        found = {}
        for number, name in enumerate(target.labels):
            columns = (each if each is None or each.dim() == 1 else each[:, number] for each in self)
            found[name] = Predicted(*columns)  # type: ignore[arg-type]
        return found


class PredictionBuffer:
    """This rank's predictions."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._parts: list[Tensor] = []

    def add(self, predicted: Predicted) -> None:
        """Add predictions of B samples, without a copy to the host; B may be 0."""
        self._parts.append(predicted.columns())

    def in_order(self, ranks: Ranks) -> Predicted:
        """Return the predictions of all ranks in the order of the samples, of which each batch's are the ranks' in
        turn, on the host. So what follows from them is the same on any number of ranks. Collective.

        All batches must be in it, empty ones too.
        """
        sizes = torch.tensor([len(part) for part in self._parts], dtype=torch.int64, device=ranks.device)
        batches = torch.arange(len(sizes), device=ranks.device).repeat_interleave(sizes)
        gathered = ranks.all_gather_rows(self._mine(ranks))
        order = ranks.all_gather_rows(batches).argsort(stable=True)
        return Predicted.of_columns(gathered[order].cpu(), self._target)

    def _mine(self, ranks: Ranks) -> Tensor:
        width = 2 * len(self._target.labels) + (self._target.weight is not None)
        return torch.cat(self._parts or [torch.empty(0, width, device=ranks.device)])


#: Samples of all ranks that a training report judges, at most: they take less than a millisecond of the thread that
#: trains, and an AUC of 0.75 has a standard error of 0.01.
WINDOW_SAMPLES = 4096
#: Newest batches that they are of, or more.
_WINDOW_BATCHES = 16
#: 2**64 over the golden ratio: the multiples of it, modulo 2**64, are evenly spread.
_GOLDEN = 0x9E3779B97F4A7C15


class PredictionWindow(PredictionBuffer):
    """This rank's share of a sample of the newest predictions, `WINDOW_SAMPLES` of all ranks at most.

    Of a batch with more samples than `WINDOW_SAMPLES / 16`, every k-th counts. Which one is the first differs from
    batch to batch, so that all samples have the same chance. Ranks that divide a batch choose what one rank does, where
    its size is a power of two.
    """

    def __init__(self, target: Target, world_size: int) -> None:
        super().__init__(target)
        self._most_of_batch = max(1, WINDOW_SAMPLES // _WINDOW_BATCHES // world_size)
        self._num_added = self._size = 0

    def add(self, predicted: Predicted) -> None:
        """Add predictions of a batch, of B samples, without a copy to the host; B may be 0."""
        every = max(1, -(-len(predicted.labels) // self._most_of_batch))
        first = self._num_added * _GOLDEN % 2**64 * every >> 64
        super().add(predicted.take(slice(first, None, every)))
        self._num_added += 1
        self._size += len(self._parts[-1])
        while self._size > self._most_of_batch * _WINDOW_BATCHES:
            self._size -= len(self._parts.pop(0))

    def quality(self, ranks: Ranks) -> AnyQuality:
        """Return the quality over the samples of all ranks. Collective, with the same result everywhere."""
        return judge(self._target, Predicted.of_columns(ranks.all_gather_rows(self._mine(ranks)).cpu(), self._target))


def judge(target: Target, predicted: Predicted) -> AnyQuality:
    """Return the quality of predictions of N samples; N may be 0.

    >>> judge(Target(), Predicted(torch.tensor([2.0, -1.0, 1.0]), torch.tensor([1, 0, 0]))).auc
    1.0
    """
    labels = zip(predicted.by_label(target).items(), target.tasks, strict=True)
    each: dict[str, Any] = {name: judge_label(task, own) for (name, own), task in labels}
    if len(each) == 1:
        return each[target.labels[0]]  # type: ignore[no-any-return]
    each |= {name: _judge_classes(predicted, target.heads[name]) for name in target.classes}
    return LabelQualities(len(predicted.labels), each)


def judge_label(task: Task, predicted: Predicted) -> Quality | RegressionQuality:
    """Return the quality of predictions of one label, for the samples that have it: whose label is not NaN."""
    judge_one = _judge_probabilities if task == "binary" else _judge_numbers
    missing = predicted.labels.isnan()
    return judge_one(*(predicted.take(~missing) if bool(missing.any()) else predicted))


def _judge_probabilities(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Quality:
    num_samples = labels.numel()
    if not num_samples:
        return Quality(0, None, None, None, None, None)
    # Imported here: it loads torchmetrics, which takes half a second, and a run's first step need not wait for it.
    from torchrec.metrics.ne import compute_cross_entropy, compute_ne

    predictions, labels = torch.sigmoid(logits.double()), labels.double()
    weight = torch.ones_like(predictions) if weights is None else weights.double()
    count, clicks = weight.sum(), (weight * labels).sum()
    one_class = bool(clicks == 0) or bool(clicks == count)
    entropy_bits = compute_cross_entropy(labels, predictions.clone(), weight, ETA).sum()
    # Of single precision, as scores are written: equal ones there are equal here.
    scores, of_all = predictions.float().cpu().numpy(), np.zeros(num_samples, np.int64)
    areas = by_group(scores, labels.cpu().numpy(), of_all, None if weights is None else weight.cpu().numpy()).auc
    right = weight * ((predictions > 0.5) == (labels > 0.5))
    return Quality(
        samples=num_samples,
        logloss=_ratio(entropy_bits * math.log(2), count),
        auc=None if one_class else float(areas[0]),
        ne=None if one_class else float(compute_ne(entropy_bits, count, clicks, count - clicks, ETA)),
        accuracy=_ratio(right.sum(), count),
        # The same as torchrec.metrics' `compute_calibration`, but None where that gives 0: without clicks.
        calibration=_ratio((weight * predictions).sum(), clicks),
    )


def _judge_numbers(outputs: Tensor, labels: Tensor, weights: Tensor | None) -> RegressionQuality:
    distance, labels = outputs.double() - labels.double(), labels.double()
    weight = torch.ones_like(distance) if weights is None else weights.double()
    count = weight.sum()
    squared = _ratio((weight * distance**2).sum(), count)
    mean = (weight * labels).sum() / count
    variance = _ratio((weight * (labels - mean) ** 2).sum(), count)
    return RegressionQuality(
        samples=labels.numel(),
        rmse=None if squared is None else math.sqrt(squared),
        mae=_ratio((weight * distance.abs()).sum(), count),
        r2=1 - squared / variance if squared is not None and variance else None,
    )


def _judge_classes(predicted: Predicted, head: range) -> ClassesQuality:
    """Return the quality of a label's classes, which are these outputs: logits of probabilities, whose sum is 1."""
    places = slice(head.start, head.stop)
    there = ~predicted.labels[:, head.start].isnan()
    logits, labels, weights = predicted.take(there)
    logits, labels = logits[:, places].double(), labels[:, places].double()
    weight = labels.new_ones(len(labels)) if weights is None else weights.double()
    right = logits.argmax(dim=1) == labels.argmax(dim=1)
    entropy = (labels * softplus(-logits)).sum(dim=1)
    count = weight.sum()
    return ClassesQuality(len(labels), _ratio((weight * entropy).sum(), count), _ratio((weight * right).sum(), count))


def _ratio(total: Tensor, count: Tensor) -> float | None:
    return float(total / count) if bool(count > 0) else None


#: An evaluation asks so often whether a rank must stop.
_BATCHES_BETWEEN_STOPS = 16


def until_stopped(batches: Iterable[Batch], supervision: Supervision, ranks: Ranks) -> Iterator[Batch]:
    """Yield batches until a rank is asked to stop. Collective."""
    for number, batch in enumerate(batches, start=1):
        if number % _BATCHES_BETWEEN_STOPS == 0 and supervision.agree(ranks):
            return
        yield batch
        supervision.beat()


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
