"""The loss of a run's task, and the wrapper that adds it to a model.

Letters: B samples, T labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from embershard.models.schema import TargetLike
from embershard.models.tasks import Towers


def loss_of(
    target: TargetLike, outputs: Tensor, labels: Tensor, weights: Tensor | None, log_variances: Tensor | None = None
) -> Tensor:
    """Return the loss [] of a batch: the sum, over the labels, of each label's factor times the mean of w x l.

    l is a sample's loss, the binary cross entropy or the squared distance, and w its weight; 0 where its label is
    missing. The mean is the sum over the batch divided by B, not by the sum of w: what a sample adds then depends on no
    other sample, and the mean over ranks with B samples each is that of all their samples.

    Args:
        outputs: [B], or [B, T] of several labels: logits, or predicted numbers with task "regression".
        labels: of the same shape; NaN where one is missing, if `target.may_be_missing`.
        weights: [B], of the samples; None: 1 each, with the same bits as ones.
        log_variances: [T], the learned s of each label in place of its factor. A sample then adds exp(-s) l + s / 2,
            and of a regression exp(-s) l / 2 + s / 2 (Kendall, Gal and Cipolla, "Multi-Task Learning Using Uncertainty
            to Weigh Losses", CVPR 2018, equations 7 and 10).

    >>> import torch
    >>> from embershard.data import Target
    >>> loss_of(Target(task="regression"), torch.tensor([1.0, 5.0]), torch.tensor([0.0, 2.0]), torch.tensor([1.0, 2.0]))
    tensor(9.5000)
    """
    if len(target.labels) == 1:
        return _mean_loss(target.tasks[0], outputs, labels, weights)
    each = label_losses(target, outputs, labels, weights)
    if log_variances is None:
        factors = target.label_weights or (1.0,) * len(each)
        each = [loss * factor for loss, factor in zip(each, factors, strict=True)]
    else:
        shares = present(labels).to(outputs.dtype)
        shares = (shares if weights is None else shares * weights.unsqueeze(1)).mean(dim=0)
        halves = [0.5 if task == "regression" else 1.0 for task in target.tasks]
        scaled = zip(each, halves, log_variances.unbind(), shares.unbind(), strict=True)
        each = [half * torch.exp(-s) * loss + 0.5 * s * share for loss, half, s, share in scaled]
    return sum(each[1:], start=each[0])


def label_losses(target: TargetLike, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> list[Tensor]:
    """Return the mean [] of w x l of each of several labels; see `loss_of`."""
    if target.may_be_missing:
        there = present(labels)
        labels = labels.masked_fill(~there, 0.0)
        each = there.to(outputs.dtype)
        each = each if weights is None else each * weights.unsqueeze(1)
        return [_mean_loss(task, outputs[:, t], labels[:, t], each[:, t]) for t, task in enumerate(target.tasks)]
    return [_mean_loss(task, outputs[:, t], labels[:, t], weights) for t, task in enumerate(target.tasks)]


def present(labels: Tensor) -> Tensor:
    """Return where labels are not missing."""
    return ~labels.isnan()


def _mean_loss(task: str, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    if task == "binary":
        return binary_cross_entropy_with_logits(outputs, labels, weights)
    each = mse_loss(outputs, labels, reduction="none")
    return (each if weights is None else each * weights).mean()


class WithLoss(nn.Module):
    """A model with the loss. Of one binary label without weights it does what TorchRec's `DLRMTrain` does.

    Args:
        model: from dense features [B, num_dense] and sparse features to outputs [B, T], by its last linear layer, or
            by one for each label.
        target: what the outputs are.
        label_weighting: with "uncertainty" the model learns the losses' weights.
    """

    def __init__(self, model: nn.Module, target: TargetLike, label_weighting: str = "fixed") -> None:
        super().__init__()
        self.model, self._target = model, target
        learns = label_weighting == "uncertainty"
        self.log_variances = nn.Parameter(torch.zeros(len(target.labels))) if learns else None
        if target.label_means:
            self._start_at(target.label_means)

    def _start_at(self, means: Sequence[float]) -> None:
        """Let the outputs of regressions start at their labels' means."""
        places = [place for place, task in enumerate(self._target.tasks) if task == "regression"]
        towers = [module for module in self.model.modules() if isinstance(module, Towers)]
        if towers:
            for place, mean in zip(places, means, strict=True):
                nn.init.constant_(towers[0].last_layers[place].bias, mean)
            return
        *_, last = (layer for layer in self.model.modules() if isinstance(layer, nn.Linear))
        last.bias.data[places] = torch.tensor(means)

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the loss [], and without gradients the loss, the outputs and the labels: [B], or [B, T] of several."""
        outputs = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        loss = loss_of(self._target, outputs, batch.labels, batch.weights, self.log_variances)
        return loss, (loss.detach(), outputs.detach(), batch.labels.detach())
