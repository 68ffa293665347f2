"""Predicted beside measured: errors, verdicts, what to know; and rates corrected by a run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.errors import ShardingError
from embershard.planning.cost.rates import Rates, StepWork, step_parts
from embershard.planning.cost.topology import Topology, load_topology, save_topology
from embershard.planning.recalibrate import Recalibration, measured_work, recalibrated
from embershard.planning.verify.compare import Pair, PlanComparison, compare, notes
from embershard.run_result import RunResult
from embershard.sharding.plan import Plan
from tests.unit.planning.runs import STEPS, changed, predicted_plan, result_of, sent_bytes, without_cache

RATES = Rates(seconds_per_flop=1e-9, seconds_per_planned_id=1e-6, seconds_per_fill=2e-6, step_overhead_seconds=1e-3)


def machine(**changes: Any) -> Topology:
    given = {"ranks_per_node": 2, "host_memory_bytes": 10**9, "rates": {2: RATES, 4: RATES}}
    return Topology("mine", "measured in May", "cpu", **{**given, **changes})


def verdict(comparison: PlanComparison, what: str) -> Any:
    return next(each for each in comparison.verdicts if each.what == what)


def compared(plan: Plan, result: dict[str, Any]) -> PlanComparison:
    return compare(plan, RunResult.of(result))


def corrected(topology: Topology, plan: Plan, result: dict[str, Any], **names: str) -> Recalibration:
    return recalibrated(topology, plan, RunResult.of(result), **names)


def told(plan: Plan, result: dict[str, Any], *more: Any) -> str:
    return " ".join(notes(plan, RunResult.of(result), *more))


def test_a_run_as_predicted_has_no_errors():
    plan = predicted_plan()
    found = compared(plan, result_of(plan))
    assert {(table.table, table.rank) for table in found.tables} == {
        (t, r) for t in ("a", "b", "c") for r in (0, 1)
    } - {("a", 1), ("c", 0)}
    for part in (*found.tables, *found.ranks):
        pairs = [each for each in vars(part.traffic).values() if isinstance(each, Pair)]
        if getattr(part, "kernel", "cached") == "cached":
            assert all(pair.error == pytest.approx(0, abs=1e-9) for pair in pairs)
            assert part.traffic.bytes_to_device.measured == part.traffic.fills.measured * 68
    assert [each.error for each in found.verdicts] == [pytest.approx(0, abs=1e-9)] * 5
    assert all(each.kept for each in found.verdicts)
    assert notes(plan, RunResult.of(result_of(plan))) == [
        "1 of 3 tables are whole on the device: nothing is counted for them."
    ]


def test_errors_have_a_sign_a_worst_table_and_a_verdict():
    plan = predicted_plan()
    result = changed(result_of(plan), 1, "b", hit_rate_unique=0.5, hit_rate_lookups=0.68)  # predicted: 0.6 and 0.7
    found = compared(plan, result)
    worst = found.tables[0]
    assert (worst.table, worst.rank) == ("b", 1)
    assert worst.traffic.hit_rate_unique.error == pytest.approx(0.1)
    assert worst.traffic.worst_points == pytest.approx(10)
    unique = verdict(found, "hit rate per unique id")
    assert unique.error == pytest.approx(10 / 3)  # of three cached tables and ranks
    assert not unique.kept
    assert "worst b on rank 1 with 10.00" in unique.detail
    assert verdict(found, "hit rate per lookup").kept


def test_the_mean_error_is_also_given_per_lookup():
    plan = predicted_plan()
    many = changed(result_of(plan), 0, "a", lookups=8 * 1000 * STEPS, hit_rate_lookups=0.79)  # predicted: 0.8
    lookups = verdict(compared(plan, many), "hit rate per lookup")
    assert lookups.error == pytest.approx(1 / 3)
    assert "0.82 where every lookup counts the same" in lookups.detail  # 8000 of 8000 + 1000 + 800


@pytest.mark.parametrize(("measured", "kept"), [(1.019, True), (1.021, False), (0.981, True)])
def test_device_bytes_promise_two_percent(measured, kept):
    plan = predicted_plan()
    result = result_of(plan)
    result["cache"]["ranks"][1]["device_bytes"] = round(result["cache"]["ranks"][1]["device_bytes"] * measured)
    found = verdict(compared(plan, result), "device bytes")
    assert found.kept is kept
    assert "rank 1" in found.detail


@pytest.mark.parametrize(("measured", "kept"), [(1.019, True), (1.021, False), (0.981, True)])
def test_bytes_between_ranks_promise_two_percent(measured, kept):
    plan = predicted_plan()
    assert plan.prediction is not None
    found = compared(plan, result_of(plan, sent_bytes=sent_bytes(plan.prediction, measured)))
    assert verdict(found, "bytes between ranks").kept is kept
    assert found.sent_bytes["ids"] == Pair(1000, pytest.approx(1000 * measured))
    assert found.sent_bytes["gradients"] == Pair(2000, pytest.approx(2000 * measured))
    assert found.sent_bytes["other"].predicted is None


def test_errors_of_two_kinds_do_not_make_up_for_each_other():
    plan = predicted_plan()
    assert plan.prediction is not None
    sent = sent_bytes(plan.prediction)
    sent["embeddings"] *= 1.05
    sent["gradients"] *= 0.95
    found = verdict(compared(plan, result_of(plan, sent_bytes=sent)), "bytes between ranks")
    assert found.kept is False
    assert "gradients, the worst kind" in found.detail


def with_averages(plan: Plan, sent: float) -> Plan:
    """The plan of a group of several, each of whose ranks sends so many bytes for averages in a step."""
    assert plan.prediction is not None
    work = {"sent_sync_bytes": sent / 4, "network_sync_bytes": sent * 3 / 4}
    ranks = tuple(dataclasses.replace(rank, work={**rank.work, **work}) for rank in plan.prediction.ranks)
    return dataclasses.replace(plan, prediction=dataclasses.replace(plan.prediction, ranks=ranks))


@pytest.mark.parametrize(("measured", "kept"), [(1.04, True), (1.06, False), (0.96, True)])
def test_averages_of_groups_are_promised_apart(measured: float, kept: bool):
    plan = with_averages(predicted_plan(), 400.0)
    assert plan.prediction is not None
    sent = sent_bytes(plan.prediction)
    sent["sync"] = 400.0 * measured * STEPS * len(plan.prediction.ranks)
    found = compared(plan, result_of(plan, sent_bytes=sent))
    assert found.sent_bytes["sync"] == Pair(400, pytest.approx(400 * measured))
    assert verdict(found, "bytes of averages").kept is kept
    assert verdict(found, "bytes between ranks").error == 0
    assert found.verdicts[-1].what == "step time"


def test_without_groups_nothing_is_said_of_averages():
    plan = predicted_plan()
    for run in (result_of(plan), result_of(plan, measured_steps=0)):
        found = compared(plan, run)
        assert list(found.sent_bytes) == ["ids", "embeddings", "gradients", "dense_all_reduce", "other"]
        assert "bytes of averages" not in [each.what for each in found.verdicts]


def test_averages_that_only_one_of_plan_and_run_has_are_shown():
    """A plan of an earlier version, or a run without groups by a plan with them."""
    plan = predicted_plan()
    assert plan.prediction is not None
    measured = compared(plan, result_of(plan, sent_bytes={**sent_bytes(plan.prediction), "sync": 1e6}))
    assert verdict(measured, "bytes of averages").kept is False
    planned = with_averages(plan, 400.0)
    assert compared(planned, result_of(planned)).sent_bytes["sync"] == Pair(400, 0)


def test_a_run_without_steps_sent_nothing_to_compare():
    plan = predicted_plan()
    assert verdict(compared(plan, result_of(plan, measured_steps=0)), "bytes between ranks").kept is None


@pytest.mark.parametrize(
    ("milliseconds", "kept"), [(10.0, True), (8.4, True), (8.3, False), (12.4, True), (12.6, False)]
)
def test_the_step_time_promises_twenty_percent_of_what_was_measured(milliseconds, kept):
    plan = predicted_plan(step_seconds=0.010)
    found = compared(plan, result_of(plan, step_ms={"p50": milliseconds}))
    assert verdict(found, "step time").kept is kept
    assert found.is_step_time_off is not kept


@pytest.mark.parametrize(("share", "kept"), [(None, False), (0.05, False), (0.4, None)])
def test_a_step_beside_other_programs_is_not_judged(share, kept):
    """Nor is its user told to recalibrate."""
    plan = predicted_plan(step_seconds=0.010)
    found = compared(plan, result_of(plan, step_ms={"p50": 30.0}, other_programs=share))
    assert verdict(found, "step time").kept is kept
    assert found.is_step_time_off is (kept is False)
    assert ("other programs took 40% of the processor time" in verdict(found, "step time").detail) is (kept is None)


def test_what_was_not_measured_has_no_verdict():
    plan = predicted_plan()
    found = compared(plan, without_cache(result_of(plan, step_ms={"p50": None})))
    assert [each.what for each in found.verdicts if each.kept is not None] == ["bytes between ranks"]
    assert [each.error for each in found.verdicts].count(None) == 4
    assert not found.is_step_time_off
    assert found.ranks[0].traffic.fills == Pair(pytest.approx(50.0), None)


def test_all_to_all_bytes_are_predicted_only():
    plan = predicted_plan()
    assert compared(plan, result_of(plan)).ranks[0].all_to_all_bytes == Pair(5000.0, None)


def test_a_plan_without_a_prediction_and_one_for_other_ranks_say_what_to_do():
    plan = predicted_plan()
    with pytest.raises(ShardingError, match="no prediction to compare with"):
        compared(dataclasses.replace(plan, prediction=None), result_of(plan))
    with pytest.raises(ShardingError, match="for 2 ranks; the run had 4"):
        compared(plan, result_of(plan, world_size=4))


def test_notes_name_every_reason_for_differences():
    plan = predicted_plan()
    assert "had no plan" in told(plan, result_of(plan, plan=None))
    assert "obeyed another plan (ffff)" in told(plan, result_of(plan, plan={"path": "x", "digest": "ffff"}))
    assert "resumed at step 60" in told(plan, result_of(plan, steps=STEPS + 60))
    assert "Another setting: cache.decay is 1." in told(plan, result_of(plan), ["cache.decay is 1"])
    assert "over 100 steps, the measurement over 40: the first steps, which fill the caches, weigh more" in told(
        plan, result_of(plan, measured_steps=40, steps=40)
    )
    assert "weigh less" in told(plan, result_of(plan, measured_steps=400, steps=400))
    assert "weigh" not in told(plan, result_of(plan, measured_steps=101, steps=101))
    assert "few beside its look-ahead" in told(plan, result_of(plan, is_steady=False))
    assert "look-ahead" not in told(plan, result_of(plan))
    assert "cache.enabled = false" in told(plan, without_cache(result_of(plan)))
    grown = changed(result_of(plan), 1, "b", overflow_growths=3)
    grown["cache"]["ranks"][1]["overflow_growths"] = 3
    assert "grew 3 times, for batches that did not fit; most misses were of b on rank 1 (3)" in told(plan, grown)
    assert "include what 2 checkpoints wrote back" in told(plan, result_of(plan), (), 2)


def test_tables_on_one_side_only_are_named():
    plan = predicted_plan()
    result = result_of(plan)
    result["cache"]["ranks"][1]["tables"]["other"] = result["cache"]["ranks"][1]["tables"].pop("b")
    said = told(plan, result)
    assert "predicted with a cache but not measured: b on rank 1." in said
    assert "measured but not predicted: other on rank 1." in said
    found = next(each for each in compared(plan, result).tables if (each.table, each.rank) == ("b", 1))
    assert found.traffic.worst_points is None
    assert found.device_bytes.measured is None


def test_a_plan_without_caches_compares_the_step_time():
    plan = predicted_plan()
    tables = tuple(dataclasses.replace(t, kernel="device") for t in plan.tables)
    plan = dataclasses.replace(plan, tables=tables, pools=())
    result = without_cache(result_of(plan))
    assert "No table is cached" in told(plan, result)
    assert verdict(compared(plan, result), "step time").error == pytest.approx(0)


@pytest.mark.slow
@given(st.floats(0.001, 1000), st.integers(0, 10**6), st.integers(0, 10**6))
def test_recalibrated_rates_give_the_measured_step_for_the_measured_work(milliseconds, fills, ids):
    plan = predicted_plan()
    result = result_of(plan, step_ms={"p50": milliseconds})
    for rank in result["cache"]["ranks"]:
        rank.update(fills=fills * STEPS, lookups=ids * STEPS)
    found = corrected(machine(), plan, result, name="new", run_name="r")
    works = measured_work(plan, RunResult.of(result))
    assert [(work.fills, work.planned_ids) for work in works] == [(pytest.approx(fills), pytest.approx(ids))] * 2
    seconds = max(sum(step_parts(work, found.topology.rates_for(2)).values()) for work in works)
    assert seconds == pytest.approx(milliseconds / 1e3)
    assert found.before_seconds * found.factor == pytest.approx(found.measured_seconds)
    assert found.topology.rates_for(4) == RATES  # of another number of ranks nothing is known
    ratio = found.topology.rates_for(2).seconds_per_fill / found.topology.rates_for(2).seconds_per_planned_id
    assert ratio == pytest.approx(2)


def test_measured_work_keeps_what_runs_do_not_count():
    plan = predicted_plan()
    result = changed(result_of(plan), 0, "a")
    work = measured_work(plan, RunResult.of(without_cache(result)))[0]
    predicted = StepWork(**plan.prediction.ranks[0].work)
    assert (work.dense_flops, work.all_to_all_bytes) == (predicted.dense_flops, predicted.all_to_all_bytes)
    assert (work.planned_ids, work.fills, work.bytes_to_host) == (0, 0, 0)


def test_a_recalibrated_topology_is_saved_with_its_origin(tmp_path):
    plan = predicted_plan()
    found = corrected(machine(), plan, result_of(plan), name="new", run_name="runs/7")
    save_topology(found.topology, tmp_path / "new.toml")
    loaded = load_topology(str(tmp_path / "new.toml"))
    assert loaded == found.topology
    assert loaded.source.startswith("measured in May; rates for 2 ranks times ")
    assert loaded.source.endswith("after run runs/7")
    assert loaded.source in loaded.note(2)
    assert not found.from_estimate


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_estimated_topology_gets_rates(ranks):
    plan = predicted_plan(device="cuda", world_size=ranks)
    estimated = load_topology("h200x8")
    found = corrected(estimated, plan, result_of(plan), name="new", run_name="r")
    assert found.from_estimate
    assert found.topology.rates.keys() == {ranks}
    assert found.topology.ranks_per_node == 8
    before = estimated.shaped(ranks).rates_for(ranks)
    assert found.topology.rates_for(ranks).seconds_per_flop == pytest.approx(before.seconds_per_flop * found.factor)


def test_rates_from_an_estimate_are_of_the_precision_of_the_run():
    plan = predicted_plan(device="cuda", world_size=1)
    plan = dataclasses.replace(plan, settings={**plan.settings, "train.precision": "bf16"})
    estimated = load_topology("h200x8")
    found = corrected(estimated, plan, result_of(plan), name="new", run_name="r")
    before = estimated.at("bf16").shaped(1).rates_for(1)
    assert found.topology.precision == "bf16"
    assert found.topology.rates_for(1).seconds_per_flop == pytest.approx(before.seconds_per_flop * found.factor)


def test_the_nearest_rates_are_corrected_where_a_number_of_ranks_has_none():
    plan = predicted_plan()
    found = corrected(machine(rates={4: RATES}), plan, result_of(plan), name="new", run_name="r")
    assert found.topology.rates_for(2).seconds_per_flop == pytest.approx(RATES.seconds_per_flop * found.factor)
    assert found.topology.rates_for(4) == RATES


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"plan": None}, "had no plan"),
        ({"plan": {"path": "x", "digest": "ffff"}}, "obeyed another plan"),
        ({"device": "cuda"}, "the run was on 'cuda'"),
        ({"step_ms": {"p50": None}}, "no step of the run was timed"),
        ({"is_steady": False}, "few beside its look-ahead.*longer run"),
        ({"world_size": 4}, "for 2 ranks; the run had 4"),
    ],
)
def test_what_says_nothing_about_rates_is_refused(changes, says):
    plan = predicted_plan()
    with pytest.raises(ShardingError, match=says):
        corrected(machine(), plan, result_of(plan, **changes), name="new", run_name="r")


def test_a_topology_of_another_device_is_refused():
    plan = predicted_plan()
    with pytest.raises(ShardingError, match="the topology is on 'cuda'"):
        corrected(load_topology("h200"), plan, result_of(plan), name="new", run_name="r")
