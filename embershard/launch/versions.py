"""Versions: what is installed, and which of Python, torch, torchrec and FBGEMM belong together and were tested so.

The one place for the latter. The set-up (scripts/setup_env.py) reads it before anything is installed, and the doctor
when something is broken, so it needs the standard library only. Tests compare requirement files, extras, the
Dockerfile, the Makefile and docs/installation.md with it.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from embershard import __version__

#: Packages whose versions matter to the figures of a run.
_PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy")


def installed_version(package: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Return the versions of Python, embershard and the packages that matter to figures.

    torch, where it is loaded, says its CUDA build, too ("2.13.0+cu130"): its distribution may leave that out.
    """
    found = {package: installed_version(package) for package in _PACKAGES}
    if "torch" in sys.modules:
        found["torch"] = str(sys.modules["torch"].__version__)
    installed = {package: version for package, version in found.items() if version is not None}
    return {"python": platform.python_version(), "embershard": __version__, **installed}


def git_commit() -> str | None:
    """Return the commit of the source tree that this package runs from; None when it is installed without one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", os.fspath(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def debug_problem() -> str:
    """Return what `TORCH_DISTRIBUTED_DEBUG` does to a training in this environment; empty: nothing."""
    level = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "")
    if level.upper() != "DETAIL":
        return ""
    return f"TORCH_DISTRIBUTED_DEBUG={level}: with it, DDP of torch 2.13 over gloo ends in a segmentation fault"


OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 13)
CUDA_FBGEMM, CPU_FBGEMM = "fbgemm-gpu", "fbgemm-gpu-cpu"


@dataclass(frozen=True)
class VersionSet:
    """Versions that the set-up installs together.

    Attributes:
        triton: what torch's CUDA build asks for; tests run kernels in its interpreter.
        tested: which of embershard's tests were run on this set, on a CPU.
        is_a_pairing: whether TorchRec and FBGEMM were released for this torch.
    """

    torch: str
    torchrec: str
    fbgemm: str
    triton: str
    tested: str
    is_a_pairing: bool = True

    def __str__(self) -> str:
        return f"torch {self.torch}, torchrec {self.torchrec}, FBGEMM {self.fbgemm}"

    @property
    def minors(self) -> tuple[str, str, str]:
        """The minor versions of torch, torchrec and FBGEMM: those of one minor version fit as these do."""
        return minor(self.torch), minor(self.torchrec), minor(self.fbgemm)


#: By the name that `EMBERSHARD_VERSIONS` gives them.
SETS = {
    "torchrec-1.8": VersionSet("2.13.0", "1.8.0", "1.8.0", "3.7.1", "the whole suite"),
    "torchrec-1.9": VersionSet("2.14.1", "1.9.2", "1.9.0", "3.8.0", "the whole suite"),
    "torchrec-1.9-on-torch-2.13": VersionSet(
        "2.13.0", "1.9.2", "1.8.0", "3.7.1", "sharding, pipelines, plans and exactness", is_a_pairing=False
    ),
}
DEFAULT_SET = "torchrec-1.8"

#: Older releases that were built for each other (minor versions), which the set-up does not install: tested or not.
OLDER = {("2.12", "1.7", "1.7"): False, ("2.11", "1.6", "1.6"): True}


def minor(version: str) -> str:
    """Return a version's first two numbers.

    >>> minor("2.13.0+cpu")
    '2.13'
    """
    return ".".join(version.partition("+")[0].split(".")[:2])


def wanted_fbgemm(torch_cuda: str | None, driver: bool) -> str:
    """Return the FBGEMM distribution that this machine can load.

    A CUDA build of torch also runs without a GPU, and then needs FBGEMM's CPU build: the CUDA build is linked against
    the driver's `libnvidia-ml.so.1` and cannot be loaded without it.
    """
    return CUDA_FBGEMM if torch_cuda and driver else CPU_FBGEMM
