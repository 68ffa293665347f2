"""The loss of a run's task, and the wrapper that adds it to a model.

Letters: B samples, T labels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss, softplus

from embershard.data.schema import Target


def loss_of(
    target: Target, outputs: Tensor, labels: Tensor, weights: Tensor | None, log_variances: Tensor | None = None
) -> Tensor:
    """Return the loss [] of a batch: the sum, over the labels, of each label's factor times the mean of w x l.

    l is a sample's loss, the binary cross entropy or the squared distance, and w its weight; 0 where its label is
    missing. Of a class, l is the sample's cross entropy where it has this class, and 0 elsewhere: the sum over the
    classes is that of the softmax. The mean is the sum over the batch divided by B, not by the sum of w: what a sample
    adds then depends on no other sample, and the mean over ranks with B samples each is that of all their samples.

    Args:
        outputs: [B], or [B, T] of several labels: logits, of classes by `class_logits`, or predicted numbers with task
            "regression".
        labels: of the same shape; NaN where one is missing, if `target.may_be_missing`.
        weights: [B], of the samples; None: 1 each, with the same bits as ones.
        log_variances: the learned s of each label, one for all its classes, in place of its factor. A sample then adds
            exp(-s) l + s / 2, and of a regression exp(-s) l / 2 + s / 2 (Kendall, Gal and Cipolla, "Multi-Task Learning
            Using Uncertainty to Weigh Losses", CVPR 2018, equations 7 and 10).

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
        of_outputs, each = each, []
        for head, s in zip(target.heads.values(), log_variances.unbind(), strict=True):
            loss = sum(of_outputs[head.start + 1 : head.stop], start=of_outputs[head.start])
            half = 0.5 if target.tasks[head.start] == "regression" else 1.0
            each.append(half * torch.exp(-s) * loss + 0.5 * s * shares[head.start])
    return sum(each[1:], start=each[0])


def label_losses(target: Target, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> list[Tensor]:
    """Return the mean [] of w x l of each of several labels; see `loss_of`."""
    each = [weights] * len(target.labels)
    if target.may_be_missing:
        there = present(labels)
        labels = labels.masked_fill(~there, 0.0)
        shares = there.to(outputs.dtype)
        each = [*(shares if weights is None else shares * weights.unsqueeze(1)).unbind(dim=1)]
    tasks = ["class" if len(head) > 1 else target.tasks[t] for head in target.heads.values() for t in head]
    return [_mean_loss(task, outputs[:, t], labels[:, t], each[t]) for t, task in enumerate(tasks)]


def present(labels: Tensor) -> Tensor:
    """Return where labels are not missing."""
    return ~labels.isnan()


def _mean_loss(task: str, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    if task == "binary":
        return binary_cross_entropy_with_logits(outputs, labels, weights)
    each = labels * softplus(-outputs) if task == "class" else mse_loss(outputs, labels, reduction="none")
    return (each if weights is None else each * weights).mean()


def class_logits(target: Target, outputs: Tensor) -> Tensor:
    """Return outputs [B, T] in which those of a label's classes, z, are the logits of the softmax's probabilities,
    z_k - log(sum over the others j of exp(z_j)): like those of any binary label.

    >>> import torch
    >>> from embershard.data import Target
    >>> target = Target(("click", "stars=1", "stars=2"), widths=(1, 2))
    >>> class_logits(target, torch.tensor([[0.5, 3.0, 1.0]]))
    tensor([[ 0.5000,  2.0000, -2.0000]])
    """
    heads = target.heads
    if len(heads) == len(target.labels):
        return outputs
    parts = []
    for head in heads.values():
        z = outputs[:, head.start : head.stop]
        parts.append(z if len(head) == 1 else z - _log_sum_of_others(z))
    return torch.cat(parts, dim=1)


def _log_sum_of_others(z: Tensor) -> Tensor:
    """Return log(sum over the others j of exp(z_j)) for each z_k, [B, K]; nothing is lost where exp(z_k) is nearly all
    of the sum."""
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    is_largest = torch.zeros_like(z, dtype=torch.bool).scatter(1, z.argmax(dim=1, keepdim=True), value=True)
    without_largest = z.masked_fill(is_largest, -torch.inf).logsumexp(dim=1, keepdim=True)
    whole = z.logsumexp(dim=1, keepdim=True)
    share = (z - whole).exp().masked_fill(is_largest, 0.0)  # at most a half
    return torch.where(is_largest, without_largest, whole + torch.log1p(-share))


class OwnOutputs(nn.Module, ABC):
    """Layers that end in a layer of its own for each label."""

    @property
    @abstractmethod
    def last_layers(self) -> list[nn.Linear]:
        """The last layer of each label."""


@torch.fx.wrap  # pipelines trace the model
def _as_wide(labels: Tensor, outputs: Tensor) -> Tensor:
    """Return labels [B] or [B, T] in float64 if outputs are: else the loss would be rounded."""
    return labels.double() if outputs.dtype == torch.float64 else labels


class WithLoss(nn.Module):
    """A model with the loss. Of one binary label without weights it does what TorchRec's `DLRMTrain` does.

    Args:
        model: from dense features [B, num_dense] and sparse features to outputs [B, T], whose bias is its
            last one; or by a linear layer for each label.
        target: what the outputs are; those of classes before the softmax.
        label_weighting: with "uncertainty" the model learns the losses' weights.
    """

    def __init__(self, model: nn.Module, target: Target, label_weighting: str = "fixed") -> None:
        super().__init__()
        self.model, self.target = model, target
        learns = label_weighting == "uncertainty"
        self.log_variances = nn.Parameter(torch.zeros(len(target.heads))) if learns else None
        if not (means := target.label_means):
            return
        # The outputs of regressions start at their labels' means.
        places = [place for place, task in enumerate(target.tasks) if task == "regression"]
        towers = [module for module in model.modules() if isinstance(module, OwnOutputs)]
        if towers:
            heads = zip(target.heads.values(), towers[0].last_layers, strict=True)
            last_layers = [layer for head, layer in heads if head.start in places]
            for layer, mean in zip(last_layers, means, strict=True):
                nn.init.constant_(layer.bias, mean)
        else:
            *_, bias = (bias for name, bias in model.named_parameters() if name.endswith(".bias"))
            bias.data[places] = torch.tensor(means)

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the loss [], and without gradients the loss, the outputs and the labels: [B], or [B, T] of several."""
        outputs = class_logits(self.target, self.model(batch.dense_features, batch.sparse_features).squeeze(-1))
        labels = _as_wide(batch.labels, outputs)
        loss = loss_of(self.target, outputs, labels, batch.weights, self.log_variances)
        return loss, (loss.detach(), outputs.detach(), batch.labels.detach())
