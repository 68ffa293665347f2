"""How often pins mattered: slots that would have been evicted but for a batch that uses them."""

from __future__ import annotations

import pytest
import torch

from embershard.cache import CacheGrowthWarning, HostStore, RowCache, Ticket
from embershard.cache.config import CachePolicy, Scoring


def make_cache(num_slots: int, scoring: Scoring = "lru") -> RowCache:
    host = HostStore([20], dim=2, dtype=torch.float32, states=[])

    def slots(count: int) -> list[torch.Tensor]:
        return [torch.zeros(count + 1, 2)]

    return RowCache(["t"], host, slots, num_slots, [0], CachePolicy(scoring, by_next_use=False), torch.device("cpu"))


def prepare(cache: RowCache, *keys: int, if_it_fits: bool = False) -> Ticket | None:
    return cache.prepare(torch.tensor(keys), torch.tensor([len(keys)]), if_it_fits=if_it_fits)


def train(cache: RowCache, *keys: int) -> None:
    ticket = prepare(cache, *keys)
    assert ticket is not None
    cache.release(ticket)


def test_evictions_of_older_rows_put_pins_under_no_pressure() -> None:
    cache = make_cache(4)
    watch = cache.watch_pins()
    train(cache, 0, 1)
    train(cache, 2, 3)
    held = prepare(cache, 4)
    train(cache, 5)
    assert held is not None
    assert cache.stats()[0].evictions == 2
    assert (watch.in_flight, watch.own) == (0, 0)


def test_slots_that_rank_below_a_victim_were_passed_over() -> None:
    cache = make_cache(4, "lfu")
    watch = cache.watch_pins()
    for _ in range(2):
        train(cache, 0, 1, 2)
    held = prepare(cache, 3)
    train(cache, 4)  # row 3 was used once
    assert held is not None
    assert cache.state.map.lookup(torch.arange(5)).sign().tolist() == [0, 1, 1, 1, 1]
    assert (watch.in_flight, watch.own) == (1, 0)


def test_a_batch_that_does_not_fit_passes_all_pinned_slots_over() -> None:
    cache = make_cache(4)
    watch = cache.watch_pins()
    held = prepare(cache, 0, 1, 2)
    assert prepare(cache, 3, 4, if_it_fits=True) is None
    assert held is not None
    assert (watch.in_flight, watch.own) == (3, 0)


def test_a_batch_alone_saves_the_rows_that_it_found() -> None:
    cache = make_cache(3)
    watch = cache.watch_pins()
    train(cache, 0, 1, 2)
    train(cache, 2, 4, 5)
    assert (watch.in_flight, watch.own) == (0, 0), "row 2 ranks above those that left"
    with pytest.warns(CacheGrowthWarning):
        train(cache, 2, 4, 6, 7)
    assert (watch.in_flight, watch.own) == (0, 2)
