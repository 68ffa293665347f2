"""Cached rows in a checkpoint: joined from any shards, cut for any shards, and ranked as the policies rank."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from embershard.cache import MemoryRows, RowCache
from embershard.cache.config import CachePolicy
from embershard.cache.homes.shape import PoolShape
from embershard.cache.slot_state import CacheContents

CPU = torch.device("cpu")


def contents(rows: list[int], ages: list[int], scores: list[float]) -> CacheContents:
    return CacheContents(
        torch.tensor(rows, dtype=torch.int64), torch.tensor(ages, dtype=torch.int32), torch.tensor(scores)
    )


@given(st.lists(st.integers(0, 99), unique=True, max_size=40), st.lists(st.integers(1, 99), max_size=4))
def test_shards_are_parts_of_the_whole(rows: list[int], cuts: list[int]):
    whole = contents(sorted(rows), [row % 7 for row in sorted(rows)], [row / 2 for row in sorted(rows)])
    borders = [0, *sorted(set(cuts)), 100]
    parts = [whole.between(start, stop - start) for start, stop in pairwise(borders)]
    placed = [part.between(0, 100, start) for part, start in zip(parts, borders, strict=False)]
    joined = CacheContents.join([*placed[::-1], *placed])  # a second time: shards by columns
    for name in ("rows", "ages", "scores"):
        assert torch.equal(getattr(joined, name), getattr(whole, name))


def test_the_best_rows_come_last():
    saved = contents([1, 2, 3, 4, 5], [9, 0, 5, 5, 1], [2.0, 1.0, 7.0, 2.0, 2.0])
    assert saved.best(9, by_age=True).tolist() == [1, 3, 4, 5, 2]
    assert saved.best(9, by_age=False).tolist() == [2, 1, 4, 5, 3]
    assert saved.best(2, by_age=False).tolist() == [5, 3]
    assert saved.best(0, by_age=True).tolist() == []


def make_cache(policy: str, num_slots: int, decay: float | None = None, pinned: Tensor | None = None) -> RowCache:
    host = MemoryRows(PoolShape([50], 2))

    def slots(count: int) -> list[Tensor]:
        return [torch.zeros(count + 1, 2)]

    rule = CachePolicy(policy, by_next_use=False, decay=decay)  # type: ignore[arg-type]
    return RowCache(["t"], host, slots, num_slots, [0], rule, CPU, pinned_keys=pinned)


def train(cache: RowCache, *batches: list[int]) -> int:
    """Train batches; the rows that they missed."""

    def missed() -> int:
        stats = cache.stats()[0]
        return stats.lookups - stats.hits_lookups

    before = missed()
    for keys in batches:
        cache.release(cache.prepare(torch.tensor(keys), torch.tensor([len(keys)])))  # type: ignore[arg-type]
    return missed() - before


HISTORY = [[1, 2, 3, 4], [5, 2, 6, 1], [7, 7, 2], [8, 1, 2]]
REST = [[9, 10], [2, 3], [8, 9], [1, 5], [11, 7], [2, 8]]


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("decay", [None, 0.5])
def test_a_restored_cache_evicts_what_the_saved_one_would(policy, decay):
    decay = None if policy == "lru" else decay
    saved = make_cache(policy, 8, decay)
    train(saved, *HISTORY)
    restored = make_cache(policy, 8, decay)
    restored.restore(saved.contents())
    fills = [(train(saved, keys), train(restored, keys)) for keys in REST]
    assert [ours for _, ours in fills] == [theirs for theirs, _ in fills]
    cold = make_cache(policy, 8, decay)
    assert sum(train(cold, keys) for keys in REST) > sum(ours for _, ours in fills)


def test_only_free_slots_are_filled_and_pinned_rows_stay():
    saved = make_cache("lfu", 8)
    train(saved, *HISTORY)
    restored = make_cache("lfu", 5, pinned=torch.tensor([2, 40]))
    train(restored, [1, 30])
    restored.restore(saved.contents())
    train(restored, [30])
    assert sorted(restored.contents().rows.tolist()) == [1, 8, 30]  # 2, the most used one, is pinned
