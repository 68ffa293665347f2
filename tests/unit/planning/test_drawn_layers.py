"""A plan's time of layers over histories is that of batches with the data's lengths, and of the slowest rank."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from embershard.commands.plan.inputs import make_workload
from embershard.data import DataConfig
from embershard.data.config import ParquetConfig
from embershard.extras.deal import deal as deal_module
from embershard.extras.length_groups.drawn import SectionCosts
from embershard.frequency.assumed import AssumedTable, assumed_statistics
from embershard.models import ModelConfig
from embershard.models.hstu_config import HstuConfig
from embershard.planning.workload import DrawnLayers, Workload
from embershard.training.config import RunConfig, TrainConfig

pytestmark = pytest.mark.extra

MOST = 400
HSTU = HstuConfig(head_dim=64, max_events=MOST)
TABLES = ParquetConfig(sparse=("user", "item", "past"), num_rows=(50, 90, 90))
MODEL = ModelConfig(
    "hstu", target=("item",), history=("past",), embedding_dim=64, dense_arch_layer_sizes=(64,), hstu=HSTU
)


def config_of(batch_size: int = 8, accumulate: int = 1, **data: Any) -> RunConfig:
    own = DataConfig(kind="parquet", path="none", parquet=TABLES, **data)
    return RunConfig(data=own, model=MODEL, train=TrainConfig(batch_size=batch_size, accumulate=accumulate))


def workload_of(
    shares: dict[int, float], ranks: int = 1, config: RunConfig | None = None, device: Any = "cpu", **more: Any
) -> Workload:
    """Of data with such shares of samples by their events: the item that is scored is in the same table."""
    data = assumed_statistics([AssumedTable("t_user", 50), AssumedTable("t_item", 90)], 100_000)
    bags = np.zeros(max(shares) + 2)
    bags[[events + 1 for events in shares]] = list(shares.values())
    tables = {**data.tables, "t_item": replace(data.tables["t_item"], bag_sizes=bags)}
    of_tables = {name: tables[name] for name in ("t_item", "t_user")}
    config = config or config_of()
    return make_workload(config, replace(data, tables=of_tables), ranks, ranks_per_node=8, device=device, **more)


@functools.cache
def drawn_of(ranks: int = 4, accumulate: int = 1, cores: int | None = None, **data: Any) -> DrawnLayers:
    """Of a sample, where most histories are short and some are long."""
    events = np.arange(1, MOST + 1)
    shares = dict(zip(events.tolist(), (events**-1.2 / (events**-1.2).sum()).tolist(), strict=True))
    return workload_of(shares, ranks, config_of(32, accumulate, **data), cores_per_node=cores).drawn


def ratio(**changes: Any) -> float:
    """The work of the rank that all wait for, relative to the mean's."""
    return drawn_of(**changes).flops / drawn_of(cores=1).flops


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_full_histories_cost_what_the_model_says(device, ranks):
    found = workload_of({MOST: 1.0}, ranks, device=device)
    assert found.drawn.flops == pytest.approx(found.model.dense_flops_per_sample)
    assert found.drawn.kept_bytes == pytest.approx(found.model.activation_bytes_per_sample)
    assert "take 1 of the time of full ones (400 events)" in found.drawn.note
    assert ('1.00 times the mean\'s work; dealt (data.deal = "cost") 1.00.' in found.drawn.note) == (ranks > 1)


def test_a_batch_that_is_computed_again_costs_a_third_more():
    many = HSTU.samples_at_once(MOST + 2) + 4
    found = workload_of({MOST: 1.0}, config=config_of(many), device="cpu")
    again = 6.0 * (1 << 21) / many  # another group
    assert found.drawn.flops == pytest.approx(found.model.dense_flops_per_sample + again)
    assert found.drawn.kept_bytes > found.model.activation_bytes_per_sample, "memory has one group at a time"


def test_short_histories_cost_what_they_are_and_memory_has_room_for_full_ones():
    full, short = (workload_of({events: 1.0}) for events in (MOST, 40))
    flops, numbers = HSTU.sample_cost(1, 64, 1, 1, 40)
    assert short.drawn[:2] == (pytest.approx(flops), pytest.approx(4 * numbers))
    assert short.drawn.flops < 0.1 * full.drawn.flops
    assert short.model == full.model


def test_samples_are_padded_to_the_longest_of_their_group():
    events = np.array([3, 300, 3, 290])
    own = [HSTU.sample_cost(1, 64, 1, 1, int(each)) for each in events]
    alone, together, two = (SectionCosts(HSTU, 1, 64, 1, most).of_batch(events) for most in (0, 1 << 40, 1 << 24))
    assert alone == (pytest.approx(sum(each[0] for each in own)), pytest.approx(sum(each[1] for each in own)))
    assert together == (4 * own[1][0], 4 * own[1][1])
    assert two[1] == 2 * own[1][1] + 2 * own[0][1]
    assert two[0] == 2 * own[1][0] + 2 * own[0][0] + 6 * (1 << 24)


@pytest.mark.slow
def test_all_ranks_wait_for_the_one_with_the_long_histories():
    undealt, dealt = ratio(), ratio(deal="cost")
    assert undealt > 1.2
    assert 1 <= dealt < 1.05
    told = f'The slowest rank has {undealt:.2f} times the mean\'s work; dealt (data.deal = "cost") {dealt:.2f}.'
    assert told in drawn_of().note
    assert told in drawn_of(deal="cost").note
    assert dealt < ratio(deal="cost", deal_ranks=2) < undealt


@pytest.mark.slow
def test_costs_that_say_nothing_of_a_sample_gain_nothing(monkeypatch):
    chance, real = np.random.default_rng(1), deal_module.deal
    monkeypatch.setattr(deal_module, "deal", lambda costs, *more: real(chance.permutation(costs), *more))
    assert ratio(deal="cost", deal_ranks=4) == pytest.approx(ratio(), rel=0.06)


@pytest.mark.slow
def test_ranks_wait_in_every_micro_batch_unless_its_samples_are_dealt():
    assert ratio(accumulate=4) > 1.1 * ratio()
    assert ratio(accumulate=4, deal="cost") < ratio()


@pytest.mark.slow
def test_of_ranks_that_take_turns_on_cores_the_mean_counts():
    assert drawn_of(cores=2).flops == drawn_of(cores=1).flops < 0.9 * drawn_of().flops
    assert drawn_of(cores=2).note.endswith("the mean counts here, as ranks take turns on cores.")


def test_a_plan_is_of_how_samples_are_dealt_where_that_has_a_time():
    without = replace(config_of(deal="cost", deal_cost=("past", 1, 0)), model=ModelConfig())
    assert "data.deal" not in without.predicted_from("cpu", 2)
    assert config_of(deal="cost").predicted_from("cpu", 2)["data.deal"] == "cost"
    assert config_of().predicted_from("cpu", 2)["data.deal"] == "order"


@pytest.mark.slow
def test_many_ranks_are_drawn_in_part_and_each_draw_is_the_same():
    found = [workload_of({3: 0.5, 9: 0.5}, ranks, config_of(64)).drawn for ranks in (4096, 8192, 4096)]
    assert found[0] == found[2]
    assert found[0].flops == pytest.approx(found[1].flops, rel=0.02)
