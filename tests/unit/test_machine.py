"""Memory of the machine and of its control groups, on folders that look like `/proc` and `/sys`."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from embershard.machine import HostMemory, MapLimit, host_memory, limits_of_maps

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
