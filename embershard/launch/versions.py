"""Versions of what is installed."""

from __future__ import annotations

import os
import platform
import subprocess
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
    """Return the versions of Python, embershard and the packages that matter to figures."""
    found = {package: installed_version(package) for package in _PACKAGES}
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
