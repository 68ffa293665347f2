"""The loss of a run's task, and the wrapper that adds it to a model.

Letters: B samples, T labels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from embershard.models.schema import TargetLike


def loss_of(target: TargetLike, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Return the loss [] of a batch: the sum, over the labels, of each label's weight times the mean of w x l.

    l is a sample's loss, the binary cross entropy or the squared distance, and w its weight. The mean is the sum over
    the batch divided by B, not by the sum of w: what a sample adds then depends on no other sample, and the mean over
    ranks with B samples each is that of all their samples.

    Args:
        outputs: [B], or [B, T] of several labels: logits, or predicted numbers with task "regression".
        labels: of the same shape.
        weights: [B], of the samples; None: 1 each, with the same bits as ones.

    >>> import torch
    >>> from embershard.data import Target
    >>> loss_of(Target(task="regression"), torch.tensor([1.0, 5.0]), torch.tensor([0.0, 2.0]), torch.tensor([1.0, 2.0]))
    tensor(9.5000)
    """
    if len(target.labels) == 1:
        return _mean_loss(target, outputs, labels, weights)
    factors = target.label_weights or (1.0,) * len(target.labels)
    each = [_mean_loss(target, outputs[:, t], labels[:, t], weights) * factor for t, factor in enumerate(factors)]
    return sum(each[1:], start=each[0])


def _mean_loss(target: TargetLike, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    if target.task == "binary":
        return binary_cross_entropy_with_logits(outputs, labels, weights)
    each = mse_loss(outputs, labels, reduction="none")
    return (each if weights is None else each * weights).mean()


class WithLoss(nn.Module):
    """A model with the loss. Of one binary label without weights it does what TorchRec's `DLRMTrain` does.

    Args:
        model: from dense features [B, num_dense] and sparse features to outputs [B, T], by its last linear layer.
        target: what the outputs are.
    """

    def __init__(self, model: nn.Module, target: TargetLike) -> None:
        super().__init__()
        self.model, self._target = model, target
        if target.label_means:
            *_, last = (layer for layer in model.modules() if isinstance(layer, nn.Linear))
            last.bias.data.copy_(torch.tensor(target.label_means))

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the loss [], and without gradients the loss, the outputs and the labels: [B], or [B, T] of several."""
        outputs = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        loss = loss_of(self._target, outputs, batch.labels, batch.weights)
        return loss, (loss.detach(), outputs.detach(), batch.labels.detach())
