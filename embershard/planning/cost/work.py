"""The work of a step, from sizes alone: bytes of rows, bytes between ranks, collectives."""

from __future__ import annotations

from collections.abc import Iterable

from embershard.errors import ConfigError
from embershard.sharding.sizes import TableSize

_FLOAT_BYTES = 4
_ID_BYTES = 8
_LENGTH_BYTES = 4  # of a bag, as `Batch` has them
#: Of one sharding type in a step: sizes, lengths and ids of the batch ahead; pooled embeddings; their gradients.
_COLLECTIVES_PER_SHARDING = 5
#: The dense gradients, and the agreement on the next batch.
_COLLECTIVES_PER_STEP = 2


def embedding_bytes(num_ids: float, table: TableSize, columns: int | None = None) -> float:
    """Return the bytes of rows that `num_ids` lookups touch in device memory: weights three times (read, gradient,
    update), optimizer state twice. `columns` of each row (default: all)."""
    return num_ids * (3 * table.weight_bytes(columns) + 2 * table.optimizer_bytes(columns))


def all_reduce_bytes(parameter_bytes: float, world_size: int) -> float:
    """Return the bytes that each of W ranks sends to add up gradients in a ring: 2 (W-1)/W times their bytes."""
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
    distinct_ids: float | None = None,
    pooled_number_bytes: float = 2 * _FLOAT_BYTES,
) -> float:
    """Return the bytes that one shard adds to its rank's link in a step: in each exchange the larger of sent and
    received.

    With B samples per rank, W ranks, L ranks per node, K ids per sample and D columns:

    * one owner of all rows (table-wise, column-wise): it receives (W-1) B K ids and (W-1) B lengths, sends (W-1) B D
      floats, and receives as many gradients;
    * rows over all ranks (row-wise): each rank receives its share of the ids, and lengths and floats as above;
    * rows over a node's ranks (table-row-wise, grid): lengths and ids as above; W B D (L-1)/L floats within the node,
      and (W/L - 1) B D from node to node;
    * distinct rows: with U distinct ids in a rank's batch, the shard's share of (W-1) U ids and of as many rows of D
      floats, a length, and the gradients;
    * replicated: none.

    Args:
        sharding: TorchRec's sharding type.
        rank_share: share of the table's lookups that this shard's rows get: 1 where it has all rows.
        distinct_ids: of the table in a rank's batch, where distinct rows are exchanged; None: pooled embeddings are.
        pooled_number_bytes: of one number of an embedding, and of its gradient, together.

    Raises:
        ConfigError: the sharding type is unknown.
    """
    if sharding == "data_parallel" or world_size == 1:
        return 0.0
    if distinct_ids is not None:
        per_id = rank_share * (_ID_BYTES + columns * pooled_number_bytes)
        return (world_size - 1) * (distinct_ids * per_id + _LENGTH_BYTES)
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
    """Return the operations among all ranks in a step with tables of these sharding types: TorchRec does them per type.

    >>> num_collectives(["row_wise", "table_wise", "row_wise"], world_size=2)
    12
    """
    if world_size == 1:
        return 0
    types = {sharding for sharding in shardings if sharding != "data_parallel"}
    return _COLLECTIVES_PER_STEP + _COLLECTIVES_PER_SHARDING * len(types)
