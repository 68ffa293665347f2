"""Two ranks with dropout: bit for bit as without a cache, and each with masks of its own."""

from __future__ import annotations

import pytest

from tests.ranks import dropout
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks


def test_a_cache_changes_no_mask_and_ranks_have_their_own(two_ranks: RankPool):
    cached, stock, plain = (
        two_ranks.run(dropout.train, probability, is_cached)
        for probability, is_cached in ((0.25, True), (0.25, False), (0.0, False))
    )
    assert [losses for losses, _, _ in cached] == [losses for losses, _, _ in stock]
    assert [losses for losses, _, _ in cached] != [losses for losses, _, _ in plain]
    assert [seed for _, seed, _ in cached] == [seed for _, seed, _ in stock]
    assert cached[0][1] != cached[1][1]
    assert sum(evictions for _, _, evictions in cached) > 0
