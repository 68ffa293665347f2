"""The benchmark's machinery, on streams that take no time."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks import fill_optimality
from benchmarks.fill_optimality import LOOKAHEADS, Run, Stream, measure, open_streams
from embershard.extras.profile_picture.hit_rate_curve import look_ahead_rule, offline_optimum
from tests.covering import keep, matrix

pytestmark = [pytest.mark.extra, pytest.mark.smoke, pytest.mark.slow]


def skewed_stream(num_batches: int = 60, batch_size: int = 12, rows: tuple[int, int] = (300, 100)) -> Stream:
    """Two tables; low ids are popular."""
    generator = torch.Generator().manual_seed(5)
    batches = [
        torch.cat(
            [
                (torch.rand(batch_size, generator=generator) ** 3 * count).long() + offset
                for count, offset in ((rows[0], 0), (rows[1], rows[0]))
            ]
        )
        for _ in range(num_batches)
    ]
    return Stream("skewed", batch_size, list(rows), batches)


def test_a_point_holds_together() -> None:
    point = measure(skewed_stream(), capacity_batches=7, prefetch=2)
    names = {"lru", "lfu", "frequency", *(f"lookahead {lookahead}" for lookahead in LOOKAHEADS)}
    assert set(point.fills) == set(point.over_optimum) == names
    assert point.distinct_rows <= point.optimum_fills <= min(point.fills.values())
    held = point.holding_over_optimum[2]
    assert held is not None
    assert 1 <= point.holding_over_optimum[1] <= held
    for lookahead in LOOKAHEADS:
        name = f"lookahead {lookahead}"
        assert point.over_optimum[name] >= held
        assert point.late_fills[name] == 0
        assert point.mean_prefetch[name] == 2.0
    assert point.aim == "lookahead 128"
    assert point.reached == (point.over_optimum["lookahead 128"] <= point.holding_over_optimum[1] + 0.005)


def test_the_target_is_about_the_window_that_belongs_to_the_capacity() -> None:
    for capacity, aim in ((4, "lookahead 128"), (8, "lookahead 128"), (16, "lookahead 256")):
        point = measure(skewed_stream(num_batches=40, rows=(3000, 1000)), capacity_batches=capacity, prefetch=1)
        assert point.aim == aim
        assert point.reached, "all of the stream is known"


def test_batches_that_do_not_fit_ahead_are_tried_again() -> None:
    """Two batches' slots: one is resident ahead at most, and the target says nothing about so few."""
    point = measure(skewed_stream(), capacity_batches=2, prefetch=2)
    assert point.holding_over_optimum[2] is None
    assert 0 < point.mean_prefetch["lookahead 128"] < 2.0
    assert point.reached is None


def test_holding_less_than_asked_for_fills_less() -> None:
    """At four batches' slots the second batch ahead stays out, and the cache beats the optimum of one that holds it."""
    point = measure(skewed_stream(batch_size=40), capacity_batches=4, prefetch=2)
    assert point.mean_prefetch["lookahead 128"] == 1.0
    assert point.late_fills["lookahead 128"] == 0
    assert point.holding_over_optimum[2] is not None
    assert point.over_optimum["lookahead 128"] < point.holding_over_optimum[2]


def test_what_is_waited_for_is_counted() -> None:
    """With slots for one batch alone, none is ever resident ahead."""
    batches = [torch.arange(start, start + 4) for start in (0, 4, 0, 4)]
    run = Run(Stream("alternating", 4, [8], batches), 4, "lfu", look_ahead=True)
    assert run.ahead(lookahead=2, prefetch=1) == (12, 0.0)
    assert run.finish() == 16


def test_lost_updates_are_noticed() -> None:
    run = Run(skewed_stream(), 60, "lru")
    run.one_by_one()
    run._weights[7] = 0  # a slot in use
    with pytest.raises(RuntimeError, match="lost updates"):
        run.finish()


def test_slots_for_less_than_a_batch_are_refused() -> None:
    with pytest.raises(SystemExit, match="do not hold every batch"):
        measure(skewed_stream(), capacity_batches=0.5, prefetch=2)


@pytest.mark.parametrize("name", keep(["drift"], ["steady", "drift"]))
def test_the_command_prints_and_writes_json(name, tmp_path, monkeypatch, capsys) -> None:
    file = tmp_path / "result.json"
    sizes = ["--batch-sizes", "16", "--batches", "12", "--scale", "0.0001", "--capacities", "4"]
    monkeypatch.setattr(sys, "argv", ["fill_optimality", name, *sizes, "--output", str(file)])
    fill_optimality.main()
    result = json.loads(file.read_text())
    printed = capsys.readouterr()
    assert json.loads(printed.out) == result
    assert [(point["stream"], point["batches"]) for point in result["points"]] == [(name, 12)]
    assert result["points"][0]["reached"] is not None
    assert sum("|" in line for line in printed.err.splitlines()) == 2, "the heading and a point; torch may warn beside"


def test_a_run_s_own_data_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A history of items, whose table the scored item has too: as many ids as there are, and rows of one table."""
    draw = np.random.default_rng(0)
    histories = [draw.integers(0, 50, draw.integers(0, 6)).tolist() for _ in range(160)]
    columns = {"label": draw.integers(0, 2, 160), "item": draw.integers(0, 50, 160), "seen": histories}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    (tmp_path / "run.toml").write_text(
        f"""
        data.kind = "parquet"
        data.path = "{tmp_path}/a.parquet"
        data.eval_fraction = 0.0
        data.shuffle = false
        data.parquet = {{sparse = ["item", "seen"], num_rows = [51, 51], id_mapping = "none"}}
        model = {{arch = "din", target = ["item"], history = ["seen"]}}
        """
    )
    options = argparse.Namespace(stream="run", config=str(tmp_path / "run.toml"), batch_sizes=[16], batches=8)
    (stream,) = open_streams(options)
    assert (stream.rows_per_table, stream.table_of, len(stream.batches)) == ([51], [0, 0], 8)
    wanted = torch.zeros(51, dtype=torch.int64)
    for first in range(0, 128, 16):
        part = slice(first, first + 16)
        ids = {*columns["item"][part].tolist(), *itertools.chain(*histories[part])}
        wanted[list(ids)] += 1
    assert stream.uses().tolist() == wanted.tolist()
    point = measure(stream, capacity_batches=2.0, prefetch=1)
    assert 1.0 <= point.over_optimum["lookahead 128"] <= 1.1
    assert max(point.late_fills.values()) == 0


def test_the_real_sample_needs_its_path(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fill_optimality", "all"])
    with pytest.raises(SystemExit):
        fill_optimality.main()
    assert "needs --path" in capsys.readouterr().err


def fills(stream: Stream, slots: int, lookahead: int) -> int:
    run = Run(stream, slots, "lfu", look_ahead=True)
    run.ahead(lookahead, prefetch=1)  # one batch ahead always comes in; a second one only where there is room
    return run.finish()


def slots_and_batches(stream: Stream, capacity_batches: float) -> tuple[int, list[np.ndarray]]:
    batches = [batch.numpy() for batch in stream.batches]
    return round(capacity_batches * sum(np.unique(batch).size for batch in batches) / len(batches)), batches


@pytest.mark.parametrize(("capacity_batches", "lookahead"), [matrix(4, 8), (6, 8), matrix(6, 16), matrix(8, 16)])
def test_the_cache_fills_what_the_rule_fills(capacity_batches: float, lookahead: int) -> None:
    """Its ranking is made in bulk and used up little by little, which costs nothing; ties may go otherwise."""
    stream = skewed_stream(num_batches=150, batch_size=30)
    slots, batches = slots_and_batches(stream, capacity_batches)
    by_rule = look_ahead_rule(batches, slots, lookahead, prefetch=1)
    assert fills(stream, slots, lookahead) == pytest.approx(by_rule, rel=0.003)


@pytest.mark.parametrize("capacity_batches", keep([4], [3.5, 4, 5, 6]))
def test_knowing_far_enough_is_the_optimum_of_what_is_held(capacity_batches: float) -> None:
    stream = skewed_stream(num_batches=200, batch_size=100, rows=(1000, 300))
    slots, batches = slots_and_batches(stream, capacity_batches)
    assert fills(stream, slots, lookahead=48) == offline_optimum(batches, slots, prefetch=1)
