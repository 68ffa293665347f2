"""The doctor on a GPU: its driver and links, and small programs that need all of what training needs. No GPU has run
them; on a CPU the tests run those that can be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from embershard.commands.doctor.checks import FAIL, PASS, SKIP, WARN, CheckResult, check_program
from embershard.machine import parse_cpus

#: The oldest driver by CUDA's major version: https://docs.nvidia.com/deploy/cuda-compatibility.
_OLDEST_DRIVERS = {"12": 525, "13": 580}
#: What FBGEMM 1.8's wheel has code for: sm_80 runs on all of 8.x, sm_90a and sm_100a on just these.
_FBGEMM_CODE = "8.x, 9.0 and 10.0"
_QUERY = "pci.bus_id,driver_version,pcie.link.width.current,pcie.link.width.max"
_SYSTEM = Path("/sys")


@dataclass(frozen=True)
class Gpu:
    """A GPU, as NVIDIA's driver and Linux describe it.

    Attributes:
        address: on the PCI bus, as Linux writes it.
        driver: its version.
        lanes, most_lanes: of its PCIe link, now and at most; None: not known.
        numa_node: next to it; None: the system does not say.
    """

    address: str
    driver: str
    lanes: int | None = None
    most_lanes: int | None = None
    numa_node: int | None = None


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
            found.append(Gpu(address, parts[1], lanes, most_lanes, _numa_node(address, system)))
    return found


def _numa_node(address: str, system: Path) -> int | None:
    try:
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def known_gpus() -> list[Gpu]:
    """Ask nvidia-smi for the GPUs; none where it is missing or does not answer."""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        return parse_gpus(subprocess.run(command, capture_output=True, text=True, timeout=60).stdout)
    except (OSError, subprocess.TimeoutExpired):
        return []


def check_driver(version: str | None, torch_cuda: str | None) -> CheckResult:
    """Check NVIDIA's driver against the CUDA of this torch."""
    oldest = _OLDEST_DRIVERS.get((torch_cuda or "").partition(".")[0])
    if version is None or oldest is None:
        remedy = (
            "is nvidia-smi installed? In a container: docker run --gpus all, NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
        return CheckResult("driver", WARN, f"version {version or 'not known'}, for CUDA {torch_cuda}", remedy)
    if int(version.partition(".")[0]) < oldest:
        detail = f"{version}; CUDA {torch_cuda} needs {oldest} or newer"
        return CheckResult("driver", FAIL, detail, "install a newer driver, or torch and FBGEMM for an older CUDA")
    return CheckResult("driver", PASS, f"{version}, for CUDA {torch_cuda}")


def check_capabilities(capabilities: Sequence[tuple[int, int]]) -> CheckResult:
    """Check that FBGEMM's wheel has code for the GPUs."""
    name, text = "capability", ", ".join(f"{major}.{minor}" for major, minor in capabilities)
    if all(major == 8 or (major, minor) in ((9, 0), (10, 0)) for major, minor in capabilities):
        return CheckResult(name, PASS, text)
    remedy = "if the lookup below fails: build FBGEMM for this GPU (TORCH_CUDA_ARCH_LIST), or train on the CPU"
    return CheckResult(name, WARN, f"{text}; FBGEMM's wheel has code for {_FBGEMM_CODE}", remedy)


def check_compiler(compiler: str | None, has_headers: bool) -> CheckResult:
    """Check the C compiler and Python's headers, with which Triton compiles its link to the driver."""
    name = "C compiler"
    if compiler is None:
        remedy = "apt-get install gcc libc6-dev, or name one in CC"
        return CheckResult(name, FAIL, "none; Triton compiles its link to the driver at its first launch", remedy)
    if not has_headers:
        return CheckResult(name, FAIL, f"{compiler}, but no Python.h", "apt-get install python3-dev")
    return CheckResult(name, PASS, compiler)


def check_links(gpus: Sequence[Gpu]) -> CheckResult:
    """Check the lanes of the PCIe links, over which rows travel."""
    text = ", ".join(f"{gpu.address} has {gpu.lanes or '?'} of {gpu.most_lanes or '?'} lanes" for gpu in gpus)
    if any(gpu.lanes is None or gpu.most_lanes is None for gpu in gpus) or not gpus:
        return CheckResult("pcie", SKIP, text or "nvidia-smi names no GPU")
    if any((gpu.lanes or 0) < (gpu.most_lanes or 0) for gpu in gpus):
        remedy = "rows travel slower: another slot or riser, or the firmware's settings of lanes"
        return CheckResult("pcie", WARN, text, remedy)
    return CheckResult("pcie", PASS, text)


def check_numa(gpus: Sequence[Gpu], num_nodes: int) -> CheckResult:
    """Check that the system says which NUMA node each GPU is beside."""
    nodes = ", ".join("?" if gpu.numa_node is None else str(gpu.numa_node) for gpu in gpus)
    if num_nodes < 2:
        return CheckResult("numa", PASS, "one node")
    detail = f"{num_nodes} nodes; beside the GPUs: {nodes or '?'}"
    if not gpus or any(gpu.numa_node is None for gpu in gpus):
        remedy = "ranks cannot stay beside their GPUs: start each with numactl (nvidia-smi topo -m shows the nodes)"
        return CheckResult("numa", WARN, detail, remedy)
    return CheckResult("numa", PASS, f"{detail}; each rank stays on its node (train.numa)")


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


def program_error(program: str, device: str, timeout_seconds: float) -> tuple[str, float]:
    """Run a program in a process of its own; return the last line of its error (empty: it worked) and the seconds."""
    start = time.monotonic()
    command = [sys.executable, "-W", "ignore", "-c", program, device]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        return f"no end after {timeout_seconds:.0f} s", timeout_seconds
    lines = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
    return lines[-1].strip()[:500] if run.returncode else "", time.monotonic() - start


def examine(num_gpus: int, torch_cuda: str | None, timeout_seconds: float) -> Iterator[CheckResult]:
    """Run the checks of this room, in the order in which a newcomer would fix what fails."""
    if not num_gpus:
        what = "driver, capability, C compiler, PCIe, NUMA, a lookup, a kernel, page-locking"
        yield CheckResult("gpu checks", SKIP, f"they need a GPU: {what}")
        return
    import torch

    gpus = known_gpus()
    yield check_driver(gpus[0].driver if gpus else None, torch_cuda)
    yield check_capabilities([torch.cuda.get_device_capability(number) for number in range(num_gpus)])
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")  # as Triton looks for it
    has_headers = Path(sysconfig.get_paths()["include"], "Python.h").is_file()
    yield check_compiler(compiler, has_headers)
    yield check_links(gpus)
    nodes = _SYSTEM / "devices/system/node/online"
    yield check_numa(gpus, len(parse_cpus(nodes.read_text())) if nodes.is_file() else 1)
    remedy = "the versions must fit each other and the GPU: see `versions`, `fbgemm build` and `capability` above"
    yield check_program("fbgemm lookup", *program_error(LOOKUP, "cuda:0", timeout_seconds), remedy)
    remedy = 'see `C compiler` and `triton` above; cache.transfer="staged" moves rows without kernels'
    yield check_program("kernel", *program_error(KERNEL, "cuda:0", timeout_seconds), remedy)
    remedy = (
        'more memory for the machine or its container; until then rows move as with cache.transfer="staged", slower'
    )
    yield check_program("lock 1 GiB", *program_error(LOCK, "cuda:0", timeout_seconds), remedy, otherwise=WARN)
