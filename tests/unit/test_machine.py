"""Memory of the machine and of its control groups, on folders that look like `/proc` and `/sys`."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from embershard.machine import (
    HostMemory,
    MapLimit,
    ProcessMemory,
    RankThreads,
    cpus_near,
    host_memory,
    limits_of_maps,
    parse_cpus,
)

GIB = 1 << 30
MACHINE = HostMemory(64 * GIB, 60 * GIB)
V1, V2 = "4:cpu:/\n3:memory:{}\n0::/\n", "0::{}\n"


def make(root: Path, cgroup: str, files: dict[str, object]) -> Path:
    files = {
        "proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 17 kB\nMemAvailable: {60 << 20} kB\nHugePages_Total: 0\n",
        "proc/self/cgroup": cgroup,
        **{f"sys/fs/cgroup/{name}": content for name, content in files.items()},
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}")
    return root


def v1(folder: str, limit: int, used: int, cache: int = 0) -> dict[str, object]:
    stat = f"cache 99\ntotal_cache {cache}\ntotal_inactive_file {cache // 2}\ntotal_active_file {cache - cache // 2}\n"
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    return {f"memory/{folder}{name}": value for name, value in zip(names, (limit, used, stat), strict=True)}


def v2(folder: str, limit: object, used: int, cache: int = 0) -> dict[str, object]:
    stat = f"anon 5\nfile {cache + 7}\nshmem 7\ninactive_file {cache}\nactive_file 0\n"
    names = ("memory.max", "memory.current", "memory.stat")
    return {f"{folder}{name}": value for name, value in zip(names, (limit, used, stat), strict=True)}


def test_memory_of_a_process_is_read_in_bytes(tmp_path: Path):
    make(tmp_path, "", {})
    (tmp_path / "proc/self/status").write_text("Name:\tx\nVmPeak:\t 9 kB\nVmHWM:\t 20480 kB\nVmRSS:\t 10240 kB\n")
    assert ProcessMemory.read(tmp_path) == ProcessMemory(now_bytes=10 << 20, most_bytes=20 << 20)


@pytest.mark.slow
def test_the_most_memory_outlives_it():
    """In a process of its own: in this one, threads of other tests may take as much meanwhile."""
    code = """
from embershard.machine import ProcessMemory
before = ProcessMemory.read()
block = bytearray(b"1" * (64 << 20))
held = ProcessMemory.read()
del block
after = ProcessMemory.read()
print(before.now_bytes, held.now_bytes, after.now_bytes, after.most_bytes)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    before, held, after, most = map(int, found.split())
    assert held > before + (60 << 20)
    assert most >= held - (1 << 20) > after


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {}, MACHINE),
        (V2.format("/a/b"), v2("a/b/", "max", 3 * GIB) | v2("a/", "max", 3 * GIB), MACHINE),
        (V2.format("/a/b"), v2("a/b/", 8 * GIB, 3 * GIB), (8, 5, "a/b")),
        (V2.format("/a/b"), v2("a/b/", 8 * GIB, 3 * GIB) | v2("a/", 9 * GIB, 7 * GIB), (9, 2, "a")),
        (V2.format("/a"), v2("a/", 8 * GIB, 7 * GIB, cache=2 * GIB), (8, 3, "a")),
        (V2.format("/a"), v2("a/", 8 * GIB, 9 * GIB), (8, 0, "a")),
        (V2.format("/"), v2("", 8 * GIB, GIB), (8, 7, "")),  # in a container that sees itself as the top
        (V2.format("/host/docker/0a"), v2("", 8 * GIB, GIB), (8, 7, "")),  # in one that does not
        (V2.format("/a"), v2("a/", 999 * GIB, GIB), MACHINE),
        (V1.format("/a"), v1("a/", 8 * GIB, 3 * GIB, cache=GIB), (8, 6, "memory/a")),
        (V1.format("/a"), v1("a/", 2**63 - 4096, 3 * GIB) | v1("", 2**63 - 4096, GIB), MACHINE),
        (V1.format("/host/docker/0a"), v1("", 8 * GIB, GIB), (8, 7, "memory")),
        (V1.format("/a"), v2("unified/a/", 8 * GIB, GIB), MACHINE),  # only the groups of this process count
    ],
)
def test_the_tightest_limit_counts(cgroup: str, files: dict[str, object], expected: object, tmp_path: Path):
    found = host_memory(make(tmp_path, cgroup, files))
    if isinstance(expected, tuple):
        total, available, folder = expected
        expected = HostMemory(total * GIB, available * GIB, str(tmp_path / "sys/fs/cgroup" / folder))
    assert found == expected


@pytest.mark.parametrize("overcommit", [0, 1, 2])
def test_what_limits_mapped_memory(overcommit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Strict overcommit (2) counts what programs mapped, used or not."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/sys/vm").mkdir(parents=True)
    (tmp_path / "proc/self/statm").write_text("500 20 10 1 0 300 0\n")
    (tmp_path / "proc/sys/vm/overcommit_memory").write_text(f"{overcommit}\n")
    (tmp_path / "proc/meminfo").write_text(f"CommitLimit: {12 << 20} kB\nCommitted_AS: {3 << 20} kB\n")
    allowed = {resource.RLIMIT_AS: 8 * GIB, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (allowed[kind], resource.RLIM_INFINITY))
    strict = [MapLimit("vm.overcommit_memory = 2", 12 * GIB, 3 * GIB)] if overcommit == 2 else []
    assert limits_of_maps(tmp_path) == [MapLimit("ulimit -v", 8 * GIB, 500 * resource.getpagesize()), *strict]


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set()), ("0-1,4-5", {0, 1, 4, 5})]
)
def test_lists_of_cpus(text: str, cpus: set[int]):
    assert parse_cpus(text) == cpus


def test_cpus_near_a_gpu(tmp_path: Path):
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    assert cpus_near(gpu, tmp_path) == set()
    (tmp_path / "0000:3b:00.0").mkdir()
    cpu = min(os.sched_getaffinity(0))
    (tmp_path / "0000:3b:00.0" / "local_cpulist").write_text(f"{cpu},100000\n")
    assert cpus_near(gpu, tmp_path) == {cpu}


KEPT = """
import os, sys, threading
from embershard.machine import keep_to
may_end, before = threading.Event(), os.sched_getaffinity(0)
old = threading.Thread(target=may_end.wait)
old.start()
keep_to(set())
assert os.sched_getaffinity(old.native_id) == before
keep_to({min(before)})
new = threading.Thread(target=may_end.wait)
new.start()
print([os.sched_getaffinity(thread) == {min(before)} for thread in (0, old.native_id, new.native_id)])
may_end.set()
"""


def test_all_threads_stay_near_the_gpu(project_dir: Path):
    """Those that were started before, too: an import starts some."""
    done = subprocess.run([sys.executable, "-c", KEPT], cwd=project_dir, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[True, True, True]\n", done.stderr


@pytest.mark.parametrize(
    ("step_flops", "cores", "count"),
    [(0.0, 64, 1), (0.9e9, 16, 1), (2.9e9, 16, 1), (3e9, 16, 2), (170e9, 2, 2), (170e9, 16, 16), (170e9, 128, 113)],
)
def test_threads_of_a_rank_follow_the_size_of_a_step_and_its_cores(step_flops, cores, count):
    assert RankThreads.for_step(step_flops, cores).count == count
