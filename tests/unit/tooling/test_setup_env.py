"""The decisions of scripts/setup_env.py, without a network and without a venv."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import carry
import pytest
import setup_env
import setup_rules as rules

CPU, CUDA = rules.CPU_FBGEMM, rules.CUDA_FBGEMM
VERSIONS = rules.SETS[rules.DEFAULT_SET]
PIN = VERSIONS.fbgemm


class FakeSite:
    """A site-packages folder, and a pip that does to it what pip does: it knows files only from RECORDs."""

    def __init__(self, venv: Path) -> None:
        self.folder = venv / "lib" / "python3.11" / "site-packages"
        self.folder.mkdir(parents=True)
        (venv / "bin").mkdir()
        (venv / "bin" / "python").touch()

    def info(self, dist: str, version: str) -> Path:
        return self.folder / f"{dist.replace('-', '_', 1)}-{version}.dist-info"

    def install(self, dist: str, version: str) -> None:
        package = "torchrec" if dist == "torchrec" else "fbgemm_gpu"
        files = {f"{package}/__init__.py": "same", f"{package}/ops.so": f"{dist} {version}"}
        if dist == CUDA:
            files[f"{package}/cuda_only.so"] = version
        for name, text in files.items():
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_text(text)
        self.info(dist, version).mkdir(exist_ok=True)
        with (self.info(dist, version) / "RECORD").open("w", newline="") as record:
            csv.writer(record).writerows([[name, "sha256=", str(len(text))] for name, text in files.items()])

    def uninstall(self, dist: str) -> None:
        _, info = rules.dist_infos(self.folder)[dist]
        with (info / "RECORD").open(newline="") as record:
            for name, _, _ in csv.reader(record):
                (self.folder / name).unlink(missing_ok=True)
        (info / "RECORD").unlink()
        info.rmdir()

    def plan(self, wanted: str) -> list[rules.Step]:
        infos = rules.dist_infos(self.folder)
        damaged = [name for name, (_, info) in infos.items() if rules.is_damaged(info)]
        return rules.plan_fbgemm(wanted, PIN, {name: version for name, (version, _) in infos.items()}, damaged)

    def run(self, steps: list[rules.Step]) -> None:
        for step in steps:
            if step.remove:
                for file in self.folder.glob(f"{step.remove}/*"):
                    file.unlink()
            elif step.pip_args[0] == "uninstall":
                for dist in step.pip_args[2:]:
                    self.uninstall(dist)
            else:
                self.install(*step.pip_args[-1].split("=="))

    def state(self) -> dict[str, str]:
        return {name: rules.snapshot(self.folder.parents[2])[name] for name in rules.dist_infos(self.folder)}


@pytest.fixture
def site(tmp_path: Path) -> FakeSite:
    return FakeSite(tmp_path / ".venv")


@pytest.mark.parametrize(
    ("torch_cuda", "driver", "wanted"),
    [(None, False, CPU), (None, True, CPU), ("13.0", True, CUDA), ("13.0", False, CPU)],
)
def test_the_fbgemm_build_is_the_one_that_can_be_loaded(torch_cuda: str | None, driver: bool, wanted: str):
    assert setup_env.wanted_fbgemm(torch_cuda, driver) == wanted


def nothing(site: FakeSite) -> None:
    pass


def trap(site: FakeSite) -> None:
    site.install(CPU, PIN)
    site.install(CUDA, "1.9.0")


def trap_then_uninstall(site: FakeSite) -> None:
    trap(site)
    site.uninstall(CUDA)


def same_version_trap(site: FakeSite) -> None:
    site.install(CPU, PIN)
    site.install(CUDA, PIN)


def wrong_only(site: FakeSite) -> None:
    site.install(CUDA, PIN)


def old_version(site: FakeSite) -> None:
    site.install(CPU, "1.6.0")


def lost_file(site: FakeSite) -> None:
    site.install(CPU, PIN)
    (site.folder / "fbgemm_gpu" / "ops.so").unlink()


def orphaned_folder(site: FakeSite) -> None:
    wrong_only(site)
    (site.info(CUDA, PIN) / "RECORD").unlink()
    site.info(CUDA, PIN).rmdir()


ACCIDENTS = [nothing, trap, trap_then_uninstall, same_version_trap, wrong_only, old_version, lost_file, orphaned_folder]


@pytest.mark.parametrize("accident", ACCIDENTS)
@pytest.mark.parametrize("wanted", [CPU, CUDA])
def test_every_accident_is_repaired(site: FakeSite, accident: Callable[[FakeSite], None], wanted: str):
    accident(site)
    site.run(site.plan(wanted))
    assert site.state() == {wanted: PIN}
    assert (site.folder / "fbgemm_gpu" / "ops.so").read_text() == f"{wanted} {PIN}"
    assert (site.folder / "fbgemm_gpu" / "cuda_only.so").exists() == (wanted == CUDA)
    assert site.plan(wanted) == [], "a second run has nothing to do"


def test_uninstalling_only_the_wrong_build_breaks_the_right_one(site: FakeSite):
    """The negative control: what the repair must not do."""
    trap(site)
    site.uninstall(CUDA)
    assert site.state() == {CPU: "damaged"}


def test_torchrec_is_installed_without_what_it_pulls_in():
    (step,) = rules.plan_torchrec("1.8.0", {"torchrec": "1.9.0"}, [])
    assert "--no-deps" in step.pip_args
    assert step.pip_args[-1] == "torchrec==1.8.0"
    assert rules.plan_torchrec("1.8.0", {"torchrec": "1.8.0"}, []) == []
    assert rules.plan_torchrec("1.8.0", {"torchrec": "1.8.0"}, ["torchrec"])


def test_versions_are_chosen_by_name():
    assert rules.chosen_set({}) == rules.chosen_set({"EMBERSHARD_VERSIONS": ""}) == rules.DEFAULT_SET
    assert rules.chosen_set({"EMBERSHARD_VERSIONS": "torchrec-1.9"}) == "torchrec-1.9"
    with pytest.raises(rules.SetupError) as raised:
        rules.chosen_set({"EMBERSHARD_VERSIONS": "torchrec-2"})
    assert "EMBERSHARD_VERSIONS=torchrec-2" in str(raised.value)
    assert all(f"{name}: {versions}" in str(raised.value) for name, versions in rules.SETS.items())


def test_a_set_of_versions_has_a_folder_of_its_own(project_dir: Path, tmp_path: Path):
    """The script and the Makefile agree, and `.venv` is not changed by another set."""
    for variables, folder in (
        ({}, ".venv"),
        ({"EMBERSHARD_VERSIONS": "torchrec-1.9"}, ".venv-torchrec-1.9"),
        ({"EMBERSHARD_VERSIONS": "torchrec-1.9", "EMBERSHARD_VENV": str(tmp_path)}, str(tmp_path)),
    ):
        assert setup_env.venv_folder(variables) == setup_env.ROOT / folder
        command = ["make", "--dry-run", "setup", *(f"{name}={value}" for name, value in variables.items())]
        ours = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "PYTHON", "VENV")}
        environ = {name: value for name, value in ours.items() if not name.startswith("EMBERSHARD_V")}
        shown = subprocess.run(command, cwd=project_dir, env=environ, capture_output=True, text=True, check=True).stdout
        assert f'EMBERSHARD_VENV="{folder}"' in shown


@pytest.mark.parametrize("name", rules.SETS)
def test_requirement_files_serve_every_set(project_dir: Path, name: str):
    """Only torch and triton differ, and the files as they are hold the default versions."""
    text = (project_dir / "requirements.txt").read_text() + (project_dir / "requirements-dev.txt").read_text()
    versions = rules.SETS[name]
    changed = rules.with_versions(text, versions)
    assert f"\ntorch=={versions.torch}\n" in changed
    assert f"\ntriton=={versions.triton}; " in changed
    others = [line for line in text.splitlines() if not line.startswith(("torch==", "triton=="))]
    assert [line for line in changed.splitlines() if not line.startswith(("torch==", "triton=="))] == others
    assert rules.with_versions(text, VERSIONS) == text


def finished(site: FakeSite, want: str, *, tests: bool = True) -> Path:
    venv = site.folder.parents[2]
    site.install(CPU, PIN)
    site.install("torchrec", VERSIONS.torchrec)
    stamp = {"digest": want, "snapshot": rules.snapshot(venv), "tests": tests}
    (venv / rules.STAMP).write_text(json.dumps(stamp))
    return venv


def test_the_stamp_holds_until_something_changes(site: FakeSite):
    venv = finished(site, "a")
    assert rules.stamp_is_valid(venv, "a", tests=True)
    assert not rules.stamp_is_valid(venv, "b", tests=True), "a requirement file changed"


@pytest.mark.parametrize("accident", [trap, trap_then_uninstall, same_version_trap, lost_file])
def test_the_stamp_does_not_hide_a_later_accident(site: FakeSite, accident: Callable[[FakeSite], None]):
    venv = finished(site, "a")
    accident(site)
    assert not rules.stamp_is_valid(venv, "a", tests=True)


def test_the_stamp_is_void_when_the_interpreter_is_gone(site: FakeSite):
    venv = finished(site, "a")
    (venv / "bin" / "python").unlink()
    assert not rules.stamp_is_valid(venv, "a", tests=True)


def test_a_torn_stamp_is_no_stamp(site: FakeSite):
    venv = finished(site, "a")
    (venv / rules.STAMP).write_text('{"digest": "a"')
    assert not rules.stamp_is_valid(venv, "a", tests=True)


def test_what_training_needs_is_not_enough_for_tests(site: FakeSite):
    venv = finished(site, "a", tests=False)
    assert rules.stamp_is_valid(venv, "a", tests=False)
    assert not rules.stamp_is_valid(venv, "a", tests=True)
    assert rules.stamp_is_valid(finished(site, "a"), "a", tests=False)


def test_the_digest_sees_files_the_driver_and_the_versions():
    files = {"setup.cfg": b"x", "requirements.txt": b"y"}
    one = rules.digest(files, driver=False, versions="a")
    assert one == rules.digest(dict(reversed(files.items())), driver=False, versions="a")
    assert one != rules.digest({**files, "requirements.txt": b"z"}, driver=False, versions="a")
    assert one != rules.digest(files, driver=True, versions="a")
    assert one != rules.digest(files, driver=False, versions="b")


def test_a_second_run_does_nothing_but_say_so(site, monkeypatch, capsys):
    inputs = {name: (setup_env.ROOT / name).read_bytes() for name in setup_env.INPUTS}
    venv = finished(site, rules.digest(inputs, rules.has_driver(), "torchrec-1.9"))
    monkeypatch.setenv("EMBERSHARD_VENV", str(venv))
    monkeypatch.setenv("EMBERSHARD_VERSIONS", "torchrec-1.9")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("a second run starts no process"))
    assert setup_env.main([]) == 0
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize(
    ("version", "fits"), [((3, 9), False), ((3, 10), True), ((3, 11), True), ((3, 13), True), ((3, 14), False)]
)
def test_python_versions(version: tuple[int, int], fits: bool):
    problem = rules.python_problem(version)
    assert (problem == "") == fits
    assert fits or "Needed: 3.10 to 3.13" in problem


def test_a_python_that_fits_is_found_on_the_path():
    versions = {sys.executable: (3, 14), "python3.12": None, "python3.11": (3, 11), "python3.10": (3, 10)}
    assert rules.choose_python({}, versions.get) == "python3.11"


def test_no_python_that_fits_says_what_to_install():
    with pytest.raises(rules.SetupError, match=r"Python 3\.9 is too old(.|\n)*EMBERSHARD_PYTHON"):
        rules.choose_python({}, {sys.executable: (3, 9)}.get)


def test_the_python_asked_for_is_taken_or_refused():
    versions = {"/good": (3, 12), "/old": (3, 8)}
    assert rules.choose_python({"EMBERSHARD_PYTHON": "/good"}, versions.get) == "/good"
    with pytest.raises(rules.SetupError, match="is too old"):
        rules.choose_python({"EMBERSHARD_PYTHON": "/old"}, versions.get)
    with pytest.raises(rules.SetupError, match="does not run as a Python"):
        rules.choose_python({"EMBERSHARD_PYTHON": "/none"}, versions.get)


def test_a_folder_that_is_no_venv_is_left_alone(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(rules.SetupError, match="not a virtual environment"):
        setup_env.ensure_venv(tmp_path, {})
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.slow
def test_an_index_out_of_reach_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """pip itself, without any index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setattr(setup_env, "venv_python", lambda venv: Path(sys.executable))
    with pytest.raises(rules.SetupError, match=r"cannot reach a package index(.|\n)*Full log: "):
        setup_env.Pip(tmp_path, None)("install", "install", "--no-deps", "embershard-has-no-such-package==1")
    assert "embershard-has-no-such-package" in (tmp_path / setup_env.LOG).read_text()


def wheel(folder: Path, name: str) -> None:
    """A wheel with a module of its name."""
    files = {
        f"{name}.py": "",
        f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{name}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{name}-1.0.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        for path, text in files.items():
            file.writestr(path, text)


@pytest.mark.matrix
def test_wheels_of_a_folder_are_carried_and_installed_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """pip itself, which has another folder in place of an index."""
    index, folder, site = (tmp_path / name for name in ("index", "wheels", "site"))
    index.mkdir()
    wheel(index, "carried")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    assert carry.main([str(folder), "--only", "carried==1.0"]) == 0
    assert f"{folder} has 1 wheels" in capsys.readouterr().out
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setattr(setup_env, "venv_python", lambda venv: Path(sys.executable))
    pip = setup_env.Pip(tmp_path, folder)
    pip("install", "install", "--target", str(site), "carried==1.0")
    assert (site / "carried.py").is_file()
    with pytest.raises(rules.SetupError, match="has no wheel of it for this Python and platform"):
        pip("install", "install", "--target", str(site), "left-behind==1.0")


def test_all_that_the_set_up_installs_is_carried_but_for_what_is_there():
    everything = carry.wanted(CPU, tests=True, there="")
    for requirement in (f"torch=={VERSIONS.torch}", f"torchrec=={VERSIONS.torchrec}", f"{CPU}=={PIN}"):
        assert requirement in everything
    there = f"torch=={VERSIONS.torch}+cu130\nTyping_Extensions==4.0\nPyYAML==6.0.3\n"
    left_out = set(everything) - set(carry.wanted(CPU, tests=True, there=there))
    assert left_out == {f"torch=={VERSIONS.torch}", "pyyaml==6.0.3"}


def test_other_pip_failures_are_not_blamed_on_the_network():
    wrong_platform = "ERROR: Could not find a version (from versions: 1.0)\nERROR: No matching distribution found"
    assert "not for this Python" in rules.explain_pip("install x", wrong_platform)
    assert "disk is full" in rules.explain_pip("install x", "OSError: [Errno 28] No space left on device")
    assert "its last lines" in rules.explain_pip("install x", "something else")
