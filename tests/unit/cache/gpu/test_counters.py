"""Counts by kernels, in Triton's interpreter, are those of the loops."""

from __future__ import annotations

import pytest
import torch

from embershard.cache import loops
from embershard.cache.gpu.counters import count_plan, count_uses
from embershard.cache.planner import CachePlan
from embershard.cache.statistics import CacheCounters

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("critical_path", [True, False])
def test_a_plan_is_counted_as_by_the_loop(critical_path: bool) -> None:
    """Of several programs; tables without rows, features without ids, and several features of a table."""
    generator = torch.Generator().manual_seed(3)
    offsets, table_of_feature = [0, 400, 400, 3000], [3, 0, 2, 2, 0]
    lengths = torch.tensor([700, 0, 1900, 3, 0])
    count = int(lengths.sum())
    missed = torch.rand(count, generator=generator) < 0.5
    fills, evicted = (torch.randperm(4000, generator=generator)[:1300] for _ in range(2))
    none = torch.empty(0, dtype=torch.int64)
    plans = [
        CachePlan(1, none.new_zeros(count), *rows, torch.rand(count, generator=generator) < 0.3, positions)
        for rows, positions in (
            ((fills.sort().values, none, evicted, none, evicted[:500], none), missed.nonzero().flatten()),
            ((none,) * 6, none),
        )
    ]
    by_loop = CacheCounters(offsets, table_of_feature, CPU)
    by_kernel = torch.zeros_like(by_loop.values)
    for plan in plans:
        by_loop.add_plan(plan, lengths, critical_path)
        tables = (torch.tensor(table_of_feature), torch.tensor([*offsets[1:], 2**62]))
        parts = (plan.first_hits, plan.missed, plan.fill_keys, plan.evicted_keys, plan.write_back_keys)
        count_plan(by_kernel, *tables, lengths, parts, critical_path)
    assert by_kernel.tolist() == by_loop.values.tolist()
    assert int((by_kernel != 0).sum()) > 12


def test_uses_are_counted_as_by_the_loop() -> None:
    slots = torch.randint(1, 700, (1500,), generator=torch.Generator().manual_seed(1))
    filled = torch.arange(650, 700)
    slots[slots >= 650] = 1
    order = slots.sort(stable=True)
    first_hits = torch.zeros(1500, dtype=torch.bool)
    first_hits[order.indices[1:][order.values[1:] != order.values[:-1]]] = True
    by_loop, by_kernel = (torch.arange(700, dtype=torch.float32) for _ in range(2))
    loops.count_uses(by_loop.numpy(), slots.numpy(), first_hits.numpy(), filled.numpy(), 1.5)
    count_uses(by_kernel, slots, first_hits, filled, 1.5)
    assert torch.equal(by_kernel, by_loop)
    assert int((by_kernel > torch.arange(700)).sum()) > 500
