"""`embershard doctor`: gathers facts of this machine, checks them, and says what to do about what fails.

Nothing here imports torch or torchrec at the start: the doctor must run when they are broken. Imports, collectives and
kernels are tried in processes of their own: a library that crashes or hangs costs one line of the report.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from embershard.commands.doctor import checks
from embershard.commands.doctor.checks import FAIL, PASS, SKIP, WARN, CheckResult, Gpu
from embershard.launch.arguments import add_settings, make_parser
from embershard.launch.versions import CPU_FBGEMM, CUDA_FBGEMM, debug_problem, installed_version
from embershard.machine import host_memory, parse_cpus
from embershard.units import size

_HELP = """Check that this machine can train.

  embershard doctor
  embershard doctor --config run.toml      measures the disk of cache.host_dir, too
"""
COLOURS = {PASS: "32", WARN: "33", FAIL: "31", SKIP: "2"}
IMPORT_TIMEOUT_SECONDS = 120.0
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
_QUERY = "pci.bus_id,driver_version,pcie.link.width.current,pcie.link.width.max"
_SYSTEM = Path("/sys")

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
# argv of all programs: the device.
KERNEL = """
import sys
import torch
from embershard.cache.rows import memory
from embershard.cache.rows.page_lock import lock_for
from embershard.cache.rows.uva_transfer import UvaTransfer
device = torch.device(sys.argv[1])
rows = memory.zeros(256 * 64, torch.float32, whole_pages=True).view(256, 64)
rows.copy_(torch.randn(256, 64))
slots = torch.zeros(257, 64, device=device)
if device.type == "cuda":
    lock = lock_for(device, [rows])
    lock.wait()
keys = torch.arange(256, device=device)
transfer = UvaTransfer([slots], [rows])
transfer.fill(keys, keys + 1)
assert torch.equal(slots[1:].cpu(), rows), "the kernel copied other numbers"
"""
LOCK = """
import sys
import torch
from embershard.cache.rows import memory
from embershard.cache.rows.page_lock import lock_for
lock_for(torch.device(sys.argv[1]), [memory.zeros(1 << 30, torch.uint8, whole_pages=True)]).wait()
"""
LOOKUP = """
import sys
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
device = torch.device(sys.argv[1])
on_gpu = device.type == "cuda"
place = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
table = (8, 16, place, ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU)
sgd = EmbOptimType.EXACT_SGD
tables = SplitTableBatchedEmbeddingBagsCodegen([table], optimizer=sgd, learning_rate=0.5, device=device)
(weights,) = tables.split_embedding_weights()
weights.data.fill_(1.0)
pooled = tables(torch.tensor([3, 3, 5], device=device), torch.tensor([0, 2, 3], device=device))
pooled.sum().backward()
assert pooled[:, 0].tolist() == [2.0, 1.0], f"bags of two and one row gave {pooled[:, 0].tolist()}"
assert weights[[3, 5, 6], 0].tolist() == [0.0, 0.5, 1.0], f"rows were updated to {weights[[3, 5, 6], 0].tolist()}"
"""

# argv: a file of settings, and overrides. Code that the settings name is not imported.
DISK = """
import sys
from pathlib import Path
from embershard.cache.file.disk_rates import disk_rates
from embershard.settings.files import load_config
from embershard.training.config import RunConfig
folder = load_config(RunConfig, Path(sys.argv[1]), sys.argv[2:], trust_code=True).cache.host_dir
if folder is not None:
    print(*disk_rates(folder), folder)
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


def program_error(program: str, *words: str, timeout_seconds: float) -> tuple[str, float]:
    """Run a program in a process of its own; return its error (empty: it worked) and the seconds."""
    return run_program(program, *words, timeout_seconds=timeout_seconds)[1:]


def run_program(program: str, *words: str, timeout_seconds: float) -> tuple[str, str, float]:
    """As `program_error`; return what it printed, too."""
    start = time.monotonic()
    command = [sys.executable, "-W", "ignore", "-c", program, *words]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        return "", f"TimeoutError: no end after {timeout_seconds:.0f} s", timeout_seconds
    seconds = time.monotonic() - start
    if run.returncode < 0:
        return run.stdout, f"{run.stderr}\nOSError: killed by signal {-run.returncode}", seconds
    error = (run.stderr or f"OSError: exit status {run.returncode}") if run.returncode else ""
    return run.stdout, error, seconds


def parse_gpus(text: str, system: Path = _SYSTEM) -> list[Gpu]:
    """Parse what nvidia-smi prints for the query of `known_gpus`.

    >>> parse_gpus("00000000:3B:00.0, 580.65.06, 8, 16")[0].address
    '0000:3b:00.0'
    """
    found = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4:
            address = parts[0].lower()[-12:]
            lanes, most_lanes = (int(part) if part.isdigit() else None for part in parts[2:])
            node = -1
            with contextlib.suppress(OSError, ValueError):
                node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
            found.append(Gpu(address, parts[1], lanes, most_lanes, node if node >= 0 else None))
    return found


def known_gpus() -> list[Gpu]:
    """Ask nvidia-smi for the GPUs; none where it is missing or does not answer."""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        return parse_gpus(subprocess.run(command, capture_output=True, text=True, timeout=60).stdout)
    except (OSError, subprocess.TimeoutExpired):
        return []


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


def examine_gpus(num_gpus: int, torch_cuda: str | None, timeout_seconds: float) -> Iterator[CheckResult]:
    """Check the GPUs: their driver and links, and small programs that need all of what training needs. No GPU has run
    them; on a CPU the tests run those that can be."""
    if not num_gpus:
        what = "driver, capability, C compiler, PCIe, NUMA, a lookup, a kernel, page-locking"
        yield CheckResult("gpu checks", SKIP, f"they need a GPU: {what}")
        return
    import torch

    gpus, run = known_gpus(), partial(program_error, timeout_seconds=timeout_seconds)
    yield checks.check_driver(gpus[0].driver if gpus else None, torch_cuda)
    yield checks.check_capabilities([torch.cuda.get_device_capability(number) for number in range(num_gpus)])
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")  # as Triton looks for it
    has_headers = Path(sysconfig.get_paths()["include"], "Python.h").is_file()
    yield checks.check_compiler(compiler, has_headers)
    yield checks.check_links(gpus)
    nodes = _SYSTEM / "devices/system/node/online"
    yield checks.check_numa(gpus, len(parse_cpus(nodes.read_text())) if nodes.is_file() else 1)
    remedy = "the versions must fit each other and the GPU: see `versions`, `fbgemm build` and `capability` above"
    yield checks.check_program("fbgemm lookup", *run(LOOKUP, "cuda:0"), remedy)
    remedy = 'see `C compiler` and `triton` above; cache.transfer="staged" moves rows without kernels'
    yield checks.check_program("kernel", *run(KERNEL, "cuda:0"), remedy)
    remedy = (
        'more memory for the machine or its container; until then rows move as with cache.transfer="staged", slower'
    )
    yield checks.check_program("lock 1 GiB", *run(LOCK, "cuda:0"), remedy, otherwise=WARN)


def collectives(num_gpus: int, timeout_seconds: float) -> Iterator[CheckResult]:
    """Try gloo between two ranks, and gloo and NCCL between a rank on each GPU; NCCL refuses two on one."""
    error, seconds = all_reduce_error("cpu", 2, timeout_seconds)
    remedy = "this host's name must resolve to an address of it (see /etc/hosts), or set GLOO_SOCKET_IFNAME=lo"
    yield checks.check_collective("gloo", 2, error, seconds, remedy)
    if not num_gpus:
        yield CheckResult("nccl", SKIP, "needs a GPU")
        return
    error, seconds = all_reduce_error("cuda", num_gpus, timeout_seconds)
    remedy = "NCCL_DEBUG=INFO shows why; check /dev/shm and nvidia-smi"
    yield checks.check_collective("nccl", num_gpus, error, seconds, remedy)


def examine(timeout_seconds: float) -> Iterator[CheckResult]:
    """Run all checks, in the order in which a newcomer would fix what fails."""
    torch_cuda, gpus = torch_facts()
    driver = has_driver()
    found = {name: installed_version(name) for name in (CUDA_FBGEMM, CPU_FBGEMM)}
    dists = {name: version for name, version in found.items() if version is not None}
    shared_bytes = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None
    yield checks.check_python((sys.version_info[0], sys.version_info[1]))
    fbgemm = next(iter(dists.values()), None)
    torch = installed_version("torch")
    yield checks.check_versions(torch, installed_version("torchrec"), fbgemm)
    yield checks.check_fbgemm_build(dists, torch, torch_cuda, driver)
    for module in ("torch", "torchrec"):
        yield checks.check_import(module, *program_error(f"import {module}", timeout_seconds=IMPORT_TIMEOUT_SECONDS))
    yield checks.check_cpu(len(os.sched_getaffinity(0)), host_memory())
    yield checks.check_gpus(gpus, torch_cuda, driver)
    yield checks.check_triton(installed_version("triton"), len(gpus))
    yield from examine_gpus(len(gpus), torch_cuda, timeout_seconds)
    yield from collectives(len(gpus), timeout_seconds)
    yield checks.check_debug(debug_problem())
    yield checks.check_huge_pages(Path(HUGE_PAGES).read_text() if os.path.isfile(HUGE_PAGES) else None)
    yield checks.check_shared_memory(shared_bytes, len(gpus))
    yield checks.check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield checks.check_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], len(gpus))
    yield checks.check_disk(os.getcwd(), shutil.disk_usage(os.getcwd()).free)


def examine_disk(settings: Sequence[str], timeout_seconds: float) -> Iterator[CheckResult]:
    """Measure the disk of `cache.host_dir`, if the settings (a file, and overrides) name one."""
    printed, error, seconds = run_program(DISK, *settings, timeout_seconds=timeout_seconds)
    if error:
        remedy = "the message says what the settings, or the folder, need"
        yield checks.check_program("cache.host_dir", error, seconds, remedy)
    elif printed:
        pages_per_second, bytes_per_second, folder = printed.rstrip("\n").split(" ", 2)
        yield checks.check_disk_rates(folder, float(pages_per_second), float(bytes_per_second))


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
    parser = make_parser("doctor", _HELP)
    add_settings(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    text = "seconds for each test with other processes (60)"
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help=text)
    arguments = parser.parse_args(argv)
    if arguments.overrides and arguments.config is None:
        parser.error("--set changes the settings of --config FILE, which is missing")
    settings = [] if arguments.config is None else [str(arguments.config), *arguments.overrides]
    more = examine_disk(settings, arguments.timeout) if settings else iter(())
    results = []
    for result in itertools.chain(examine(arguments.timeout), more):
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
