"""How certain the assumed constants of a machine are: the range of each, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from embershard.planning.cost.topology import Assumptions, Topology


@dataclass(frozen=True)
class Constant:
    """An assumption of a machine that its step time depends on, and how far it may be off.

    Ranges are relative to the machine's own value, for machines differ: a step's host thread takes 5.2 ms on one and
    7.1 on another. None comes from a step, measured or published.

    >>> CONSTANTS["network"].range(Assumptions())
    (0.5, 0.97)

    Attributes:
        name: of the field of `Assumptions`.
        low, high: factors of the machine's value; as far as the field may be.
        source: of the range.
    """

    name: str
    low: float
    high: float
    source: str

    def range(self, assumptions: Assumptions) -> tuple[float, float]:
        """Return the least and the greatest value, in the field's own unit."""
        value, (least, most) = float(getattr(assumptions, self.name)), Assumptions.limits(self.name)
        low, high = (min(most, max(least, factor * value)) for factor in (self.low, self.high))
        return float(f"{low:.2g}"), float(f"{high:.2g}")

    def set_to(self, topology: Topology, value: float) -> Topology:
        """Return the machine with another value."""
        return replace(topology, assumptions=replace(topology.assumptions, **{self.name: value}))


_UNKNOWN = "none; as far off as a factor of 2 either way"
_OF_CLOCKS = "base to boost clock of server processors: AMD EPYC 9554, 3.1 to 3.75 GHz; 7742, 2.25 to 3.4"
#: By name. What no step time depends on is not here: `reserve_bytes` is memory. Nor is `jitter`: plans have none.
CONSTANTS: dict[str, Constant] = {
    each.name: each
    for each in (
        Constant("flops", 0.75, 1.09, "Maximum Achievable Matmul FLOPS (Bekman): at most 87 %; below 80, none"),
        Constant("streaming", 0.85, 1.06, "BabelStream: about 90 %; below 85, none"),
        Constant("device_memory", 0.6, 1.4, "none; from rows of one or two sectors to whole pages, with sort and L2"),
        Constant("host_memory", 0.5, 2.0, _UNKNOWN),
        Constant("host_link", 0.7, 1.3, "none; up to what PCIe's headers leave of its peak, 91 %"),
        Constant("node_link", 0.72, 1.36, "none; up to 96 % of the peak, NVIDIA's between nodes"),
        Constant("network", 0.72, 1.38, "none; up to 96 % of the peak, NVIDIA's"),
        Constant("planned_id_bytes", 0.5, 2.0, _UNKNOWN),
        Constant("row_access_bytes", 0.5, 2.0, _UNKNOWN),
        Constant("collective_seconds", 0.5, 2.0, _UNKNOWN),
        Constant("network_collective_seconds", 0.5, 2.0, _UNKNOWN),
        Constant("message_seconds", 0.2, 2.0, "none; from messages sent at once to one after the other"),
        Constant("launch_seconds", 0.65, 1.5, "CUDA Graphs' 2.9 to 3.8 us; 80 to 150 small kernels, not 110"),
        Constant("ranks_per_host_link", 0.5, 1.0, "one or two GPUs behind a PCIe switch, by the node"),
        Constant("step_overhead_seconds", 0.7, 1.5, _OF_CLOCKS),
        Constant("collective_host_seconds", 0.5, 2.0, "none; TorchRec's own step has 26 operations more, not 38"),
        Constant("input_threads", 0.5, 2.0, "a setting of the run"),
    )
}
