"""The checks of the doctor: functions from plain facts to a `CheckResult`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from embershard.launch.versions import (
    CPU_FBGEMM,
    CUDA_FBGEMM,
    DEFAULT_SET,
    NEWEST_PYTHON,
    OLDER,
    OLDEST_PYTHON,
    SETS,
    minor,
    wanted_fbgemm,
)
from embershard.machine import HostMemory
from embershard.units import size

PASS, WARN, FAIL, SKIP = "PASS", "WARN", "FAIL", "SKIP"
_GIB = 1 << 30
#: Of a solid-state disk, even of a slow one; a disk that turns has a few hundred.
_FEW_PAGES = 2000
#: The oldest driver by CUDA's major version: https://docs.nvidia.com/deploy/cuda-compatibility.
_OLDEST_DRIVERS = {"12": 525, "13": 580}
#: What FBGEMM 1.8's wheel has code for: sm_80 runs on all of 8.x, sm_90a and sm_100a on just these.
_FBGEMM_CODE = "8.x, 9.0 and 10.0"

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


def check_collective(backend: str, num_ranks: int, error: str, seconds: float, remedy: str) -> CheckResult:
    """Check an all-reduce between processes. `error` says what went wrong; empty when it worked."""
    name = f"{backend}, {num_ranks} {'rank' if num_ranks == 1 else 'ranks'}"
    if error:
        return CheckResult(name, FAIL, error, remedy)
    return CheckResult(name, PASS, f"all-reduce in {seconds:.1f} s, start of the processes included")


def check_debug(problem: str) -> CheckResult:
    """Check what torch's variable for debugging does to a training (`debug_problem`)."""
    if problem:
        return CheckResult("torch's debugging", WARN, problem, "use TORCH_DISTRIBUTED_DEBUG=INFO, or unset it")
    return CheckResult("torch's debugging", PASS, "TORCH_DISTRIBUTED_DEBUG does no harm")


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


def check_disk_rates(folder: str, pages_per_second: float, bytes_per_second: float) -> CheckResult:
    """Check the disk of `cache.host_dir`: random pages of 4 KiB, read by 16 threads, and bytes in order."""
    detail = f"{pages_per_second:,.0f} random pages and {size(bytes_per_second)} in order a second, in {folder}; in a "
    detail += f"topology's file, for plans: disk_pages_per_second = {pages_per_second:.0f}"
    if pages_per_second < _FEW_PAGES:
        remedy = (
            'each row of cache.host = "file" that is not in memory is a page: take a solid-state disk, or as much '
            "cache.host_bytes as there is"
        )
        return CheckResult("cache.host_dir", WARN, detail, remedy)
    return CheckResult("cache.host_dir", PASS, detail)


def check_program(name: str, error: str, seconds: float, remedy: str, otherwise: str = FAIL) -> CheckResult:
    """Check a program that the doctor ran: `error` is empty when it worked, and `otherwise` the status when not."""
    if error:
        return CheckResult(name, otherwise, error.strip().splitlines()[-1].strip()[:500], remedy)
    return CheckResult(name, PASS, f"{seconds:.1f} s")


def check_huge_pages(setting: str | None) -> CheckResult:
    """Check transparent huge pages. `setting`: Linux's file for them, such as "always [madvise] never"."""
    name = "huge pages"
    if setting is None:
        return CheckResult(name, SKIP, "this system does not name them")
    chosen = re.search(r"\[(\w+)\]", setting)
    if chosen is None or chosen[1] == "never":
        remedy = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (row copies take longer without)"
        return CheckResult(name, WARN, setting.strip(), remedy)
    return CheckResult(name, PASS, chosen[1])


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
