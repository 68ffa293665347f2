"""The replay of host memory in front of a file: it reads no less than the optimum, and tells what moved."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.two_levels import replay_two_levels
from embershard.cache.config import CachePolicy
from embershard.cache.file import places
from embershard.extras.profile_picture.hit_rate_curve import offline_optimum
from embershard.planning.simulate.file_tier import FileTraffic, Levels
from embershard.sharding.run_shape import ReplaySettings

Batches = list[tuple[Tensor, Tensor]]


def of_rows(*rows: list[int]) -> Batches:
    return [(torch.tensor(batch), torch.tensor([len(batch)])) for batch in rows]


def skewed(num_batches: int, batch_size: int, rows: int, seed: int = 0) -> Batches:
    generator = np.random.default_rng(seed)
    drawn = (generator.random((num_batches, batch_size)) ** 3 * rows).astype(np.int64)
    return of_rows(*drawn.tolist())


def replay(
    batches: Batches, rows: int, levels: Levels, lookahead: int, policy: CachePolicy | None = None
) -> FileTraffic:
    return replay_two_levels(batches, [rows], levels, ReplaySettings(policy or CachePolicy(), lookahead, prefetch=1))


def fewest_reads(batches: Batches, places: int) -> int:
    """Of any cache: what it fills, less the rows that are drawn."""
    fills = offline_optimum([keys.numpy() for keys, _ in batches], places)
    assert fills is not None
    return fills - torch.cat([keys for keys, _ in batches]).unique().numel()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 19), min_size=1, max_size=4), min_size=1, max_size=14),
    st.integers(12, 16),
    st.integers(0, 16),
    st.integers(0, 3),
    st.sampled_from([CachePolicy(), CachePolicy("lru", by_next_use=False)]),
)
def test_no_replay_reads_less_than_the_optimum(
    rows: list[list[int]], places: int, lookahead: int, read_ahead: int, policy: CachePolicy
) -> None:
    """8 slots hold two batches; 12 places hold what is on the device, and one more."""
    batches = of_rows(*rows)
    found = replay(batches, 20, Levels(8, places, 4, read_ahead), lookahead, policy)
    assert found.steps == len(batches)
    assert found.rows_read >= fewest_reads(batches, places)
    assert found.rows_drawn == len({row for batch in rows for row in batch})
    in_memory = found.rows_drawn + found.rows_read - found.rows_written
    assert 0 < in_memory <= places, "a row comes into memory and leaves it in turn"
    assert found.pages_read <= found.rows_read
    assert found.pages_patched <= found.pages_written <= found.rows_written


@pytest.mark.slow
def test_a_cache_with_more_places_would_be_seen() -> None:
    """The negative control of the optimum: a replay with places for half as many rows again."""
    batches = skewed(60, 8, 300)
    levels = Levels(24, 60, 8, read_ahead=1)
    assert replay(batches, 300, levels, 59).rows_read >= fewest_reads(batches, 60)
    assert replay(batches, 300, dataclasses.replace(levels, num_places=90), 59).rows_read < fewest_reads(batches, 60)


@pytest.mark.matrix
def test_knowing_more_reads_less() -> None:
    batches = skewed(200, 8, 400)
    reads = [replay(batches, 400, Levels(24, 80, 8, 2), lookahead).rows_read for lookahead in (2, 8, 64)]
    lru = replay(batches, 400, Levels(24, 80, 8, 2), 8, CachePolicy("lru", by_next_use=False)).rows_read
    assert reads == sorted(reads, reverse=True)
    assert reads[-1] < 0.8 * reads[0]
    assert reads[0] < lru


def test_all_in_memory_reads_and_writes_nothing() -> None:
    found = replay(skewed(40, 8, 100), 100, Levels(24, 110, 8), 16)
    assert (found.rows_read, found.rows_written, found.crowded_steps) == (0, 0, 0)
    assert found.rows_drawn > 60


def test_rows_of_a_page_that_leave_together_are_one_write() -> None:
    """Rows 0 to 15 leave at once (a sixteenth of 32 is 2, but a batch needs 16 places): two pages of 8, both whole."""
    batches = of_rows(list(range(16)), list(range(16, 32)), list(range(32, 48)), [0, 1, 8])
    found = replay(batches, 48, Levels(16, 33, 8, read_ahead=0), 2)
    assert (found.rows_read, found.pages_read) == (3, 2)
    assert found.pages_written < found.rows_written / 4


def test_a_page_is_read_before_it_is_patched_only_if_others_of_its_rows_are_in_the_file() -> None:
    together = of_rows([0, 1], [2, 3], [4, 5], [6, 7])
    alone = of_rows([0, 4], [1, 5], [2, 6], [3, 7])
    levels = Levels(2, 4, rows_per_page=2, read_ahead=0)
    assert replay(together, 8, levels, 1).pages_patched == 0
    assert replay(alone, 8, levels, 1).pages_patched > 0


@pytest.mark.slow
def test_rows_on_the_device_keep_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = of_rows(*([[0, 1, 2, 3], [4 + n % 30, 40 + n]][n % 2] for n in range(120)))
    levels, lru = Levels(8, 14, 4, read_ahead=1), CachePolicy("lru", by_next_use=False)
    assert replay(batches, 200, levels, 1, lru).rows_read > 0
    monkeypatch.setattr(places, "_PINNED", 0)  # the negative control: the longest unused, so the first victims
    with pytest.raises(AssertionError, match="were not pinned"):
        replay(batches, 200, levels, 1, lru)


@pytest.mark.slow
def test_steps_without_room_for_the_read_ahead_are_counted() -> None:
    batches = skewed(30, 12, 2000)
    assert replay(batches, 2000, Levels(26, 200, 8, 4), 16).crowded_steps == 0
    assert replay(batches, 2000, Levels(26, 40, 8, 4), 16).crowded_steps > 20


def test_a_batch_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="need more than 3 places in host memory"):
        replay(of_rows([0, 1, 2, 3]), 9, Levels(4, 3, 4), 2)


def test_a_warm_up_is_refused() -> None:
    with pytest.raises(ValueError, match="needed one without warm-up"):
        replay(of_rows([0]), 9, Levels(4, 3, 4), 2, CachePolicy("frequency", warmup=True))
