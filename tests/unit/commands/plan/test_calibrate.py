"""Calibration: reference settings, what is kept of noisy measurements, and rates from steps that really ran."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console

from embershard.distributed import process_group
from embershard.errors import ConfigError, SetupError
from embershard.extras.calibrate import calibrate, reference_steps
from embershard.extras.calibrate.calibrate import REFERENCE, reference_setting, run_calibration, summarize
from embershard.extras.calibrate.reference_steps import Segment, Segments, measure, simple_plan
from embershard.planning.cost.rates import Rates, StepWork, step_parts
from embershard.planning.cost.topology import load_topology
from embershard.settings.decoding import decode
from embershard.sharding.plan import check_plan
from embershard.training.config import RunConfig

pytestmark = pytest.mark.extra

RATES = Rates(seconds_per_flop=1e-11, seconds_per_planned_id=1e-7, step_overhead_seconds=0.01)


def segment(setting: str = "base", seconds: float = 0.1, foreign: float = 0.0, flops: float = 1e9) -> Segment:
    return Segment(setting, seconds, StepWork(dense_flops=flops), foreign)


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_settings_are_valid_runs(name) -> None:
    config = decode(RunConfig, reference_setting(REFERENCE[name]))
    assert config.train.device == "cpu"
    assert not config.holds_out


def test_reference_settings_do_not_share_values() -> None:
    reference_setting({})["data"]["synthetic"]["scale"] = 1.0
    assert reference_setting({})["data"]["synthetic"]["scale"] == 0.02


def test_disturbed_segments_are_left_out() -> None:
    kept = summarize([segment(seconds=9, foreign=0.5), segment(seconds=1), segment(seconds=3, flops=3e9)], False)
    assert [(each.setting, each.step_seconds, each.foreign) for each in kept] == [("base", 2, 0)]
    assert kept[0].work.dense_flops == 2e9


def test_without_a_quiet_segment_the_share_that_was_had_counts() -> None:
    segments = [segment(seconds=s, foreign=f) for s, f in ((6, 0.6), (3, 0.2), (4, 0.4), (99, 0.9))]
    (of_all_cores,) = summarize(segments, ranks_fill_machine=True)  # 2.4 of 6, 2.4 of 3 and 2.4 of 4 seconds
    assert (of_all_cores.step_seconds, of_all_cores.foreign) == (pytest.approx(2.4), 0.6)
    (of_some,) = summarize(segments, ranks_fill_machine=False)
    assert (of_some.step_seconds, of_some.foreign) == (3.5, 0.4)
    (worst,) = summarize(segments[-1:], ranks_fill_machine=True)
    assert (worst.step_seconds, worst.foreign) == (pytest.approx(9.9), 0.9)


def test_segments_survive_json() -> None:
    assert decode(Segment, json.loads(json.dumps(dataclasses.asdict(segment())))) == segment()


@pytest.fixture
def told(monkeypatch) -> list[tuple[int, Segments]]:
    """Instead of running ranks: times as `RATES` say, half as fast with two ranks."""
    asked: list[tuple[int, Segments]] = []

    def fake(num_ranks: int, segments: Segments) -> list[Segment]:
        asked.append((num_ranks, segments))
        works = [StepWork(dense_flops=(i + 1) * 1e9, planned_ids=i**2 * 1e4) for i in range(len(segments.settings))]
        seconds = [sum(step_parts(work, RATES).values()) * num_ranks for work in works]
        return [Segment(*each, 0.0) for each in zip(segments.settings, seconds, works, strict=True)]

    monkeypatch.setattr(calibrate, "measure", fake)
    return asked


@pytest.mark.smoke
def test_calibration_writes_what_it_found_per_number_of_ranks(told, tmp_path) -> None:
    shown = io.StringIO()
    found = run_calibration([2, 1, 2], tmp_path / "here.toml", console=Console(file=shown, width=200))
    assert [ranks for ranks, _ in told] == [1, 2]
    assert load_topology(str(tmp_path / "here.toml")) == found
    assert (found.name, found.device, found.ranks_per_node) == ("here", "cpu", 2)
    assert found.rates_for(1).to_dict() == pytest.approx(RATES.to_dict())
    assert found.rates_for(2).seconds_per_flop == pytest.approx(2 * RATES.seconds_per_flop)
    assert "calibrated here" in found.source
    assert "up to 0%" in found.source
    assert found.source in found.note(2)
    assert "Calibrate again when it is quiet" not in shown.getvalue()
    assert "wide layers" in shown.getvalue()
    assert "GPU" not in shown.getvalue()


def test_a_machine_with_a_gpu_is_told_that_its_cpu_is_measured(told, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    shown = io.StringIO()
    found = run_calibration([1], console=Console(file=shown, width=400))
    assert (found.device, found.source[:8]) == ("cpu", "its CPU,")
    assert "This machine has a GPU, and a calibration measures its CPU" in shown.getvalue()


def test_a_busy_machine_is_named(told, monkeypatch) -> None:
    monkeypatch.setattr(calibrate, "measure", lambda _, asked: [segment(name, foreign=0.3) for name in asked.settings])
    shown = io.StringIO()
    assert "up to 30%" in run_calibration([1], console=Console(file=shown, width=200)).source
    assert "Other programs used up to 30%" in shown.getvalue()
    assert "Calibrate again when it is quiet" in shown.getvalue()


def test_settings_that_a_busy_machine_leaves_no_time_for_are_named(told, monkeypatch) -> None:
    """Rates are fitted without a few of them, and not from few."""

    def first(share: float) -> io.StringIO:
        def fake(_: int, asked: Segments) -> list[Segment]:
            names = list(asked.settings)
            return [segment(name, foreign=0.6) for name in names[: round(share * len(names))]]

        monkeypatch.setattr(calibrate, "measure", fake)
        shown = io.StringIO()
        run_calibration([1], console=Console(file=shown, width=2000))
        return shown

    assert "other programs took up to 60% of the processor time. Left out: " in first(0.9).getvalue()
    assert "Left out" not in first(1.0).getvalue()
    with pytest.raises(SetupError, match=r"settings were measured in 300 s.*too few.*when the machine is quiet"):
        first(0.5)
    with pytest.raises(SetupError, match=r"^1 ranks: 0 of "):
        first(0.0)


def test_a_quick_calibration_says_that_it_is_rough(told) -> None:
    found = run_calibration([1], quick=True, console=Console(file=io.StringIO()))
    assert "roughly" in found.source
    assert len(told[0][1].settings) == 3


def test_tables_without_a_cache_are_not_run_where_one_would_be_empty(told) -> None:
    run_calibration([2, 4], console=Console(file=io.StringIO()))
    (_, two), (_, four) = told
    assert set(two.settings) - set(four.settings) == {"no cache", "no cache, dim 128"}


def test_distinct_rows_are_not_exchanged_by_one_rank(told) -> None:
    run_calibration([1, 2], console=Console(file=io.StringIO()))
    (_, one), (_, two) = told
    assert "distinct rows" not in one.settings
    assert {"distinct rows", "distinct rows, many ids"} < set(two.settings)


def test_what_an_exchange_takes_is_told_from_what_a_step_takes(told) -> None:
    """Between ranks some settings have more exchanges than others: with as many in all, no rate would follow."""
    run_calibration([1, 2], console=Console(file=io.StringIO()))
    (_, one), (_, two) = told
    mixed = {"two exchanges", "three exchanges", "resident, two exchanges"}
    assert not mixed & set(one.settings)
    assert mixed < set(two.settings)
    assert {name for pair in calibrate.PAIRS for name in pair} < set(two.settings)
    for name, types in calibrate.SHARDING.items():
        kernel = "device" if name in calibrate.RESIDENT else "cached"
        plan = simple_plan(decode(RunConfig, reference_setting(REFERENCE[name])), types, 4, kernel)
        check_plan(plan)
        assert {table.sharding for table in plan.tables} == set(types)
        assert {table.kernel for table in plan.tables} == {kernel}


@pytest.mark.parametrize("ranks", [[], [0], [2, -1]])
def test_impossible_numbers_of_ranks_are_refused(ranks) -> None:
    with pytest.raises(ConfigError, match="needed numbers of ranks"):
        run_calibration(ranks)


@pytest.mark.parametrize(("ranks", "exchange"), [(2, "rows"), (1, "pooled")])
def test_reference_plans_exchange_what_their_setting_says(ranks, exchange) -> None:
    config = decode(RunConfig, reference_setting(REFERENCE["distinct rows"]))
    plan = simple_plan(config, ("table_wise",), ranks)
    assert {table.exchange for table in plan.tables} == {exchange}


def test_ranks_that_fail_are_an_error(monkeypatch) -> None:
    monkeypatch.setattr(calibrate, "start_ranks", lambda *_: 1)
    with pytest.raises(SetupError, match="Calibration with 3 ranks failed"):
        calibrate.measure(3, Segments({}, 1, 1, 1, 0))


@pytest.mark.slow
def test_work_is_counted_in_steps_that_ran(tmp_path, monkeypatch, capsys) -> None:
    small = {"data.synthetic.scale": 1e-4, "data.synthetic.bag_sizes": [2], "train.batch_size": 32}
    at_once = {"look_ahead.lookahead": 0, "cache.policy": "lfu", "cache.ratio": 0.5}  # each step plans its own batch
    settings = {
        "cached": reference_setting({**small, **at_once}),
        "stock": reference_setting({**small, "cache": {"enabled": False}}),
        "planned": reference_setting({**small, **at_once}),
    }
    all_rows = decode(RunConfig, reference_setting({**small, **at_once, "cache.ratio": 1.0}))
    simple_plan(all_rows, ("table_wise",), 1).save(tmp_path / "plan.json")
    plans = {"planned": str(tmp_path / "plan.json")}
    monkeypatch.setattr(reference_steps, "_SHOWN_SECONDS", -1.0)
    asked = Segments(settings, num_quiet=1, skip=1, steps=3, seconds=0, plans=plans)
    with process_group("cpu") as ranks:
        found = measure(asked, ranks)
        assert measure(dataclasses.replace(asked, most_seconds=0.0), ranks) == []
    assert "Round 1, 2 of 3 settings (stock): " in capsys.readouterr().err
    cached, stock, planned = (next(each for each in found if each.setting == name) for name in settings)
    assert planned.work.planned_ids == cached.work.planned_ids
    assert planned.work.fills < cached.work.fills  # the plan keeps all rows
    assert min(cached.step_seconds, stock.step_seconds) > 0
    ids = 26 * 2 * 32
    assert (cached.work.planned_ids, stock.work.planned_ids) == (ids, 0)
    assert 0 < cached.work.unique_ids < ids
    row_bytes = 16 * 4 + 4  # row-wise Adagrad keeps one number a row
    assert cached.work.bytes_to_device == pytest.approx(cached.work.fills * row_bytes)
    assert cached.work.embedding_bytes == ids * (3 * 16 * 4 + 2 * 4)
    assert cached.work.input_seconds > 0
    assert cached.work.all_to_all_bytes == cached.work.all_reduce_bytes == cached.work.num_collectives == 0
    same = ("dense_flops", "activation_bytes", "embedding_bytes")
    assert [getattr(cached.work, name) for name in same] == [getattr(stock.work, name) for name in same]
    assert stock.work.fills == stock.work.unique_ids == 0
