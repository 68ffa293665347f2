"""The replayed curve: the optimum bounds it, its ends are known, and a sampled trace gives nearly the same."""

from __future__ import annotations

import numpy as np
import pytest

from embershard.extras.profile_picture.hit_rate_curve import hit_rate_curve
from embershard.frequency.downsampling import downsampled
from embershard.sharding.run_shape import ReplaySettings
from tests.unit.planning.traces import skewed, trace_of

pytestmark = [pytest.mark.extra, pytest.mark.smoke, pytest.mark.slow]

ROWS = {"a": 6000, "b": 1500}
TRACE = trace_of({name: skewed(rows, 20_000, seed=rows) for name, rows in ROWS.items()})
SIZES = [400, 800, 2000, 7500]


@pytest.mark.matrix
def test_the_optimum_bounds_look_ahead():
    points = hit_rate_curve(TRACE, ROWS, SIZES, 50)
    assert [point.num_slots for point in points] == SIZES
    assert all(0.5 < point.look_ahead <= point.optimum for point in points)
    assert [point.optimum for point in points] == sorted(point.optimum for point in points)
    blind = hit_rate_curve(TRACE, ROWS, SIZES[:2], 50, ReplaySettings(lookahead=0, prefetch=0))
    for one, other in zip(points, blind, strict=False):
        assert one.optimum == other.optimum
        assert one.look_ahead > other.look_ahead + 0.01


def test_with_all_rows_each_occurring_row_is_moved_once():
    occurring = sum(len(np.unique(table.rows)) for table in TRACE.tables.values())
    (point,) = hit_rate_curve(TRACE, ROWS, [7500], 50)
    assert point.optimum == pytest.approx(1 - occurring / TRACE.num_lookups)
    assert point.look_ahead == pytest.approx(point.optimum)


def test_a_size_that_a_batch_does_not_fit_is_left_out():
    assert [point.num_slots for point in hit_rate_curve(TRACE, ROWS, [40, 800], 50)] == [800]
    with pytest.raises(ValueError, match="less than a batch"):
        hit_rate_curve(TRACE, ROWS, [800], 50_000)


@pytest.mark.matrix
def test_a_sampled_trace_gives_nearly_the_same():
    sampled = downsampled(TRACE, 10_000)
    assert sampled.rate < 1
    exact, estimated = (hit_rate_curve(trace, ROWS, SIZES, 50) for trace in (TRACE, sampled))
    for one, other in zip(exact, estimated, strict=True):
        assert other.look_ahead == pytest.approx(one.look_ahead, abs=0.02)
        assert other.optimum == pytest.approx(one.optimum, abs=0.02)
