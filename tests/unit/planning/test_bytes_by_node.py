"""Bytes within nodes and between them, of each sharding type: the cost model's beside messages counted one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from embershard.planning.cost import work as formulas

#: Nodes, ranks of each.
SHAPES = [(1, 4), (2, 2), (2, 4), (4, 8)]
BATCH, COLUMNS, IDS, DISTINCT = 6, 8, 3.0, 5.0
#: A message: its sender, its receiver, its bytes.
Message = tuple[int, int, float]


def ring(ranks: list[int], chunk: float) -> Iterator[Message]:
    """A reduce-scatter: in each of W - 1 rounds every rank hands a chunk on to the next one. NCCL has as many rings as
    a node has network cards, which leave a node by different ranks: each message here is one of L, on ring l."""
    for _ in range(len(ranks) - 1):
        for place, rank in enumerate(ranks):
            yield rank, ranks[(place + 1) % len(ranks)], chunk


def rings(num_nodes: int, local: int, chunk: float) -> Iterator[Message]:
    for first in range(local):
        order = [node * local + (first + each) % local for node in range(num_nodes) for each in range(local)]
        yield from ring(order, chunk / local)


def vectors_sent(sharding: str, num_nodes: int, local: int) -> list[Message]:
    """The messages that carry pooled vectors of one table to the ranks of their samples."""
    world_size, vectors = num_nodes * local, BATCH * COLUMNS * 4.0
    if sharding in ("table_wise", "column_wise"):
        return [(0, other, vectors) for other in range(1, world_size)]
    if sharding == "row_wise":
        return list(rings(num_nodes, local, vectors))
    within = ring(list(range(local)), world_size * vectors / local)
    across = [(rank, node * local + rank, vectors) for rank in range(local) for node in range(1, num_nodes)]
    return [*within, *across]


def most_sent(messages: list[Message], local: int) -> tuple[float, float]:
    """Bytes of the busiest rank to its own node, and to others."""
    within, between = Counter[int](), Counter[int]()
    for sender, receiver, count in messages:
        (within if sender // local == receiver // local else between)[sender] += count
    return max(within.values(), default=0.0), max(between.values(), default=0.0)


@pytest.mark.parametrize("sharding", ["table_wise", "column_wise", "row_wise", "table_row_wise", "grid_shard"])
@pytest.mark.parametrize(("num_nodes", "local"), SHAPES)
def test_pooled_vectors_and_ids_as_counted(sharding, num_nodes, local) -> None:
    world_size = num_nodes * local
    owners = {"row_wise": world_size, "table_row_wise": local, "grid_shard": local}.get(sharding, 1)
    found = formulas.exchanged_bytes(
        sharding,
        batch_size=BATCH,
        world_size=world_size,
        ranks_per_node=local,
        ids_per_sample=IDS,
        columns=COLUMNS,
        rank_share=1 / owners,
        number_bytes=(4, 2),
    )
    counted = most_sent(vectors_sent(sharding, num_nodes, local), local)
    assert (found.in_node.embeddings, found.to_nodes.embeddings) == pytest.approx(counted)
    assert (found.in_node.gradients, found.to_nodes.gradients) == pytest.approx(tuple(each / 2 for each in counted))
    ids = [(0, other, BATCH * (IDS / owners * 8 + 4)) for other in range(1, world_size)]  # as received by rank 0
    assert (found.in_node.ids, found.to_nodes.ids) == pytest.approx(most_sent(ids, local))


@pytest.mark.parametrize(("num_nodes", "local"), SHAPES)
def test_distinct_rows_as_counted(num_nodes, local) -> None:
    world_size = num_nodes * local
    found = formulas.exchanged_bytes(
        "table_wise",
        batch_size=BATCH,
        world_size=world_size,
        ranks_per_node=local,
        ids_per_sample=IDS,
        columns=COLUMNS,
        distinct_ids=DISTINCT,
    )
    rows = [(0, other, DISTINCT * COLUMNS * 4) for other in range(1, world_size)]
    assert (found.in_node.embeddings, found.to_nodes.embeddings) == pytest.approx(most_sent(rows, local))
    ids = [(0, other, DISTINCT * 8 + 4) for other in range(1, world_size)]
    assert (found.in_node.ids, found.to_nodes.ids) == pytest.approx(most_sent(ids, local))


def test_rows_of_a_node_leave_it_once_per_other_node() -> None:
    """What table_row_wise is made for: (W/L - 1) B D numbers, of (W - L) B D that a table on one rank sends there."""
    common = {"batch_size": BATCH, "world_size": 32, "ranks_per_node": 8, "ids_per_sample": IDS, "columns": COLUMNS}
    of_node = formulas.exchanged_bytes("table_row_wise", rank_share=1 / 8, **common)
    assert of_node.to_nodes.embeddings == 3 * BATCH * COLUMNS * 4
    assert formulas.exchanged_bytes("table_wise", **common).to_nodes.embeddings == 24 * BATCH * COLUMNS * 4
