"""Machines of several kinds in one job: each rank at its own speed, tables where they are faster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from embershard.errors import ConfigError
from embershard.planning import cost_arrays as arrays
from embershard.planning.cost.rates import Rates, StepWork, fastest
from embershard.planning.cost.topology import load_topology
from embershard.planning.make_plan import best_candidate, make_plan, sized
from embershard.planning.many_ranks import fastest_candidate
from embershard.planning.request import Budget, PlanRequest
from embershard.planning.simulate.step_replay import Pipeline, replay_steps, stage_seconds
from embershard.planning.uncertainty import uncertainty
from tests.covering import keep
from tests.unit.planning.exhaustive import NUM_TASKS, of_two_speeds, tried
from tests.unit.planning.requests import data_of, make_request

ROWS = tuple(int(rows) for rows in np.geomspace(3000, 40_000, 12))
NODES = "h100x2+a10x2"


def on(machine: str, **changes: object) -> PlanRequest:
    """Twelve tables on four GPUs; the host's thread hides nothing."""
    topology = load_topology(machine)
    num_ranks = topology.world_size
    data = replace(data_of(ROWS, bag_size=20), read_seconds_per_sample=None)
    given = {"rows": ROWS, "data": data, "world_size": num_ranks, "ranks_per_node": topology.ranks_per_node}
    given |= {"batch_size": 1024, "rates": topology.rates_of_ranks(num_ranks), "effort": 0.2, "types": ["table_wise"]}
    return make_request(Budget(device_bytes=10**9), **{**given, **changes}).without_host


@pytest.mark.slow
@pytest.mark.parametrize("seed", keep((0, 1), range(NUM_TASKS[of_two_speeds])))
def test_no_plan_is_faster_than_the_bound(seed):
    found = tried(of_two_speeds(seed))
    assert not found.problem
    assert found.best is None or found.found <= 1.02 * found.best


@pytest.mark.slow
def test_a_bound_as_if_a_rank_were_slower_is_above_plans(monkeypatch):
    """A negative control."""
    slowdown = arrays._Options.slowdown

    def slower(options: arrays._Options, *given: object) -> np.ndarray:
        return (3.0 if options._at_best else 1.0) * slowdown(options, *given)

    monkeypatch.setattr(arrays._Options, "slowdown", slower)
    problems = [tried(of_two_speeds(seed)).problem for seed in (0, 24)]
    assert all(problem.startswith("a bound of ") for problem in problems), problems


def test_two_nodes_of_one_kind_are_two_nodes():
    """To the digit, whichever way they are named."""
    both, two = load_topology("h100x2+h100x2"), load_topology("h100x2x2")
    assert replace(both, name="") == replace(two, name=""), "without a word of several kinds"
    expected = on("h100x2x2")
    found = best_candidate(replace(expected, rates=(expected.rates,) * 4))  # of each rank, and all the same
    best = best_candidate(expected)
    assert (found.tables, found.quick, found.bound) == (best.tables, best.quick, best.bound)


def test_tables_go_where_they_are_faster():
    fast = load_topology("h100x4").rates_for(4)
    slow = replace(fast, seconds_per_embedding_byte=6 * fast.seconds_per_embedding_byte)
    request = on("h100x4", rates=(fast, fast, slow, slow))
    lookups = np.zeros(4)
    plan = make_plan(request)
    for part in plan.prediction.tables:
        lookups[part.rank] += part.lookups
    assert lookups[:2].sum() > 1.3 * lookups[2:].sum()
    # As if all ranks were as slow, they get as much: their plan takes longer here.
    alike = best_candidate(replace(request, rates=request.rates[-1]))
    rated = sized(request, alike.tables)
    assert rated is not None
    assert rated.step_seconds > 1.05 * plan.prediction.step_seconds


def test_a_step_takes_what_each_rank_takes_at_its_speed():
    """On one stage after the other: the slowest rank's, whichever has more to do."""
    slow, fast = Rates(seconds_per_flop=2e-12), Rates(seconds_per_flop=1e-12)
    works = [StepWork(dense_flops=1e9), StepWork(dense_flops=3e9)]
    for rates, expected in (((slow, fast), 3e-3), ((fast, slow), 6e-3), (slow, 6e-3)):
        assert replay_steps(works, rates, Pipeline("cuda", 2)).step_seconds == pytest.approx(expected)
    assert stage_seconds(works[:1], (slow, fast))["forward"] == pytest.approx([2e-3 / 3, 1e-3 / 3])
    assert fastest((slow, replace(fast, seconds_per_fill=1.0))).seconds_per_fill == 0.0


def test_the_slowest_decides_the_dense_part():
    seconds = [on(machine).without_host for machine in ("h100x2x2", NODES, "a10x2x2")]
    h100, both, a10 = (best_candidate(request).step_seconds for request in seconds)
    assert h100 < both < a10
    forward = [arrays.cost_arrays(each, resident=True, cached=False).formula.forward for each in seconds]
    assert forward[0] < forward[1]
    assert forward[1] == forward[2]


def test_every_rank_has_its_own_memory(tmp_path):
    topology = load_topology(NODES)
    memory = topology.memory_of_ranks(4)
    assert memory == (
        *(load_topology("h100").device_memory_bytes,) * 2,
        *(load_topology("a10").device_memory_bytes,) * 2,
    )
    assert load_topology("h100x2x2").memory_of_ranks(4) == ()
    assert topology.device_memory_bytes == max(memory)
    assert topology.world_size == 4
    assert "Ranks are of several kinds: 0 to 1 h100x2, 2 to 3 a10x2." in topology.note()


def test_the_slower_network_is_between_all_nodes():
    slow, fast = load_topology("a10x2x2").rates_for(4), load_topology("h100x2x2").rates_for(4)
    assert slow.seconds_per_network_byte > fast.seconds_per_network_byte
    for own in load_topology(NODES).rates_of_ranks(4):
        assert own.seconds_per_network_byte == slow.seconds_per_network_byte
        assert own.seconds_per_all_reduce_byte >= fast.seconds_per_all_reduce_byte


def test_intervals_draw_the_constants_of_all_kinds():
    """A constant that is at its end on one kind is at its own end on the other."""
    request, topology = on(NODES), load_topology(NODES)
    found = best_candidate(request)
    certainty = uncertainty(request.workload, found.quick, topology)
    assert certainty.low_seconds < certainty.high_seconds
    half = topology.assuming("flops", topology.assumptions.flops / 2)
    before, after = topology.rates_of_ranks(4), half.rates_of_ranks(4)
    assert [new.seconds_per_flop / old.seconds_per_flop for new, old in zip(after, before, strict=True)] == [2.0] * 4
    kept = topology.assuming("ranks_per_host_link", 1.0)
    assert [part.assumptions.ranks_per_host_link for part in kept.parts] == [1.0, 1.0], "within its limits"
    in_tf32 = topology.at("tf32")
    assert [part.precision for part in in_tf32.parts] == ["tf32", "tf32"]
    assert topology.at("fp16").precision == "fp32", "the speed of an A10 in fp16 is not known"


def test_all_ranks_are_searched_where_they_differ(monkeypatch):
    """Not the nodes alone that could be busy: which ones they are, matters."""
    monkeypatch.setattr("embershard.planning.many_ranks.MOST_SEARCHED_RANKS", 2)
    request = on(NODES)
    assert fastest_candidate(request).step_seconds == best_candidate(request).step_seconds
    with pytest.raises(ConfigError, match="2 ranks: the speeds of 4 ranks are known"):
        request.for_ranks(2)
    with pytest.raises(ConfigError, match="rates of 3 ranks, 4 ranks"):
        replace(request, rates=request.rates[:3])


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("h100x4+a100-80x2", "nodes of 4 and of 2 ranks, needed as many on each"),
        ("h100x2+cpu", "got a CPU among its parts"),
        ("h100x2+", "h100x2\\+: got nothing on a side of \\+"),
        ("h100x2+b100x2", "Unknown topology 'b100x2'.*with \\+ between"),
    ],
)
def test_nodes_that_are_no_job_are_refused(name, problem):
    with pytest.raises(ConfigError, match=problem):
        load_topology(name)


def test_a_mix_has_its_number_of_ranks():
    with pytest.raises(ConfigError, match=r"got 1 nodes of 2 ranks, needed its 2 nodes of 2: --ranks 4"):
        load_topology(NODES).shaped(2)
    assert load_topology(NODES).shaped(2, 2) == load_topology(NODES)
