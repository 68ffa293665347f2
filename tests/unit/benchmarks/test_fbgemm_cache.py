"""A model of FBGEMM's cache: sets of 32 rows by LRU, over batches that come again and again."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import fbgemm_cache
from benchmarks.fbgemm_cache import WAYS, Misses, extra_seconds, missed_rows
from embershard.planning.cost.rates import Rates
from embershard.planning.cost.topology import load_topology


@pytest.fixture(autouse=True)
def every_set(monkeypatch) -> None:
    monkeypatch.setattr(fbgemm_cache, "_SAMPLED", 1)


@pytest.mark.parametrize(("num_rows", "missed"), [(WAYS, 0), (WAYS + 1, WAYS + 1)])
def test_one_row_too_many_in_a_set_misses_all_of_them(num_rows, missed) -> None:
    """Rows that come once in a round: the oldest is always the next."""
    drawn = np.arange(num_rows).reshape(num_rows, 1)
    assert missed_rows(drawn, WAYS, num_tables=3) == Misses(3 * missed / num_rows, 3)


def test_rows_of_every_batch_stay() -> None:
    hot, cold = np.zeros((50, 1), int), np.arange(1, 51).reshape(50, 1)
    assert missed_rows(np.hstack([hot, cold]), WAYS, num_tables=1).rows == 1, "the cold one"


def test_no_row_of_the_batch_leaves_for_another() -> None:
    drawn = np.arange(2 * WAYS).reshape(1, 2 * WAYS)
    assert missed_rows(drawn, WAYS, num_tables=1).rows == WAYS, "what has no place is read where it is"


def test_sampled_sets_tell_as_much_as_all(monkeypatch) -> None:
    drawn = np.random.default_rng(3).integers(40_000, size=(20, 8000))
    found = []
    for sampled in (1, 8):
        monkeypatch.setattr(fbgemm_cache, "_SAMPLED", sampled)
        found.append(missed_rows(drawn, 30_000, num_tables=1).rows)
    assert found[1] == pytest.approx(found[0], rel=0.05)


def test_bytes_by_hand() -> None:
    """1,000 ids, 200 distinct, of 2^28 rows, in 64 sets; 10 rows of 512 bytes come, and go."""
    of_ids = 16 + 16 + 24 + (5 + 17 + 136 + 16) + (4 * 16 + 8 + 16) + (4 + 1 * 24 + 4)
    probes = 2 * 256 * (200 + 800 / 3) + 200 * (8 + 256 + 64)
    inserted = 10 * (256 + 64 + 1024)
    rates = Rates(seconds_per_embedding_byte=1e-3, seconds_per_byte_to_device=1.0)
    waited = extra_seconds(0, 0, 512, 2**28, Misses(0, 64), rates)
    found = extra_seconds(1000, 200, 512, 2**28, Misses(10, 64), rates) - waited
    assert found == pytest.approx((1000 * of_ids + probes + inserted) * 1e-3 + 10 * 512)
    assert waited == pytest.approx(9 * 5.2e-3 / 178)


def test_finding_slots_is_a_part_of_what_fbgemms_forward_takes_longer() -> None:
    """Of 3.0 ms for 1.05M ids in NVIDIA's points: rows that miss, and a counter that waits, are the rest."""
    rates = load_topology("h100").rates_for(1)
    none = extra_seconds(1_048_570, 433_723, 512, 268_435_450, Misses(0, 780_000), rates)
    some = extra_seconds(1_048_570, 433_723, 512, 268_435_450, Misses(80_000, 780_000), rates)
    assert 0.4e-3 < none < 1.0e-3 < some < 2.5e-3
