"""Steps of small models whose messages are known by hand, as one rank of a pool of processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from embershard.distributed.sent_bytes import SentBytes
from embershard.distributed.traffic import count_sent_bytes, counted_as_other, sent_bytes
from tests.ranks.parity import Case, batches, build, train


def of_a_step(case: Case, cached: bool) -> tuple[SentBytes, list[list[int]]]:
    """What this rank sent in one step, and the ids of each of its features."""
    count_sent_bytes()
    count_sent_bytes()  # again: nothing is counted twice
    model: Any = build(case, cached)
    before = sent_bytes()
    train(model, case, steps=1)
    features, _ = next(batches(case, dist.get_rank()))
    return sent_bytes() - before, [features[name].values().tolist() for name in case.features]


def of_collectives() -> dict[str, SentBytes]:
    """What this rank sent in one call of each collective, on 12 floats (48 bytes)."""
    count_sent_bytes()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    full, part = torch.ones(12), torch.ones(12 // ranks)
    parts = list(full.chunk(ranks))
    keep = [torch.empty_like(full) for _ in range(ranks)]
    calls = {
        "all-to-all": lambda: dist.all_to_all_single(torch.empty(12), full),
        "all-to-all of int32": lambda: dist.all_to_all_single(torch.empty(12).int(), full.int()),
        "all-gather": lambda: dist.all_gather(keep, full),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, full),
        "reduce-scatter of a list": lambda: dist.reduce_scatter(part, parts),
        "all-reduce": lambda: dist.all_reduce(full),
        "broadcast": lambda: dist.broadcast(full, src=0),
        "gather": lambda: dist.gather(full, keep if rank == 0 else None, dst=0),
        "scatter": lambda: dist.scatter(part, parts if rank == 0 else None, src=0),
        "barrier": dist.barrier,
    }
    found = {}
    for name, call in calls.items():
        before = sent_bytes()
        call()
        found[name] = sent_bytes() - before
    before = sent_bytes()
    with counted_as_other():
        calls["all-to-all of int32"]()
    found["counted as other"] = sent_bytes() - before
    return found
