"""`embershard doctor`: checks this machine, and says what to do about what fails.

The checks are functions from plain facts to a `CheckResult`; below them the facts are gathered. Nothing here imports
torch or torchrec at the start: the doctor must run when they are broken. Imports and collectives are tried in processes
of their own: a library that crashes or hangs costs one line of the report.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from embershard.launch.arguments import make_parser
from embershard.launch.versions import (
    CPU_FBGEMM,
    CUDA_FBGEMM,
    DEFAULT_SET,
    NEWEST_PYTHON,
    OLDER,
    OLDEST_PYTHON,
    SETS,
    installed_version,
    minor,
    wanted_fbgemm,
)
from embershard.machine import HostMemory, host_memory
from embershard.units import size

PASS, WARN, FAIL, SKIP = "PASS", "WARN", "FAIL", "SKIP"
_GIB = 1 << 30

TESTED = "; or ".join(str(versions) for versions in SETS.values() if versions.is_a_pairing)
SETUP = "make setup repairs .venv; by hand, see docs/installation.md"


@dataclass(frozen=True)
class CheckResult:
    """One line of the doctor's report. `remedy` says what to do; it is empty when there is nothing to do."""

    name: str
    status: str  # PASS, WARN, FAIL or SKIP
    detail: str
    remedy: str = ""


def check_python(version: tuple[int, int]) -> CheckResult:
    """Check the Python version: older ones than those tested cannot work."""
    text, oldest, newest = (".".join(map(str, each)) for each in (version, OLDEST_PYTHON, NEWEST_PYTHON))
    if version < OLDEST_PYTHON:
        return CheckResult("python", FAIL, f"{text}; needed: {oldest} or newer", "make the venv with a newer Python")
    if version > NEWEST_PYTHON:
        remedy = f"if something fails, try Python {newest}"
        return CheckResult("python", WARN, f"{text}; tested: {oldest} to {newest}", remedy)
    return CheckResult("python", PASS, text)


def check_versions(torch: str | None, torchrec: str | None, fbgemm: str | None) -> CheckResult:
    """Check that torch, torchrec and FBGEMM are releases that were built for each other."""
    got = {"torch": torch, "torchrec": torchrec, "FBGEMM": fbgemm}
    detail = ", ".join(f"{name} {version or 'is missing'}" for name, version in got.items())
    if not (torch and torchrec and fbgemm):
        return CheckResult("versions", FAIL, detail, f"{SETUP} (needed: {SETS[DEFAULT_SET]})")
    found = minor(torch), minor(torchrec), minor(fbgemm)
    fitting = {versions.minors: True for versions in SETS.values() if versions.is_a_pairing} | OLDER
    if fitting.get(found):
        return CheckResult("versions", PASS, detail)
    if found in fitting:
        return CheckResult("versions", WARN, f"{detail}: they fit, but are not tested", f"tested: {TESTED}")
    for versions in SETS.values():
        if found == versions.minors:
            detail += f": not released for each other; tested with {versions.tested} only"
            return CheckResult("versions", WARN, detail, f"for training: {TESTED}")
    for release in fitting:
        if found[0] == release[0]:
            remedy = f"torch {release[0]} needs torchrec {release[1]}.x and FBGEMM {release[2]}.x: {SETUP}"
            return CheckResult("versions", FAIL, f"{detail}: they do not fit", remedy)
    return CheckResult("versions", WARN, f"{detail}: an unknown set", f"tested: {TESTED}")


def check_fbgemm_build(
    dists: Mapping[str, str], torch: str | None, torch_cuda: str | None, driver: bool
) -> CheckResult:
    """Check that exactly one FBGEMM is installed: the one that this torch and this machine can load.

    Args:
        dists: version by name of the installed FBGEMM distributions.
        torch: the installed torch's version.
        torch_cuda: `torch.version.cuda`.
        driver: whether NVIDIA's driver is on this machine.
    """
    name = "fbgemm build"
    build = f"torch is a {f'CUDA {torch_cuda}' if torch_cuda else 'CPU'} build"
    wanted = wanted_fbgemm(torch_cuda, driver)
    fitting = next((each for each in SETS.values() if torch and each.minors[0] == minor(torch)), SETS[DEFAULT_SET])
    by_hand = f"pip uninstall -y {CUDA_FBGEMM} {CPU_FBGEMM}, then pip install --no-deps {wanted}=={fitting.fbgemm}"
    remedy = f"make setup, or: {by_hand}"
    if not dists:
        return CheckResult(name, FAIL, f"none is installed; {build}", remedy)
    found = " and ".join(f"{dist} {version}" for dist, version in sorted(dists.items()))
    if len(dists) > 1:
        return CheckResult(name, FAIL, f"{found} are both installed, over each other; {build}", remedy)
    if wanted not in dists:
        where = "" if driver or not torch_cuda else ", without an NVIDIA driver"
        return CheckResult(name, FAIL, f"{found}, but {build}{where}: needs {wanted}", remedy)
    return CheckResult(name, PASS, f"{found}; {build}")


def check_import(module: str, error: str, seconds: float) -> CheckResult:
    """Check an import. `error` is its stderr; empty when it worked."""
    name = f"import {module}"
    if not error:
        return CheckResult(name, PASS, f"{seconds:.1f} s")
    lines = [line.strip() for line in error.strip().splitlines() if line.strip()]
    causes = [line for line in lines if re.match(r"[A-Za-z_.]*(Error|Exception|Interrupt)\b", line)]
    detail = " <- ".join(reversed(causes[-3:])) or lines[-1]
    missing = re.search(r"No module named '([\w.]+)'", error)
    if missing and missing[1].partition(".")[0] != module:
        remedy = f"pip install {missing[1].partition('.')[0].replace('_', '-')}, or make setup"
    elif "libnvidia-ml" in error or "libcuda" in error:
        remedy = f"FBGEMM's CUDA build needs NVIDIA's driver; on this machine take {CPU_FBGEMM}: make setup"
    elif "undefined symbol" in error or "no attribute" in error:
        remedy = f"the versions were not built for each other; tested: {TESTED}; {SETUP}"
    else:
        remedy = SETUP
    return CheckResult(name, FAIL, detail[:500], remedy)


def check_cpu(cores: int, memory: HostMemory) -> CheckResult:
    """Check the cores that this process may use, and its memory: the machine's, or its control group's."""
    detail = (
        f"{cores} cores, {size(memory.total_bytes)} of memory ({memory.limit}), "
        f"{size(memory.available_bytes)} of it available"
    )
    if memory.total_bytes < 4 * _GIB:
        return CheckResult("cpu", WARN, detail, "tables live in host memory: keep them under half of it")
    return CheckResult("cpu", PASS, detail)


def check_gpus(names: tuple[str, ...], torch_cuda: str | None, driver: bool) -> CheckResult:
    """Check the GPUs. `names` are those that torch sees, with their memory."""
    if names:
        return CheckResult("gpus", PASS, ", ".join(names))
    if driver and torch_cuda is None:
        remedy = "for the GPU: install a CUDA build of torch, then make setup"
        return CheckResult("gpus", WARN, "NVIDIA's driver is here, but torch is a CPU build", remedy)
    if driver:
        remedy = f"does nvidia-smi show a driver for CUDA {torch_cuda}? Is CUDA_VISIBLE_DEVICES set?"
        return CheckResult("gpus", WARN, "NVIDIA's driver is here, but torch finds no GPU", remedy)
    return CheckResult("gpus", SKIP, "none: training runs on the CPU, with gloo")


def check_triton(version: str | None, num_gpus: int) -> CheckResult:
    """Check Triton, whose kernels plan the caches of a GPU. `version`: the installed one's."""
    if version is not None:
        return CheckResult("triton", PASS, version)
    if not num_gpus:
        return CheckResult("triton", SKIP, "not installed: it serves caches on a GPU only")
    remedy = "CUDA builds of torch for Linux bring it along: reinstall torch, or install the triton that it requires"
    return CheckResult("triton", FAIL, "not installed, and caches on a GPU are planned by its kernels", remedy)


def check_collective(backend: str, error: str, seconds: float, remedy: str) -> CheckResult:
    """Check an all-reduce between two processes. `error` says what went wrong; empty when it worked."""
    name = f"{backend}, two ranks"
    if error:
        return CheckResult(name, FAIL, error, remedy)
    return CheckResult(name, PASS, f"all-reduce in {seconds:.1f} s, start of two processes included")


def check_shared_memory(free_bytes: int | None, num_gpus: int) -> CheckResult:
    """Check /dev/shm, through which processes and NCCL pass data; containers often have 64 MiB."""
    name = "shared memory"
    remedy = "in a container: docker run --shm-size=8g; else: mount -o remount,size=8G /dev/shm"
    if free_bytes is None:
        return CheckResult(name, WARN, "there is no /dev/shm", remedy)
    detail = f"{size(free_bytes)} free in /dev/shm"
    if free_bytes < _GIB:
        return CheckResult(name, FAIL if num_gpus > 1 else WARN, f"{detail}; wanted: 1 GiB", remedy)
    return CheckResult(name, PASS, detail)


def check_open_files(limit: int) -> CheckResult:
    """Check `ulimit -n`, which limits sockets between ranks and data files; -1 is unlimited."""
    detail = f"ulimit -n is {'unlimited' if limit < 0 else limit}"
    if 0 <= limit < 256:
        return CheckResult("open files", FAIL, f"{detail}; needed: 256", "ulimit -n 65536")
    if 0 <= limit < 1024:
        return CheckResult("open files", WARN, f"{detail}; wanted: 1024 or more", "ulimit -n 65536")
    return CheckResult("open files", PASS, detail)


def check_locked_memory(limit_bytes: int, num_gpus: int) -> CheckResult:
    """Check `ulimit -l`, which limits the memory that RDMA between nodes registers; -1 is unlimited."""
    name = "locked memory"
    detail = f"ulimit -l is {'unlimited' if limit_bytes < 0 else size(limit_bytes)}"
    if limit_bytes < 0:
        return CheckResult(name, PASS, detail)
    if num_gpus == 0:
        return CheckResult(name, SKIP, f"{detail}; it matters only to RDMA between GPU machines")
    if limit_bytes < _GIB:
        remedy = "only for RDMA between machines: ulimit -l unlimited, or docker run --ulimit memlock=-1"
        return CheckResult(name, WARN, detail, remedy)
    return CheckResult(name, PASS, detail)


def check_disk(folder: str, free_bytes: int) -> CheckResult:
    """Check the free disk space where runs and checkpoints go."""
    detail = f"{size(free_bytes)} free in {folder}"
    remedy = "checkpoints are as large as the tables with their optimizer states: --run-dir on a larger disk"
    if free_bytes < _GIB:
        return CheckResult("disk", FAIL, f"{detail}; needed: 1 GiB", remedy)
    if free_bytes < 10 * _GIB:
        return CheckResult("disk", WARN, detail, remedy)
    return CheckResult("disk", PASS, detail)


COLOURS = {PASS: "32", WARN: "33", FAIL: "31", SKIP: "2"}
IMPORT_TIMEOUT_SECONDS = 120.0

# argv: backend, rank, port, timeout in seconds.
ALL_REDUCE = """
import datetime, sys
import torch
import torch.distributed as dist
backend, rank, port, timeout = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
if backend == "nccl":
    torch.cuda.set_device(rank)
limit = datetime.timedelta(seconds=timeout)
store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=limit)
dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=limit)
value = torch.tensor([rank + 1.0], device="cuda" if backend == "nccl" else "cpu")
dist.all_reduce(value)
assert value.item() == 3.0, f"1 + 2 gave {value.item()}"
dist.barrier()
dist.destroy_process_group()
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


def all_reduce_error(backend: str, timeout_seconds: float) -> tuple[str, float]:
    """Run an all-reduce between two processes on 127.0.0.1; return the error (empty: it worked) and the seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = time.monotonic()
    python = [sys.executable, "-W", "ignore", "-c", ALL_REDUCE]
    ranks = []
    for rank in range(2):
        command = [*python, backend, str(rank), str(port), str(timeout_seconds)]
        ranks.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
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
    """Try gloo always, and NCCL where there are two GPUs."""
    error, seconds = all_reduce_error("gloo", timeout_seconds)
    remedy = "this host's name must resolve to an address of it (see /etc/hosts), or set GLOO_SOCKET_IFNAME=lo"
    yield check_collective("gloo", error, seconds, remedy)
    if num_gpus < 2:
        yield CheckResult("nccl, two ranks", SKIP, f"needs two GPUs, there are {num_gpus}")
        return
    error, seconds = all_reduce_error("nccl", timeout_seconds)
    yield check_collective("nccl", error, seconds, "NCCL_DEBUG=INFO shows why; check /dev/shm and nvidia-smi")


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
    yield from collectives(len(gpus), timeout_seconds)
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
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds for each two-rank test (60)")
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
