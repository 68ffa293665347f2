"""Published times of kernels stand beside what a plan's costs say, and no cost knows them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import kernel_points
from benchmarks.kernel_points import HEAD, POINTS, kernel_case, table_row
from embershard.planning.cost.topology import Assumptions, load_topology

ROOT = Path(__file__).resolve().parents[3]
SHOWN = json.loads((ROOT / "benchmarks" / "results" / "simulator_public.json").read_text())
#: What is told of a point; all else in its case has a published figure in it.
TOLD = ("ours_ms", "fbgemm_by_its_code_ms", "fills", "missed_by_fbgemm")


@pytest.mark.slow
def test_every_point_is_told_and_printed(monkeypatch) -> None:
    monkeypatch.setattr(kernel_points, "NUM_BATCHES", 1)
    found = kernel_points.kernel_points()
    assert len(found["cases"]) == len(POINTS) == 10
    for case, point in zip(found["cases"], POINTS, strict=True):
        told = [*case["ours_ms"].values(), case["fbgemm_by_its_code_ms"], *case["ours_over_published"].values()]
        assert all(math.isfinite(each) and each >= 0 for each in told), case
        assert case["ours_ms"]["device"] > 0
        assert ("never measured" in case["ours"]) == (point.kept is not None)
        assert table_row(case).count("|") == HEAD.count("|")


@pytest.mark.slow
@pytest.mark.parametrize("point", [POINTS[0], POINTS[2], POINTS[7]], ids=lambda point: point.storage)
def test_nothing_told_depends_on_what_was_published(point, monkeypatch) -> None:
    monkeypatch.setattr(kernel_points, "NUM_BATCHES", 1)
    other = replace(point, fbgemm_ms=0.5, dynamicemb_ms=50.0, distinct=1.0)
    assert [kernel_case(point)[name] for name in TOLD] == [kernel_case(other)[name] for name in TOLD]


def test_the_machine_has_no_constant_of_its_own_beside_its_datasheet() -> None:
    machine = load_topology("h100")
    assert machine.assumptions == Assumptions()
    assert not machine.rates


def test_the_points_are_shown_where_the_steps_are() -> None:
    cases = SHOWN["kernels"]["cases"]
    assert [case["published_ms"] for case in cases] == [
        {"FBGEMM": each.fbgemm_ms, "dynamicemb": each.dynamicemb_ms} for each in POINTS
    ]
    assert SHOWN["kernels"]["largest_error_of_resident"] <= 0.1
    assert max(abs(case["error"]) for case in cases) <= 0.35, "FBGEMM's cache, by its code"
    page = (ROOT / "docs" / "planning.md").read_text()
    for line in (HEAD, *map(table_row, cases)):
        assert line in page
    assert not [name for name in SHOWN["not_simulated"] if "dynamicemb" in name]


@pytest.mark.slow
def test_what_is_shown_of_resident_tables_is_what_is_told_today() -> None:
    (shown,) = (each for each in SHOWN["kernels"]["cases"] if (each["rows"], each["optimizer"]) == ("resident", "Adam"))
    assert kernel_case(POINTS[0])["ours_ms"] == pytest.approx(shown["ours_ms"], rel=2e-3)
    assert shown["error"] == pytest.approx(shown["ours_ms"]["device"] / POINTS[0].fbgemm_ms - 1, abs=1e-3)
    assert shown["distinct_rows"]["drawn"] == pytest.approx(shown["distinct_rows"]["published"], rel=0.01)
