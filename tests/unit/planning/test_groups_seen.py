"""Plans for groups of ranks: the machine as a group sees it, what averages send, and both beside one group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from embershard.commands import cli
from embershard.errors import ConfigError
from embershard.extras.groups.predicted import seen_from_a_group, sync_work
from embershard.planning.cost.rates import StepWork
from embershard.planning.cost.topology import load_topology
from embershard.sharding.sizes import PlacedShard
from tests.unit.planning.requests import make_workload

pytestmark = pytest.mark.extra


def test_a_group_of_a_node_has_the_latency_of_a_node() -> None:
    machine = load_topology("h100x8x4")
    every, alone, seen = machine.rates_for(32), machine.rates_for(8), seen_from_a_group(machine, 4, 32).rates_for(8)
    assert seen.seconds_per_all_reduce_byte == every.seconds_per_all_reduce_byte > alone.seconds_per_all_reduce_byte
    assert alone.seconds_per_collective < seen.seconds_per_collective < every.seconds_per_collective
    assert seen_from_a_group(machine, 2, 32).rates_for(16) == every, "a group of two nodes"


@pytest.mark.parametrize(
    ("name", "groups", "needed"), [("h100x8x4", 3, "divides the ranks"), ("h100x8+a100-80x8", 2, "needed one kind")]
)
def test_what_cannot_be_planned_is_refused(name: str, groups: int, needed: str) -> None:
    machine = load_topology(name)
    with pytest.raises(ConfigError, match=needed):
        seen_from_a_group(machine, groups, machine.world_size)


def averages(groups: int, per_node: int = 1, sync_every: int = 1, number_bytes: int = 4, **of_table: Any) -> StepWork:
    workload = make_workload(world_size=2)
    shape = replace(workload.shape, groups=groups, groups_per_node=per_node, sync_every=sync_every)
    tables = tuple(replace(each, **of_table) for each in workload.model.tables)
    model = replace(workload.model, tables=tables)
    workload = replace(workload, shape=replace(shape, sync_number_bytes=number_bytes), model=model)
    places = [PlacedShard(each, 0, 0, each.rows, each.dim, "table_wise", "cached") for each in workload.model.tables]
    return sync_work(workload, places)


def test_averages_go_between_nodes_where_groups_are() -> None:
    assert averages(4).sent_sync_bytes == 0 < averages(4).network_sync_bytes
    half = averages(4, per_node=2)
    assert half.network_sync_bytes == pytest.approx(2 * half.sent_sync_bytes), "one of three others is on the node"
    assert half.sent_sync_bytes + half.network_sync_bytes == pytest.approx(averages(4).network_sync_bytes)
    assert averages(2, per_node=2).network_sync_bytes == 0


def test_weights_in_fp16_take_half_of_the_bytes_and_states_as_many() -> None:
    def of_weights(number_bytes: int, state_bytes: int) -> float:
        sent, none = (averages(2, number_bytes=each, state_bytes_per_column=state_bytes) for each in (number_bytes, 0))
        return sent.network_sync_bytes - none.network_sync_bytes

    assert of_weights(4, 0) == pytest.approx(of_weights(4, 4))
    assert of_weights(2, 4) == pytest.approx(of_weights(4, 4) / 2)
    assert of_weights(2, 4) > 10_000
    already = [averages(2, number_bytes=each, dtype="fp16").network_sync_bytes for each in (4, 2)]
    assert already[0] == already[1], "they are sent as they are"


def test_rows_that_are_averaged_later_are_averaged_once() -> None:
    sent = [averages(2, sync_every=steps).network_sync_bytes for steps in (1, 4, 64)]
    assert sent == sorted(sent, reverse=True)
    assert sent[0] < 4 * sent[1], "four batches have other rows, too"
    everything = sum((64 * 4 + 4) * rows for rows in (5000, 900, 300, 40))
    assert 64 * sent[2] < everything * (1 + 4 / 260)


@pytest.mark.smoke
@pytest.mark.slow
def test_one_group_and_one_of_each_node_are_simulated(tmp_path, capsys) -> None:
    tables = tmp_path / "tables.toml"
    tables.write_text("[model]\nembedding_dim = 16\n[tables.item]\nrows = 100_000\ncount = 4\n")
    asked = ["--tables", str(tables), "--topology", "a100-40x8", "--ranks", "8,16", "--simulate", "--ratios", "0.1"]
    assert cli.main(["plan", *asked, "--set", "sharding.groups=2", "--set", "sharding.sync_every=8"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Simulated ")]
    assert [line.split(":")[0] for line in told if ":" in line] == [
        "Simulated 8 ranks",
        "Simulated 16 ranks",
        "Simulated 16 ranks in 2 groups",
    ]
    assert cli.main(["plan", *asked]) == 0
    assert "groups" not in capsys.readouterr().out
