"""What others published of a second node and of groups of ranks, beside what our costs tell; none fitted.

    python -m benchmarks.public_groups [--output FILE]

Two points. Neither names its model, so each is told as bounds over public models that it could have been (both ends
are printed), and as ratios that do not depend on the model.

* **dlrm#356** (https://github.com/facebookresearch/dlrm/issues/356, 2023-09): the TorchRec version of the example at
  18 steps a second on 8 A100, at 3 on two such nodes "connected through a 100Gb/s NIC"; `sparse_data_dist` takes 28 and
  246 ms. It names TorchRec 0.3.2. Not named: tables, batch, layers, the memory of an A100, what the card speaks.
* **Pinterest** (Pinterest Engineering, "Achieving Near-Linear Training Scalability for Pinterest's Foundation Models",
  June 2026; its beginning and summaries of it were read): 1.13 and 1.21 times a node's speed on 2 and 4 nodes; with fp8
  between ranks, balanced shards, narrower rows and groups 2.0, 3.9 and 7.5 on 2, 4 and 8; the all-to-all of 78 ms took
  13 when it stayed inside of a node. Not named: GPUs, links (EFA), model, batch, how often groups average.

A machine's figures are those of a plan (embershard/planning/cost/topologies.toml); only what a link is differs. Steps
are planned and simulated as `embershard plan --simulate` does, with a shorter search.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.common import machine, make_parser, report
from benchmarks.plan_scale import NUM_SAMPLES, model
from benchmarks.simulator_back_test import model_size
from embershard.extras.groups.predicted import seen_from_a_group
from embershard.extras.what_if.simulate_scaling import SimulatedRun, simulate_run
from embershard.frequency.assumed import assumed_statistics
from embershard.planning.cost.topology import Topology, load_topology
from embershard.planning.cost.work import exchanged_bytes
from embershard.planning.request import Budget, PlanRequest
from embershard.planning.workload import Workload
from embershard.sharding.run_shape import ReplaySettings, RunShape

#: Of the search for a placement: three steps were within 2 % of those of a whole search, in a quarter of the time.
_EFFORT = 0.1
_GBIT = 1e9 / 8
_RANKS_PER_NODE = 8
#: Of a sample, on one core, what `torchrec.datasets.criteo` takes (benchmarks/simulator_back_test.py).
_READ_SECONDS = 0.16e-6 * 1.36


@dataclass(frozen=True)
class Job:
    """A training that a point could have been.

    Attributes:
        name: in the table.
        model: a name of `benchmarks.plan_scale.model`, its tables as MLPerf has them, of 40 million rows at most.
        bags: ids are those of MLPerf's bags; False: one per feature.
        batch_size: samples per rank.
    """

    name: str
    model: str
    bags: bool
    batch_size: int


@dataclass(frozen=True)
class Link:
    """What is between nodes.

    Attributes:
        node_bytes: that a node's cards send in a second, by their datasheet; its ranks share them.
        share: of it that an exchange reaches; None: as a plan assumes.
    """

    node_bytes: float
    share: float | None = None

    def of(self, topology: Topology) -> Topology:
        """Return a machine with this link."""
        assert topology.bandwidths is not None, "a built-in machine"
        own = replace(topology.bandwidths, network_bytes=self.node_bytes / _RANKS_PER_NODE)
        share = topology.assumptions.network if self.share is None else self.share
        return replace(topology.assuming("network", share), bandwidths=own)


@dataclass(frozen=True)
class Way:
    """How ranks are grouped, and what travels."""

    groups: int = 1
    sync_every: int = 1
    number_bytes: float = 4

    @property
    def name(self) -> str:
        """As the table has it."""
        wire = {4: "fp32", 1: "fp8"}[int(self.number_bytes)]
        return wire if self.groups == 1 else f"{self.groups} groups, average every {self.sync_every}, {wire}"


@functools.cache
def step(job: Job, kind: str, nodes: int, link: Link, way: Way) -> SimulatedRun:
    """Return a simulated step of a job on so many nodes of 8 GPUs of a kind."""
    topology = link.of(load_topology(f"{kind}x{_RANKS_PER_NODE}x{nodes}"))
    topology = host_of(job, topology)
    if way.groups > 1:
        topology = seen_from_a_group(topology, way.groups, topology.world_size)
    tables, dim, dense = model("mlperf_dcnv2")
    if job.model == "dlrm":
        dense = model("criteo_1tb")[2]
    tables = [replace(table, bag_size=table.bag_size if job.bags else 1) for table in tables]
    shape = RunShape(
        nodes * _RANKS_PER_NODE // way.groups,
        _RANKS_PER_NODE,
        job.batch_size,
        "cuda",
        ReplaySettings(lookahead=1, prefetch=1),
        number_bytes=(way.number_bytes, way.number_bytes),
        groups=way.groups,
        sync_every=way.sync_every,
    )
    workload = Workload(model_size(tables, dim, dense, 4), assumed_statistics(tables, NUM_SAMPLES), shape)
    limits = Budget(device_bytes=topology.device_memory_bytes, host_bytes=topology.host_memory_bytes)
    request = PlanRequest(workload, topology.rates_of_ranks(shape.world_size), limits, effort=_EFFORT)
    found = simulate_run(request, topology)
    assert found.parts is not None, found.problem
    print(f"{job.name}, {nodes} x 8 {kind}, {way.name}: {1e3 * found.step_seconds:.1f} ms", file=sys.stderr, flush=True)
    return found


def host_of(job: Job, topology: Topology) -> Topology:
    """Return a machine whose host reads the job's samples, too."""
    seconds = topology.assumptions.step_overhead_seconds + _READ_SECONDS * job.batch_size
    return topology.assuming("step_overhead_seconds", seconds)


def exchange_seconds(topology: Topology, nodes: int) -> float:
    """Return the seconds of an exchange of whole tables' embeddings among the ranks of so many nodes, for a byte that a
    rank receives in all, its own part included."""
    ranks = nodes * _RANKS_PER_NODE
    sent = exchanged_bytes(
        "table_wise", batch_size=1, world_size=ranks, ids_per_sample=0, columns=4, ranks_per_node=_RANKS_PER_NODE
    )
    rates = topology.rates_for(ranks)
    within, across = sent.in_node.embeddings, sent.to_nodes.embeddings
    seconds = within * rates.seconds_per_all_to_all_byte + across * rates.seconds_per_network_byte
    return seconds / (ranks * 16)  # of a sample's vector from each rank


# dlrm#356

DLRM_MACHINE = "a100-40"
#: Commands of the example's README (torchrec_dlrm/README.MD at 090956ee), with Adagrad, in fp32.
DLRM_JOBS = (
    Job("DLRM, one id a feature, 2,048 a rank", "dlrm", False, 2_048),
    Job("DLRM, one id a feature, 16,384 a rank", "dlrm", False, 16_384),
    Job("DCNv2, one id a feature, 2,048 a rank", "dcn", False, 2_048),
    Job("DCNv2, one id a feature, 16,384 a rank", "dcn", False, 16_384),
    Job("DCNv2, MLPerf's bags, 8,192 a rank", "dcn", True, 8_192),
)
#: With RDMA as a plan assumes. Over sockets NCCL has one stream and one thread a connection where the card is neither
#: AWS's nor Google's (`ncclNetSocketGetNsockNthread` in src/transport/net_socket.cc): a fifth of it is assumed then.
RDMA, SOCKETS = Link(100 * _GBIT), Link(100 * _GBIT, 0.2)
#: The links that it may have been, and what is told of each: with RDMA of groups, too.
DLRM_LINKS = {"RDMA": (RDMA, (Way(), Way(2, 1), Way(2, 16), Way(2, 256))), "sockets": (SOCKETS, (Way(),))}
DLRM_REPORTED = {"one node": 18.0, "two nodes": 3.0, "sparse_data_dist ms": (28, 246)}


def ids_seconds(job: Job, nodes: int, link: Link) -> float:
    """Return the seconds of the exchange of ids alone, and of their lengths, both int32 in the example's data
    (torchrec/datasets/criteo.py, data/multi_hot_criteo.py)."""
    topology = link.of(load_topology(f"{DLRM_MACHINE}x{_RANKS_PER_NODE}x{nodes}"))
    numbers = sum(table.bag_size if job.bags else 1 for table in model("mlperf_dcnv2")[0]) + 26
    return job.batch_size * numbers * 4 * exchange_seconds(topology, nodes)


def in_data_dist(job: Job, nodes: int, link: Link, step_ms: float) -> tuple[float, float]:
    """Return the bounds of the milliseconds of `sparse_data_dist`: of the exchange of ids, and of a step less what its
    host launches.

    In TorchRec 0.3.2 (torchrec/distributed/train_pipeline.py, dist_data.py) the host begins it behind the launch of a
    forward, and waits there for how many ids come. These numbers go through the communicator of all ranks, behind that
    forward's embeddings and, by an event, the backward before: it ends when the GPU has done all of that.
    """
    rates = host_of(job, link.of(load_topology(f"{DLRM_MACHINE}x{_RANKS_PER_NODE}x{nodes}"))).rates_for()
    ids_ms = round(1e3 * ids_seconds(job, nodes, link), 3)
    return ids_ms, max(ids_ms, round(step_ms - 1e3 * rates.step_overhead_seconds, 2))


def second_node(jobs: Sequence[Job] = DLRM_JOBS) -> list[dict[str, Any]]:
    """Return what is told of each job on one node and on two."""
    cases = []
    for job in jobs:
        one = _told(step(job, DLRM_MACHINE, 1, RDMA, Way()))
        two = {
            name: {way.name: _told(step(job, DLRM_MACHINE, 2, link, way)) for way in ways}
            for name, (link, ways) in DLRM_LINKS.items()
        }
        cases.append(
            {
                "job": job.name,
                "one node": one,
                "two nodes": two,
                "two over one": {name: round(ways["fp32"]["ms"] / one["ms"], 2) for name, ways in two.items()},
                "sparse_data_dist ms": {
                    "one node": in_data_dist(job, 1, RDMA, one["ms"]),
                    **{
                        name: in_data_dist(job, 2, link, two[name]["fp32"]["ms"])
                        for name, (link, _) in DLRM_LINKS.items()
                    },
                },
            }
        )
    return cases


# Pinterest

#: Nodes of 8 GPUs with EFA at AWS: p4d and p4de of 400 Gb/s a node, p5 of 3,200, p5en of 3,200.
EFA = {
    "a100-40": Link(400 * _GBIT),
    "a100-80": Link(400 * _GBIT),
    "h100": Link(3_200 * _GBIT),
    "h200": Link(3_200 * _GBIT),
}
PINTEREST_JOBS = (
    Job("DLRM, one id a feature, 8,192 a rank", "dlrm", False, 8_192),
    Job("DCNv2, MLPerf's bags, 8,192 a rank", "dcn", True, 8_192),
)
PINTEREST_KINDS = ("a100-80", "h100")
#: How often groups average is not published. At the last, averages take no time: as if they ran beside the steps.
PINTEREST_SYNCS = (16, 256, 2**20)
#: Times the speed of one node, by nodes; and the milliseconds of the all-to-all before groups and with them.
PINTEREST_REPORTED: Mapping[str, Mapping[int, float]] = {
    "one group": {2: 1.13, 4: 1.21},
    "groups": {2: 2.0, 4: 3.9, 8: 7.5},
}
PINTEREST_EXCHANGE_MS = (78, 13)


def exchange_ratios() -> dict[str, dict[int, float]]:
    """Return how many times as long an exchange takes among the ranks of 2, 4 and 8 nodes as inside of each node, by
    the GPUs: whatever the model, if ranks have as many samples."""
    found: dict[str, dict[int, float]] = {}
    for kind, link in EFA.items():
        inside = exchange_seconds(load_topology(f"{kind}x{_RANKS_PER_NODE}"), 1)
        across = {
            nodes: exchange_seconds(link.of(load_topology(f"{kind}x{_RANKS_PER_NODE}x{nodes}")), nodes)
            for nodes in (2, 4, 8)
        }
        found[kind] = {nodes: round(seconds / inside, 2) for nodes, seconds in across.items()}
    return found


def least_on_four() -> dict[str, float]:
    """Return the least speed on 4 nodes, over that of one, that goes with the one which is published of 2, whatever the
    model: of a step, nothing grows by more than the exchange does."""
    of_two = PINTEREST_REPORTED["one group"][2]
    return {kind: round(2 * of_two / (ratios[4] / ratios[2]), 2) for kind, ratios in exchange_ratios().items()}


def more_nodes(
    jobs: Sequence[Job] = PINTEREST_JOBS,
    kinds: Sequence[str] = PINTEREST_KINDS,
    syncs: Sequence[int] = PINTEREST_SYNCS,
) -> list[dict[str, Any]]:
    """Return how many times as fast as one node more of them are told to be, with as many samples a rank: in fp32 as
    one group, and in fp8 as a group of each node, over one node that sends the same type."""
    cases = []
    for job in jobs:
        for kind in kinds:

            def times(nodes: int, way: Way, job: Job = job, kind: str = kind) -> float:
                alone = step(job, kind, 1, EFA[kind], Way(number_bytes=way.number_bytes))
                return round(nodes * alone.step_seconds / step(job, kind, nodes, EFA[kind], way).step_seconds, 2)

            cases.append(
                {
                    "job": job.name,
                    "machine": kind,
                    "one node ms": _ms(step(job, kind, 1, EFA[kind], Way()).step_seconds),
                    "one group": {nodes: times(nodes, Way()) for nodes in PINTEREST_REPORTED["one group"]},
                    "one group, fp8": {2: times(2, Way(number_bytes=1))},
                    "groups": {
                        every: {nodes: times(nodes, Way(nodes, every, 1)) for nodes in PINTEREST_REPORTED["groups"]}
                        for every in syncs
                    },
                }
            )
    return cases


def bounds(cases: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, tuple[float, float]]]:
    """Return the least and the most that is told of each of Pinterest's points."""
    told: dict[str, dict[int, list[float]]] = {}
    for case in cases:
        for name, points in (("one group", case["one group"]), *(("groups", each) for each in case["groups"].values())):
            for nodes, value in points.items():
                told.setdefault(name, {}).setdefault(nodes, []).append(value)
    return {name: {nodes: (min(each), max(each)) for nodes, each in points.items()} for name, points in told.items()}


def _told(run: SimulatedRun) -> dict[str, Any]:
    """Return a step's figures for the report."""
    return {
        "steps/s": round(1 / run.step_seconds, 2),
        "ms": _ms(run.step_seconds),
        "from ms": _ms(run.low_seconds),
        "to ms": _ms(run.high_seconds),
        "parts ms": {name: _ms(seconds) for name, seconds in (run.parts or {}).items() if seconds > 5e-5},
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def main() -> None:
    """Print all."""
    options = make_parser(__doc__).parse_args()
    nodes = more_nodes()
    found = {
        "dlrm#356": {"reported": DLRM_REPORTED, "cases": second_node()},
        "Pinterest": {
            "reported": PINTEREST_REPORTED,
            "reported all-to-all ms": PINTEREST_EXCHANGE_MS,
            "all-to-all over that of one node": exchange_ratios(),
            "at least on four nodes, with 1.13 on two": least_on_four(),
            "bounds": bounds(nodes),
            "cases": nodes,
        },
    }
    report({"benchmark": "public_groups", **found, "machine": machine()}, options.output)


if __name__ == "__main__":
    main()
