"""How far training may be from the same training whose sums were added up in another order; no processor decides it."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

#: Times the mean rounding of one pair of orders that another pair may have: it depends on how nearly some gradients of
#: Adagrad cancel out. A fault in one row is some ten thousand times as large.
MANY = 256


def loss_rounding(steps: int, samples: int, dtype: torch.dtype = torch.float32) -> float:
    """Return the most that losses of about 1 differ by after some steps.

    Two orders of a sum of n terms differ by at most n eps of the terms' magnitude (Higham, Accuracy and Stability of
    Numerical Algorithms, section 4.2). A step's longest sums are over the samples of all ranks, and each step may add
    as much to what earlier ones left.

    Args:
        samples: of a step, over all ranks.
        dtype: in which the sums are computed.
    """
    return steps * samples * torch.finfo(dtype).eps


def reversed_samples(features: KeyedJaggedTensor, labels: Tensor) -> tuple[KeyedJaggedTensor, Tensor]:
    """Return the batch with its last sample first: the same losses and gradients, added up in another order."""
    keys, stride = features.keys(), features.stride()
    bags = torch.arange(len(keys) * stride).view(len(keys), stride).flip(1).flatten().tolist()
    lengths = features.lengths()

    def turned(values: Tensor) -> Tensor:
        parts = values.split(lengths.tolist())
        return torch.cat([parts[bag] for bag in bags])

    weights = features.weights_or_none()
    turned_features = KeyedJaggedTensor(
        keys, turned(features.values()), None if weights is None else turned(weights), lengths[bags]
    )
    return turned_features, labels.flip(0)
