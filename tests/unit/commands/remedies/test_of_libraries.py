"""Messages about libraries that are not installed, and about what `embershard doctor` finds."""

from __future__ import annotations

import configparser
import re
import resource
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from embershard.commands.doctor import checks
from embershard.commands.doctor.checks import FAIL, PASS, CheckResult
from embershard.commands.doctor.command import all_reduce_error, examine_disk, main
from embershard.launch.versions import CPU_FBGEMM, CUDA_FBGEMM
from tests.covering import keep
from tests.unit.commands.remedies.table import FILES, LEFT_OUT, Remedy, cases, check

FILES |= {
    "needy.py": "import nothere\n\n\ndef build(schema, tables): ...\n",
    "needy.toml": '[data.synthetic]\nnum_samples = 600\nscale = 0.0001\n[model]\nbuild = "needy:build"\nfolder = "."\n',
    "jobs.toml": 'config = "tiny.toml"\ngrid.cache.ratio = [0.3, 0.5]\n[kubernetes]\nimage = "a"\nclaim = "b"\n'
    'mount = "/"\n',
}
_SETUP = Path(__file__).parents[4] / "setup.cfg"


def _refused(*_: object, **__: object) -> None:
    raise ConnectionError("nobody answers")


class _NoConfigError(Exception):
    """Kubernetes' client finds no cluster."""


def _no_cluster() -> None:
    raise _NoConfigError("no file")


#: What a command needs of each library to go on.
_LIBRARIES: dict[str, dict[str, Any]] = {
    "argcomplete": {"shellcode": lambda *_, **__: "complete"},
    "ray": {"init": _refused},
    "submitit": {},
    "kubernetes": {
        "client": SimpleNamespace(ApiException=KeyError, CustomObjectsApi=SimpleNamespace),
        "config": SimpleNamespace(
            ConfigException=_NoConfigError, load_config=_no_cluster, load_kube_config=_no_cluster
        ),
    },
}
_HIDDEN = ("wandb", "mlflow", "trackio", "prometheus_client", "mlperf_logging", "nothere", *_LIBRARIES)


def _install(words: str) -> None:
    """Do as if pip had installed what an extra of setup.cfg has by the name of the group."""
    setup = configparser.ConfigParser()
    setup.read(_SETUP)
    listed = {line for lines in setup["options.extras_require"].values() for line in lines.split("\n") if line}
    for requirement in re.findall(r'"([^"]+)"', words):
        assert requirement in listed, f"setup.cfg has no {requirement}"
        name = Requirement(requirement).name.replace("-skinny", "").replace("-", "_")
        _add_module(name)


def _add_module(name: str) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(_LIBRARIES.get(name, {}))
    sys.modules[name] = module


_INSTALL = r"Try: pip install (\"[^\"]+\")"
_TRACK = "--set tracking.trackers="
_HSTU = "--set model.arch=hstu --set model.target=[a] --set model.history=[b]"
OF_LIBRARIES = [
    *(
        Remedy((f"train tiny.toml --dry-run {more}",), "", f"{_TRACK}[{name}]", _INSTALL, done=_install)
        for name, more in (("wandb", ""), ("mlflow", ""), ("trackio", ""), ("prometheus", ""), ("mlperf", _HSTU))
    ),
    Remedy(("train tiny.toml --dry-run",), "", f"{_TRACK}[wandb]", "or (leave it out)", LEFT_OUT, True),
    Remedy(("completion bash",), "", "", _INSTALL, done=_install),
    Remedy(("sweep jobs.toml",), "", "--on ray", _INSTALL, done=_install, leads_to="Check RAY_ADDRESS"),
    Remedy(("profile --config city.toml -o out.npz",), "", "--on ray", _INSTALL, done=_install,
        leads_to="Check RAY_ADDRESS"),
    Remedy(("profile --config city.toml -o out.npz --on ray",), "", "--workers 2", "(--workers) has no effect",
        LEFT_OUT, True, leads_to="needs Ray"),
    Remedy(("sweep jobs.toml",), "", "--on slurm", _INSTALL, done=_install, leads_to="needs the commands of Slurm"),
    Remedy(("sweep jobs.toml",), "", "--on kubernetes", _INSTALL, done=_install, leads_to="kubectl cluster-info"),
    Remedy(("sweep jobs.toml",), "", "--on kubernetes", "or (--dry-run)"),
    Remedy(("train needy.toml --dry-run --trust-code",), "", "", r"imports '(\w+)', .*Install it", done=_add_module,
        leads_to="^(?!.*Install it)"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "command"), cases(OF_LIBRARIES))
def test_what_is_advised_of_libraries_helps(
    row: Remedy, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in _HIDDEN:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "urllib3.exceptions", SimpleNamespace(HTTPError=KeyError))  # of Kubernetes' client
    monkeypatch.setattr("embershard.commands.sweep.run.lock_run_dir", lambda *_: None)  # it holds until a process ends
    monkeypatch.delitem(sys.modules, "needy", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    check(row, command, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("hidden", keep(["plotly"], ["plotly", "jinja2"]))
def test_what_is_advised_for_a_page_helps(
    hidden: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The run need not be there: what is missing is said first."""
    for name in [name for name in sys.modules if name.startswith(("embershard.extras.report_page", hidden))]:
        monkeypatch.delitem(sys.modules, name)
    finders = [*sys.meta_path]

    class Missing:
        """Finds no module of the library."""

        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name.partition(".")[0] == hidden:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Missing, *finders])

    def install(words: str) -> None:
        setup = configparser.ConfigParser()
        setup.read(_SETUP)
        assert set(re.findall(r'"([^"]+)"', words)) == set(setup["options.extras_require"]["report"].split())
        monkeypatch.setattr(sys, "meta_path", finders)

    row = Remedy(("report nowhere -o out.html",), "", "", r"Try: pip install (.*)$", done=install,
        leads_to="Give the folder of a run")  # fmt: skip
    check(row, row.commands[0], capsys)


@pytest.mark.parametrize("driver", [True, False])
@pytest.mark.parametrize("torch", ["2.13.0", "2.14.1"])
@pytest.mark.parametrize("torch_cuda", ["12.8", None])
@pytest.mark.parametrize("names", [(), (CUDA_FBGEMM,), (CPU_FBGEMM,), (CUDA_FBGEMM, CPU_FBGEMM)])
def test_what_the_doctor_advises_of_fbgemm_helps(
    driver: bool, torch: str, torch_cuda: str | None, names: tuple[str, ...]
):
    dists = dict.fromkeys(names, "1.8.0")
    found = checks.check_fbgemm_build(dists, torch, torch_cuda, driver)
    if found.status != FAIL:
        return
    advised = re.search(r"pip uninstall -y (\S+) (\S+), then pip install --no-deps (\S+)==(\S+)", found.remedy)
    assert advised is not None, found.remedy
    left = {name: version for name, version in dists.items() if name not in (advised[1], advised[2])}
    fbgemm = {**left, advised[3]: advised[4]}
    assert checks.check_fbgemm_build(fbgemm, torch, torch_cuda, driver).status == PASS
    torchrec = {"1.8": "1.8.0", "1.9": "1.9.2"}[advised[4][:3]]
    assert checks.check_versions(torch, torchrec, advised[4]).status == PASS


@pytest.mark.parametrize(("torch", "torchrec", "fbgemm"), [("2.13.0", "1.9.2", "1.8.0"), ("2.14.1", "1.8.0", "1.9.0")])
def test_what_the_doctor_advises_of_versions_helps(torch: str, torchrec: str, fbgemm: str):
    remedy = checks.check_versions(torch, torchrec, fbgemm).remedy
    advised = re.search(r"needs torchrec (\S+)\.x and FBGEMM (\S+)\.x", remedy)
    if advised is not None:
        assert checks.check_versions(torch, f"{advised[1]}.0", f"{advised[2]}.0").status != FAIL
    else:
        assert str(checks.SETS[checks.DEFAULT_SET]) in remedy


def test_what_the_doctor_advises_of_open_files_helps(capsys: pytest.CaptureFixture[str]):
    most = resource.getrlimit(resource.RLIMIT_NOFILE)

    def examine(_: float) -> Iterator[CheckResult]:
        yield checks.check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    if 0 <= most[1] < 1024:
        pytest.skip("this process may not have more open files")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (255, most[1]))
        assert main([], examine) == 1
        advised = re.search(r"ulimit -n (\d+)", capsys.readouterr().out)
        assert advised is not None
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(int(advised[1]), most[1] % 2**63), most[1]))
        assert main([], examine) == 0
        assert "1 PASS" in capsys.readouterr().out
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)


@pytest.mark.matrix  # test_doctor.py has a folder that can be made
@pytest.mark.slow
def test_what_the_doctor_advises_of_a_folder_of_rows_helps():
    """The message of a folder that cannot be made says what it needs."""
    settings = ["city.toml", "cache.host=mmap"]
    (found,) = examine_disk([*settings, "cache.host_dir=city.csv/rows"], 60.0)
    assert (found.status, found.remedy) == (FAIL, "the message says what the settings, or the folder, need")
    assert "check the path" in found.detail
    (found,) = examine_disk([*settings, "cache.host_dir=rows"], 60.0)
    assert found.status != FAIL


@pytest.mark.matrix
@pytest.mark.slow
def test_what_the_doctor_advises_of_gloo_helps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothere")
    assert all_reduce_error("cpu", 2, 60.0)[0]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # as `collectives` says
    assert not all_reduce_error("cpu", 2, 60.0)[0]
