"""The errors that are said beside predictions are those that were measured."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from embershard.planning.cost import back_test
from embershard.planning.cost.back_test import PUBLIC_POINTS, caches_note, error_note
from embershard.planning.cost.topology import load_topology
from embershard.planning.make_plan import make_plan
from embershard.planning.request import Budget
from tests.unit.planning.requests import make_request

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results"


def test_published_figures_are_those_of_the_benchmark() -> None:
    cases = json.loads((RESULTS / "simulator_public.json").read_text())["cases"]
    names = ("system", "model", "machine", "precision", "published_samples_per_second", "simulated_samples_per_second",
             "error", "limited_by")  # fmt: skip
    assert [tuple(case[name] for name in names) for case in cases] == [
        (each.system, each.model, each.machine, each.precision, each.reported, each.simulated, each.error,
         each.limited_by) for each in PUBLIC_POINTS
    ]  # fmt: skip
    assert [case["global_batch_size"] for case in cases] == [
        each.batch_size * load_topology(each.machine).world_size for each in PUBLIC_POINTS
    ]
    assert {each.precision for each in PUBLIC_POINTS if each.model == "dlrm"} == {"tf32"}, "torch's default until 1.12"


def test_the_pages_show_them() -> None:
    log, page = ((ROOT / "docs" / name).read_text() for name in ("log/planning.md", "planning.md"))
    for each in PUBLIC_POINTS:
        assert f"| {each.reported:,} | {each.simulated:,} | {each.error:+.0%} |" in log, each
    page = " ".join(page.split()).replace(" %", "%")
    errors = [each.error for each in PUBLIC_POINTS]
    beyond = sum(abs(error) > 0.45 for error in errors)
    assert f"Of {len(errors)} points the median error is {statistics.median(map(abs, errors)):.0%}" in page
    assert f"{min(errors):+.0%} to {max(errors):+.0%}, and {beyond} are beyond 45%" in page


def test_errors_after_a_calibration_are_those_of_the_benchmark() -> None:
    found = json.loads((RESULTS / "simulator_back_test.json").read_text())
    assert (found["median_error"], found["largest_error"], len(found["cases"])) == (
        back_test.CALIBRATED_MEDIAN,
        back_test.CALIBRATED_LARGEST,
        back_test.CALIBRATED_CASES,
    )


@pytest.mark.parametrize(
    ("limit", "is_calibrated", "is_gpu", "said"),
    [
        ("dense", False, True, "limited by dense: on 43 published figures of DLRM and DCNv2 (HugeCTR, PyTorch, SOK, "),
        ("dense", False, True, "TorchRec on A100, H100, V100) simulated samples/s were off by -19% to +108%, in the "),
        ("overhead", False, True, "off by -17% to +18%, in the median by 13%. Do not choose or buy machines by it"),
        (
            "all_to_all",
            False,
            True,
            "limited by all to all: not known, no published figure is. Over all limits: on 50 ",
        ),
        ("dense", False, False, "not known, no CPU's assumed speed was compared"),
        ("dense", True, False, "the median was 5.2% and the largest 17.9%."),
        ("dense", True, True, "not known for a GPU; "),
    ],
)
def test_the_note_is_of_what_limits_the_step(limit, is_calibrated, is_gpu, said) -> None:
    assert said in error_note(limit, is_calibrated=is_calibrated, is_gpu=is_gpu)


@pytest.mark.slow
def test_a_plan_carries_it() -> None:
    request = make_request(Budget(ratio=0.1), topology=load_topology("h100x2"))
    plan = make_plan(request)
    assert error_note(plan.prediction.bottleneck, is_calibrated=False, is_gpu=True) in plan.notes


@pytest.mark.slow
def test_a_plan_with_caches_on_a_gpu_says_that_none_has_measured_them() -> None:
    """In one sentence, with the part of the step that it is about."""
    gpu = load_topology("h100x2")
    measured = replace(gpu, rates={2: gpu.rates_for(2)})
    few, all_rows = Budget(ratio=0.1), Budget(device_bytes=10**10)
    cases = (few, gpu), (all_rows, gpu), (few, measured)
    plans = [make_plan(make_request(each, topology=machine)) for each, machine in cases]
    said = [[note for note in plan.notes if "No GPU has measured these caches" in note] for plan in plans]
    assert [len(notes) for notes in said] == [1, 0, 0]
    told = plans[0].prediction.planning_seconds
    assert said[0] == [caches_note(told)]
    assert f"is told to take {1e3 * told:.2g} ms of a step" in said[0][0]
    assert said[0][0].count(".") == 2, "one sentence, and a number"
