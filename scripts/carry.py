"""Makes a folder of wheels for a machine without a network, which `scripts/setup_env.py --from FOLDER` installs there:

    python3 scripts/carry.py wheels                                       # for a machine like this one
    python3 scripts/carry.py wheels --python 3.12 --fbgemm fbgemm-gpu     # for Python 3.12 and a GPU
    python3 scripts/carry.py wheels --there there.txt                     # without what `pip freeze > there.txt` lists
    python3 scripts/carry.py wheels --python 3.12 --only torchrec==1.6.1 iopath==0.1.10

Packages named by `--only` come as they are, without what they need. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from setup_env import ROOT, TESTS, TRAINING
from setup_rules import CPU_FBGEMM, CUDA_FBGEMM, SetupError, chosen_set, explain_pip, has_driver, with_versions

from embershard.launch.versions import SETS

#: pip takes a wheel only for a platform that it was given by name; a glibc of 2.39 runs all of these.
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]


def wanted(fbgemm: str, tests: bool, there: str) -> list[str]:
    """Return the requirements of a set-up, but for those that a machine has.

    Args:
        fbgemm: the distribution of FBGEMM.
        there: what `pip freeze` prints there.
    """
    versions = SETS[chosen_set(os.environ)]
    files = (TRAINING, TESTS) if tests else (TRAINING,)
    lines = with_versions("".join((ROOT / file).read_text() for file in files), versions).splitlines()
    pinned = [line.partition("#")[0].strip() for line in lines]
    pinned += [f"torchrec=={versions.torchrec}", f"{fbgemm}=={versions.fbgemm}"]
    has = set(map(_normal, there.split()))
    return [line for line in pinned if line and _normal(line.partition(";")[0]) not in has]


def _normal(requirement: str) -> str:
    name, _, version = requirement.strip().partition("==")
    return f"{re.sub(r'[-_.]+', '-', name).lower()}=={version.partition('+')[0]}"


def download(folder: Path, requirements: Sequence[str], python: str | None) -> None:
    """Download wheels of exactly these; of torch, also what it needs (a CUDA build: several GiB)."""
    torch = [line for line in requirements if re.match(r"torch==", line)]
    for lines, more in ((torch, []), ([line for line in requirements if line not in torch], ["--no-deps"])):
        if not lines:
            continue
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(lines))
            file.flush()
            words = ["download", "--only-binary=:all:", "--dest", str(folder), *more, "-r", file.name]
            if python is not None:
                words += ["--python-version", python, "--implementation", "cp"]
                words += [word for platform in _PLATFORMS for word in ("--platform", platform)]
            command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", *words]
            run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if run.returncode:
            raise SetupError(explain_pip(f"download {' '.join(lines)}", run.stdout))


def main(argv: Sequence[str] | None = None) -> int:
    """Make the folder. Return 0, or 1 after printing the error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tests", action="store_true", help=f"what tests and checks need, too: {TESTS}")
    parser.add_argument("--python", metavar="3.X", help="of that machine, which runs Linux on x86-64; default: as here")
    parser.add_argument("--fbgemm", choices=(CPU_FBGEMM, CUDA_FBGEMM), default=(CPU_FBGEMM, CUDA_FBGEMM)[has_driver()])
    parser.add_argument("--there", type=Path, metavar="FILE", help="what `pip freeze` prints there; left out")
    parser.add_argument("--only", nargs="+", metavar="NAME==VERSION", help="these alone")
    arguments = parser.parse_args(argv)
    try:
        there = arguments.there.read_text() if arguments.there else ""
        requirements = arguments.only or wanted(arguments.fbgemm, arguments.tests, there)
        download(arguments.folder, requirements, arguments.python)
    except (SetupError, OSError) as error:
        print(f"[carry] FAILED: {error}", file=sys.stderr)
        return 1
    wheels = sorted(arguments.folder.glob("*.whl"))
    num_bytes = sum(wheel.stat().st_size for wheel in wheels)
    print(f"[carry] {arguments.folder} has {len(wheels)} wheels, {num_bytes / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
