"""Machines as values: ranks, memory and speed, from datasheets or calibrated on the machine."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from embershard.errors import ConfigError, naming_file
from embershard.lazy_names import named
from embershard.machine import cores_problem
from embershard.planning.cost.back_test import error_note
from embershard.planning.cost.rates import Amounts, Precision, RankRates, Rates
from embershard.settings.decoding import decode, read_toml, to_toml
from embershard.units import size

#: The dense optimizer reads gradient, state and weight, and writes state and weight.
_UPDATE_PASSES = 5
_SHARES = ("flops", "streaming", "device_memory", "host_memory", "host_link", "node_link", "network")
_MOST_BYTES = 2**60  # of a memory
_LEAST_SPEED = 1e3  # a second
_SHAPE = re.compile(r"(?P<base>.+?)x(?P<ranks>\d+)(?:x(?P<nodes>\d+))?")


@dataclass(frozen=True)
class Bandwidths(Amounts):
    """Peak figures of a datasheet, per second. A GPU's are per rank; a CPU's are the node's, and its ranks share them.

    Attributes:
        flops: floating-point operations in fp32, without TF32.
        tf32_flops, ...: of products of matrices in that format that are not sparse; 0: not known.
        host_memory_bytes: of the node.
        to_device_bytes, to_host_bytes: host link, each way.
        node_bytes: sent by a rank to the others of its node.
        network_bytes: sent by a rank to other nodes; 0 without a network, which several nodes need.
    """

    flops: float
    device_memory_bytes: float
    host_memory_bytes: float
    to_device_bytes: float
    to_host_bytes: float
    node_bytes: float
    network_bytes: float = 0
    tf32_flops: float = 0
    bf16_flops: float = 0
    fp16_flops: float = 0
    fp64_flops: float = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tf32_flops", "bf16_flops", "fp16_flops", "fp64_flops"):
            value = getattr(self, name)
            _need(value == 0 or value >= _LEAST_SPEED, f"Bandwidths.{name}", value, f"{_LEAST_SPEED:g} or more, or 0")

    def flops_in(self, precision: Precision) -> float:
        """Return the operations of dense layers in this format; 0: not known."""
        return self.flops if precision == "fp32" else float(getattr(self, f"{precision}_flops"))

    @staticmethod
    def limits(name: str) -> tuple[float, float]:
        """Return limits far beyond any machine: work that costs nothing, or for ever, makes no plan."""
        return 0.0 if name == "network_bytes" or name.endswith("_flops") else _LEAST_SPEED, 1e24


@dataclass(frozen=True)
class Assumptions(Amounts):
    """Assumptions for a machine without a calibration: shares of the peak figures that a step reaches, and costs. Each
    has its source in docs/planning.md; none was fitted to a measured or published step.

    Attributes:
        flops: share that the largest matrix products reach; small ones less (`dense.py`).
        streaming, device_memory: share of the device's memory speed that kernels over activations reach, and those that
            read rows.
        planned_id_bytes: device memory traffic of finding a slot for one id (sorting, maps), or its distinct row.
        row_access_bytes: least memory traffic of a row: rows are read one by one.
        collective_seconds, network_collective_seconds: latency of a collective within a node and across nodes.
        message_seconds: what a collective takes longer for each further rank.
        jitter: of a rank's time for the same work, from step to step: standard deviation over mean.
        launch_seconds: that the smallest kernel takes on a GPU.
        ranks_per_host_link: GPUs that share one link to the host.
        step_overhead_seconds: of the host for a step: on a GPU its thread launches the kernels, beside the GPU's work.
        collective_host_seconds: what that thread takes longer on several ranks, whose collectives it launches, too.
        input_threads: threads of a rank that parse during the training.
        reserve_bytes: of a GPU's memory, left free for the CUDA context, NCCL's buffers, and what torch's allocator
            cannot use.
    """

    flops: float = 0.8
    streaming: float = 0.85
    device_memory: float = 0.6
    host_memory: float = 0.3
    host_link: float = 0.7
    node_link: float = 0.7
    network: float = 0.7
    planned_id_bytes: float = 500
    row_access_bytes: float = 128
    collective_seconds: float = 3e-5
    network_collective_seconds: float = 6e-5
    message_seconds: float = 5e-7
    jitter: float = 0.03
    launch_seconds: float = 3e-6
    ranks_per_host_link: float = 2
    step_overhead_seconds: float = 5.2e-3
    collective_host_seconds: float = 1.1e-3
    input_threads: float = 2
    reserve_bytes: float = 2 * 2**30

    @staticmethod
    def limits(name: str) -> tuple[float, float]:
        """Return those of a share of a peak, or of a cost."""
        if name in _SHARES:
            return 1e-3, 1.0
        return {
            "input_threads": (1e-3, 1e6),
            "ranks_per_host_link": (1.0, 1e6),
            "jitter": (0.0, 10.0),
            "reserve_bytes": (0.0, 1e15),
        }.get(name, (0.0, 1e4))


@dataclass(frozen=True)
class Topology:
    """Ranks, memory and speed of one or more equal nodes.

    Attributes:
        source: origin of the figures.
        device_memory_bytes: of one rank; None on a CPU, whose device tier is part of the host's memory.
        host_memory_bytes: of one node.
        cores_per_node: of a CPU's node, which its ranks share; None: not known, or a GPU.
        rates: calibrated rates, by the number of ranks that ran.
        bandwidths, assumptions: for estimates, where nothing is calibrated.
        precision: in which dense layers compute. Calibrated rates are of this one.
        disk_pages_per_second: random pages of 4 KiB that a node's disk reads, by several threads; 0: not known.

    Raises:
        ConfigError: a field is out of range, or there are neither rates nor bandwidths.
    """

    name: str
    source: str
    device: Literal["cpu", "cuda"]
    ranks_per_node: int
    host_memory_bytes: int
    num_nodes: int = 1
    device_memory_bytes: int | None = None
    cores_per_node: int | None = None
    rates: Mapping[int, Rates] = field(default_factory=dict)
    bandwidths: Bandwidths | None = None
    assumptions: Assumptions = field(default_factory=Assumptions)
    precision: Precision = "fp32"
    disk_pages_per_second: float = 0

    def __post_init__(self) -> None:
        _need(0 <= self.disk_pages_per_second <= 1e12, "disk_pages_per_second", self.disk_pages_per_second, "0 to 1e12")
        memory = self.device_memory_bytes
        for name in ("ranks_per_node", "num_nodes", "host_memory_bytes", "device_memory_bytes", "cores_per_node"):
            value = getattr(self, name)
            _need(value is None or value >= 1, name, value, "1 or more")
            _need(value is None or value <= _MOST_BYTES, name, value, f"at most {_MOST_BYTES}")
        _need(self.device == "cpu" or memory is not None, "device_memory_bytes", None, "the memory of one GPU in bytes")
        for ranks in self.rates:
            _need(ranks >= 1, "rates", ranks, "a number of ranks, 1 or more")
        _need(bool(self.rates) or self.bandwidths is not None, "rates", "no rates and no bandwidths", "one of them")
        if self.num_nodes > 1 and not self.rates:
            self._check_network()

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.ranks_per_node * self.num_nodes

    def at(self, precision: Precision) -> Topology:
        """Return the machine with dense layers in this format; unchanged where its speed in it is not known."""
        is_known = not self.rates and self.bandwidths is not None and self.bandwidths.flops_in(precision)
        return replace(self, precision=precision) if is_known else self

    def precision_note(self, wanted: str) -> str | None:
        """Return the sentence on a run in another format than that of the rates; None where they are of its own. A CPU
        computes "tf32" as fp32."""
        if wanted == self.precision or (self.device == "cpu" and (wanted, self.precision) == ("tf32", "fp32")):
            return None
        return (
            f'Dense work is predicted in {self.precision}, and the run computes it in "{wanted}", whose speed is not '
            f"known of {self.name}: its time is another, and a plan may be slower or faster than told."
        )

    def rates_for(self, num_ranks: int | None = None) -> Rates:
        """Return the rates of `num_ranks` (default: all): calibrated for that number, or derived from the nearest, else
        estimated. Ranks beyond the node's cores share them, and its disk; and a collective has a message for each other
        rank."""
        num_ranks = num_ranks or self.world_size
        per_page = min(num_ranks, self.ranks_per_node) / self.disk_pages_per_second if self.disk_pages_per_second else 0
        return replace(self._rates_of_cores(num_ranks), seconds_per_page=per_page)

    def rates_of_ranks(self, num_ranks: int) -> RankRates:
        """Return the rates of all of so many ranks; of each one where there are several kinds of machines."""
        return self.rates_for(num_ranks)

    def memory_of_ranks(self, num_ranks: int) -> tuple[int, ...]:
        """Return the device memory of each of so many ranks where there are several kinds; else none."""
        return ()

    def assuming(self, name: str, value: float) -> Topology:
        """Return the machine with another value of one of its assumptions."""
        return replace(self, assumptions=replace(self.assumptions, **{name: value}))

    def _rates_of_cores(self, num_ranks: int) -> Rates:
        cores = self.cores_per_node
        if not self.rates:
            if num_ranks > self.ranks_per_node:
                self._check_network()
            return _estimate(self, num_ranks)
        calibrated = self._nearest(num_ranks)
        rates = self.rates[calibrated]
        if num_ranks > self.ranks_per_node and not rates.seconds_per_network_byte:  # not known: as within the node
            rates = replace(rates, seconds_per_network_byte=rates.seconds_per_all_to_all_byte)
        if num_ranks == calibrated:
            return rates
        local = num_ranks if self.num_nodes == 1 else min(num_ranks, self.ranks_per_node)
        share = max(1.0, local / cores) / max(1.0, calibrated / cores) if cores is not None else 1.0
        messages = (num_ranks - 1) / (calibrated - 1) if calibrated > 1 else 1.0
        rates = rates.scaled(share)
        return replace(rates, seconds_per_collective=rates.seconds_per_collective * messages)

    def jitter_for(self, num_ranks: int) -> float:
        """Return the jitter of so many ranks' times: 0 where their rates were calibrated, which have it in them."""
        return 0.0 if num_ranks in self.rates and self.num_nodes == 1 else self.assumptions.jitter

    def note(self, num_ranks: int | None = None) -> str:
        """Return where the rates of `num_ranks` come from, and how certain they are."""
        num_ranks = num_ranks or self.world_size
        if not self.rates:
            better = "calibrate on the machine itself" if self.device == "cpu" else "correct it by a run of its own"
            return (
                f"The speed of {self.name} is an estimate ({self.source}, times assumed efficiencies), not a "
                f"measurement; {better} for better."
            )
        nearest = self._nearest(num_ranks)
        if self.num_nodes > 1:
            return (
                f"{self.name} was calibrated on one node, for {nearest} ranks: its network was not. Bytes to other "
                "nodes are taken to be as fast as those within."
            )
        if nearest == num_ranks:
            return f"The speed of {self.name}: {self.source}."
        return f"{self.name} was calibrated for {nearest} ranks, not for {num_ranks}: step times are less certain."

    def error_note(self, limit: str) -> str:
        """Return how far such speeds were off where they could be compared, for a step that is limited by `limit`."""
        return error_note(limit, is_calibrated=bool(self.rates), is_gpu=self.device == "cuda")

    def reserve_within(self, device_bytes: int | None) -> int:
        """Return the part of the reserve that lies within a limit of `device_bytes` (None: all memory of the device): a
        lower limit leaves memory outside of it."""
        if self.device_memory_bytes is None:
            return 0
        outside = 0 if device_bytes is None else self.device_memory_bytes - device_bytes
        return max(0, round(self.assumptions.reserve_bytes) - max(0, outside))

    def reserve_note(self, device_bytes: int | None) -> str | None:
        """Return the sentence on the reserve; None on a CPU, which needs none."""
        if self.device_memory_bytes is None:
            return None
        reserve, within = round(self.assumptions.reserve_bytes), self.reserve_within(device_bytes)
        outside = "" if within == reserve else f"; {size(reserve - within)} of them lie outside of --device-memory"
        return (
            f"Reserve: {size(reserve)} of a GPU's memory are left free for the CUDA context, NCCL and what the "
            f"allocator cannot use{outside}. That is an assumption: reserve_bytes in the assumptions of a topology's "
            "file."
        )

    @property
    def cores_note(self) -> str | None:
        """A warning where far more ranks than it has cores are on a node; None elsewhere, and for GPUs."""
        problem = cores_problem(self.ranks_per_node, self.cores_per_node, f"a node ({self.name})")
        return problem and f"{problem} Use fewer ranks, or more nodes: --ranks-per-node {self.cores_per_node}."

    def shaped(self, ranks_per_node: int, num_nodes: int = 1) -> Topology:
        """Return so many nodes of this kind with so many ranks each. A part of a node's GPUs gets that part of the host
        memory.

        Raises:
            ConfigError: a node has fewer GPUs.
        """
        if self.device == "cpu":
            return replace(self, ranks_per_node=ranks_per_node, num_nodes=num_nodes)
        if ranks_per_node > self.ranks_per_node:
            raise ConfigError(
                f"Topology {self.name}: got {ranks_per_node} ranks per node, needed at most {self.ranks_per_node}, one "
                f"per GPU. For more ranks use more nodes: {self.name}x{self.ranks_per_node}xNODES."
            )
        host = self.host_memory_bytes * ranks_per_node // self.ranks_per_node
        return replace(self, ranks_per_node=ranks_per_node, num_nodes=num_nodes, host_memory_bytes=host)

    def _check_network(self) -> None:
        speed = 0.0 if self.bandwidths is None else self.bandwidths.network_bytes
        least, most = _LEAST_SPEED, Bandwidths.limits("network_bytes")[1]
        needed = f"the bytes that a rank sends to other nodes in a second, from {least:g} to {most:g}"
        _need(speed >= least, "Bandwidths.network_bytes", speed or "none", f"{needed}: there are several nodes")

    def _nearest(self, num_ranks: int) -> int:
        num_ranks = num_ranks if self.num_nodes == 1 else min(num_ranks, self.ranks_per_node)
        return min(self.rates, key=lambda known: (abs(math.log(known / num_ranks)), -known))


def load_topology(name: str, files: Sequence[str | Path] = ()) -> Topology:
    """Find a machine by name, or read it from a TOML file.

    Names are `KIND`, `KINDxRANKS` or `KINDxRANKSxNODES` with RANKS per node: "h200x8", "h200x8x4", "cpux2"; with "+"
    between them nodes of several kinds, "h100x8+a100-80x8x2". Kinds in `files` override those of embershard.

    >>> load_topology("h200x8x4").world_size
    32

    Raises:
        ConfigError: no such name, or a file cannot be read or is malformed.
    """
    if "+" in name:
        if not all(name.split("+")):
            raise ConfigError(f"Topology {name}: got nothing on a side of +, needed nodes, as in h100x8+a100-80x8.")
        parts = [load_topology(part, files) for part in name.split("+")]
        mixed: Topology = named("embershard.planning.cost.mixed:mixed")(name, parts)
        return mixed
    if name.endswith(".toml"):
        found = read_topologies(Path(name))
        if len(found) != 1:
            raise ConfigError(f"{name} holds {len(found)} topologies ({', '.join(found)}), needed is one.")
        return next(iter(found.values()))
    known = read_topologies(resources.files(__package__).joinpath("topologies.toml"))
    for file in files:
        known.update(read_topologies(Path(file)))
    if name in known:
        return known[name]
    shape = _SHAPE.fullmatch(name)
    if shape is None or shape["base"] not in known:
        raise ConfigError(
            f"Unknown topology {name!r}. Known are {', '.join(sorted(known))}, each also as NAMExRANKS or "
            "NAMExRANKSxNODES (h200x8x4 is 4 nodes of 8), several of them with + between, and .toml files of your own."
        )
    ranks, nodes = int(shape["ranks"]), int(shape["nodes"] or 1)
    return replace(known[shape["base"]].shaped(ranks, nodes), name=name)


def read_topologies(file: Any) -> dict[str, Topology]:
    """Read all topologies of a TOML file, by name: one section each."""
    found = {}
    for name, section in read_toml(file).items():
        try:
            _need(isinstance(section, dict), name, section, "a section with a topology's figures")
            _need("name" not in section, "name", section.get("name"), "none: the section is the name")
            found[name] = decode(Topology, {**section, "name": name})
        except ConfigError as error:
            raise ConfigError(f"{file}, topology {name!r}: {error}") from error
    return found


def save_topology(topology: Topology, path: str | Path) -> None:
    """Write a TOML file that `load_topology` reads."""
    values = asdict(topology)
    name = values.pop("name")
    if topology.bandwidths is None:  # nothing is assumed of calibrated rates
        del values["assumptions"]
    with naming_file(path):
        Path(path).write_text(to_toml({name: values}), encoding="utf-8")


def _estimate(topology: Topology, num_ranks: int) -> Rates:
    peak, share = topology.bandwidths, topology.assumptions
    assert peak is not None, "a topology has rates or bandwidths"
    speed = peak.flops_in(topology.precision)
    needed = f"the operations of dense layers in {topology.precision} in a second"
    _need(speed > 0, f"Bandwidths.{topology.precision}_flops", speed, needed)
    local = min(num_ranks, topology.ranks_per_node)
    sharing = local if topology.device == "cpu" else 1
    device = 1 / (peak.device_memory_bytes * share.device_memory) * sharing
    streamed = 2 * device if topology.device == "cpu" else 1 / (peak.device_memory_bytes * share.streaming)
    linked = 1.0 if topology.device == "cpu" else min(local, share.ranks_per_host_link)
    host = 1 / (peak.host_memory_bytes * share.host_memory) * local
    within = 1 / (peak.node_bytes * share.node_link) * sharing
    across = 1 / (peak.network_bytes * share.network) * sharing if num_ranks > local else 0.0
    outside = num_ranks > local
    return Rates(
        seconds_per_flop=1 / (speed * share.flops) * sharing,
        seconds_per_activation_byte=streamed,
        seconds_per_launch=0.0 if topology.device == "cpu" else share.launch_seconds,
        seconds_per_update_byte=_UPDATE_PASSES * (device if topology.device == "cpu" else streamed),
        seconds_per_embedding_byte=device,
        seconds_per_row_id=share.planned_id_bytes * device,
        seconds_per_planned_id=share.planned_id_bytes * device,
        seconds_per_unique_id=share.row_access_bytes * device,
        seconds_per_fill=share.row_access_bytes * host,
        seconds_per_write_back=share.row_access_bytes * host,
        seconds_per_byte_to_device=max(host, linked / (peak.to_device_bytes * share.host_link)),
        seconds_per_byte_to_host=max(host, linked / (peak.to_host_bytes * share.host_link)),
        seconds_per_all_to_all_byte=within,
        seconds_per_network_byte=across if outside else within,
        # A ring enters and leaves each node once per rank of it, over all of its network links.
        seconds_per_all_reduce_byte=max(within, across / local),
        seconds_per_collective=share.message_seconds * (num_ranks - 1)
        + (share.network_collective_seconds if outside else share.collective_seconds),
        seconds_per_input_second=1 if topology.device == "cpu" else 1 / share.input_threads,
        step_overhead_seconds=share.step_overhead_seconds
        + (share.collective_host_seconds if num_ranks > 1 and topology.device == "cuda" else 0.0),
    )


def _need(holds: bool, key: str, got: Any, needed: str) -> None:
    if not holds:
        raise ConfigError(f"{key}: got {got!r}, needed {needed}.")
