"""Step times, the work of a step from sizes, and rates from measured steps."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.data.schema import Schema, SparseFeature, Target
from embershard.distributed.sent_bytes import SentBytes
from embershard.errors import ConfigError
from embershard.extras.calibrate.fit import fit_rates, nonnegative_least_squares
from embershard.models import ModelConfig, build_model
from embershard.models.config import FACTORIZED, WITH_TOWERS
from embershard.models.dense_size import DenseSize
from embershard.planning.cost import work as formulas
from embershard.planning.cost.rates import TERMS, Rates, StepWork, step_parts
from embershard.settings.decoding import decode
from embershard.sharding.sizes import PlacedShard, TableSize

AMOUNTS = [field.name for field in dataclasses.fields(StepWork)]
numbers = st.floats(0, 1e6)
works = st.builds(StepWork, **dict.fromkeys(AMOUNTS, numbers))
rates_ = st.builds(Rates, **{field.name: numbers for field in dataclasses.fields(Rates)})


def test_every_kind_of_work_counts_once() -> None:
    assert [amount for amount, _, _ in TERMS] == sorted(AMOUNTS, key=[a for a, _, _ in TERMS].index)
    assert len({amount for amount, _, _ in TERMS}) == len(TERMS) == len(AMOUNTS)
    assert {rate for _, rate, _ in TERMS} | {"step_overhead_seconds"} == set(Rates().to_dict())


@given(works, rates_, st.sampled_from(AMOUNTS), st.floats(1, 1e6))
def test_more_work_never_takes_less_time(work, rates, amount, more) -> None:
    larger = dataclasses.replace(work, **{amount: getattr(work, amount) + more})
    parts = step_parts(work, rates)
    assert all(seconds >= parts[part] for part, seconds in step_parts(larger, rates).items())


@given(rates_)
def test_no_work_takes_the_overhead(rates) -> None:
    assert sum(step_parts(StepWork(), rates).values()) == rates.step_overhead_seconds


@pytest.mark.slow
@given(works, rates_)
def test_values_survive_json(work, rates) -> None:
    assert decode(StepWork, json.loads(json.dumps(work.to_dict()))) == work
    assert decode(Rates, json.loads(json.dumps(rates.to_dict()))) == rates


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "1", None, True])
def test_work_that_is_no_amount_is_refused(value) -> None:
    with pytest.raises(ConfigError, match=r"StepWork\.fills: got .*, needed a finite number"):
        StepWork(fills=value)


def test_an_unknown_kind_of_work_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sleep: unknown key\. Known here: dense_flops"):
        decode(StepWork, {"sleep": 1})


# ---------------------------------------------------------------------------------------- work


BELOW_TOWERS = [(arch, below) for arch in WITH_TOWERS for below in ("dlrm", "dlrm_dcn")]


@pytest.mark.parametrize(
    ("arch", "interaction"), [*((arch, None) for arch in ("dlrm", "dlrm_dcn", *FACTORIZED)), *BELOW_TOWERS]
)
def test_dense_sizes_are_those_of_the_model(arch, interaction) -> None:
    crossing = interaction or arch
    cross = {"dcn_num_layers": 2, "dcn_low_rank_dim": 3} if crossing == "dlrm_dcn" else {}
    layers: dict[str, Any] = {} if arch in FACTORIZED else {"dense_arch_layer_sizes": (20, 8)}
    layers |= {} if arch == "fm" else {"over_arch_layer_sizes": (12, 6, 1)}
    config = ModelConfig(arch, 8, interaction=interaction, **layers, **cross)
    has_several = interaction or arch in FACTORIZED
    labels, widths = (("x", "y=1", "y=2", "y=3", "z"), (1, 3, 1)) if has_several else (("x",), (1,))
    target = Target(labels, widths=widths)
    schema = Schema(("a", "b", "c"), tuple(SparseFeature(f"s{i}", 5) for i in range(4)), target)
    model = build_model(config, schema, torch.device("cpu"))
    dense = [p for p in model.parameters() if not p.is_meta]
    size = DenseSize.of(config, 3, 4, widths=widths)
    assert size.parameter_bytes == sum(p.numel() * 4 for p in dense)
    weights = sum(p.numel() for p in dense if p.dim() == 2)
    others = {"dlrm": 5 * 5 * 8, "fm": 2 * 7 * 3, "deepfm": 2 * 7 * 3}.get(crossing, 0)  # 5 x 8, or 7 fields x 3
    assert size.flops_per_sample == 6 * (weights + others)
    assert size.activation_bytes_per_sample > 0
    if not has_several:
        assert size == DenseSize(arch, 3, 4, 8, (20, 8), (12, 6, 1), *cross.values())
    in_fp64 = DenseSize.of(config, 3, 4, number_bytes=8, widths=widths)
    assert in_fp64.parameter_bytes == 2 * size.parameter_bytes
    assert in_fp64.activation_bytes_per_sample == 2 * size.activation_bytes_per_sample


def test_one_rank_sends_nothing() -> None:
    common = {"batch_size": 4, "world_size": 1, "ids_per_sample": 2, "columns": 8}
    assert all(
        formulas.exchanged_bytes(kind, **common).in_all.in_training == 0
        for kind in ("table_wise", "row_wise", "grid_shard")
    )
    assert formulas.all_reduce_bytes(100, 1) == 0 == formulas.num_collectives(1, 1)


def test_bytes_of_each_sharding_by_hand() -> None:
    common = {"batch_size": 10, "ids_per_sample": 2, "columns": 8}
    # From each of 3 others: 10 samples of 2 ids of 8 bytes and a length of 4; to and from each 10 x 8 floats.
    table_wise = formulas.exchanged_bytes("table_wise", world_size=4, **common).in_all
    assert table_wise == SentBytes(3 * 10 * (2 * 8 + 4), 3 * 10 * 8 * 4, 3 * 10 * 8 * 4)
    shared = formulas.exchanged_bytes("table_wise", world_size=4, num_features=2, **common).in_all
    assert shared == SentBytes(3 * 10 * (2 * 8 + 2 * 4), 2 * 3 * 10 * 8 * 4, 2 * 3 * 10 * 8 * 4), "bags of two features"
    row_wise = formulas.exchanged_bytes("row_wise", world_size=4, rank_share=0.25, **common).in_all
    assert row_wise == SentBytes(3 * 10 * (0.5 * 8 + 4), 3 * 10 * 8 * 4, 3 * 10 * 8 * 4)
    # Two nodes of 2: partial sums of all 40 samples, half of them to the neighbour; then 10 samples to the other node.
    by_node = formulas.exchanged_bytes("table_row_wise", world_size=4, rank_share=0.5, **common).in_all
    assert by_node == SentBytes(3 * 10 * (1 * 8 + 4), (20 + 10) * 8 * 4, (20 + 10) * 8 * 4)
    assert formulas.exchanged_bytes("data_parallel", world_size=4, **common).in_all == SentBytes()
    with pytest.raises(ConfigError, match="Unknown sharding type 'diagonal'"):
        formulas.exchanged_bytes("diagonal", world_size=4, **common)


@given(st.integers(2, 64), st.integers(1, 4096), st.floats(0, 100), st.integers(1, 64))
def test_rows_over_one_node_cost_as_rows_over_all_ranks(ranks, batch_size, ids, columns) -> None:
    common = {"batch_size": batch_size, "world_size": ranks, "ids_per_sample": ids, "columns": columns}
    by_node = formulas.exchanged_bytes("table_row_wise", **common, rank_share=1 / ranks).in_all
    everywhere = formulas.exchanged_bytes("row_wise", **common, rank_share=1 / ranks).in_all
    assert astuple(by_node) == pytest.approx(astuple(everywhere))


def test_tables_are_exchanged_by_type_and_rows_by_columns_too() -> None:
    table = TableSize("t", 10, 8)
    kinds = [("row_wise", 8, "pooled"), ("row_wise", 8, "rows"), ("row_wise", 4, "rows"), ("table_wise", 8, "pooled")]
    shards = [PlacedShard(table, 0, 0, 10, columns, kind, "cached", exchange) for kind, columns, exchange in kinds]
    replicated = PlacedShard(table, 0, 0, 10, 8, "data_parallel", "replicated")
    assert len(formulas.exchange_groups([*shards, *shards, replicated])) == 4
    four = PlacedShard(table, 0, 0, 10, 4, "row_wise", "cached")
    assert formulas.exchange_groups([shards[0], four]) == formulas.exchange_groups(shards[:1])

    assert formulas.num_collectives(2, 4) == 2 + 2 * 5
    assert formulas.num_collectives(2, 4, 3) == 2 + 2 * 5 + 3 * 2
    assert formulas.sizes_bytes(2, 4) == 2 * 3 * 24


# ---------------------------------------------------------------------------------------- fit


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_nonnegative_least_squares_meets_its_optimality_conditions(rows, columns, seed) -> None:
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(rows, columns)), rng.normal(size=rows)
    found = nonnegative_least_squares(matrix, target)
    gain = matrix.T @ (target - matrix @ found)
    assert (found >= 0).all()
    assert gain.max() <= 1e-6  # no column would help
    assert np.abs(gain[found > 1e-9]).max(initial=0) <= 1e-6  # those in use are at their best


def test_rates_are_found_again() -> None:
    rng = np.random.default_rng(0)
    true = Rates(
        seconds_per_flop=2e-11,
        seconds_per_planned_id=1e-7,
        seconds_per_fill=4e-7,
        seconds_per_write_back=4e-7,
        seconds_per_input_second=0.5,
        step_overhead_seconds=0.02,
    )
    works = [
        StepWork(dense_flops=f, planned_ids=i, fills=x, write_backs=x, input_seconds=s)
        for f, i, x, s in rng.uniform(0, 1, (12, 4)) * [1e10, 2e5, 1e4, 0.02]
    ]
    fit = fit_rates([(work, sum(step_parts(work, true).values())) for work in works])
    assert fit.rates.to_dict() == pytest.approx(true.to_dict())
    assert fit.errors == pytest.approx([0] * 12, abs=1e-9)


def test_a_fit_says_how_far_off_it_is() -> None:
    fit = fit_rates([(StepWork(), 0.1), (StepWork(), 0.2)])
    low, high = fit.errors
    assert low > 0 > high
    assert fit.rates.step_overhead_seconds == pytest.approx(0.1 * (1 + low))


@pytest.mark.parametrize("measured", [[], [(StepWork(), 0.0)]])
def test_a_fit_needs_times(measured) -> None:
    with pytest.raises(ConfigError, match="needed at least one"):
        fit_rates(measured)


def test_the_difference_of_alike_steps_tells_what_little_work_takes() -> None:
    """Work is not all that decides: here steps of many ids take 10 % more than their work says, and those of few take
    less. That hides what five more collectives take, unless the two steps that differ in these alone are a pair."""
    true = Rates(seconds_per_planned_id=1e-7, seconds_per_collective=5e-4, step_overhead_seconds=0.01)

    def step(ids: float, collectives: float, wrong: float) -> tuple[StepWork, float]:
        work = StepWork(planned_ids=ids, num_collectives=collectives)
        return work, sum(step_parts(work, true).values()) * wrong

    measured = [step(1e5, 7, 0.9), step(4e5, 7, 1.0), step(8e5, 7, 1.1), step(8e5, 12, 1.1)]
    errors = [
        abs(fit_rates(measured, pairs).rates.seconds_per_collective / true.seconds_per_collective - 1)
        for pairs in ([], [(2, 3)])
    ]
    assert errors[1] < 0.5 * errors[0]


def test_work_that_comes_together_is_told_apart_by_expected_rates() -> None:
    """Every distinct id brings two operations: their sum is known, and which of them takes how long is not."""
    true = Rates(seconds_per_unique_id=1e-6, seconds_per_collective=2e-6, step_overhead_seconds=0.01)
    works = [StepWork(unique_ids=ids, num_collectives=2 * ids) for ids in (1e3, 3e3, 5e3, 9e3)]
    measured = [(work, sum(step_parts(work, true).values())) for work in works]
    near = fit_rates(measured, expected={"seconds_per_unique_id": 1e-6}).rates
    assert near.seconds_per_unique_id == pytest.approx(1e-6, rel=0.05)
    assert near.seconds_per_collective == pytest.approx(2e-6, rel=0.05)
    alone = fit_rates(measured).rates  # the control: one of them has it all
    assert abs(alone.seconds_per_unique_id / 1e-6 - 1) > 0.3


def test_an_expected_rate_gives_way_to_what_was_measured() -> None:
    true = Rates(seconds_per_unique_id=1e-6, seconds_per_flop=1e-11, step_overhead_seconds=0.01)
    works = [StepWork(unique_ids=ids, dense_flops=flops) for ids in (1e3, 5e4) for flops in (1e8, 1e10)]
    measured = [(work, sum(step_parts(work, true).values())) for work in works]
    found = fit_rates(measured, expected={"seconds_per_unique_id": 3e-6, "seconds_per_flop": 3e-11}).rates
    assert found.seconds_per_unique_id == pytest.approx(1e-6, rel=0.1)
    assert found.seconds_per_flop == pytest.approx(1e-11, rel=0.1)
