"""A plan's page: which table is where."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly", reason="Plotly is not installed (the extra [report])")

from embershard.extras.report_page.parts import PageFigure
from embershard.extras.report_page.plan import plan_section
from embershard.extras.report_page.write import write_page
from embershard.sharding.plan import Plan, TablePlacement
from tests.unit.planning.runs import predicted_plan
from tests.unit.sharding.plans import make_plan

pytestmark = [pytest.mark.slow, pytest.mark.extra]


def part(plan: Plan, title: str) -> Any:
    (found,) = [each for each in plan_section(Path("plan.json"), plan).parts if each.title == title]
    return found.drawn if isinstance(found, PageFigure) else found


def test_every_table_is_drawn_on_its_ranks_with_type_bytes_and_cached_share() -> None:
    """Of `predicted_plan`: a (1000 x 16) on the first rank, b (1200 x 16) over both, c (50 x 16) on the last one."""
    plan = predicted_plan()
    (heat,) = part(plan, "Where each table is").data
    cells = {name: (tuple(text), tuple(z)) for name, text, z in zip(heat.y, heat.text, heat.z, strict=True)}
    assert list(heat.x) == ["rank 0", "rank 1"]
    assert list(cells) == ["b, row_wise", "a, table_wise", "c, table_wise"], "largest first"
    slots = {(pool.rank, pool.tables): pool.slots for pool in plan.pools}
    shown = f"62.50 KiB, {slots[0, ('a',)] / 1000:.1%}"
    assert cells["a, table_wise"] == ((shown, ""), (math.log2(64_000), None))
    assert all(cell.startswith("37.50 KiB, ") for cell in cells["b, row_wise"][0])
    assert cells["c, table_wise"] == (("", "3.12 KiB"), (None, math.log2(3_200))), "without a cache"


def test_copies_and_columns_are_counted_on_each_rank() -> None:
    tables = [
        TablePlacement("copies", 100, 16, "fp32", "data_parallel", "replicated", ()),
        TablePlacement("columns", 100, 16, "fp16", "column_wise", "device", (1, 1)),
    ]
    plan = make_plan(tables, 2, 2)
    (heat,) = part(plan, "Where each table is").data
    cells = dict(zip(heat.y, heat.text, strict=True))
    assert cells["copies, data_parallel"] == ["6.25 KiB", "6.25 KiB"]
    assert cells["columns, column_wise"] == ["", "3.12 KiB"]


def test_ranks_have_the_predicted_memory_and_steps() -> None:
    plan = predicted_plan()
    assert plan.prediction is not None
    memory = {trace.name: list(trace.x) for trace in part(plan, "Memory of each rank").data}
    slots = [rank.device_bytes["slots"] / 2**10 for rank in plan.prediction.ranks]
    assert memory["slots (device)"] == slots
    steps = {trace.name: list(trace.x) for trace in part(plan, "A step of each rank").data}
    assert steps["step, simulated"] == [10.0, 10.0]
    rows = {row[0]: row for row in part(plan, "Tables").rows}
    assert rows["a"][1:6] == ("1,000 x 16", "62.50 KiB", "table_wise", "cached", "0")
    assert rows["a"][-1] == "80.00%"


def test_a_plan_without_a_prediction_has_its_places() -> None:
    section = plan_section(Path("plan.json"), replace(predicted_plan(), prediction=None))
    assert [each.title for each in section.parts] == ["Where each table is", "Tables", "Made from", "Notes"]
    assert "It predicts nothing" in section.text[1]


@pytest.mark.smoke
def test_a_plans_file_gives_a_page(tmp_path: Path) -> None:
    predicted_plan().save(tmp_path / "plan.json")
    write_page([tmp_path / "plan.json"], tmp_path / "page.html")
    assert f"Plan {tmp_path / 'plan.json'}</h2>" in (tmp_path / "page.html").read_text()
