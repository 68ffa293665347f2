"""`embershard doctor`: gathers facts of this machine, checks them, and says what to do about what fails.

Nothing here imports torch or torchrec at the start: the doctor must run when they are broken. Imports, collectives and
kernels are tried in processes of their own: a library that crashes or hangs costs one line of the report.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from embershard.commands.doctor import gpu
from embershard.commands.doctor.checks import (
    FAIL,
    PASS,
    SKIP,
    WARN,
    CheckResult,
    check_collective,
    check_cpu,
    check_disk,
    check_fbgemm_build,
    check_gpus,
    check_huge_pages,
    check_import,
    check_locked_memory,
    check_open_files,
    check_python,
    check_shared_memory,
    check_triton,
    check_versions,
)
from embershard.launch.arguments import make_parser
from embershard.launch.versions import CPU_FBGEMM, CUDA_FBGEMM, installed_version
from embershard.machine import host_memory
from embershard.units import size

COLOURS = {PASS: "32", WARN: "33", FAIL: "31", SKIP: "2"}
IMPORT_TIMEOUT_SECONDS = 120.0
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"

# argv: device, rank. The group is made as training makes it; the variables are torchrun's.
ALL_REDUCE = """
import sys
import torch
import torch.distributed as dist
from embershard.distributed import process_group
with process_group(sys.argv[1]) as ranks:
    value = torch.tensor([float(sys.argv[2])], device=ranks.device)
    dist.all_reduce(value)
    expected = sum(range(ranks.world_size))
    assert value.item() == expected, f"the sum of {ranks.world_size} ranks' numbers is {value.item()}, not {expected}"
    ranks.barrier()
"""


def has_driver() -> bool:
    """Return whether NVIDIA's driver has the library that FBGEMM's CUDA build loads."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnvidia-ml.so.1")
        return True
    return False


def torch_facts() -> tuple[str | None, tuple[str, ...]]:
    """Return `torch.version.cuda`, and each GPU with its memory; nothing when torch cannot be imported."""
    try:
        import torch
    except Exception:  # the import check shows the error
        return None, ()
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = tuple(f"{device.name} ({size(device.total_memory)})" for device in devices)
    return torch.version.cuda, names


def import_error(module: str, timeout_seconds: float) -> tuple[str, float]:
    """Import a module in a process of its own; return its error (empty: it worked) and the seconds."""
    start = time.monotonic()
    command = [sys.executable, "-W", "ignore", "-c", f"import {module}"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        return f"TimeoutError: no end after {timeout_seconds:.0f} s", timeout_seconds
    seconds = time.monotonic() - start
    if run.returncode < 0:
        return f"{run.stderr}\nImportError: killed by signal {-run.returncode}", seconds
    if run.returncode:
        return run.stderr or f"ImportError: exit status {run.returncode}", seconds
    return "", seconds


def all_reduce_error(device: str, num_ranks: int, timeout_seconds: float) -> tuple[str, float]:
    """Run an all-reduce between processes on 127.0.0.1; return the error (empty: it worked) and the seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = time.monotonic()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    ranks = []
    for rank in range(num_ranks):
        command = [sys.executable, "-W", "ignore", "-c", ALL_REDUCE, device, str(rank)]
        variables = {**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(
            subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        )
    errors = []
    try:
        for rank, process in enumerate(ranks):
            left = max(1.0, timeout_seconds - (time.monotonic() - start))
            _, stderr = process.communicate(timeout=left)
            if process.returncode:
                last_line = (stderr.strip() or "no message").splitlines()[-1].strip()  # of a traceback: the error
                errors.append(f"rank {rank}: {last_line}")
    except subprocess.TimeoutExpired:
        errors.append(f"no answer after {timeout_seconds:.0f} s")
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    return "; ".join(errors), time.monotonic() - start


def collectives(num_gpus: int, timeout_seconds: float) -> Iterator[CheckResult]:
    """Try gloo between two ranks, and gloo and NCCL between a rank on each GPU; NCCL refuses two on one."""
    error, seconds = all_reduce_error("cpu", 2, timeout_seconds)
    remedy = "this host's name must resolve to an address of it (see /etc/hosts), or set GLOO_SOCKET_IFNAME=lo"
    yield check_collective("gloo", 2, error, seconds, remedy)
    if not num_gpus:
        yield CheckResult("nccl", SKIP, "needs a GPU")
        return
    error, seconds = all_reduce_error("cuda", num_gpus, timeout_seconds)
    yield check_collective("nccl", num_gpus, error, seconds, "NCCL_DEBUG=INFO shows why; check /dev/shm and nvidia-smi")


def examine(timeout_seconds: float) -> Iterator[CheckResult]:
    """Run all checks, in the order in which a newcomer would fix what fails."""
    torch_cuda, gpus = torch_facts()
    driver = has_driver()
    found = {name: installed_version(name) for name in (CUDA_FBGEMM, CPU_FBGEMM)}
    dists = {name: version for name, version in found.items() if version is not None}
    shared_bytes = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None
    yield check_python((sys.version_info[0], sys.version_info[1]))
    fbgemm = next(iter(dists.values()), None)
    torch = installed_version("torch")
    yield check_versions(torch, installed_version("torchrec"), fbgemm)
    yield check_fbgemm_build(dists, torch, torch_cuda, driver)
    for module in ("torch", "torchrec"):
        yield check_import(module, *import_error(module, IMPORT_TIMEOUT_SECONDS))
    yield check_cpu(len(os.sched_getaffinity(0)), host_memory())
    yield check_gpus(gpus, torch_cuda, driver)
    yield check_triton(installed_version("triton"), len(gpus))
    yield from gpu.examine(len(gpus), torch_cuda, timeout_seconds)
    yield from collectives(len(gpus), timeout_seconds)
    yield check_huge_pages(Path(HUGE_PAGES).read_text() if os.path.isfile(HUGE_PAGES) else None)
    yield check_shared_memory(shared_bytes, len(gpus))
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield check_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], len(gpus))
    yield check_disk(os.getcwd(), shutil.disk_usage(os.getcwd()).free)


def line(result: CheckResult, colour: bool) -> str:
    """Return a result as text, its remedy on a line of its own."""
    status = f"\033[{COLOURS[result.status]}m{result.status}\033[0m" if colour else result.status
    text = f"{status}  {result.name:<17}  {result.detail}"
    return f"{text}\n      {'':<17}  -> {result.remedy}" if result.remedy else text


def summary(results: Sequence[CheckResult]) -> str:
    """Return the last line: the number of results of each status, and what to do next."""
    statuses = [result.status for result in results]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in COLOURS if status in statuses)
    if FAIL in statuses:
        return f"{counts}. Fix what FAILs from the top, then run embershard doctor again."
    return f"{counts}. Ready: `make train` in a clone, or `embershard train --config FILE`."


def main(argv: list[str], examine: Callable[[float], Iterator[CheckResult]] = examine) -> int:
    """Print the report. Return 1 when a check failed, else 0."""
    parser = make_parser("doctor", "Check that this machine can train.\n\n  embershard doctor\n")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds for each test with other processes (60)"
    )
    arguments = parser.parse_args(argv)
    results = []
    for result in examine(arguments.timeout):
        results.append(result)
        if not arguments.json:
            print(line(result, sys.stdout.isatty()), flush=True)
    failed = any(result.status == FAIL for result in results)
    if arguments.json:
        print(json.dumps({"ok": not failed, "checks": [asdict(result) for result in results]}, indent=2))
    else:
        print(summary(results))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
