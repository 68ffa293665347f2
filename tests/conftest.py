"""Fixtures and settings of all tests. Fixtures of one subject live in that subject's folder."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["PYTHONDONTWRITEBYTECODE"] = ""  # every process would compile all tests again
os.environ["TRITON_INTERPRET"] = "1"  # before Triton, which the next conftest.py may import
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests run side by side, on few cores
# Before numba: in tests, a compiled loop that leaves an array raises. Such loops are kept apart from those of users.
os.environ.setdefault("NUMBA_BOUNDSCHECK", "1")
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "loops"))

import pytest
import torch
from hypothesis import HealthCheck, settings

from embershard.launch.versions import SETS, installed_version

PROJECT = Path(__file__).resolve().parent.parent
SHARED_VARIABLE = "EMBERSHARD_SHARED"
_STARTED_ANEW = ("test_planning_workflow.py", "test_torchrec_dlrm.py", "test_train_cli.py")  # as users start them
CRITEO_SAMPLE = Path("data", "criteo_1tb_day0_10k")

# The same examples on every run, and no clock: a slow machine is not a bug.
settings.register_profile(
    "embershard", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("without the matrix", settings.get_profile("embershard"), max_examples=25)
settings.load_profile("embershard")

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Reserve the GPU for tests/gpu. All other tests use the CPU on every machine, and Triton's interpreter; a process
    chooses once. Without the matrix, properties are tried with fewer examples."""
    if re.search(r"^not matrix|and not matrix", config.option.markexpr):
        settings.load_profile("without the matrix")
    places = [Path(config.invocation_params.dir, arg.split("::")[0]).resolve() for arg in config.args]
    if all(PROJECT / "tests" / "gpu" in (place, *place.parents) for place in places):
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish() -> None:
    """What is there by now, thousands of tests among it, is no garbage: a training that a test runs here ends with a
    search for some."""
    gc.collect()
    gc.freeze()


def pytest_sessionstart() -> None:
    """Refuse to test other versions than those that `EMBERSHARD_VERSIONS` names: they would prove nothing."""
    name = os.environ.get("EMBERSHARD_VERSIONS")
    if name:
        torch_version, torchrec_version = (
            (installed_version("torch") or "").partition("+")[0],
            installed_version("torchrec"),
        )
        if name not in SETS or (torch_version, torchrec_version) != (SETS[name].torch, SETS[name].torchrec):
            raise pytest.UsageError(
                f"got torch {torch_version} and torchrec {torchrec_version}, but EMBERSHARD_VERSIONS={name} means "
                f"{SETS.get(name, 'no known set of versions')}: make setup-tests EMBERSHARD_VERSIONS={name}"
            )


def cuda_problem() -> str:
    """Return why GPU tests cannot run here; an empty string when they can."""
    if torch.cuda.is_available():
        return ""
    build = f"torch {torch.__version__}"
    if torch.version.cuda is None:
        return f"{build} is a CPU build"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "they need a process of their own: pytest tests/gpu"
    return f"{build} is a CUDA {torch.version.cuda} build, but finds no GPU"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests that use pools of ranks to one process, since pools are reused. Every other file goes to any free
    process, in the order of the folders: those of `tests/unit`, each a few seconds, fill the end on all processes."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False

    class RanksTogether(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            uses_pools = file.startswith(("tests/ranks/", "tests/gpu/")) and Path(file).name not in _STARTED_ANEW
            return "ranks" if uses_pools else file

    return RanksTogether(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu`, and all of tests/gpu, where there is no GPU."""
    problem = cuda_problem()
    for item in items:
        if PROJECT / "tests" / "gpu" in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if problem and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {problem}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report at the end which tests did not run, and why: a line for each reason, which says what they need."""
    files: dict[str, list[str]] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        files.setdefault(reason.removeprefix("Skipped: "), []).append(report.nodeid.partition("::")[0])
    for reason, own in files.items():
        names = [*dict.fromkeys(own)]
        more = f" and {len(names) - 3} more files" if len(names) > 3 else ""
        terminalreporter.write_line(f"{len(own)} skipped in {', '.join(names[:3])}{more}: {reason}", yellow=True)


@pytest.fixture(scope="session", autouse=True)
def _copies(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Copies of text are not made in the user's folder of caches."""
    os.environ["EMBERSHARD_COPIES"] = str(tmp_path_factory.mktemp("copies"))


@pytest.fixture(scope="session")
def project_dir() -> Path:
    """Return the root of the project's working tree."""
    return PROJECT


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Return the folder of shared test data: `$EMBERSHARD_SHARED`, or `../shared` beside the project."""
    folder = Path(os.environ.get(SHARED_VARIABLE) or PROJECT.parent / "shared")
    if not folder.is_dir():
        pytest.skip(f"no shared data: {folder} does not exist; point {SHARED_VARIABLE} at it")
    return folder


@pytest.fixture(scope="session")
def criteo_sample(shared_dir: Path) -> Path:
    """Return the folder of a small sample of the Criteo 1TB click logs, tab-separated files."""
    folder = shared_dir / CRITEO_SAMPLE
    if not folder.exists():
        pytest.skip(f"no Criteo sample: {folder} does not exist; point {SHARED_VARIABLE} at a folder that has it")
    return folder


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Reset the number of torch threads after each test."""
    yield
    torch.set_num_threads(1)
