"""The work of a step, from sizes alone: bytes of rows, bytes between ranks, collectives."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from statistics import NormalDist

from embershard.distributed.sent_bytes import SentBytes
from embershard.sharding.sharding_types import COPIES, sharding_type
from embershard.sharding.sizes import PlacedShard, TableSize

_FLOAT_BYTES = 4
_ID_BYTES = 8
_LENGTH_BYTES = 4  # of a bag, as `Batch` has them
#: The least that a GPU reads or writes of its memory.
_SECTOR_BYTES = 32
#: How much faster than memory the L2 cache is. An A100's reads 5,120 bytes a clock of 1.41 GHz, 4.6 times its memory
#: (NVIDIA, A100 whitepaper); it is taken to reach two thirds of that.
_L2_SPEEDUP = 3.0
#: To sort ids of 8 bytes with places of 4: made and read (20), a histogram (8), four passes of 8 bits that read and
#: write them (96; Adinets and Merrill 2022, "Onesweep", which CUB has), and runs of equal ones found (20).
_SORTED_ID_BYTES = 144
#: Of a row whose numbers travel as one byte each.
_SCALE_BYTES = 4
#: Three numbers tell another rank how many lengths, ids and samples come.
_SIZES_BYTES = 3 * 8
#: Of one group of tables in a step: sizes, lengths and ids of the batch ahead; embeddings; their gradients.
_COLLECTIVES_PER_GROUP = 5
#: Of replicated tables with as many columns: how many rows each rank has gradients of, and these.
_COLLECTIVES_PER_COPIES_GROUP = 2
#: The agreement on the next batch, and the sum of the dense gradients.
_AGREEMENTS = _DENSE_REDUCTIONS = 1


def embedding_bytes(num_ids: float, table: TableSize, columns: int | None = None) -> float:
    """Return the bytes of rows that `num_ids` lookups touch in a CPU's memory: weights three times (read, gradient,
    update), optimizer state twice. `columns` of each row (default: all)."""
    return num_ids * (3 * table.weight_bytes(columns) + 2 * table.optimizer_bytes(columns))


def gpu_embedding_bytes(
    num_ids: float, distinct_ids: float, vectors: float, table: TableSize, columns: int | None = None
) -> float:
    """Return the bytes of a GPU's memory that the kernels of FBGEMM's table-batched embeddings move, forward and
    backward (its `embedding_forward_split_template.cu` and `embedding_backward_split_template.cu`).

    * A row is read once; lookups of it again find it in the L2 cache, as long as its batch lasts.
    * Each vector that is pooled is written, and its gradient read; a bag's further ids find that in L2.
    * Ids are sorted. Each distinct row, and each of its states, is read and written once.
    * Memory is read in sectors of 32 bytes (NVIDIA, "CUDA C++ Best Practices Guide", coalesced access): a row-wise
      state of 4 bytes costs one.

    Args:
        num_ids, distinct_ids: that are looked up in a step; linear in both.
        vectors: pooled ones, or those of sequences or rows, that are handed on.
        columns: of each row (default: all).
    """
    columns = table.dim if columns is None else columns
    weights, vector = _sectors(table.weight_bytes(columns)), columns * _FLOAT_BYTES
    states = _sectors(table.state_bytes) + _sectors(table.state_bytes_per_column * columns)
    read = distinct_ids * weights + (num_ids - distinct_ids) * weights / _L2_SPEEDUP
    gradients = vectors * vector + (num_ids - vectors) * vector / _L2_SPEEDUP
    return read + vectors * vector + gradients + num_ids * _SORTED_ID_BYTES + distinct_ids * 2 * (weights + states)


def copies_embedding_bytes(
    num_ids: float, own_ids: float, all_ids: float, vectors: float, table: TableSize, world_size: int, *, gpu: bool
) -> float:
    """Return the bytes of its memory that a rank moves for its copy of a table, one of several: it looks its own
    samples up, adds up the gradients that each of W ranks has of its rows, and trains the rows of all.

    On a GPU as `gpu_embedding_bytes` counts; rows are gathered, pooled and their gradients divided by operations of
    their own (`embershard/sharding/torchrec/modes/replicated_rows.py`). On a CPU as `embedding_bytes` does.

    Args:
        num_ids, own_ids: that the rank's samples look up, and the distinct ones of these.
        all_ids: distinct ones of all ranks' samples.
        vectors: pooled ones of the rank's samples.
    """
    received, width = world_size * own_ids, table.weight_bytes()
    if not gpu:
        return 2 * num_ids * width + received * width + all_ids * (width + 2 * table.optimizer_bytes())
    weights, vector = _sectors(width), table.dim * _FLOAT_BYTES
    states = _sectors(table.state_bytes) + _sectors(table.state_bytes_per_column * table.dim)
    looked_up = own_ids * (weights + vector) + num_ids * vector / _L2_SPEEDUP + vectors * vector
    gradients = vectors * vector + (num_ids - vectors) * vector / _L2_SPEEDUP + 3 * own_ids * vector
    added_up = received * (vector + _SORTED_ID_BYTES) + all_ids * vector
    updated = all_ids * (_SORTED_ID_BYTES + vector + 2 * (weights + states))
    return num_ids * _SORTED_ID_BYTES + looked_up + gradients + added_up + updated


def _sectors(num_bytes: float) -> int:
    return math.ceil(num_bytes / _SECTOR_BYTES) * _SECTOR_BYTES


def all_reduce_bytes(parameter_bytes: float, world_size: int) -> float:
    """Return the bytes that each of W ranks sends to add up gradients in a ring: 2 (W-1)/W times their bytes."""
    return 2 * (world_size - 1) / world_size * parameter_bytes


def exchanged_bytes(
    sharding: str,
    *,
    batch_size: int,
    world_size: int,
    ids_per_sample: float,
    columns: int,
    rank_share: float = 1.0,
    distinct_ids: float | None = None,
    number_bytes: tuple[float, float] = (_FLOAT_BYTES, _FLOAT_BYTES),
    vectors_per_sample: float | None = None,
    num_features: int = 1,
    ranks_per_node: int | None = None,
    pieces: int = 1,
) -> Exchanged:
    """Return the bytes that a shard adds to its rank's links in a step: of each kind, the larger of sent and received.

    `Exchanged` says what travels with each sharding type.

    Args:
        sharding: TorchRec's sharding type.
        ranks_per_node: L; None: all ranks are on one node.
        rank_share: share of the table's lookups that this shard's rows get: 1 where it has all rows.
        distinct_ids: of the table in a rank's batch, those of its `pieces` added up, where distinct rows are exchanged;
            None: pooled embeddings are.
        number_bytes: of one number of an embedding, and of its gradient; 1: beside a scale for each row.
        vectors_per_sample: embeddings of a sequence that travel for a sample, of which this shard sends those of its
            rows; None: a pooled one travels for each feature.
        num_features: that share the table, B lengths of bags each.

    Raises:
        ConfigError: the sharding type is unknown.
    """
    kind = sharding_type(sharding)
    if kind.rows_over == "copies" or world_size == 1:
        return Exchanged.of(0.0, 0.0, columns, number_bytes, (0.0, 0.0, 0.0))
    local = min(ranks_per_node or world_size, world_size)
    away = (world_size - local) / (world_size - 1)  # of what each rank gets as much of
    if distinct_ids is not None:
        rows = (world_size - 1) * distinct_ids * rank_share
        ids = rows * _ID_BYTES + (world_size - 1) * _LENGTH_BYTES * pieces
        return Exchanged.of(ids, rows, columns, number_bytes, (away, away, away))
    others = (world_size - 1) * batch_size
    ids = others * (ids_per_sample * rank_share * _ID_BYTES + num_features * _LENGTH_BYTES)
    vectors = num_features if vectors_per_sample is None else vectors_per_sample * rank_share
    of_sums = {"node": (world_size / local - 1) / (world_size - 1), "all": (world_size > local) / local}
    backward = of_sums.get(kind.rows_over, away) if vectors_per_sample is None else away
    forward = away if 1 in number_bytes and kind.rows_over == "all" else backward  # no reduce-scatter adds bytes up
    return Exchanged.of(ids, others * vectors, columns, number_bytes, (away, forward, backward))


@dataclass(frozen=True)
class Exchanged:
    """What a shard sends: to the other ranks of its node, and to other nodes.

    With B samples per rank, W ranks, L of them on each node, K ids per sample and D columns:

    * one owner of all rows (table-wise, column-wise): it receives (W-1) B K ids and (W-1) B lengths, sends (W-1) B D
      floats, and receives as many gradients; (W-L) of the (W-1) ranks are on other nodes;
    * rows over all ranks (row-wise): each rank receives its share of the ids, and lengths, as above. Partial sums are
      reduced and scattered around a ring of all ranks, (W-1) B D floats each, and gradients gathered on it: what enters
      a node goes through one of its L ranks in turn, (W-1) B D / L each. Sums in bytes go from rank to rank instead;
    * rows over a node's L ranks (table-row-wise, grid): ids as above. W B D (L-1)/L floats stay within the node, in
      such a ring, and (W/L - 1) B D go from node to node, which is (W-1) B D;
    * distinct rows: with U distinct ids in a rank's batch, the shard's share of (W-1) U ids and of as many rows of D
      floats, a length, and the gradients; other nodes get their part by the ranks on them;
    * replicated: none here; see `copies_bytes`.
    """

    in_node: SentBytes
    to_nodes: SentBytes

    @classmethod
    def of(
        cls, ids: float, vectors: float, columns: int, number_bytes: tuple[float, float], away: tuple[float, ...]
    ) -> Exchanged:
        """Of bytes of ids, and of embeddings; `away`: shares of ids, embeddings and gradients that leave the node."""
        of_all = (ids, *(vectors * columns * each + vectors * _SCALE_BYTES * (each == 1) for each in number_bytes))
        shares = list(zip(of_all, away, strict=True))
        here, there = ((each * (1 - share) for each, share in shares), (each * share for each, share in shares))
        return cls(SentBytes(*here), SentBytes(*there))

    @property
    def in_all(self) -> SentBytes:
        """Both together."""
        one, other = astuple(self.in_node), astuple(self.to_nodes)
        return SentBytes(*(a + b for a, b in zip(one, other, strict=True)))


def copies_bytes(num_rows: float, variance: float, columns: int, world_size: int) -> float:
    """Return the bytes of gradients that a rank sends in a step for a group of replicated tables: how many rows its
    samples look up, and of each row a number and D floats, go to each other rank.

    All messages are as long as that of the rank with most rows: the largest of W normal numbers, by Blom's formula
    (1958, "Statistical estimates and transformed beta-variables").

    Args:
        num_rows, variance: of the rows that a rank's samples look up: mean and variance.

    >>> copies_bytes(100, 0.0, columns=16, world_size=4)
    21624.0
    """
    if world_size == 1:
        return 0.0
    above = NormalDist().inv_cdf((world_size - 0.375) / (world_size + 0.25))
    most = num_rows + above * math.sqrt(variance)
    return (world_size - 1) * (_ID_BYTES + most * (_ID_BYTES + columns * _FLOAT_BYTES))


def exchange_groups(shards: Iterable[PlacedShard]) -> set[str]:
    """Return names of the groups of tables that are exchanged together: those of one sharding type; of tables that
    exchange rows, those of one type and number of columns."""
    return {
        f"{shard.sharding}, rows of {shard.columns}" if shard.exchange == "rows" else shard.sharding
        for shard in shards
        if shard.sharding != "data_parallel"
    }


def groups_of_collectives(names: Iterable[str]) -> float:
    """Return how many groups of sharded tables have as many collectives in a step as these, of which some are copies',
    and "" has none.

    >>> groups_of_collectives(["table_wise", "data_parallel of 16", ""])
    1.4
    """
    of_copies = _COLLECTIVES_PER_COPIES_GROUP / _COLLECTIVES_PER_GROUP
    return sum(of_copies if name.startswith(COPIES) else 1.0 for name in names if name)


def sizes_bytes(num_groups: int, world_size: int) -> float:
    """Return the bytes of the messages by which a rank announces, in a step, how many lengths, ids and samples it sends
    to each other rank."""
    return num_groups * (world_size - 1) * _SIZES_BYTES


def num_collectives(num_groups: int, world_size: int, num_copies_groups: int = 0, pieces: int = 1) -> int:
    """Return the operations among all ranks in a step with so many groups of sharded tables, and of copies. Each piece
    has those of the sharded tables and an agreement on the next one.

    >>> num_collectives(2, world_size=2)
    12
    """
    if world_size == 1:
        return 0
    of_piece = _AGREEMENTS + _COLLECTIVES_PER_GROUP * num_groups
    return pieces * of_piece + _COLLECTIVES_PER_COPIES_GROUP * num_copies_groups + _DENSE_REDUCTIONS
