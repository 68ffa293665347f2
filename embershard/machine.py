"""Memory that the system lets this process and its children take: the machine's, or less in a container. And
cores, and which of them are near a GPU.

Nothing here imports torch: the doctor must run when it is broken.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_RANKS_PER_CORE = 2


@dataclass(frozen=True)
class HostMemory:
    """Memory of this machine, or of the control group (cgroup) that limits this process more than the machine does.

    Attributes:
        total_bytes: the limit.
        available_bytes: of it, what is free or can be freed at once (file cache); swap does not count.
        limit: "this machine", or the folder of the control group.

    >>> HostMemory(total_bytes=24 << 30, available_bytes=20 << 30).limit
    'this machine'
    """

    total_bytes: int
    available_bytes: int
    limit: str = "this machine"


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Return the memory of this process, from `/proc/meminfo` and the control groups, of version 1 or 2.

    A group is limited by the groups above it, too: the one with the least memory left counts.

    Args:
        root: folder with `proc` and `sys`; for tests.

    >>> 0 < host_memory().available_bytes <= host_memory().total_bytes
    True
    """
    meminfo = _numbers(root / "proc/meminfo")
    machine = HostMemory(meminfo["MemTotal"] * 1024, meminfo["MemAvailable"] * 1024)
    groups = [group for group in _limited_groups(root) if group.total_bytes < machine.total_bytes]
    least = min((machine, *groups), key=lambda memory: memory.available_bytes)
    return HostMemory(least.total_bytes, max(0, least.available_bytes), least.limit)


@dataclass(frozen=True)
class MapLimit:
    """A limit of the memory that may be mapped, whether it is used or not.

    Attributes:
        name: where it is set.
        most_bytes: it allows.
        taken_bytes: of it, by this process, or by all programs.
    """

    name: str
    most_bytes: int
    taken_bytes: int


def limits_of_maps(root: Path = Path("/")) -> list[MapLimit]:
    """Return the limits of the memory that this process may map, besides the memory that there is.

    Args:
        root: folder with `proc`; for tests.
    """
    pages = [int(word) for word in (root / "proc/self/statm").read_text(encoding="utf-8").split()]
    kinds = (("ulimit -v", resource.RLIMIT_AS, pages[0]), ("ulimit -d", resource.RLIMIT_DATA, pages[5]))
    page_bytes = resource.getpagesize()
    limits = [(name, resource.getrlimit(kind)[0], taken * page_bytes) for name, kind, taken in kinds]
    if (root / "proc/sys/vm/overcommit_memory").read_text(encoding="utf-8").strip() == "2":
        meminfo = _numbers(root / "proc/meminfo")
        limits.append(("vm.overcommit_memory = 2", meminfo["CommitLimit"] * 1024, meminfo["Committed_AS"] * 1024))
    return [MapLimit(*limit) for limit in limits if limit[1] != resource.RLIM_INFINITY]


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of this process: what it has now, and the most that it has had. Pages that it shares with others count."""

    now_bytes: int
    most_bytes: int

    @classmethod
    def read(cls, root: Path = Path("/")) -> ProcessMemory:
        """Read it.

        Args:
            root: folder with `proc`; for tests.
        """
        lines = (root / "proc/self/status").read_text(encoding="utf-8").splitlines()
        kibibytes = {line.partition(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Vm")}
        return cls(kibibytes["VmRSS"] * 1024, kibibytes["VmHWM"] * 1024)


#: OpenMP's number of threads; and what the launcher set it to for its ranks, where the user had set none.
THREADS_VARIABLE, OWN_THREADS_VARIABLE = "OMP_NUM_THREADS", "EMBERSHARD_RANK_CORES"
#: Operations of a step for each thread. With fewer, a thread is ready before the next one has woken.
_FLOPS_PER_THREAD = 1.5e9


def cores_of_a_rank(num_ranks: int) -> int:
    """Return the cores for each of so many ranks on this machine, of those that this process may use.

    >>> cores_of_a_rank(10_000)
    1
    """
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


@dataclass(frozen=True)
class RankThreads:
    """In how many threads the operations of a rank run, and why so many.

    >>> RankThreads.for_step(step_flops=9e9, cores=16)
    RankThreads(count=6, why='a step is 9 GFLOP, a thread gets 1.5 or more, and a rank 16 cores')
    """

    count: int
    why: str

    @classmethod
    def for_step(cls, step_flops: float, cores: int) -> RankThreads:
        """Choose by the size of a step alone: sums over another number of threads are rounded otherwise, so a number
        that was measured could change what is trained.

        Args:
            step_flops: floating-point operations of a rank's step in the dense layers.
            cores: of the rank.
        """
        count = max(1, min(cores, int(step_flops / _FLOPS_PER_THREAD)))
        least, of = f"{_FLOPS_PER_THREAD / 1e9:g} or more", "1 core" if cores == 1 else f"{cores} cores"
        return cls(count, f"a step is {step_flops / 1e9:.2g} GFLOP, a thread gets {least}, and a rank {of}")


def cores_problem(num_ranks: int, cores: int | None, where: str) -> str | None:
    """Return what is wrong with so many ranks on the cores of a CPU; None up to two ranks per core, or if the cores are
    not known (None).

    >>> cores_problem(128, 2, "this machine")
    '128 ranks share the 2 cores of this machine and take turns on them: expect no more samples/s than of 2 ranks.'
    """
    if cores is None or num_ranks <= _RANKS_PER_CORE * cores:
        return None
    return (
        f"{num_ranks} ranks share the {cores} cores of {where} and take turns on them: expect no more samples/s than "
        f"of {cores} ranks."
    )


_PCI_DEVICES = Path("/sys/bus/pci/devices")


def cpus_near(gpu: Any, folder: Path = _PCI_DEVICES) -> set[int]:
    """Return the CPUs of the NUMA node next to a GPU that this process may run on; empty if the system does not name
    them.

    Args:
        gpu: its properties, as torch gives them.
    """
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    try:
        listed = (folder / address / "local_cpulist").read_text()
    except OSError:
        return set()
    return parse_cpus(listed) & os.sched_getaffinity(0)


def keep_to(cpus: set[int]) -> None:
    """Let all threads of this process, and those that it starts, run on these CPUs; on any as before if there are none.

    Pages that they touch first are then allocated in the memory of these CPUs.
    """
    if cpus:
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread.name), cpus)


def parse_cpus(text: str) -> set[int]:
    """Parse a list of CPUs as Linux writes it.

    >>> sorted(parse_cpus("0-2,8"))
    [0, 1, 2, 8]
    """
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def _limited_groups(root: Path) -> Iterator[HostMemory]:
    top = root / "sys/fs/cgroup"
    for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield from _groups_up(top, path, _V2)
            yield from _groups_up(top / "unified", path, _V2)
        elif "memory" in controllers.split(","):
            yield from _groups_up(top / "memory", path, _V1)


_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2 = ("memory.max", "memory.current", "")


def _groups_up(mount: Path, path: str, names: tuple[str, str, str]) -> Iterator[HostMemory]:
    """Yield the group at `path` and those above it. In a container the path may be the host's, and this process's own
    group is mounted at the top."""
    folder = mount / path.lstrip("/")
    while folder != mount.parent:
        memory = _group(folder, *names)
        if memory is not None:
            yield memory
        folder = folder.parent


def _group(folder: Path, limit_file: str, usage_file: str, prefix: str) -> HostMemory | None:
    """Return the memory of a control group; None where it has no limit or its files cannot be read."""
    try:
        limit = int((folder / limit_file).read_text())
        used = int((folder / usage_file).read_text())
        stat = _numbers(folder / "memory.stat")
    except (OSError, ValueError):  # "max"; or the group is not mounted here
        return None
    file_cache = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    return HostMemory(limit, limit - used + file_cache, str(folder))


def _numbers(file: Path) -> dict[str, int]:
    """Return the numbers of a file of lines `name number` or `name: number unit`."""
    rows = (line.replace(":", " ").split() for line in file.read_text(encoding="utf-8").splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
