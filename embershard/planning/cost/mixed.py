"""Machines of several kinds in one job: nodes of each kind, whose ranks train at their own speeds.

All ranks have as many samples, so the slowest kind decides the dense part of a step; tables go where they are faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from embershard.errors import ConfigError
from embershard.planning.cost.rates import Precision, Rates
from embershard.planning.cost.topology import Assumptions, Topology


@dataclass(frozen=True)
class MixedTopology(Topology):
    """Nodes of several kinds, one kind after the other. Its own figures are those of the first one, with the least
    memory of a node and the slowest network.

    Attributes:
        parts: of each kind, with its nodes.
    """

    parts: tuple[Topology, ...] = ()

    def at(self, precision: Precision) -> Topology:
        """Return the machines with dense layers in this format; unchanged where the speed of one in it is not known."""
        parts = tuple(part.at(precision) for part in self.parts)
        if any(part.precision != precision for part in parts):
            return self
        return replace(self, parts=parts, precision=precision)

    def rates_of_ranks(self, num_ranks: int) -> tuple[Rates, ...]:
        """Return the rates of each rank, between whose nodes the slowest network is."""
        ends = [part.rates_for(num_ranks) for part in self.parts]
        slowest = max(each.seconds_per_network_byte for each in ends)
        latency, ring = (max(getattr(each, name) for each in ends) for name in _OF_ALL)
        shared = {"seconds_per_network_byte": slowest, **dict(zip(_OF_ALL, (latency, ring), strict=True))}
        pairs = zip(ends, self.parts, strict=True)
        return tuple(replace(own, **shared) for own, part in pairs for _ in range(part.world_size))

    def memory_of_ranks(self, num_ranks: int) -> tuple[int, ...]:
        """Return the device memory of each rank."""
        return tuple(part.device_memory_bytes or 0 for part in self.parts for _ in range(part.world_size))

    def assuming(self, name: str, value: float) -> Topology:
        """Return the machines with another value of an assumption: those that differ in it stay as far apart."""
        before, (least, most) = float(getattr(self.assumptions, name)), Assumptions.limits(name)
        factor = value / before if before else 1.0
        values = [min(most, max(least, factor * float(getattr(part.assumptions, name)))) for part in self.parts]
        own = tuple(part.assuming(name, each) for part, each in zip(self.parts, values, strict=True))
        return replace(self, parts=own, assumptions=replace(self.assumptions, **{name: value}))

    def shaped(self, ranks_per_node: int, num_nodes: int = 1) -> Topology:
        """Return these nodes, of which there are as many as there are.

        Raises:
            ConfigError: other numbers of ranks were asked for.
        """
        if (ranks_per_node, num_nodes) != (self.ranks_per_node, self.num_nodes):
            raise ConfigError(
                f"Topology {self.name}: got {num_nodes} nodes of {ranks_per_node} ranks, needed its {self.num_nodes} "
                f"nodes of {self.ranks_per_node}: --ranks {self.world_size}. For other numbers name others, as "
                "h100x8x2+a100-80x8."
            )
        return self

    def note(self, num_ranks: int | None = None) -> str:
        """Return which ranks are what, and how certain their speeds are."""
        first, kinds = 0, []
        for part in self.parts:
            kinds.append(f"{first} to {first + part.world_size - 1} {part.name}")
            first += part.world_size
        return (
            f"Ranks are of several kinds: {', '.join(kinds)}. All of them have as many samples, so the slowest decides "
            f"the dense part of a step. {super().note(num_ranks)}"
        )


#: Rates that are of all ranks together, and as slow as the slowest kind's.
_OF_ALL = ("seconds_per_collective", "seconds_per_all_reduce_byte")


def mixed(name: str, parts: Sequence[Topology]) -> Topology:
    """Return nodes of several kinds as one machine.

    Raises:
        ConfigError: numbers of ranks of a node differ, a part is a CPU, or its rates are calibrated.
    """
    if any(part.device != "cuda" for part in parts):
        raise ConfigError(f"Topology {name}: got a CPU among its parts, needed GPUs, whose ranks share no cores.")
    local = list(dict.fromkeys(part.ranks_per_node for part in parts))
    if len(local) > 1:
        raise ConfigError(
            f"Topology {name}: got nodes of {' and of '.join(map(str, local))} ranks, needed as many on each: torchrun "
            "starts as many on every node."
        )
    if any(part.rates for part in parts):
        raise ConfigError(
            f"Topology {name}: a part has calibrated rates, which are of one machine; needed datasheets'."
        )
    nodes = sum(part.num_nodes for part in parts)
    if all(
        replace(part, name=name, num_nodes=nodes) == replace(parts[0], name=name, num_nodes=nodes) for part in parts
    ):
        return replace(parts[0], name=name, num_nodes=nodes)  # of one kind
    own = {each.name: getattr(parts[0], each.name) for each in fields(Topology)}
    own |= {
        "name": name,
        "source": "; ".join(dict.fromkeys(part.source for part in parts)),
        "num_nodes": nodes,
        "host_memory_bytes": min(part.host_memory_bytes for part in parts),
        "device_memory_bytes": max(part.device_memory_bytes or 0 for part in parts),
    }
    return MixedTopology(**own, parts=tuple(parts))
