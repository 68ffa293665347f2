"""NVIDIA's published points are simulated as its programs place and exchange tables, and by nothing that they show."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import public_systems
from benchmarks.public_systems import POINTS, ROWS, SYSTEMS, simulated
from embershard.planning.cost.topology import load_topology

RESULTS = Path(public_systems.__file__).parent / "results"


def test_every_point_has_a_machine_a_format_and_a_source() -> None:
    assert len(POINTS) == len(set(POINTS)) == 42
    for point in POINTS:
        assert load_topology(point.machine).at(point.precision).precision == point.precision
        assert point.reported > 100_000
    assert all("github.com/NVIDIA" in system.source for system in SYSTEMS.values())
    assert {sum(rows) * 128 * 4 // 2**30 for rows in ROWS.values()} == {15, 84, 420}, "GiB, as the READMEs have them"


@pytest.mark.parametrize("num_ranks", [1, 8, 16])
@pytest.mark.parametrize("system", SYSTEMS)
def test_tables_are_where_the_programs_have_them(system, num_ranks) -> None:
    placed = SYSTEMS[system].places(ROWS["large"], num_ranks)
    assert len(placed) == 26
    assert all(ranks and all(0 <= rank < num_ranks for rank in ranks) for _, ranks in placed)
    tables = Counter(rank for kind, ranks in placed if kind != "row_wise" for rank in ranks)
    if num_ranks == 8:
        assert max(tables.values(), default=0) == {"TensorFlow 2": 4, "PyTorch": 4, "SOK": 0}[system]
    if system == "PyTorch" and num_ranks > 4:
        assert 0 not in tables, "it has the layers over dense features"
    if system == "TensorFlow 2" and num_ranks == 8:
        assert sum(kind == "column_wise" for kind, _ in placed) == 3, "tables of more than 5e9 numbers"


def test_tables_of_more_than_ten_billion_numbers_are_cut_by_rows() -> None:
    placed = SYSTEMS["TensorFlow 2"].places(ROWS["extra_large"], 8)
    by_rows = [rows for rows, (kind, _) in zip(ROWS["extra_large"], placed, strict=True) if kind == "row_wise"]
    assert sorted(by_rows) == [130229467, 187188510, 227605432, 292775614]


@pytest.mark.parametrize("point", [POINTS[2], POINTS[21], POINTS[35]], ids=lambda point: point.system)
def test_nothing_told_depends_on_what_was_published(point) -> None:
    assert simulated(point) == simulated(replace(point, reported=1))


def test_a_host_that_waits_for_the_gpu_adds_to_the_step(monkeypatch) -> None:
    point = next(point for point in POINTS if point.system == "PyTorch" and point.machine == "a100-80x8")
    system = SYSTEMS["PyTorch"]
    told = []
    for waits in (True, False):
        slow = replace(system, waits=waits, host_seconds=lambda *_: 1e-3)
        monkeypatch.setitem(SYSTEMS, "PyTorch", slow)
        told.append(simulated(point)[0])
    assert told[0] == pytest.approx(told[1] + 1e-3), "beside the GPU it is hidden"


def test_layers_on_the_first_rank_alone_make_the_others_wait(monkeypatch) -> None:
    point = next(point for point in POINTS if point.system == "PyTorch" and point.machine == "a100-80x8")
    split = simulated(point)[0]
    monkeypatch.setitem(SYSTEMS, "PyTorch", replace(SYSTEMS["PyTorch"], bottom_on_first=False))
    assert simulated(point)[0] < split - 3e-4


@pytest.mark.slow
def test_what_is_shown_is_what_is_told_today() -> None:
    cases = json.loads((RESULTS / "simulator_public.json").read_text())["cases"][-len(POINTS) :]
    for point, case in zip(POINTS, cases, strict=True):
        seconds, _, host_seconds = simulated(point)
        assert case["simulated_ms"] == pytest.approx(1e3 * seconds, rel=0.01, abs=0.01), point
        assert case["host_ms"] == pytest.approx(1e3 * host_seconds, abs=0.01)
        assert case["published_samples_per_second"] == point.reported
