"""Machines as values: the catalogue, names, rates, and files."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.errors import ConfigError
from embershard.planning.cost.rates import Amounts, Rates
from embershard.planning.cost.topology import Assumptions, Bandwidths, Topology, load_topology, save_topology
from embershard.planning.make_plan import make_plan
from embershard.planning.request import Budget
from tests.unit.planning.requests import make_request

KINDS = ("a100-40", "a100-80", "h100", "h200", "b200", "cpu")


def calibrated(*ranks: int) -> Topology:
    rates = {n: Rates(seconds_per_flop=n * 1e-11, step_overhead_seconds=n) for n in ranks}
    return Topology("here", "calibrated", "cpu", 2, 10**9, rates=rates)


@pytest.mark.parametrize("kind", KINDS)
def test_the_catalogue_is_complete_and_says_that_it_was_not_measured(kind) -> None:
    topology = load_topology(kind)
    assert "never measured by us" in topology.source
    assert "estimate" in topology.note()
    free = {name for name, rate in topology.rates_for().to_dict().items() if not rate}
    assert free == {"seconds_per_page", *(["seconds_per_launch"] if kind == "cpu" else [])}


def test_the_ranks_of_a_node_share_its_disk() -> None:
    topology = dataclasses.replace(load_topology("h200x4x2"), disk_pages_per_second=40_000)
    assert [topology.rates_for(ranks).seconds_per_page for ranks in (1, 4, 8)] == [1 / 40_000, 1e-4, 1e-4]
    calibrated = dataclasses.replace(topology, rates={4: Rates()}, bandwidths=None)
    assert calibrated.rates_for(4).seconds_per_page == 1e-4
    with pytest.raises(ConfigError, match="disk_pages_per_second: got -1, needed 0 to"):
        dataclasses.replace(topology, disk_pages_per_second=-1)


def test_names_give_the_number_of_ranks_and_nodes() -> None:
    names = {"h200": 8, "h200x8": 8, "h200x2": 2, "h200x8x4": 32, "cpux4": 4}
    assert {name: load_topology(name).world_size for name in names} == names
    four_nodes = load_topology("a100-80x8x4")
    assert (four_nodes.name, four_nodes.ranks_per_node, four_nodes.num_nodes) == ("a100-80x8x4", 8, 4)
    assert four_nodes.device_memory_bytes == 80 * 10**9


def test_a_quarter_of_the_gpus_gets_a_quarter_of_the_host_memory() -> None:
    assert load_topology("h100x2").host_memory_bytes * 4 == load_topology("h100").host_memory_bytes
    assert load_topology("cpux1").host_memory_bytes == load_topology("cpu").host_memory_bytes


@pytest.mark.parametrize("name", ["h300", "h300x8", "h200x8x", "h200x8x4x2", ""])
def test_an_unknown_name_lists_the_known_ones(name) -> None:
    with pytest.raises(ConfigError, match=r"Unknown topology .*a100-40, a100-80, b200, cpu, h100, h200"):
        load_topology(name)


@pytest.mark.parametrize(
    ("name", "needed"),
    [("h200x9", "got 9 ranks per node, needed at most 8"), ("h200x0", "ranks_per_node: got 0, needed 1 or more")],
)
def test_impossible_nodes_are_refused(name, needed) -> None:
    with pytest.raises(ConfigError, match=needed):
        load_topology(name)


def test_across_nodes_the_network_limits_what_leaves_the_node() -> None:
    one, four = load_topology("h200x8").rates_for(), load_topology("h200x8x4").rates_for()
    assert four.seconds_per_network_byte == pytest.approx(1 / (50e9 * 0.7))
    assert four.seconds_per_all_to_all_byte == one.seconds_per_all_to_all_byte == pytest.approx(1 / (450e9 * 0.7))
    assert four.seconds_per_collective > one.seconds_per_collective
    assert four.seconds_per_embedding_byte == one.seconds_per_embedding_byte


def test_ranks_beyond_the_calibrated_number_share_the_cores_and_send_more_messages() -> None:
    rates = Rates(seconds_per_flop=1e-11, seconds_per_collective=1e-3)
    here = Topology("here", "calibrated", "cpu", 2, 10**9, cores_per_node=2, rates={2: rates})
    eight = here.shaped(8).rates_for(8)
    assert (eight.seconds_per_flop, eight.seconds_per_collective) == pytest.approx((4e-11, 4 * 7e-3))
    one = here.shaped(1).rates_for(1)
    assert (one.seconds_per_flop, one.seconds_per_collective) == (1e-11, 0)
    nodes = here.shaped(2, 4)
    assert nodes.rates_for(8).seconds_per_flop == 1e-11
    assert "its network was not" in str(nodes.note(8))
    assert (here.jitter_for(2), nodes.jitter_for(8)) == (0, here.assumptions.jitter)


def test_each_precision_has_its_own_rate_of_dense_work() -> None:
    """Only that one; where it is not known, the machine stays as it is, and says so."""
    gpu, cpu, measured = load_topology("a100-80x8"), load_topology("cpu"), calibrated(1)
    rates = {name: gpu.at(name).rates_for(8) for name in ("fp32", "tf32", "bf16", "fp64")}
    assert [rates["fp32"].seconds_per_flop / each.seconds_per_flop for each in rates.values()] == pytest.approx(
        [1, 8, 16, 1]
    )
    assert len({dataclasses.replace(each, seconds_per_flop=0) for each in rates.values()}) == 1
    assert gpu.at("bf16").shaped(2).at("fp32").rates_for(2) == gpu.rates_for(2)
    assert (cpu.at("bf16"), measured.at("bf16")) == (cpu, measured)
    assert gpu.at("bf16").precision_note("bf16") is cpu.precision_note("tf32") is None
    assert 'in fp32, and the run computes it in "bf16"' in str(measured.precision_note("bf16"))
    assert 'in bf16, and the run computes it in "tf32"' in str(gpu.at("bf16").precision_note("tf32"))


def test_ranks_share_the_host_memory_and_a_cpus_cores() -> None:
    eight, one = load_topology("b200x8").rates_for(), load_topology("b200x1").rates_for()
    assert eight.seconds_per_byte_to_device > one.seconds_per_byte_to_device
    assert eight.seconds_per_flop == one.seconds_per_flop
    cpu = load_topology("cpu")
    assert cpu.rates_for(2).seconds_per_flop == pytest.approx(2 * cpu.rates_for(1).seconds_per_flop)


@pytest.mark.slow
@given(st.integers(1, 64), st.integers(1, 64))
def test_more_ranks_never_make_a_byte_to_another_node_cheaper(few, many) -> None:
    topology = load_topology("h100x8x8")
    few, many = sorted((few, many))
    slow, fast = topology.rates_for(many), topology.rates_for(few)
    assert slow.seconds_per_network_byte >= fast.seconds_per_network_byte
    assert slow.seconds_per_collective >= fast.seconds_per_collective


@pytest.mark.parametrize(("wanted", "taken"), [(1, 1), (2, 2), (3, 4), (4, 4), (64, 4)])
def test_the_nearest_calibrated_number_of_ranks_is_taken_and_named(wanted, taken) -> None:
    topology = calibrated(1, 2, 4)
    assert topology.rates_for(wanted).step_overhead_seconds == taken
    note = topology.note(wanted)
    if wanted == taken:
        assert note == f"The speed of {topology.name}: {topology.source}.", "also how busy the machine was"
    else:
        assert f"calibrated for {taken} ranks, not for {wanted}" in note


def test_a_gpus_host_launches_the_collectives_of_several_ranks() -> None:
    for name, of_collectives in (("h100", 1.1e-3), ("a100-40", 1.5e-3), ("cpu", 0.0)):
        alone, two, eight = (load_topology(f"{name}x{n}").rates_for(n).step_overhead_seconds for n in (1, 2, 8))
        assert two == eight == pytest.approx(alone + of_collectives)


def test_a_topology_survives_its_file(tmp_path) -> None:
    for topology in (calibrated(1, 4), load_topology("h200x8x2"), load_topology("cpu")):
        save_topology(topology, tmp_path / "machine.toml")
        assert load_topology(str(tmp_path / "machine.toml")) == topology


def test_files_go_before_the_catalogue(tmp_path) -> None:
    mine = dataclasses.replace(calibrated(2), name="cpu")
    save_topology(mine, tmp_path / "a.toml")
    assert load_topology("cpu", files=[tmp_path / "a.toml"]) == mine
    assert load_topology("cpux4", files=[tmp_path / "a.toml"]).rates_for(4) == mine.rates_for(2)
    assert load_topology("h100", files=[tmp_path / "a.toml"]).device == "cuda"


GOOD = """
[x]
source = "s"
device = "cpu"
ranks_per_node = 2
host_memory_bytes = 10
[x.rates.2]
seconds_per_fill = 1
"""


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("ranks_per_node = 2", "ranks_per_node = 2.5", "ranks_per_node: got 2.5, needed integer"),
        ("ranks_per_node = 2", "", "ranks_per_node: is missing, needed integer"),
        ('"cpu"', '"tpu"', 'device: got \'tpu\', needed "cpu" | "cuda"'),
        ('"cpu"', '"cuda"', "device_memory_bytes: got None, needed the memory of one GPU"),
        ("host_memory_bytes", "host_memory", "host_memory: unknown key. Did you mean host_memory_bytes?"),
        ("rates.2", "rates.two", "rates.two: got 'two', needed integer"),
        (
            "seconds_per_fill = 1",
            "seconds_per_fill = -1",
            "Rates.seconds_per_fill: got -1.0, needed a number from 0 to 1e+09",
        ),
        ("seconds_per_fill", "seconds_per_sleep", "rates.2.seconds_per_sleep: unknown key. Did you mean rates.2."),
        ("[x.rates.2]\nseconds_per_fill = 1", "", "rates: got 'no rates and no bandwidths', needed one of them"),
        (
            "[x.rates.2]\nseconds_per_fill",
            "[x.bandwidths]\nflops",
            "bandwidths.device_memory_bytes: is missing, needed number",
        ),
        ("[x]", "y = 1\n[x]", "y: got 1, needed a section"),
        ("[x]", "[x", "is not TOML"),
    ],
)
def test_a_malformed_file_says_where_and_what_is_needed(tmp_path, before, after, message) -> None:
    file = tmp_path / "machine.toml"
    file.write_text(GOOD)
    assert load_topology(str(file)).rates_for(2) == Rates(seconds_per_fill=1)
    assert before in GOOD
    file.write_text(GOOD.replace(before, after))
    with pytest.raises(ConfigError) as error:
        load_topology(str(file))
    assert message in str(error.value)
    assert str(file) in str(error.value)


ODD = ("0", "-1", "nan", "inf", "1e-300", "1e300", '""')


def machine(**changes: str) -> str:
    """The file of a machine of two nodes, with these figures, by section and key; "" leaves one out."""
    values = {
        "x": {
            "source": '"s"',
            "device": '"cuda"',
            "ranks_per_node": "2",
            "num_nodes": "2",
            "device_memory_bytes": "80_000_000_000",
            "host_memory_bytes": "2_000_000_000_000",
        },
        "x.bandwidths": {name: "1e12" for name, _, _ in limits(Bandwidths)},
        "x.assumptions": {name: str(getattr(Assumptions(), name)) for name, _, _ in limits(Assumptions)},
    }
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        values[section][name] = value
    sections = [
        f"[{section}]\n" + "\n".join(f"{name} = {value}" for name, value in own.items() if value)
        for section, own in values.items()
    ]
    return "\n".join(sections)


def limits(kind: type[Amounts]) -> list[tuple[str, float, float]]:
    return [(field.name, *kind.limits(field.name)) for field in dataclasses.fields(kind)]


@pytest.mark.slow
def test_a_figure_that_is_none_is_refused_with_file_and_key(tmp_path) -> None:
    """Each figure of a machine, each odd value: a sentence, or rates that are numbers; never free or endless work."""
    file = tmp_path / "machine.toml"
    sizes = ("ranks_per_node", "num_nodes", "device_memory_bytes", "host_memory_bytes")
    costs = [f"x.assumptions.{name}" for name, least, _ in limits(Assumptions) if not least]
    unknown = [f"x.bandwidths.{name}_flops" for name in ("tf32", "bf16", "fp16", "fp64")]
    keys = [f"x.{name}" for name in sizes]
    keys += [f"x.bandwidths.{name}" for name, _, _ in limits(Bandwidths)]
    keys += [f"x.assumptions.{name}" for name, _, _ in limits(Assumptions)]
    for key, odd in itertools.product(keys, ODD):
        file.write_text(machine(**{key: odd}))
        if (key in costs and odd in ("0", "1e-300")) or (key in unknown and odd == "0"):
            assert load_topology(str(file)).rates_for().seconds_per_flop > 0
            continue
        with pytest.raises(ConfigError) as error:
            load_topology(str(file))
        said = str(error.value)
        assert all(part in said for part in (str(file), key.rpartition(".")[2], "got", "needed")), (key, odd, said)


@pytest.mark.parametrize("left_out", [True, False])
def test_several_nodes_need_a_network(tmp_path, left_out) -> None:
    """In the file, and where a machine of one node is made more; without it bytes to other nodes cost nothing."""
    file = tmp_path / "machine.toml"
    file.write_text(machine(**{"x.bandwidths.network_bytes": "" if left_out else "0"}))
    needed = "Bandwidths.network_bytes: got 'none', needed the bytes that a rank sends to other nodes in a second"
    with pytest.raises(ConfigError, match=needed) as error:
        load_topology(str(file))
    assert str(file) in str(error.value)
    file.write_text(machine(**{"x.bandwidths.network_bytes": "" if left_out else "0", "x.num_nodes": "1"}))
    one = load_topology(str(file))
    assert one.rates_for(2).seconds_per_all_to_all_byte > 0
    for more in (lambda: one.shaped(2, 2), lambda: one.rates_for(4)):
        with pytest.raises(ConfigError, match=needed):
            more()


def test_ranks_of_a_cpu_share_its_network() -> None:
    """As they share its memory: two ranks of a node send to other nodes half as fast as one."""
    cpu = load_topology("cpu")
    one, two = (cpu.shaped(local, 4).rates_for(4 * local) for local in (1, 2))
    per_byte = 1 / (cpu.bandwidths.network_bytes * cpu.assumptions.network)
    assert one.seconds_per_network_byte == pytest.approx(per_byte)
    assert two.seconds_per_network_byte == pytest.approx(2 * per_byte)
    assert two.seconds_per_all_reduce_byte == pytest.approx(per_byte)


@pytest.mark.slow
@pytest.mark.parametrize("end", [1, 2], ids=["least", "most"])
@pytest.mark.parametrize("kind", [Bandwidths, Assumptions, Rates])
def test_a_machine_at_its_limits_makes_a_plan(kind, end) -> None:
    """All figures at once: seconds stay numbers, and so does what is told of the bound."""
    figures = {name: value for name, *ends in limits(kind) for value in [ends[end - 1]]}
    bandwidths, assumptions = Bandwidths(**{name: 1e12 for name, _, _ in limits(Bandwidths)}), Assumptions()
    if kind is Bandwidths:
        bandwidths = Bandwidths(**{**figures, "network_bytes": max(1e3, figures["network_bytes"])})
    elif kind is Assumptions:
        assumptions = Assumptions(**figures)
    extreme = Topology(
        "x", "s", "cuda", 2, 2**40, 2, device_memory_bytes=2**60, bandwidths=bandwidths, assumptions=assumptions
    )
    rates = Rates(**figures) if kind is Rates else extreme.rates_for(4)
    plan = make_plan(make_request(Budget(device_bytes=10**9), world_size=4, ranks_per_node=2, rates=rates))
    assert math.isfinite(plan.prediction.step_seconds)
    assert plan.bound is None or (math.isfinite(plan.bound.least_seconds) and plan.bound.is_valid)


def test_a_missing_file_and_two_topologies_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_topology(str(tmp_path / "none.toml"))
    (tmp_path / "two.toml").write_text(GOOD + GOOD.replace("[x", "[y"))
    with pytest.raises(ConfigError, match=r"holds 2 topologies \(x, y\), needed is one"):
        load_topology(str(tmp_path / "two.toml"))


def test_a_network_is_not_needed_within_a_node() -> None:
    spec = Bandwidths(1e12, 1e12, 1e11, 1e10, 1e10, 1e11)
    topology = Topology("x", "s", "cuda", 4, 10**12, device_memory_bytes=10**10, bandwidths=spec)
    assert topology.rates_for(4).seconds_per_all_to_all_byte > 0
