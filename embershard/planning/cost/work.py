"""How much work a step is, from sizes alone: operations of the dense part, bytes of rows, bytes between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from embershard.errors import ConfigError

_FLOAT_BYTES = 4
_ID_BYTES = 8
_LENGTH_BYTES = 8
_OPERATIONS_PER_MULTIPLY_ADD = 2
_PASSES = 3  # the forward, and in the backward the gradients of inputs and of weights
#: Of one sharding type in a step: sizes, lengths and ids of the batch ahead; pooled embeddings; their gradients.
COLLECTIVES_PER_SHARDING = 5
#: The dense gradients, and the agreement on the next batch.
COLLECTIVES_PER_STEP = 2


@dataclass(frozen=True)
class DenseSize:
    """The dense part of a DLRM with F tables of dim D: an MLP over the dense features, the interaction, an MLP over it.

    Attributes:
        arch: "dlrm" (dot products of all pairs) or "dlrm_dcn" (low-rank cross network).
        num_dense: dense features of a sample.
        num_tables, dim: F and D.
        dense_layers, over_layers: layer widths of the two MLPs.
        cross_layers, cross_rank: of the cross network; 0 for "dlrm".
    """

    arch: Literal["dlrm", "dlrm_dcn"]
    num_dense: int
    num_tables: int
    dim: int
    dense_layers: Sequence[int]
    over_layers: Sequence[int]
    cross_layers: int = 0
    cross_rank: int = 0

    @property
    def interaction_width(self) -> int:
        """Numbers per sample that go into the last MLP."""
        if self.arch == "dlrm_dcn":
            return self._features * self.dim
        return self.dim + self._features * (self._features - 1) // 2

    @property
    def multiply_adds_per_sample(self) -> int:
        """Of the forward."""
        mlps = sum(a * b for a, b in (*pairwise(self._dense_widths), *pairwise(self._over_widths)))
        if self.arch == "dlrm_dcn":
            return mlps + self.cross_layers * 2 * self.cross_rank * self._features * self.dim
        return mlps + self._features**2 * self.dim

    @property
    def num_parameters(self) -> int:
        """Weights and biases."""
        mlps = sum((a + 1) * b for a, b in (*pairwise(self._dense_widths), *pairwise(self._over_widths)))
        crossed = self._features * self.dim
        return mlps + self.cross_layers * (2 * self.cross_rank * crossed + crossed)

    @property
    def activations_per_sample(self) -> int:
        """Numbers that are there when the backward goes through the interaction, the point of most memory: what the
        forward kept for it, and the gradients of the interaction."""
        crossed = self._features * self.dim
        mlps = self.num_dense + sum(self.dense_layers) + sum(self.over_layers)
        if self.arch == "dlrm_dcn":  # two kept per layer, and one; the gradients of first and present input
            return mlps + (2 * self.cross_layers + 3) * crossed + self.cross_layers * self.cross_rank
        return mlps + 2 * (crossed + self._features**2 + self.interaction_width)

    @property
    def _features(self) -> int:
        return self.num_tables + 1

    @property
    def _dense_widths(self) -> tuple[int, ...]:
        return (self.num_dense, *self.dense_layers)

    @property
    def _over_widths(self) -> tuple[int, ...]:
        return (self.interaction_width, *self.over_layers)


def dense_flops(size: DenseSize, batch_size: int) -> float:
    """Floating-point operations of forward and backward for ``batch_size`` samples: 3 x 2 per multiply-add."""
    return float(_PASSES * _OPERATIONS_PER_MULTIPLY_ADD * size.multiply_adds_per_sample * batch_size)


def dense_parameter_bytes(size: DenseSize) -> int:
    """Of the dense part's weights and biases, in bytes."""
    return size.num_parameters * _FLOAT_BYTES


def activation_bytes(size: DenseSize, batch_size: int) -> float:
    """Activations and gradients of ``batch_size`` samples at the point of most memory, in bytes."""
    return float(size.activations_per_sample * _FLOAT_BYTES * batch_size)


def embedding_bytes(num_ids: float, weight_bytes_per_row: int, state_bytes_per_row: int) -> float:
    """Bytes of rows that N ids touch in device memory: weights three times (read; gradient; update), state twice."""
    return num_ids * (3 * weight_bytes_per_row + 2 * state_bytes_per_row)


def all_reduce_bytes(parameter_bytes: float, world_size: int) -> float:
    """What each of W ranks sends to add up gradients in a ring: 2 (W-1)/W times their bytes."""
    return 2 * (world_size - 1) / world_size * parameter_bytes


def all_to_all_bytes(
    sharding: str,
    *,
    batch_size: int,
    world_size: int,
    ids_per_sample: float,
    columns: int,
    rank_share: float = 1.0,
    ranks_per_node: int | None = None,
    pooled_number_bytes: float = 2 * _FLOAT_BYTES,
) -> float:
    """Bytes that one shard adds to its rank's link in a step, sent or received, whichever is more in each exchange.

    With B samples per rank, W ranks, L ranks per node, K ids per sample and D columns:

    * one owner of all rows (table-wise, column-wise): it receives (W-1) B K ids and (W-1) B lengths, sends (W-1) B D
      floats, and receives as many gradients;
    * rows over all ranks (row-wise): each rank receives its share of the ids, and lengths and floats as above;
    * rows over a node's ranks (table-row-wise, grid): lengths and ids as above; W B D (L-1)/L floats within the node,
      and (W/L - 1) B D from node to node;
    * replicated: none.

    Args:
        sharding: TorchRec's sharding type.
        rank_share: share of the table's lookups that this shard's rows get: 1 where it has all rows.
        pooled_number_bytes: of one number of a pooled embedding, and of its gradient, together.

    Raises:
        ConfigError: the sharding type is unknown.
    """
    if sharding == "data_parallel" or world_size == 1:
        return 0.0
    others = (world_size - 1) * batch_size
    ids = others * (ids_per_sample * rank_share * _ID_BYTES + _LENGTH_BYTES)
    if sharding in ("table_wise", "column_wise", "table_column_wise", "row_wise"):
        return ids + others * columns * pooled_number_bytes
    if sharding in ("table_row_wise", "grid_shard"):
        local = min(ranks_per_node or world_size, world_size)
        within = world_size * (local - 1) / local
        across = world_size / local - 1
        return ids + (within + across) * batch_size * columns * pooled_number_bytes
    raise ConfigError(f"Unknown sharding type {sharding!r}; needed one of TorchRec's, for instance 'table_wise'.")


def num_collectives(shardings: Iterable[str], world_size: int) -> int:
    """Operations among all ranks in a step with tables of these sharding types: TorchRec does them once per type."""
    if world_size == 1:
        return 0
    types = {sharding for sharding in shardings if sharding != "data_parallel"}
    return COLLECTIVES_PER_STEP + COLLECTIVES_PER_SHARDING * len(types)
