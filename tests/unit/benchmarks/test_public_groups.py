"""What others published of a second node stands beside bounds, and no bound knows it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import public_groups
from benchmarks.public_groups import DLRM_JOBS, EFA, PINTEREST_REPORTED, RDMA, SOCKETS, Job, Link, Way
from embershard.extras.what_if.simulate_scaling import SimulatedRun
from embershard.planning.cost.topology import load_topology

pytestmark = pytest.mark.extra
ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "public_groups.json"
_SMALL = Job("two tables", "dlrm", False, 16_384)


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(public_groups, "_EFFORT", 0.01)


def test_the_script_tells_every_point(monkeypatch, tmp_path) -> None:
    """All of it but the simulation, which another test runs."""
    asked = []

    def simulated(job: Job, kind: str, nodes: int, link: Link, way: Way) -> SimulatedRun:
        asked.append((job, kind, nodes, link, way))
        seconds = 0.1 * nodes / way.sync_every**0.25 / way.groups
        return SimulatedRun(8 * nodes, 1, seconds, 1 / seconds, {"dense": seconds}, low_seconds=0.001, high_seconds=1)

    monkeypatch.setattr(public_groups, "step", simulated)
    monkeypatch.setattr("sys.argv", ["public_groups", "--output", str(tmp_path / "found.json")])
    public_groups.main()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["dlrm#356"]["reported"] == {"one node": 18, "two nodes": 3, "sparse_data_dist ms": [28, 246]}
    assert [case["job"] for case in found["dlrm#356"]["cases"]] == [job.name for job in DLRM_JOBS]
    for case in found["dlrm#356"]["cases"]:
        assert case["two over one"] == {"RDMA": 2, "sockets": 2}
        for least, most in case["sparse_data_dist ms"].values():
            assert 0 < least < most < 200
        assert set(case["two nodes"]["RDMA"]) == {way.name for way in public_groups.DLRM_LINKS["RDMA"][1]}
    told = found["Pinterest"]["bounds"]
    assert {name: set(each) for name, each in told.items()} == {
        name: {str(nodes) for nodes in each} for name, each in PINTEREST_REPORTED.items()
    }
    assert told["one group"] == {"2": [1, 1], "4": [1, 1]}
    assert told["groups"]["8"] == [16, 256], "both ends, of averages every 16th step and hardly any"
    links = {(kind, nodes): link for _, kind, nodes, link, _ in asked}
    assert links["h100", 8] == EFA["h100"]
    assert {link for job, kind, *_, link, _ in asked if kind == "a100-40"} == {RDMA, SOCKETS}


@pytest.mark.slow
def test_what_is_told_obeys_links_and_groups(monkeypatch) -> None:
    """Simulated, with two of the tables: a second node on a slow link costs, a slower one more, and groups less if
    they seldom average."""
    whole = public_groups.model
    monkeypatch.setattr(public_groups, "model", lambda name: (whole(name)[0][:2], *whole(name)[1:]))
    seconds = {
        name: public_groups.step(_SMALL, "a100-40", nodes, link, way).step_seconds
        for name, nodes, link, way in (
            ("one", 1, RDMA, Way()),
            ("RDMA", 2, RDMA, Way()),
            ("sockets", 2, SOCKETS, Way()),
            ("often", 2, SOCKETS, Way(2, 1)),
            ("seldom", 2, SOCKETS, Way(2, 4096)),
        )
    }
    assert seconds["one"] < seconds["RDMA"] < seconds["sockets"]
    assert seconds["seldom"] < seconds["sockets"]
    assert seconds["seldom"] < seconds["often"]


def test_an_exchange_is_as_long_as_its_bytes_take() -> None:
    """By hand: of a byte, 7 of 8 parts go to the node's other ranks; of two nodes 7 of 16, and 8 to the other node."""
    topology = EFA["h100"].of(load_topology("h100x8x2"))
    within, across = 1 / (450e9 * 0.7), 1 / (50e9 * 0.7)
    assert public_groups.exchange_seconds(load_topology("h100x8"), 1) == pytest.approx(7 / 8 * within)
    assert public_groups.exchange_seconds(topology, 2) == pytest.approx((7 * within + 8 * across) / 16)
    ratios = public_groups.exchange_ratios()
    assert ratios["h100"] == ratios["h200"], "links decide, whatever the GPU"
    assert list(ratios["h100"].values()) == sorted(ratios["h100"].values())
    faster = replace(EFA["h100"], share=1.0).of(load_topology("h100x8x2"))
    assert public_groups.exchange_seconds(faster, 2) < public_groups.exchange_seconds(topology, 2)


def test_what_is_shown_is_of_these_points() -> None:
    shown = json.loads(RESULTS.read_text())
    dlrm, pinterest = shown["dlrm#356"], shown["Pinterest"]
    assert [case["job"] for case in dlrm["cases"]] == [job.name for job in DLRM_JOBS]
    page = (ROOT / "docs" / "groups.md").read_text()
    for case in dlrm["cases"]:
        two = case["two nodes"]
        of_groups = (two["RDMA"][f"2 groups, average every {every}, fp32"] for every in (1, 16, 256))
        steps = (case["one node"], two["RDMA"]["fp32"], two["sockets"]["fp32"], *of_groups)
        assert f"| {case['job']} | {' | '.join(format(each['steps/s'], '.1f') for each in steps)} |" in page
    assert pinterest["at least on four nodes, with 1.13 on two"] == public_groups.least_on_four()
    assert {
        kind: {int(nodes): each for nodes, each in of.items()}
        for kind, of in pinterest["all-to-all over that of one node"].items()
    } == public_groups.exchange_ratios()
    again = public_groups.bounds(
        [
            {
                **case,
                "one group": {int(nodes): each for nodes, each in case["one group"].items()},
                "groups": {
                    every: {int(nodes): each for nodes, each in points.items()}
                    for every, points in case["groups"].items()
                },
            }
            for case in pinterest["cases"]
        ]
    )
    assert {name: {str(nodes): list(ends) for nodes, ends in each.items()} for name, each in again.items()} == (
        pinterest["bounds"]
    )


@pytest.mark.slow
def test_what_is_shown_is_told_today(monkeypatch) -> None:
    monkeypatch.setattr(public_groups, "_EFFORT", 0.1)
    public_groups.step.cache_clear()
    shown = json.loads(RESULTS.read_text())["dlrm#356"]["cases"][0]["two nodes"]["RDMA"]["fp32"]
    found = public_groups.step(DLRM_JOBS[0], public_groups.DLRM_MACHINE, 2, RDMA, Way())
    assert shown["ms"] == pytest.approx(1e3 * found.step_seconds, rel=0.02)
