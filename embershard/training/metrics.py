"""Quality of predicted click probabilities over the samples of all ranks."""

from __future__ import annotations

import math

import torch

from embershard.distributed import Ranks
from embershard.training.quality import Quality

#: Least distance of a prediction from 0 and 1 in logarithms, as in TorchRec's metrics.
ETA = 1e-12


class PredictionBuffer:
    """This rank's newest `capacity` predictions and labels (None: all)."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._size = 0

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add logits [B] and labels [B], without a copy to the host; B may be 0."""
        self._parts.append((logits.detach().float().reshape(-1), labels.detach().float().reshape(-1)))
        self._size += logits.numel()
        while self.capacity is not None and self._size - self._parts[0][0].numel() >= self.capacity:
            self._size -= self._parts.pop(0)[0].numel()

    def quality(self, ranks: Ranks) -> Quality:
        """Return the quality over all ranks' samples. Collective, with the same result everywhere."""
        empty = torch.empty(0, device=ranks.device)
        logits = torch.cat([part[0] for part in self._parts] or [empty])
        labels = torch.cat([part[1] for part in self._parts] or [empty])
        both = ranks.all_gather_rows(torch.stack([logits, labels], dim=1))
        return judge(both[:, 0], both[:, 1])


def judge(logits: torch.Tensor, labels: torch.Tensor) -> Quality:
    """Return the quality of `logits` [N] against `labels` [N] in {0, 1}; N may be 0.

    >>> judge(torch.tensor([2.0, -1.0, 1.0]), torch.tensor([1, 0, 0])).auc
    1.0
    """
    num_samples = labels.numel()
    if not num_samples:
        return Quality(0, None, None, None, None, None)
    # Imported here: these load torchmetrics, which takes half a second, and a run's first step need not wait for it.
    from torchmetrics.functional.classification import binary_auroc
    from torchrec.metrics.ne import compute_cross_entropy, compute_ne

    predictions = torch.sigmoid(logits.double())
    clicks = labels.double().sum()
    one_class = bool(clicks == 0) or bool(clicks == num_samples)
    entropy_bits = compute_cross_entropy(labels.double(), predictions.clone(), torch.ones_like(predictions), ETA).sum()
    count = torch.tensor(float(num_samples), dtype=torch.float64, device=labels.device)
    ne = None if one_class else float(compute_ne(entropy_bits, count, clicks, count - clicks, ETA))
    return Quality(
        samples=num_samples,
        logloss=float(entropy_bits) * math.log(2) / num_samples,
        auc=None if one_class else float(binary_auroc(predictions.float(), labels.long(), validate_args=False)),
        ne=ne,
        accuracy=float(((predictions > 0.5) == (labels > 0.5)).double().mean()),
        calibration=None if clicks == 0 else float(predictions.sum() / clicks),
    )
