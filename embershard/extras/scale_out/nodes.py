"""Ranks on several nodes of one machine: `embershard train` in network namespaces, with a link of a chosen speed.

    python -m embershard.extras.scale_out.nodes train quickstart --nproc 4 --nodes 2 --link 50mbit --run-dir runs/linked

Each node is a network namespace; torchrun starts its ranks there. Within a node ranks meet over the loopback interface,
which is as fast as ever; between nodes over a bridge, and a token bucket (tc-tbf) on both ends of each node's cable
limits what it sends and what it receives. The processors, caches and memory of the machine stay shared.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields, replace

from embershard.distributed.supervision import end_with_parent
from embershard.errors import ConfigError, SetupError
from embershard.launch.stop_signals import STOP_SIGNALS
from embershard.machine import OWN_THREADS_VARIABLE, THREADS_VARIABLE, cores_of_a_rank
from embershard.planning.cost.topology import Topology
from embershard.sweeps.experiments import Experiment

_LINK = re.compile(r"(\d+(?:\.\d+)?)([kmg])bit", re.IGNORECASE)
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9}
#: Of a frame of Ethernet and TCP, at an MTU of 1500: a token bucket counts frames.
_PAYLOAD = 1448 / 1514
_SUBNET, _PORT, _MOST_NODES = "10.77.0", 29500, 200
_INSIDE = "EMBERSHARD_NODES"
_POLL_SECONDS, _GRACE_SECONDS = 0.1, 30.0
#: Bytes that pass at once, at least, and those that wait: nothing is dropped before.
_BURST_BYTES, _QUEUE_BYTES = 65536, 1 << 24


def bits_of(link: str) -> float:
    """Return the bits of a link in a second.

    >>> bits_of("2.5gbit")
    2500000000.0

    Raises:
        ConfigError: it says none.
    """
    found = _LINK.fullmatch(link)
    if found is None or not float(found[1]):
        raise ConfigError(f"link: got {link!r}, needed bits a second: 50mbit, 1gbit, 25gbit.")
    return float(found[1]) * _BITS[found[2].lower()]


def nodes_of(experiment: Experiment) -> int:
    """Return the nodes of a run's ranks."""
    return int(experiment.placed.get("nodes", 1))


def link_of(experiment: Experiment) -> str | None:
    """Return the link between a run's nodes; None: as fast as this machine."""
    link = experiment.placed.get("link", "none")
    return None if link == "none" else str(link)


def check(experiment: Experiment) -> None:
    """Raise where ranks cannot be placed so.

    Raises:
        ConfigError: nodes do not divide the ranks, or a link has no effect.
    """
    num_nodes, link = nodes_of(experiment), link_of(experiment)
    if not 1 <= num_nodes <= _MOST_NODES or experiment.ranks % num_nodes:
        raise ConfigError(f"nodes: got {num_nodes}, needed a divisor of the {experiment.ranks} ranks.")
    if link is not None:
        bits_of(link)
        if num_nodes == 1:
            raise ConfigError(f'link = "{link}" has no effect with nodes = 1; give nodes = 2, or link = "none".')


def words_of(experiment: Experiment) -> tuple[str, ...]:
    """Return the options of this program for a run."""
    link = link_of(experiment)
    return ("--nodes", str(nodes_of(experiment)), *(() if link is None else ("--link", link)))


def cut(topology: Topology, num_ranks: int, num_nodes: int) -> Topology:
    """Return a node of a machine with so many ranks that is cut into nodes: of its processors and memory each has a
    part. GPUs are not cut."""
    if topology.device != "cpu":
        return topology
    per_node, cores, peak = num_ranks // num_nodes, topology.cores_per_node, topology.bandwidths
    part = replace(
        topology, ranks_per_node=per_node, cores_per_node=None if cores is None else max(1, cores // num_nodes)
    )
    if topology.rates:
        own = topology.shaped(num_ranks).rates_for(num_ranks)
        messages = (num_ranks - 1) / (per_node - 1) if per_node > 1 else 1.0  # which rates of fewer ranks lack
        own = replace(own, seconds_per_collective=own.seconds_per_collective / messages)
        return replace(part, rates={per_node: own})
    assert peak is not None, "a topology has rates or bandwidths"
    shared = {each.name: getattr(peak, each.name) / num_nodes for each in fields(peak) if each.name != "network_bytes"}
    return replace(part, bandwidths=replace(peak, **shared))


def with_link(topology: Topology, link: str, ranks_per_node: int) -> Topology:
    """Return a machine whose nodes of so many ranks have this link: all ranks of a node share it.

    Each byte to another node takes the link's time beside what a byte within the node takes. Of an all-reduce in a
    ring, one rank of each node sends to another node.
    """
    seconds = 8 / bits_of(link) / _PAYLOAD
    rates = {
        ranks: replace(
            own,
            seconds_per_network_byte=own.seconds_per_all_to_all_byte + ranks_per_node * seconds,
            seconds_per_all_reduce_byte=own.seconds_per_all_reduce_byte + seconds,
        )
        for ranks, own in topology.rates.items()
    }
    peak, known = topology.bandwidths, replace(topology.assumptions, network=1.0)
    if peak is not None:  # a CPU's are of the node, and a GPU's of each rank
        peak = replace(peak, network_bytes=1 / seconds / (1 if topology.device == "cpu" else ranks_per_node))
    source = f"{topology.source}; {link} between nodes, as asked for"
    return replace(topology, rates=rates, bandwidths=peak, assumptions=known, source=source)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `embershard` by torchrun on several nodes of this machine; return the largest exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m embershard.extras.scale_out.nodes", allow_abbrev=False)
    parser.add_argument("--nproc", type=int, required=True, help="ranks in all")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--link", help="between nodes: 50mbit, 1gbit")
    arguments, command = parser.parse_known_args(argv)
    if _INSIDE not in os.environ:
        if missing := [name for name in ("ip", "tc", "unshare", "nsenter") if shutil.which(name) is None]:
            raise SetupError(f"nodes need {', '.join(missing)}, missing here. Try: apt-get install iproute2 util-linux")
        if os.geteuid():
            raise SetupError("nodes are network namespaces, which only root may make. Run as root, or with nodes = 1.")
        os.environ[_INSIDE] = "1"
        os.execvp("unshare", ["unshare", "--net", sys.executable, "-m", __spec__.name, *argv])
    with ExitStack() as stack:
        spaces = _spaces(arguments.nodes, arguments.link, stack)
        agents = [
            stack.enter_context(_Ended(_agent(number, space, arguments, command)))
            for number, space in enumerate(spaces)
        ]
        asked: list[int] = []

        def pass_on(number: int, _: object) -> None:
            asked.append(number)
            for agent in agents:
                agent.process.send_signal(number)

        for number in STOP_SIGNALS:
            signal.signal(number, pass_on)
        failed_at: float | None = None
        while (codes := [agent.process.poll() for agent in agents]).count(None):
            if failed_at is None and any(codes):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > _GRACE_SECONDS:
                break  # the others wait for it, longer than anybody wants to
            time.sleep(_POLL_SECONDS)
    return 128 + asked[0] if asked else max((code or 0 for code in codes), key=abs)


class _Ended:
    """A process that is killed at the end of the context."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def __enter__(self) -> _Ended:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def _spaces(num_nodes: int, link: str | None, stack: ExitStack) -> list[int]:
    """Make a namespace per node, with a cable to a bridge in this one; return a process in each. They end with it."""
    _call("ip link set lo up")
    _call("ip link add switch type bridge")
    _call("ip link set switch up")
    spaces = []
    for number in range(num_nodes):
        holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], preexec_fn=end_with_parent)
        space = stack.enter_context(_Ended(holder)).process.pid
        while os.readlink(f"/proc/{space}/ns/net") == os.readlink("/proc/self/ns/net"):
            if holder.poll() is not None:
                raise SetupError("no network namespace could be made for a node: unshare --net says why.")
            time.sleep(0.01)
        _call(f"ip link add node{number} type veth peer name eth0 netns {space}")
        _call(f"ip link set node{number} master switch up")
        within = f"nsenter --target {space} --net"
        _call(f"{within} ip addr add {_SUBNET}.{number + 1}/24 dev eth0")
        for name in ("lo", "eth0"):
            _call(f"{within} ip link set {name} up")
        if link is not None:
            bits = bits_of(link)
            burst = max(_BURST_BYTES, round(bits / 8 / 250))  # what a kernel of 250 Hz lets pass between two ticks
            bucket = f"root tbf rate {bits:.0f}bit burst {burst}b limit {_QUEUE_BYTES + burst}b"
            _call(f"{within} tc qdisc add dev eth0 {bucket}")
            _call(f"tc qdisc add dev node{number} {bucket}")
        spaces.append(space)
    return spaces


def _agent(number: int, space: int, arguments: argparse.Namespace, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start torchrun on a node."""
    meeting = [f"--nnodes={arguments.nodes}", f"--nproc_per_node={arguments.nproc // arguments.nodes}"]
    meeting += [f"--node_rank={number}", f"--master_addr={_SUBNET}.1", f"--master_port={_PORT}"]
    words = ["nsenter", "--target", str(space), "--net", sys.executable, "-m", "torch.distributed.run", *meeting]
    cores = str(cores_of_a_rank(arguments.nproc))  # as of ranks that share the machine without nodes
    threads = {} if THREADS_VARIABLE in os.environ else dict.fromkeys((THREADS_VARIABLE, OWN_THREADS_VARIABLE), cores)
    environment = {**os.environ, **threads, "GLOO_SOCKET_IFNAME": "eth0"}
    program = ["-m", "embershard.commands.cli", *command]
    return subprocess.Popen([*words, *program], env=environment, preexec_fn=end_with_parent)


def _call(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(
            f"nodes of one machine need network namespaces, veth, a bridge and tc-tbf: {command}: "
            f"{done.stderr.strip()}. Load the kernel's modules, or train with nodes = 1."
        )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ConfigError, SetupError) as problem:
        sys.exit(f"embershard: {type(problem).__name__}: {problem}")
