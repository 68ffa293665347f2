"""An exception at any line of an operation leaves a cache that is as good as before, or one that refuses everything."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.covering import keep, matrix
from tests.faults.cache_level import (
    SETTINGS,
    Point,
    bound_too_early,
    chosen,
    each_place_once,
    try_point,
    try_points,
    unguarded,
)
from tests.faults.injection import no_collections

# Where a fault once had consequences; all of their lines, wherever they run.
_FORMER_BUGS = ("StagedTransfer._land_one", "UpdateGate.", "RowMoves.fetch_again")


@pytest.mark.parametrize("every", [32, matrix(1)])
def test_every_line_of_every_operation_once(every: int) -> None:
    tally = try_points(each_place_once(seed=1)[::every])
    assert tally.problems == []
    assert tally.totals["equal"] > 500 / every
    assert tally.totals["refused"] > 200 / every


@functools.cache
def points_of_staged_and_written_rows() -> list[Point]:
    return chosen(None, 0, [name for name in SETTINGS if "staged" in name or "written" in name])


@pytest.mark.parametrize("function", keep(["RowMoves.fetch_again"], _FORMER_BUGS))
def test_where_a_fault_once_had_consequences(function: str) -> None:
    found = [point for point in points_of_staged_and_written_rows() if f" {function}" in point.place]
    assert len(found) > 100
    assert try_points(found[:: max(1, len(found) // 40)]).problems == []


@pytest.mark.matrix
@pytest.mark.parametrize("control", keep([unguarded], [unguarded, bound_too_early]))
def test_the_harness_finds_what_is_wrong(control: Callable[[], AbstractContextManager[None]]) -> None:
    with control(), no_collections():
        assert any("rows differ in the host tier" in try_point(point)[1] for point in chosen(1500, seed=3))
