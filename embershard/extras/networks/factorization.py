"""Models that add a weight per id to what embeddings give: factorization machines (FM), DeepFM, and Wide & Deep.

Letters: B samples, N dense features, F sparse ones, D the dim, T outputs, K = D - T factors.

The row of an id has K factors, and behind them a first-order weight for each output. So plans, caches, checkpoints and
exports need not know of these weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.mlp import MLP

from embershard.data.schema import Schema
from embershard.models.config import ModelConfig
from embershard.models.dropout import add_dropout
from embershard.models.loss import WithLoss
from embershard.models.table_modules import PooledRows, bags_of
from embershard.models.tables import built_in_tables

_INITIAL_SPREAD = 0.01  # of the factors of dense features: a standard deviation


class FM(nn.Module):
    """A factorization machine of order 2 (Rendle, "Factorization Machines", ICDM 2010, equations 1 and 5), over fields.

    ```text
    y_t = b_t + sum over the fields f of w_tf + sum over the pairs f < g of <v_f, v_g>
    ```

    A sparse feature is a field, whose v and w are pooled over the ids of its bag; ids of one bag are no pair. A dense
    feature x is a field with x v and x w, whose v and w are parameters. Of several outputs, each weighs the K products
    of a pair by weights of its own, at first 1, as in the last layer of a neural FM (arXiv 1708.05027).

    Args:
        has_bias: False without b, where what is added has one.

    >>> fm = FM(num_dense=1, dim=5, num_outputs=1)
    >>> same = torch.tensor([[[1.0, -1.0, 2.0, -2.0, 0.5]]])
    >>> fm(torch.zeros(1, 1), torch.cat([same, same], dim=1)).item(), fm(torch.zeros(1, 1), same).item()
    (11.0, 0.5)
    """

    def __init__(self, num_dense: int, dim: int, num_outputs: int, *, has_bias: bool = True) -> None:
        super().__init__()
        self._num_factors = dim - num_outputs
        rows = torch.zeros(num_dense, dim)
        nn.init.normal_(rows[:, : self._num_factors], std=_INITIAL_SPREAD)
        self.dense_rows = nn.Parameter(rows)
        self.mix = nn.Parameter(torch.ones(num_outputs, self._num_factors)) if num_outputs > 1 else None
        self.bias = nn.Parameter(torch.zeros(num_outputs)) if has_bias else None

    def split(self, dense: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return factors [B, N + F, K] and first-order weights [B, N + F, T] of all fields, of dense features [B, N]
        and pooled rows [B, F, D]."""
        fields = torch.cat([dense.unsqueeze(2) * self.dense_rows, rows], dim=1)
        return fields[:, :, : self._num_factors], fields[:, :, self._num_factors :]

    def outputs(self, factors: Tensor, weights: Tensor) -> Tensor:
        """Return the outputs [B, T] of what `split` returned."""
        pairs = 0.5 * (factors.sum(dim=1).square() - factors.square().sum(dim=1))  # [B, K]
        second = pairs.sum(dim=1, keepdim=True) if self.mix is None else pairs @ self.mix.t()
        found = weights.sum(dim=1) + second
        return found if self.bias is None else found + self.bias

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        """Return the outputs [B, T] of dense features [B, N] and pooled rows [B, F, D]."""
        return self.outputs(*self.split(dense, rows))


class DeepFM(nn.Module):
    """A factorization machine and an MLP, added (Guo et al., "DeepFM", IJCAI 2017, arXiv 1703.04247, equations 1 to 4).
    Both see the factors of the sparse features. The MLP sees the dense features as they are: it would hardly see what
    the machine's small factors make of them. The logit is the sum of both; its bias is that of the MLP.

    Args:
        layers: widths of the MLP; the last one is T.

    >>> DeepFM(num_dense=2, num_sparse=3, dim=8, layers=[6, 1])(torch.ones(4, 2), torch.ones(4, 3, 8)).shape
    torch.Size([4, 1])
    """

    def __init__(self, num_dense: int, num_sparse: int, dim: int, layers: Sequence[int]) -> None:
        super().__init__()
        self.fm = FM(num_dense, dim, layers[-1], has_bias=False)
        self.deep = _mlp(num_dense + num_sparse * (dim - layers[-1]), layers)

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        """Return the outputs [B, T] of dense features [B, N] and pooled rows [B, F, D]."""
        factors, weights = self.fm.split(dense, rows)
        embeddings = factors[:, dense.shape[1] :]
        return self.fm.outputs(factors, weights) + self.deep(torch.cat([dense, embeddings.flatten(1)], dim=1))


class WideDeep(nn.Module):
    """A linear model and an MLP, added (Cheng et al., "Wide & Deep Learning", DLRS 2016, arXiv 1606.07792, equation 3).

    The linear one has a weight per id and per dense feature. Cross-product transformations are features of the data.
    The MLP sees the first K numbers of the rows, and the dense features as they are. The bias is that of the MLP.

    Args:
        layers: widths of the MLP; the last one is T.

    >>> WideDeep(num_dense=2, num_sparse=3, dim=8, layers=[6, 1])(torch.ones(4, 2), torch.ones(4, 3, 8)).shape
    torch.Size([4, 1])
    """

    def __init__(self, num_dense: int, num_sparse: int, dim: int, layers: Sequence[int]) -> None:
        super().__init__()
        self._num_factors = dim - layers[-1]
        self.wide = nn.Parameter(torch.zeros(num_dense, layers[-1]))
        self.deep = _mlp(num_dense + num_sparse * self._num_factors, layers)

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        """Return the outputs [B, T] of dense features [B, N] and pooled rows [B, F, D]."""
        embeddings, weights = rows[:, :, : self._num_factors], rows[:, :, self._num_factors :]
        wide = weights.sum(dim=1) + dense @ self.wide
        return wide + self.deep(torch.cat([dense, embeddings.flatten(1)], dim=1))


def _mlp(width: int, layers: Sequence[int]) -> nn.Sequential:
    *hidden, last = layers
    return nn.Sequential(MLP(width, hidden), nn.Linear([width, *hidden][-1], last))


class OverFields(nn.Module):
    """Tables, and a network over what they give; for `WithLoss`, which adds the loss."""

    def __init__(self, sparse_arch: nn.Module, network: nn.Module) -> None:
        super().__init__()
        self.sparse_arch, self.network = sparse_arch, network

    def forward(self, dense_features: Tensor, sparse_features: Any) -> Tensor:
        """Return the outputs [B, T]."""
        return self.network(dense_features, self.sparse_arch(sparse_features))


def build_factorized(config: ModelConfig, schema: Schema, device: torch.device) -> WithLoss:
    """Build an FM, DeepFM or Wide & Deep: see `build_model`."""
    collection = bags_of(built_in_tables(config, schema))
    num_dense, num_sparse, dim = len(schema.dense), len(schema.sparse), config.embedding_dim
    layers = config.over_layers(len(schema.target.labels))
    with device:
        network: nn.Module
        if config.arch == "fm":
            network = FM(num_dense, dim, layers[-1])
        else:
            network_class = DeepFM if config.arch == "deepfm" else WideDeep
            network = network_class(num_dense, num_sparse, dim, layers)
        add_dropout(network, config.dropout)
        return WithLoss(OverFields(PooledRows(collection), network), schema.target, config.label_weighting)
