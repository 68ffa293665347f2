"""The decisions of scripts/setup_env.py as pure functions of facts, and the functions that find the facts.

Standard library only, because it runs before anything is installed.
"""

from __future__ import annotations

import contextlib
import csv
import ctypes
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from embershard.launch.versions import (
    CPU_FBGEMM,
    CUDA_FBGEMM,
    DEFAULT_SET,
    NEWEST_PYTHON,
    OLDEST_PYTHON,
    SETS,
    VersionSet,
)

STAMP = ".embershard-setup.json"


class SetupError(Exception):
    """The environment cannot be made; the message says what to do about it."""


@dataclass(frozen=True)
class Step:
    """One step of the set-up: run pip with `pip_args`, or remove the left-over folder `remove` of site-packages."""

    why: str
    pip_args: tuple[str, ...] = ()
    remove: str = ""


def python_problem(version: tuple[int, int]) -> str:
    """Return why this Python cannot be used, or an empty string."""
    if OLDEST_PYTHON <= version <= NEWEST_PYTHON:
        return ""
    got, oldest, newest = (".".join(map(str, v)) for v in (version, OLDEST_PYTHON, NEWEST_PYTHON))
    reason = "is too old" if version < OLDEST_PYTHON else "is newer than what is tested with these pinned packages"
    return f"Python {got} {reason}. Needed: {oldest} to {newest}."


def chosen_set(environ: Mapping[str, str]) -> str:
    """Return the name of the versions to install: the default ones, unless `EMBERSHARD_VERSIONS` names others."""
    name = environ.get("EMBERSHARD_VERSIONS") or DEFAULT_SET
    if name not in SETS:
        known = "\n".join(f"    {each}: {versions}" for each, versions in SETS.items())
        raise SetupError(f"EMBERSHARD_VERSIONS={name} is no known set of versions. Known are:\n{known}")
    return name


def plan_fbgemm(wanted: str, version: str, installed: Mapping[str, str], damaged: Sequence[str]) -> list[Step]:
    """Return the steps after which exactly the distribution `wanted` is installed, complete and in this version.

    `installed` has a version per distribution; of those in `damaged`, files are missing or were overwritten.
    """
    found = {name: installed[name] for name in (CUDA_FBGEMM, CPU_FBGEMM) if name in installed}
    requirement = f"{wanted}=={version}"
    if found == {wanted: version} and wanted not in damaged:
        return []
    clean = Step("remove what is left of fbgemm_gpu", remove="fbgemm_gpu")
    if not found:
        return [clean, Step(f"install {requirement}", ("install", "--no-deps", requirement))]
    names = " and ".join(f"{name} {version}" for name, version in found.items())
    repair = f"found {names}{' (damaged)' if damaged else ''}; exactly {requirement} is needed here"
    return [
        Step(f"FBGEMM: {repair}", ("uninstall", "--yes", *found)),
        clean,
        Step(f"install {requirement}", ("install", "--no-deps", "--force-reinstall", requirement)),
    ]


def plan_torchrec(version: str, installed: Mapping[str, str], damaged: Sequence[str]) -> list[Step]:
    """Return the steps after which this torchrec is installed, without its dependencies."""
    if installed.get("torchrec") == version and "torchrec" not in damaged:
        return []
    requirement = f"torchrec=={version}"
    return [Step(f"install {requirement}", ("install", "--no-deps", "--force-reinstall", requirement))]


def with_versions(requirements: str, versions: VersionSet) -> str:
    """Return requirement files' text, which pins the default versions of torch and triton, with those of another set.

    >>> print(with_versions("torch==2.13.0\\ntriton==3.7.1; x\\ntqdm==4.70.1", SETS["torchrec-1.9"]))
    torch==2.14.1
    triton==3.8.0; x
    tqdm==4.70.1
    """
    for name in ("torch", "triton"):
        requirements = re.sub(rf"^{name}==[\w.]+", f"{name}=={getattr(versions, name)}", requirements, flags=re.M)
    return requirements


def explain_pip(requirement: str, output: str, folder: Path | None = None) -> str:
    """Return the message for a failed pip run, from its output.

    Args:
        folder: of wheels, that it took instead of an index.
    """
    tail = "\n".join(f"    {line[:300]}" for line in output.strip().splitlines()[-6:])
    unreachable = re.search(
        r"NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError"
        r"|Temporary failure in name resolution|Network is unreachable|Connection refused"
        r"|\(from versions: none\)",
        output,
    )
    if folder is not None and (unreachable or "No matching distribution" in output):
        fix = (
            f"{folder} has no wheel of it for this Python and platform. Make it again, where there is a network:\n"
            f"    python3 scripts/carry.py {folder.name} --python {sys.version_info.major}.{sys.version_info.minor}"
        )
    elif unreachable:
        fix = (
            "pip cannot reach a package index that has it. Check the network, then pip's settings:\n"
            "    pip config list; env | grep -i -E '^(pip|https?_proxy)'"
        )
    elif "No matching distribution" in output:
        fix = "The index has it, but not for this Python and platform (see the versions listed in the log)."
    elif "No space left" in output:
        fix = "The disk is full: a CPU environment takes 2 GiB, a CUDA one up to 8 GiB."
    else:
        fix = "pip failed; its last lines are above."
    return f"could not run: pip {requirement}\n{tail}\n{fix}"


def digest(inputs: Mapping[str, bytes], driver: bool, versions: str) -> str:
    """Return the hash of the inputs that decide the venv's content: files, the driver, the name of the versions."""
    hashed = hashlib.sha256(f"driver={driver} versions={versions}".encode())
    for name in sorted(inputs):
        hashed.update(f"\n{name} {len(inputs[name])}\n".encode() + inputs[name])
    return hashed.hexdigest()


def has_driver() -> bool:
    """Return whether NVIDIA's driver has the library that FBGEMM's CUDA build loads."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnvidia-ml.so.1")
        return True
    return False


def dist_infos(site_packages: Path) -> dict[str, tuple[str, Path]]:
    """Return version and `.dist-info` folder of torch, torchrec and FBGEMM, by distribution name."""
    found = {}
    for folder in site_packages.glob("*.dist-info"):
        name, _, version = folder.name[: -len(".dist-info")].rpartition("-")
        name = re.sub(r"[-_.]+", "-", name).lower()
        if name in ("torch", "torchrec", CUDA_FBGEMM, CPU_FBGEMM):
            found[name] = (version, folder)
    return found


def is_damaged(info: Path) -> bool:
    """Return whether a file of the distribution is missing, or has another size than its RECORD says."""
    try:
        with (info / "RECORD").open(newline="") as record:
            for path, _, size in csv.reader(record):
                file = info.parent / path
                if "__pycache__" not in path and size and file.stat().st_size != int(size):
                    return True
    except (OSError, ValueError):
        return True
    return False


def site_packages_of(venv: Path) -> Path | None:
    """Return the venv's site-packages folder, without starting its Python."""
    return next(iter(sorted(venv.glob("lib/python3*/site-packages"))), None)


def snapshot(venv: Path) -> dict[str, str]:
    """Return the versions of torch, torchrec and FBGEMM in the venv, by name; or "damaged"."""
    site_packages = site_packages_of(venv)
    infos = dist_infos(site_packages) if site_packages else {}
    return {
        name: "damaged" if name != "torch" and is_damaged(info) else version
        for name, (version, info) in sorted(infos.items())
    }


def stamp_is_valid(venv: Path, want: str, *, tests: bool) -> bool:
    """Return whether a set-up with the same inputs was completed here, and nothing has broken it since.

    Args:
        tests: what tests need must be in it, too.
    """
    try:
        stamp = json.loads((venv / STAMP).read_text())
        is_enough = (venv / "bin" / "python").exists() and (stamp["tests"] or not tests)
        return bool(is_enough and stamp["digest"] == want and stamp["snapshot"] == snapshot(venv))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def python_version(python: str) -> tuple[int, int] | None:
    """Return an interpreter's major and minor version; None when it does not run."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        run = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        major, minor = run.stdout.split()
        return int(major), int(minor)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def choose_python(environ: Mapping[str, str], version_of: Callable[[str], tuple[int, int] | None]) -> str:
    """Return the venv's base interpreter: the requested one, this one, or the newest on the PATH that fits."""
    asked = environ.get("EMBERSHARD_PYTHON")
    if asked:
        version = version_of(asked)
        if version is None:
            raise SetupError(f"EMBERSHARD_PYTHON={asked} does not run as a Python. Give the path of one that does.")
        if python_problem(version):
            raise SetupError(f"EMBERSHARD_PYTHON={asked}: {python_problem(version)}")
        return asked
    minors = range(NEWEST_PYTHON[1], OLDEST_PYTHON[1] - 1, -1)
    for python in (sys.executable, *(f"python3.{minor}" for minor in minors)):
        version = version_of(python)
        if version and not python_problem(version):
            return python
    problem = python_problem(version_of(sys.executable) or (0, 0))
    raise SetupError(
        f"{problem}\nInstall one (for example: apt install python3.11 python3.11-venv), then run this again; "
        "or point EMBERSHARD_PYTHON at one."
    )
