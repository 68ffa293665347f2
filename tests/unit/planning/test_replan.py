"""A plan under new data: rows that change ranks, what a change takes, and whether it pays."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.errors import ConfigError, ShardingError
from embershard.extras.replan.moves import moves, with_kept_ranks
from embershard.extras.replan.replan import LEAST_GAIN, Replan, changes_to, replan
from embershard.extras.replan.resume import storage_bytes, warm_up
from embershard.extras.replan.view import show
from embershard.frequency.assumed import AssumedTable, assumed_statistics
from embershard.launch.screen import plain_console
from embershard.planning.cost.topology import load_topology
from embershard.planning.make_plan import all_sized, make_plan
from embershard.planning.request import Budget, PlanRequest
from embershard.sharding.pins import TablePin
from embershard.sharding.plan import Plan, TablePlacement, check_plan
from embershard.sharding.shards import shards_of
from embershard.sharding.sizes import ModelSize, TableSize
from tests.covering import examples
from tests.unit.planning.requests import make_request
from tests.unit.sharding import plans

pytestmark = [pytest.mark.extra, pytest.mark.slow]


@st.composite
def two_placements(draw: st.DrawFn) -> tuple[ModelSize, Plan, Plan]:
    """The same tables in two plans on the same ranks, with optimizers of every kind."""
    world_size = draw(st.sampled_from([1, 2, 4, 8]))
    per_node = draw(st.sampled_from([n for n in (1, 2, 4) if n <= world_size]))
    sizes, both = [], ([], [])
    for number in range(draw(st.integers(1, 4))):
        rows, dim = draw(st.integers(1, 12)), draw(st.sampled_from([8, 16]))
        states = draw(st.sampled_from([(0, 0), (4, 0), (0, 4), (4, 8)]))
        sizes.append(TableSize(f"t{number}", rows, dim, draw(st.sampled_from(["fp32", "fp16"])), *states))
        for tables in both:
            sharding = draw(st.sampled_from([*plans.SHARDED, "data_parallel"]))
            blocks = draw(st.sampled_from([n for n in (1, 2, 4) if dim % (4 * n) == 0]))
            ranks = plans.ranks_for(sharding, draw(st.integers(0, 7)), world_size, per_node, blocks)
            kernel: Any = "replicated" if sharding == "data_parallel" else draw(st.sampled_from(["cached", "device"]))
            tables.append(TablePlacement(f"t{number}", rows, dim, sizes[-1].dtype, sharding, kernel, ranks))
    before, after = (plans.make_plan(tables, world_size, per_node) for tables in both)
    return ModelSize(tuple(sizes), 0, 0, 0, 0), before, after


def marked(size: TableSize, table: TablePlacement, plan: Plan) -> list[dict[tuple[int, int], set[int]]]:
    """Of each shard: the columns of each of its rows, by rank, row and number of the shard."""
    if table.kernel == "replicated":
        return [{(rank, row): set(range(size.dim)) for row in range(size.rows)} for rank in range(plan.world_size)]
    return [
        {
            (shard.rank, row): set(range(shard.first_column, shard.first_column + shard.columns))
            for row in range(shard.first_row, shard.first_row + shard.rows)
        }
        for shard in shards_of(table, plan.ranks_per_node)
    ]


def moved_by_marks(size: TableSize, before: Plan, after: Plan, number: int) -> np.ndarray:
    """Bytes from rank to rank, row by row and column by column."""
    found = np.zeros((before.world_size, before.world_size), np.int64)
    if before.tables[number].kernel == "replicated":
        return found
    old, new = (marked(size, plan.tables[number], plan) for plan in (before, after))
    owner_of_cell = {(row, c): rank for shard in old for (rank, row), columns in shard.items() for c in columns}
    owner_of_state = {(row, min(columns)): rank for shard in old for (rank, row), columns in shard.items()}
    firsts = {min(columns) for shard in old for columns in shard.values()}
    same_cut = firsts == {min(columns) for shard in new for columns in shard.values()}
    for shard in new:
        for (rank, row), columns in shard.items():
            for column in columns:
                found[owner_of_cell[row, column], rank] += size.weight_bytes(1) + size.state_bytes_per_column
            for first in {min(columns)} if same_cut else firsts:
                found[owner_of_state[row, first], rank] += size.state_bytes
    np.fill_diagonal(found, 0)
    return found


@given(case=two_placements())
@examples(60)
@pytest.mark.smoke
def test_what_moves_is_what_marks_of_every_row_and_column_say(case: tuple[ModelSize, Plan, Plan]) -> None:
    model, before, after = case
    found = moves(model, before.tables, after.tables, before)
    by_marks = [moved_by_marks(size, before, after, number) for number, size in enumerate(model.tables)]
    assert (found.between == sum(by_marks)).all()
    assert found.tables == {f"t{n}": int(each.sum()) for n, each in enumerate(by_marks) if each.any()}
    assert moves(model, before.tables, before.tables, before).total == 0


@given(case=two_placements())
@examples(60)
def test_renamed_ranks_are_a_plan_that_moves_no_more(case: tuple[ModelSize, Plan, Plan]) -> None:
    model, before, after = case
    renamed = with_kept_ranks(model, before.tables, after.tables, before)
    check_plan(plans.make_plan(renamed, before.world_size, before.ranks_per_node))
    least, most = (moves(model, before.tables, tables, before).total for tables in (renamed, after.tables))
    assert least <= most
    again = [(table.table, table.sharding, table.kernel, len(table.ranks)) for table in renamed]
    assert again == [(table.table, table.sharding, table.kernel, len(table.ranks)) for table in after.tables]


@given(case=two_placements(), seed=st.integers(0, 99))
@examples(40)
def test_other_numbers_of_equal_ranks_move_nothing(case: tuple[ModelSize, Plan, Plan], seed: int) -> None:
    """Nodes, ranks of a node, and blocks of columns, in any order."""
    model, before, _ = case
    rng, per_node = np.random.default_rng(seed), before.ranks_per_node
    nodes = rng.permutation(before.world_size // per_node)
    inside = rng.permutation(per_node)

    def other(table: TablePlacement) -> TablePlacement:
        if table.sharding in ("row_wise", "data_parallel"):
            return table
        places = [per_node * nodes[rank // per_node] + rank % per_node for rank in table.ranks]
        if table.sharding in ("table_wise", "column_wise", "table_column_wise"):
            places = [rank - rank % per_node + inside[rank % per_node] for rank in places]
        return replace(table, ranks=tuple(map(int, places)))

    after = tuple(map(other, before.tables))
    renamed = with_kept_ranks(model, before.tables, after, before)
    assert moves(model, before.tables, renamed, before).total == 0


def test_blocks_of_columns_are_on_the_ranks_that_have_them() -> None:
    """In another order no block need move; the other table tells ranks apart."""
    model = ModelSize((TableSize("t0", 100, 16, state_bytes=4), TableSize("t1", 900, 16)), 0, 0, 0, 0)
    anchor = replace(placed("table_wise", (0,)), table="t1", rows=900)
    before, after = (placed("column_wise", (0, 1)), anchor), (placed("column_wise", (1, 0)), anchor)
    plan = plans.make_plan(before, 2, 2)
    assert moves(model, before, after, plan).total == 100 * (16 * 4 + 2 * 4)
    assert with_kept_ranks(model, before, after, plan) == before


#: Of eight tables on four GPUs, two hot ones become cold, and two cold ones hot.
ROWS, DIM = (400_000, 30_000, 90_000, 200_000, 50_000, 700_000, 20_000, 150_000), 128
THEN = (24, 24, 24, 24, 2, 3, 4, 5)
NOW = (2, 24, 24, 3, 24, 24, 4, 5)


def request_for(lookups: Sequence[int] = THEN, **changes: Any) -> PlanRequest:
    """Four H100s whose hosts take no time, and a look-up of rows by Zipf's law."""
    tables = [AssumedTable(f"t{n}", *pair) for n, pair in enumerate(zip(ROWS, [1.0] * 8, lookups, strict=True))]
    given: dict[str, Any] = {
        "budget": Budget(device_bytes=4 * 2**30),
        "rows": ROWS,
        "dims": (DIM,) * 8,
        "data": assumed_statistics(tables, 10**8),
        "world_size": 4,
        "batch_size": 4096,
        "effort": 0.05,
    }
    request = make_request(**{**given, **changes})
    return replace(request, rates=replace(request.rates, step_overhead_seconds=0.0))


@pytest.fixture(scope="module")
def old() -> Plan:
    return make_plan(request_for())


@pytest.fixture(scope="module")
def drifted(old: Plan) -> Replan:
    return replan(old, request_for(NOW), steps=10**9, storage_bytes_per_second=2e9)


@pytest.mark.smoke
def test_equal_data_are_no_reason_to_change(old: Plan) -> None:
    found = replan(old, request_for(), steps=10**9, storage_bytes_per_second=2e9)
    assert [choice.moves.total for choice in found.choices] == [0]
    assert found.best is found.choices[0]
    assert found.choices[0].prediction == old.prediction, "what it told is what it would do"
    assert found.plan(found.choices[0]).tables == old.tables
    text = io.StringIO()
    show(replace(found, old=replace(old, prediction=None)), plain_console(file=text, width=150), top=2)
    (told,) = (line for line in text.getvalue().splitlines() if line.startswith("│told"))
    assert told.count("not told") == 8, "of a plan that was edited"
    assert "drifted" not in text.getvalue()


@pytest.mark.smoke
def test_a_change_pays_after_the_steps_whose_gain_is_what_it_takes(old: Plan, drifted: Replan) -> None:
    stay, best = drifted.choices[0], drifted.choices[-1]
    assert drifted.best is best
    assert stay.prediction.step_seconds > 1.02 * best.prediction.step_seconds
    assert best.prediction.step_seconds <= make_plan(request_for(NOW)).prediction.step_seconds * (1 + 1e-9)
    assert all(table.kernel == "device" and table.sharding == "table_wise" for table in old.tables), "or count anew"
    all_rows = sum(rows * (DIM * 4 + 4) for rows in ROWS)
    seconds = 3 * all_rows / 2e9  # written, checked, read
    gain = stay.prediction.step_seconds - best.prediction.step_seconds
    assert best.pays_after == math.ceil(seconds / gain)
    two = replace(drifted, choices=(stay, best))
    assert replace(two, steps=best.pays_after - 1).best is stay
    assert replace(two, steps=best.pays_after + 1).best is best


def test_a_horizon_that_is_too_short_stays(old: Plan, drifted: Replan) -> None:
    first = min(choice.pays_after for choice in drifted.choices[1:])
    assert replace(drifted, steps=first - 1).best is drifted.choices[0]
    after = replace(drifted, steps=first + 1).best
    assert after is not drifted.choices[0]
    assert after.pays_after <= first + 1


def test_choices_move_more_and_are_faster_one_by_one_and_are_plans(drifted: Replan) -> None:
    """From the old plan to the best; each is told as the planner tells its plan."""
    pairs = [(choice.moves.total, choice.prediction.step_seconds) for choice in drifted.choices]
    assert len(pairs) >= 3, "a change of few tables is among them"
    assert pairs == sorted(pairs, key=lambda pair: (pair[0], -pair[1]))
    assert [seconds for _, seconds in pairs] == sorted((seconds for _, seconds in pairs), reverse=True)
    old = {table.table: table for table in drifted.old.tables}
    for choice in drifted.choices[1:]:
        plan = drifted.plan(choice)
        check_plan(plan)
        assert plan.prediction.step_seconds == choice.prediction.step_seconds
        assert plan.prediction.most_device_bytes <= 4 * 2**30
        assert choice.gain_seconds >= LEAST_GAIN * pairs[0][1]
        assert [table.table for table in plan.tables if table != old[table.table]] == list(choice.changed)
        assert set(choice.moves.tables) <= set(choice.changed)
    assert drifted.plan(drifted.choices[-1]).bound.is_valid


def test_the_table_that_gains_most_for_its_bytes_is_changed_first(drifted: Replan) -> None:
    """Of all tables that a change could begin with, and of those that it could go on with."""
    request, begin, target = drifted.request, drifted.choices[0].candidate, drifted.choices[-1].candidate
    bytes_of = drifted.choices[-1].moves.tables
    assert len(bytes_of) >= 3
    wanted, now = {table.table: table for table in target.tables}, begin
    left = dict(bytes_of)
    for step in changes_to(request, begin, target):
        worth = {}
        for name in left:
            tables = tuple(wanted[name] if table.table == name else table for table in now.tables)
            (tried,) = all_sized(request, [tables])
            worth[name] = (now.step_seconds - tried.step_seconds) / left[name]
        (changed,) = (new.table for was, new in zip(now.tables, step.tables, strict=True) if was != new)
        assert worth[changed] == max(worth.values())
        now = step
        del left[changed]
    assert len(left) == 1, "the last change is the target"


def test_gains_that_a_search_may_find_without_any_drift_are_none(old: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embershard.extras.replan.replan.LEAST_GAIN", 0.5)
    assert len(replan(old, request_for(NOW)).choices) == 1


def test_beside_a_slower_host_all_places_are_as_fast(old: Plan) -> None:
    request = request_for(NOW)
    assert len(replan(old, replace(request, rates=replace(request.rates, step_overhead_seconds=0.1))).choices) == 1
    close = replace(request, rates=replace(request.rates, step_overhead_seconds=0.0009))
    plan = (found := replan(old, close)).plan(found.choices[-1])
    assert plan.tables != old.tables
    assert plan.bound is not None
    assert plan.bound.is_valid
    assert plan.bound.least_seconds >= 0.0009, "the host's"
    assert plan.bound.step_seconds == pytest.approx(plan.prediction.step_seconds)


def test_without_a_rate_nothing_is_told_of_seconds(old: Plan) -> None:
    found = replan(old, request_for(NOW), steps=10**6)
    assert (found.best, found.choices[-1].seconds, found.choices[-1].pays_after) == (None, None, None)
    assert "is not told: the topology has no rate of a disk" in found.storage_note
    given = replan(old, request_for(NOW), steps=10**6, resume_seconds=60.0)
    assert given.choices[-1].seconds == 60.0
    assert given.choices[-1].pays_after == math.ceil(60.0 / given.choices[-1].gain_seconds)


def test_a_run_that_stops_anyway_changes_for_what_its_resume_takes_longer(old: Plan) -> None:
    found = replan(old, request_for(NOW), steps=1, storage_bytes_per_second=2e9, stops_anyway=True)
    assert found.choices[-1].seconds == 0.0, "tables that are whole are read once, wherever"
    assert found.best is found.choices[-1]
    for other in ({"stops_anyway": True}, {"storage_bytes_per_second": 1e9}):
        with pytest.raises(
            ConfigError, match="--resume-seconds takes the place of --storage, and --stops needs a rate"
        ):
            replan(old, request_for(NOW), resume_seconds=9.0, **other)


def test_the_topology_s_disk_is_a_rate(old: Plan) -> None:
    machine = replace(load_topology("h100x4"), disk_pages_per_second=500_000)
    request = replace(request_for(NOW), topology=machine)
    found = replan(old, request, steps=10**9)
    through = found.choices[-1].storage
    assert found.choices[-1].seconds == pytest.approx(through.total / (500_000 * 4096))
    assert "disk_pages_per_second of h100x4 x 4 KiB" in found.storage_note


def test_slots_alone_move_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches get other slots where one table's lookups spread, and another's come together."""
    rows = (200_000, 200_000)

    def request(zipfs: Sequence[float], lookups: int = 4) -> PlanRequest:
        tables = [AssumedTable(f"t{n}", *pair, lookups) for n, pair in enumerate(zip(rows, zipfs, strict=True))]
        data = assumed_statistics(tables, 10**7)
        given: dict[str, Any] = {"rows": rows, "dims": (128, 64), "data": data, "world_size": 1, "batch_size": 1024}
        made = make_request(Budget(device_bytes=60_000_000), **given)
        return replace(made, rates=replace(made.rates, step_overhead_seconds=0.0))

    old = make_plan(request((0.7, 1.3)))
    found = replan(old, request((1.3, 0.7)), resume_seconds=10.0, steps=10**9)
    assert [choice.moves.total for choice in found.choices] == [0] * len(found.choices)
    assert len(found.choices) > 1
    change = found.choices[-1]
    rows_held, seconds = warm_up(change.candidate.layout, change.candidate.slots, found.request.rates)
    assert (change.fills, change.warm_up_seconds) == (rows_held, seconds)
    assert 0 < rows_held <= sum(change.candidate.slots.values()) + 1
    assert change.seconds == 10.0 + seconds
    slots = {pool.tables: pool.slots for pool in found.plan(change).pools}
    assert slots != {pool.tables: pool.slots for pool in old.pools}
    with monkeypatch.context() as patch:  # no search is needed for it
        patch.setattr("embershard.extras.replan.replan._targets", lambda *_: [])
        alone = replan(old, request((1.3, 0.7)), resume_seconds=10.0, steps=10**9)
    assert alone.choices[-1].candidate.slots == change.candidate.slots
    with pytest.raises(ShardingError, match=r"does not fit any more: under the new profile rank 0 needs .* MiB"):
        replan(make_plan(request((0.2, 1.6), 8)), request((1.6, 0.2), 8))  # a cache grows beyond the limit


def placed(sharding: str, ranks: tuple[int, ...], kernel: Any = "device") -> TablePlacement:
    return TablePlacement("t0", 100, 16, "fp32", sharding, kernel, ranks)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "after", "read"),
    [
        (placed("table_wise", (0,)), placed("table_wise", (1,)), 100 * (16 * 4 + 4)),
        (placed("table_wise", (0,)), placed("row_wise", (0, 1)), 100 * (16 * 4 + 4)),
        (placed("table_wise", (0,)), placed("column_wise", (0, 1)), 2 * 100 * (16 * 4 + 4)),
        (placed("column_wise", (0, 1)), placed("column_wise", (1, 0)), 100 * (16 * 4 + 2 * 4)),
        (placed("column_wise", (0, 1)), placed("table_wise", (0,)), 100 * (16 * 4 + 2 * 4)),
        (placed("column_wise", (0, 1)), placed("row_wise", (0, 1)), 100 * 16 * 4 + 2 * 100 * 2 * 4),
        (placed("data_parallel", (), "replicated"), placed("table_wise", (0,)), 100 * (16 * 4 + 4)),
        (placed("table_wise", (0,)), placed("data_parallel", (), "replicated"), 2 * 100 * (16 * 4 + 4)),
    ],
)
def test_what_a_resume_reads(before: TablePlacement, after: TablePlacement, read: int) -> None:
    """Blocks that were saved, with all their columns; states per row of every shard, where there are more or fewer."""
    model = ModelSize((TableSize("t0", 100, 16, state_bytes=4),), 0, 0, 0, 0)
    plan = plans.make_plan([before], 2, 2)
    through = storage_bytes(model, [before], [after], plan)
    blocks = len(before.ranks) if before.sharding == "column_wise" else 1
    assert through.written == through.checked == 100 * (16 * 4 + blocks * 4)
    assert through.read == read


def test_what_is_another_model_or_does_not_fit_is_refused(old: Plan) -> None:
    request = request_for(NOW)
    for changed, message in (
        (replace(old, tables=old.tables[:-1]), "does not place tables of the model: t7"),
        (replace(old, tables=(replace(old.tables[0], rows=9), *old.tables[1:])), "'t0' has 9 rows x 128 fp32 in the"),
        (replace(old, world_size=2, ranks_per_node=2), "the plan is for 2 ranks, 2 to a node; this run has 4"),
        (replace(old, device="cpu"), "the old plan is for 'cpu' and the topology is of kind 'cuda'"),
    ):
        with pytest.raises((ShardingError, ConfigError), match=message):
            replan(changed, request)
    with pytest.raises(ShardingError, match=r"does not fit any more: under the new profile rank \d needs .* missing"):
        replan(old, request_for(NOW, budget=Budget(device_bytes=100_000_000)))
    other = TablePin(ranks=((old.tables[0].ranks[0] + 1) % 4,), type="table_wise")
    with pytest.raises(ConfigError, match=r"sharding\.pin\.t0: the old plan cannot stay, its ranks is"):
        replan(old, replace(request, pins={"t0": other}))
    cached = replace(old, tables=tuple(replace(table, kernel="cached") for table in old.tables))
    with pytest.raises(ShardingError, match=r"the old plan has no cache of .* on rank 0"):
        replan(cached, request)


def test_a_run_of_one_rank_and_a_plan_over_nodes(old: Plan) -> None:
    alone = request_for(world_size=1, budget=Budget(device_bytes=16 * 2**30))
    assert len(replan(make_plan(alone), alone).choices) == 1
    nodes = {"world_size": 16, "ranks_per_node": 8}
    found = replan(make_plan(request_for(**nodes)), request_for(NOW, **nodes), storage_bytes_per_second=1e9, steps=1)
    best = found.choices[-1]
    assert best.gain_seconds > 0
    assert best.moves.between.shape == (16, 16)
    assert best.moves.between.sum() == best.moves.total > 0
    text = io.StringIO()
    show(found, plain_console(file=text, width=150), top=2)
    pairs = np.count_nonzero(best.moves.between)
    assert pairs > 12
    said = " ".join(text.getvalue().split())
    assert f"the 2 with most of {len(best.moves.tables)} tables" in said
    assert f"the 12 pairs with most of {pairs}" in said
    assert "Best for 1 steps: stay. The best plan would pay after " in said
