"""Makes or repairs `.venv`: `python3 scripts/setup_env.py [--tests] [--force] [--from FOLDER]`.

Standard library only, because it runs before anything is installed. Versions that belong together are the sets of
embershard/launch/versions.py; all others are pinned in requirements.txt, and hold for every set. pip's own
configuration decides where packages come from, but for `--from`: a folder of wheels that `scripts/carry.py` made, for a
machine without a network.

FBGEMM needs care. It comes as two distributions, `fbgemm-gpu` (CUDA) and `fbgemm-gpu-cpu`, that own the *same* folder
`fbgemm_gpu`: the second one installed overwrites the first, and uninstalling one breaks the other. torchrec requires
`fbgemm-gpu` without a version, so a plain `pip install torchrec` puts the newest CUDA build over a CPU build. This
script installs torchrec with `--no-deps`, and leaves exactly one FBGEMM: the one that this machine can load.

Training needs requirements.txt. Tests and checks need requirements-dev.txt, too: `--tests` adds it.

A stamp in the venv makes the second run immediate. It is void when a requirement file, these scripts, the GPU driver,
or the torch, torchrec or FBGEMM files in the venv have changed.

Environment: `EMBERSHARD_PYTHON` is the interpreter that makes the venv, `EMBERSHARD_VENV` the venv's folder, and
`EMBERSHARD_VERSIONS` the set of versions: by default the first one, in `.venv`; another one in `.venv-NAME`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # embershard is not installed yet

from setup_rules import (
    STAMP,
    SetupError,
    choose_python,
    chosen_set,
    digest,
    dist_infos,
    explain_pip,
    has_driver,
    is_damaged,
    plan_fbgemm,
    plan_torchrec,
    python_problem,
    python_version,
    site_packages_of,
    snapshot,
    stamp_is_valid,
    with_versions,
)

from embershard.launch.versions import CPU_FBGEMM, SETS, VersionSet, wanted_fbgemm

ROOT = Path(__file__).resolve().parent.parent
TRAINING, TESTS = "requirements.txt", "requirements-dev.txt"
INPUTS = (
    TRAINING,
    TESTS,
    "setup.cfg",
    "pyproject.toml",
    "scripts/setup_env.py",
    "scripts/setup_rules.py",
    "embershard/launch/versions.py",
)
REQUIREMENTS = ".embershard-requirements.txt"
LOG = ".embershard-setup.log"

# Run by the venv's Python. It prints one JSON line even if torch is broken.
INSPECT = """
import json, sys
out = {"version": list(sys.version_info[:2]), "torch": None, "torch_cuda": None, "error": None}
try:
    import torch
    out["torch"], out["torch_cuda"] = torch.__version__, torch.version.cuda
except Exception as error:
    out["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(out))
"""

# Proves that the set-up works: one forward of a table-batched embedding, with a known result. The last import compiles
# the caches' loops: for seconds now, instead of in every rank of the first run.
PROOF = """
import torch, fbgemm_gpu, torchrec
import embershard.cache
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
)
cuda = torch.cuda.is_available()
device = "cuda" if cuda else "cpu"
place = (EmbeddingLocation.DEVICE if cuda else EmbeddingLocation.HOST, getattr(ComputeDevice, device.upper()))
tbe = SplitTableBatchedEmbeddingBagsCodegen([(8, 4, *place)], device=torch.device(device))
rows = torch.arange(32.0, device=device).view(8, 4)
tbe.split_embedding_weights()[0].copy_(rows)
ids, offsets = torch.tensor([1, 2, 7], device=device), torch.tensor([0, 2, 3], device=device)
got, want = tbe(ids, offsets), torch.stack([rows[1] + rows[2], rows[7]])
assert torch.equal(got, want), f"FBGEMM summed rows to {got}, needed {want}"
print(f"torch {torch.__version__}, torchrec {torchrec.__version__}, FBGEMM {fbgemm_gpu.__version__} "
      f"({fbgemm_gpu.__variant__}), on {torch.cuda.get_device_name() if cuda else 'the CPU'}")
"""


def venv_folder(environ: Mapping[str, str]) -> Path:
    """Return the venv's folder: a set of versions that was asked for by name has one of its own."""
    asked = environ.get("EMBERSHARD_VERSIONS")
    return Path(environ.get("EMBERSHARD_VENV") or ROOT / (f".venv-{asked}" if asked else ".venv")).absolute()


def venv_python(venv: Path) -> Path:
    """Return the venv's interpreter."""
    return venv / "bin" / "python"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Allow one set-up at a time in this folder; a second one waits for the first."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another set-up is at work in {folder}; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def ensure_venv(venv: Path, environ: Mapping[str, str]) -> None:
    """Make the venv; make it again when its Python no longer runs or has a wrong version."""
    have = python_version(str(venv_python(venv))) if venv_python(venv).exists() else None
    asked = environ.get("EMBERSHARD_PYTHON")
    if have and not python_problem(have):
        if asked and python_version(asked) not in (None, have):
            raise SetupError(
                f"{venv} has Python {have[0]}.{have[1]}, but EMBERSHARD_PYTHON={asked} is another version.\n"
                "Remove that folder (make clean-venv), or set EMBERSHARD_VENV to a new one."
            )
        return
    python = choose_python(environ, python_version)
    if venv.exists() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").exists():
        raise SetupError(f"{venv} is not empty and not a virtual environment. Move it, or set EMBERSHARD_VENV.")
    say(f"{venv}: a new virtual environment from {python}" + (" (the old one does not run)" if venv.exists() else ""))
    made = subprocess.run([python, "-m", "venv", "--clear", str(venv)], capture_output=True, text=True)
    if made.returncode:
        raise SetupError(
            f"{python} cannot make a virtual environment:\n{(made.stdout + made.stderr).strip()}\n"
            "On Debian and Ubuntu: apt install python3-venv."
        )


class Pip:
    """Runs the venv's pip, shows its progress, and keeps its output in a log file of the venv. Packages come from a
    `folder` of wheels, if there is one."""

    def __init__(self, venv: Path, folder: Path | None) -> None:
        self.venv = venv
        self.log = venv / LOG
        self.folder = folder

    def __call__(self, why: str, *args: str) -> None:
        start = time.monotonic()
        say(f"{why} ...")
        command = [str(venv_python(self.venv)), "-m", "pip", "--no-input", "--disable-pip-version-check", *args]
        if args[0] == "install":
            command += ["--progress-bar", "off"]
            command += ["--no-index", "--find-links", str(self.folder)] if self.folder is not None else []
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=str(ROOT))
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n{run.stdout}\n")
        if run.returncode:
            raise SetupError(f"{explain_pip(' '.join(args), run.stdout, self.folder)}\nFull log: {self.log}")
        seconds = time.monotonic() - start
        if seconds > 5:
            say(f"    {seconds:.0f} s")


def inspect(venv: Path) -> dict[str, object]:
    """Return the versions of the venv's Python and torch, as they report them."""
    run = subprocess.run([str(venv_python(venv)), "-c", INSPECT], capture_output=True, text=True)
    try:
        found: dict[str, object] = json.loads(run.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise SetupError(f"{venv_python(venv)} does not run:\n{run.stderr.strip()[-2000:]}") from None
    return found


def install(venv: Path, driver: bool, files: Sequence[str], versions: VersionSet, folder: Path | None) -> None:
    """Install these `versions` and what the requirement `files` say; a package that is right already stays."""
    pip = Pip(venv, folder)
    if subprocess.run([str(venv_python(venv)), "-m", "pip", "--version"], capture_output=True).returncode:
        say("this environment has no pip; installing the one that comes with Python")
        subprocess.run([str(venv_python(venv)), "-m", "ensurepip"], capture_output=True)
    torch_pin = f"torch=={versions.torch}"
    pip(f"install {torch_pin} (up to 3 GiB with CUDA)", "install", torch_pin)
    found = inspect(venv)
    if found["error"]:
        pip(f"torch does not import ({found['error']}); install it again", "install", "--force-reinstall", torch_pin)
        found = inspect(venv)
    if found["error"]:
        raise SetupError(f"torch does not import: {found['error']}")
    requirements = venv / REQUIREMENTS
    requirements.write_text(with_versions("".join((ROOT / file).read_text() for file in files), versions))
    pip(f"install {' and '.join(files)}", "install", "-r", str(requirements))

    site_packages = site_packages_of(venv)
    assert site_packages is not None
    infos = dist_infos(site_packages)
    installed = {name: version for name, (version, _) in infos.items()}
    damaged = [name for name, (_, info) in infos.items() if name != "torch" and is_damaged(info)]
    cuda = found["torch_cuda"]
    wanted = wanted_fbgemm(str(cuda) if cuda else None, driver)
    if cuda and not driver:
        say(f"torch is a CUDA {cuda} build, but there is no NVIDIA driver here: taking {CPU_FBGEMM}")
    fbgemm = plan_fbgemm(wanted, versions.fbgemm, installed, damaged)
    for step in [*fbgemm, *plan_torchrec(versions.torchrec, installed, damaged)]:
        if step.remove:
            shutil.rmtree(site_packages / step.remove, ignore_errors=True)
        else:
            pip(step.why, *step.pip_args)
    pip("install embershard itself, editable", "install", "--no-deps", "--no-build-isolation", "-e", ".")


def prove(venv: Path) -> str:
    """Import torchrec and FBGEMM and run one embedding forward; return its report."""
    environ = {**os.environ, "PYTHONWARNINGS": "ignore"}
    run = subprocess.run([str(venv_python(venv)), "-c", PROOF], capture_output=True, text=True, env=environ)
    if run.returncode:
        raise SetupError(
            "everything is installed, but torchrec and FBGEMM do not work together:\n"
            f"{run.stderr.strip()[-3000:]}\n"
            f"Try: rm -r {venv} && make setup. `{venv}/bin/embershard doctor` says more."
        )
    return run.stdout.strip().splitlines()[-1]


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"[setup] {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Set the venv up. Return 0, or 1 after printing the error."""
    parser = argparse.ArgumentParser(description="Make or repair embershard's virtual environment.")
    parser.add_argument("--tests", action="store_true", help=f"install what tests and checks need, too: {TESTS}")
    parser.add_argument("--force", action="store_true", help="run all steps, even if the stamp is valid")
    parser.add_argument("--from", dest="folder", type=Path, help="of wheels, in place of a network")
    arguments = parser.parse_args(argv)
    driver = has_driver()
    try:
        name = chosen_set(os.environ)
        venv = venv_folder(os.environ)
        want = digest({file: (ROOT / file).read_bytes() for file in INPUTS}, driver, name)
        with locked(venv.parent):
            if not arguments.force and stamp_is_valid(venv, want, tests=arguments.tests):
                say(f"{venv} is up to date")
                return 0
            start = time.monotonic()
            say(f"{name}: {SETS[name]}")
            ensure_venv(venv, os.environ)
            (venv / STAMP).unlink(missing_ok=True)
            folder = arguments.folder.absolute() if arguments.folder else None
            install(venv, driver, (TRAINING, TESTS) if arguments.tests else (TRAINING,), SETS[name], folder)
            say(prove(venv))
            stamp = {"digest": want, "snapshot": snapshot(venv), "tests": arguments.tests}
            (venv / STAMP).write_text(json.dumps(stamp, indent=1))
            say(f"done in {time.monotonic() - start:.0f} s")
    except SetupError as error:
        print(f"[setup] FAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("[setup] interrupted; run it again to go on where it stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
