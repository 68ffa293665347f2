"""Predictions of a model for some batches, and their quality over the samples of all ranks.

Letters: B samples of a batch, N samples, T labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.data import Batch, Target
from embershard.data.schema import Task
from embershard.distributed import Ranks, Supervision
from embershard.metrics.config import MetricsConfig
from embershard.metrics.figures import Figures, OfGroups, OfOwn, OfPairs, known_row, names_of, total
from embershard.metrics.own_metric import own_figure
from embershard.metrics.ranking import Floats, by_group, weighted_mean


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

    def detached(self) -> Predicted:
        """Return them without the graph of the forward."""
        return self._replace(outputs=self.outputs.detach())

    @staticmethod
    def joined(parts: Sequence[Predicted]) -> Predicted:
        """Return the predictions of some batches as those of one."""
        outputs, labels, weights = zip(*parts, strict=True)
        return Predicted(torch.cat(outputs), torch.cat(labels), None if weights[0] is None else torch.cat(weights))

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
        self._width = 2 * len(target.labels) + (target.weight is not None)
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
        gathered = ranks.all_gather_rows(torch.cat(self._parts or [torch.empty(0, self._width, device=ranks.device)]))
        order = ranks.all_gather_rows(batches).argsort(stable=True)
        return Predicted.of_columns(gathered[order].cpu(), self._target)


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
        self._most = self._most_of_batch * _WINDOW_BATCHES
        self._num_added = self._size = 0

    def add(self, predicted: Predicted) -> None:
        """Add predictions of a batch, of B samples, without a copy to the host; B may be 0."""
        every = max(1, -(-len(predicted.labels) // self._most_of_batch))
        first = self._num_added * _GOLDEN % 2**64 * every >> 64
        super().add(predicted.take(slice(first, None, every)))
        self._num_added += 1
        self._size += len(self._parts[-1])
        while self._size > self._most:
            self._size -= len(self._parts.pop(0))

    def quality(self, ranks: Ranks) -> Figures:
        """Return the figures over the samples of all ranks. Collective, with the same result everywhere."""
        options: Any = {"dtype": torch.float32, "device": ranks.device}
        size = torch.full((1, self._width), self._size, **options)  # a row of its own: one collective, and one wait
        mine = torch.cat([size, *self._parts, torch.empty(self._most - self._size, self._width, **options)])
        columns = [each[1 : 1 + int(each[0, 0])] for each in ranks.all_gather(mine).cpu().numpy()]
        return judge(self._target, Predicted.of_columns(torch.from_numpy(np.concatenate(columns)), self._target))


def judge(
    target: Target, predicted: Predicted, metrics: MetricsConfig | None = None, groups: Tensor | None = None
) -> Figures:
    """Return the figures of predictions of N samples, by name; N may be 0. Of several labels they are named as
    `auc/click`, and where not all samples have a label, `samples/click` is how many do.

    Args:
        metrics: asks for more figures than those of the task.
        groups: int64 [N], the group of each sample, from 0; -1: it is in none. Needed for figures of groups.

    >>> predicted = Predicted(torch.tensor([2.0, 1.0, -1.0, 0.0]), torch.tensor([1, 0, 1, 0]))
    >>> metrics = MetricsConfig(names=("gauc", "precision@1"), group="user")
    >>> found = judge(Target(), predicted, metrics, torch.tensor([0, 0, 1, 1]))
    >>> found["samples"], found["auc"], found["gauc"], found["precision@1"]
    (4, 0.5, 0.5, 0.5)
    """
    metrics = metrics or MetricsConfig()
    each = {
        label: _judge_label(task, own, (*names_of(task), *metrics.more(task)), metrics, groups)
        for (label, own), task in zip(predicted.by_label(target).items(), target.tasks, strict=True)
    }
    if len(each) == 1:
        return each[target.labels[0]]
    for label in target.classes:
        places = slice(target.heads[label].start, target.heads[label].stop)
        own = Predicted(predicted.outputs[:, places], predicted.labels[:, places], predicted.weights)
        each[label] = _judge_label("multiclass", own, names_of("multiclass"), MetricsConfig(), None)
    found: Figures = {"samples": len(predicted.labels)}
    of_classes = {name for own in target.classes.values() for name in own}  # a class has the samples of its label
    for label, figures in each.items():
        count = figures.pop("samples")
        found |= {} if count == found["samples"] or label in of_classes else {f"samples/{label}": count}
        found |= {f"{name}/{label}": value for name, value in figures.items()}
    return found


def _judge_label(
    task: Task, predicted: Predicted, names: Iterable[str], metrics: MetricsConfig, groups: Tensor | None
) -> Figures:
    """Return the figures of one label, for the samples that have it: whose label is not NaN."""
    missing = np.isnan((predicted.labels if task != "multiclass" else predicted.labels[:, 0]).numpy())
    if missing.any():
        has = torch.from_numpy(~missing)
        predicted, groups = predicted.take(has), None if groups is None else groups[has]
    raw, labels = (each.numpy().astype(np.float64) for each in (predicted.outputs, predicted.labels))
    weights = None if predicted.weights is None else predicted.weights.numpy().astype(np.float64)
    outputs = _sigmoid(raw) if task == "binary" else raw
    scores = outputs.astype(np.float32)  # as they are written: equal ones there are equal here
    ones = np.ones(len(labels)) if weights is None else weights
    sums: dict[Any, list[Floats]] = {}
    found: Figures = {"samples": len(labels)}
    hows = {name: known_row(name).of[task] for name in names}
    places = sorted({int(name.partition("@")[2]) for name in hows if "@" in name})
    if groups is not None and any(isinstance(how, OfGroups) for how in hows.values()):
        there = groups.numpy() >= 0
        of_groups = by_group(scores[there], labels[there], groups.numpy()[there], ones[there], places)
    for name, how in hows.items():
        if isinstance(how, OfPairs):
            area = by_group(scores, labels, weights=weights).auc
            found[name] = None if np.isnan(area).all() else float(area[0])
        elif isinstance(how, OfGroups):
            values = how.of_each(of_groups, places.index(int(name.partition("@")[2])) if how.has_place else 0)
            found[name] = weighted_mean(values, None if how.has_place else of_groups.weight)
        elif isinstance(how, OfOwn):
            found[name] = own_figure(name, metrics.folder, outputs, labels, ones)
        else:
            rate = metrics.recalibration
            shift = math.log(rate) if rate and known_row(name).is_recalibrated else 0.0
            key = how.columns, shift
            with np.errstate(all="ignore"):  # as tensors do
                if key not in sums:
                    shifted = _sigmoid(raw + shift) if shift else outputs
                    sums[key] = [total(column) for column in how.columns(shifted, labels, ones)]
                found[name] = float(how.figure(*sums[key])[0]) if how.is_defined(*sums[key])[0] else None
    return found


def _sigmoid(values: Floats) -> Floats:
    return torch.from_numpy(values).sigmoid().numpy()


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
