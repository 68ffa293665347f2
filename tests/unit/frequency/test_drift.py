"""Drift is seen where there is some, and not where there is none."""

from __future__ import annotations

import numpy as np
import pytest

from embershard.frequency import SampledTrace, TableTrace
from embershard.frequency.compare import measure_drift
from embershard.frequency.downsampling import downsampled

NUM_ROWS = 20_000


def loss(drift):
    """Hit rate that rows chosen on the first part lose on the last one, against its own best."""
    return drift.hit_rates[-1, -1] - drift.hit_rates[0, -1]


def zipf_trace(moved: float, num_samples: int = 120_000) -> SampledTrace:
    """Lookups whose rows are shifted by ``moved`` times the table from the first sample to the last."""
    random = np.random.default_rng(0)
    samples = np.arange(num_samples)
    ranks = np.floor(NUM_ROWS ** random.random(num_samples)).astype(np.int64)
    shift = np.floor(samples / num_samples * moved * NUM_ROWS).astype(np.int64)
    return SampledTrace(1.0, num_samples, {"t": TableTrace(samples, (ranks * 7919 + shift * 7919) % NUM_ROWS)}, {}, {})


def test_data_that_stay_the_same():
    drift = measure_drift(zipf_trace(0.0))
    assert drift.hit_rates.shape == (8, 8)
    assert loss(drift) < 0.03
    assert drift.top_rows_kept > 0.5
    neighbours, far = drift.hit_rates[-2, -1], drift.hit_rates[0, -1]
    assert far == pytest.approx(neighbours, abs=0.01)


def test_data_that_move():
    drift = measure_drift(zipf_trace(1.0))
    assert loss(drift) > 0.9 * drift.hit_rates[-1, -1], "the first part's rows are of no use"
    assert drift.top_rows_kept < 0.1
    assert (drift.hit_rates.max(0) == np.diag(drift.hit_rates)).all(), "a part's own rows find most"


def test_rows_that_come_up_late_are_new():
    samples = np.arange(8000)
    rows = np.where(samples < 6000, samples % 10, 100 + samples % 30)
    rows[samples % 2 == 0] = 0
    drift = measure_drift(SampledTrace(1.0, 8000, {"t": TableTrace(samples, rows)}, {}, {}))
    assert drift.new_rows_share == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("moved", [0.0, 1.0])
def test_a_sampled_trace_shows_the_same_drift(moved):
    trace = zipf_trace(moved)
    whole, sampled = measure_drift(trace), measure_drift(downsampled(trace, 40_000))
    assert loss(sampled) == pytest.approx(loss(whole), abs=0.05)
    assert sampled.new_rows_share == pytest.approx(whole.new_rows_share, abs=0.05)


def test_too_little_to_be_cut_into_parts():
    trace = zipf_trace(0.0, 1500)
    assert measure_drift(trace) is None
    assert measure_drift(zipf_trace(0.0, 2500)).hit_rates.shape == (2, 2)
