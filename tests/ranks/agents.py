"""Several torchrun agents on this machine, as on several: `python -m tests.ranks.agents [RANKS_PER_AGENT ...]`.

Trains by two agents and by one with as many ranks, and prints what differs. Takes a minute per number; the default is
2, four ranks in all.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.ranks.test_resharding import tensors_that_differ

_TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
_PROGRAM = ["-m", "embershard", "train"]
_SETTINGS = [
    "data.synthetic.scale=0.001", "data.eval_fraction=0.0", "profile.samples=2000", "train.batch_size=none",
    "train.global_batch_size=128", "train.max_steps=12", "train.log_every=1", "train.eval_every=none",
    "cache.ratio=0.1",
]  # fmt: skip


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def start(command: Sequence[str], project: Path, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **variables}
    environment["PYTHONPATH"] = os.pathsep.join([str(project), environment.get("PYTHONPATH", "")])
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=project, env=environment, text=True, stdout=pipe, stderr=subprocess.STDOUT)


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Waits for all; returns what each printed. Kills what is left when one does not end."""
    try:
        return [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def two_agents(
    project: Path,
    settings: Sequence[str],
    run_dir: Path,
    ranks_per_agent: int,
    *,
    address: str = "127.0.0.1",
    within: Sequence[Sequence[str]] = ((), ()),
    interfaces: Sequence[str] = ("lo", "lo"),
) -> list[tuple[int, str]]:
    """Trains by two agents; returns the exit code and the output of each.

    `within` are words before each agent's command, and `interfaces` its network interfaces.
    """
    meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{address}:{free_port()}", "--rdzv_id", "agents"]
    meeting += ["--nnodes", "2", "--nproc_per_node", str(ranks_per_agent)]
    agents = []
    for number, (words, host) in enumerate(zip(within, _hosts(address), strict=True)):
        # Both machines have the name of this one, by which torchrun finds out where the endpoint is.
        place = ["--local_addr", host, "--rdzv_conf", f"is_host={number == 0}"]
        program = [*_PROGRAM, *settings, "--run-dir", str(run_dir)]
        interface = {"GLOO_SOCKET_IFNAME": interfaces[number]}
        agents.append(start([*words, *_TORCHRUN, *meeting, *place, *program], project, **interface))
    outputs = ended(agents)
    return [(agent.returncode, output) for agent, output in zip(agents, outputs, strict=True)]


def _hosts(address: str) -> list[str]:
    if address == "127.0.0.1":
        return [address, address]
    return [address, f"{address.rpartition('.')[0]}.2"]


@contextlib.contextmanager
def two_networks() -> Iterator[tuple[str, list[list[str]], list[str]]]:
    """Two network namespaces with a cable between them: the first one's address, the words before a command that runs
    in each, and the interface of each.

    Raises:
        OSError, subprocess.CalledProcessError: this process may not make them.
    """
    name = uuid.uuid4().hex[:6]
    spaces, ends = [f"es-{name}-{side}" for side in "ab"], [f"es{name}{side}" for side in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    try:
        for space in spaces:
            ip("netns", "add", space)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (space, end) in enumerate(zip(spaces, ends, strict=True), start=1):
            ip("link", "set", end, "netns", space)
            ip("-n", space, "addr", "add", f"10.251.7.{number}/24", "dev", end)
            ip("-n", space, "link", "set", end, "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield "10.251.7.1", [["ip", "netns", "exec", space] for space in spaces], ends
    finally:
        for space in spaces:  # the cable goes with them
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)


def main() -> None:
    """Compare for each number of ranks per agent."""
    project = Path(__file__).parents[2]
    settings = ["--config", "examples/quickstart.toml", *(word for text in _SETTINGS for word in ("--set", text))]
    for count in [int(word) for word in sys.argv[1:]] or [2]:
        with tempfile.TemporaryDirectory() as name:
            two, one = Path(name, "two"), Path(name, "one")
            of_two, of_one = (["--plan", str(plan)] for plan in _plans(project, settings, Path(name), count))
            found = two_agents(project, [*settings, *of_two], two, count)
            standalone = ["--standalone", "--nproc_per_node", str(2 * count)]
            words = [*settings, *of_one, "--run-dir", str(one)]
            ended([alone := start([*_TORCHRUN, *standalone, *_PROGRAM, *words], project)])
            if any(code for code, _ in found) or alone.returncode:
                sys.exit("\n".join(output for _, output in found))
            different = tensors_that_differ(one / "checkpoints" / "step_12", two / "checkpoints" / "step_12")
            print(f"2 agents x {count} ranks beside 1 x {2 * count}: losses {_losses(one, two)}", flush=True)
            print(f"tensors that differ: {different or 'none'}", flush=True)


def _plans(project: Path, settings: Sequence[str], folder: Path, ranks_per_agent: int) -> tuple[Path, Path]:
    """Makes a plan for one machine, and the same placement for two: the default placement depends on their number."""
    profile, plan, same = folder / "profile.npz", folder / "one.json", folder / "two.json"
    embershard = [sys.executable, "-m", "embershard.commands.cli"]
    ended([start([*embershard, "profile", *settings, "-o", str(profile)], project)])
    words = ["--profile", str(profile), "--ranks", str(2 * ranks_per_agent), "-o", str(plan)]
    (output,) = ended([start([*embershard, "plan", *settings, *words], project)])
    before = f'"ranks_per_node": {2 * ranks_per_agent}'
    assert plan.exists(), output
    assert before in plan.read_text()
    same.write_text(plan.read_text().replace(before, f'"ranks_per_node": {ranks_per_agent}'))
    return same, plan


def _losses(one: Path, two: Path) -> str:
    from tests.ranks.test_train_cli import losses

    return "equal" if losses(one) == losses(two) else "NOT EQUAL"


if __name__ == "__main__":
    main()
