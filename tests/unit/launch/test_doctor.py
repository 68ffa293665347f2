"""embershard doctor: cases that pass and fail for every check, and the whole of it on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from embershard.launch import doctor
from embershard.launch.doctor import FAIL, PASS, SKIP, WARN, CheckResult
from embershard.machine import HostMemory

CPU, CUDA = doctor.CPU_FBGEMM, doctor.CUDA_FBGEMM
GIB = 1 << 30

CASES = [
    # python
    (doctor.check_python((3, 10)), PASS),
    (doctor.check_python((3, 12)), PASS),
    (doctor.check_python((3, 9)), FAIL),
    (doctor.check_python((3, 13)), WARN),
    # versions
    (doctor.check_versions("2.13.0+cpu", "1.8.0", "1.8.0"), PASS),
    (doctor.check_versions("2.11.0+cu128", "1.6.1", "1.6.0"), PASS),
    (doctor.check_versions("2.12.0", "1.7.0", "1.7.0"), WARN),
    (doctor.check_versions("2.13.0", "1.8.0", "1.9.0"), FAIL),
    (doctor.check_versions("2.13.0", "1.6.0", "1.8.0"), FAIL),
    (doctor.check_versions("2.14.1", "1.9.2", "1.9.0"), PASS),
    (doctor.check_versions("2.14.1", "1.8.0", "1.9.0"), FAIL),
    (doctor.check_versions("2.13.0+cpu", "1.9.2", "1.8.0"), WARN),
    (doctor.check_versions("2.15.0", "1.9.2", "1.9.0"), WARN),
    (doctor.check_versions("2.13.0", None, "1.8.0"), FAIL),
    # FBGEMM's build
    (doctor.check_fbgemm_build({CPU: "1.8.0"}, "2.13.0", None, False), PASS),
    (doctor.check_fbgemm_build({CUDA: "1.8.0"}, "2.13.0", "13.0", True), PASS),
    (doctor.check_fbgemm_build({CPU: "1.8.0"}, "2.13.0", "13.0", False), PASS),
    (doctor.check_fbgemm_build({CUDA: "1.8.0"}, "2.13.0", None, True), FAIL),
    (doctor.check_fbgemm_build({CUDA: "1.8.0"}, "2.13.0", "13.0", False), FAIL),
    (doctor.check_fbgemm_build({CPU: "1.8.0"}, "2.13.0", "13.0", True), FAIL),
    (doctor.check_fbgemm_build({CPU: "1.8.0", CUDA: "1.9.0"}, "2.13.0", None, False), FAIL),
    (doctor.check_fbgemm_build({}, "2.13.0", None, False), FAIL),
    # imports
    (doctor.check_import("torchrec", "", 2.5), PASS),
    (doctor.check_import("torchrec", "ModuleNotFoundError: No module named 'tensordict'", 0.1), FAIL),
    # devices
    (doctor.check_cpu(2, HostMemory(16 * GIB, 15 * GIB)), PASS),
    (doctor.check_cpu(2, HostMemory(2 * GIB, GIB)), WARN),
    (doctor.check_gpus(("H200 (139 GiB)",), "13.0", True), PASS),
    (doctor.check_gpus((), None, False), SKIP),
    (doctor.check_gpus((), None, True), WARN),
    (doctor.check_gpus((), "13.0", True), WARN),
    (doctor.check_triton("3.7.1", 1), PASS),
    (doctor.check_triton(None, 0), SKIP),
    (doctor.check_triton(None, 1), FAIL),
    # collectives
    (doctor.check_collective("gloo", "", 2.0, "remedy"), PASS),
    (doctor.check_collective("gloo", "no answer after 60 s", 60.0, "remedy"), FAIL),
    # limits
    (doctor.check_shared_memory(8 * GIB, 8), PASS),
    (doctor.check_shared_memory(64 << 20, 0), WARN),
    (doctor.check_shared_memory(64 << 20, 8), FAIL),
    (doctor.check_shared_memory(None, 0), WARN),
    (doctor.check_open_files(65536), PASS),
    (doctor.check_open_files(-1), PASS),
    (doctor.check_open_files(512), WARN),
    (doctor.check_open_files(64), FAIL),
    (doctor.check_locked_memory(-1, 8), PASS),
    (doctor.check_locked_memory(8 << 20, 8), WARN),
    (doctor.check_locked_memory(8 << 20, 0), SKIP),
    (doctor.check_disk("/runs", 100 * GIB), PASS),
    (doctor.check_disk("/runs", 5 * GIB), WARN),
    (doctor.check_disk("/runs", GIB // 2), FAIL),
]


@pytest.mark.parametrize(("result", "status"), CASES, ids=[f"{r.name}: {r.detail}"[:60] for r, _ in CASES])
def test_every_check_passes_and_fails_as_it_should(result: CheckResult, status: str):
    assert result.status == status
    assert bool(result.remedy) == (status in (WARN, FAIL)), "a remedy stands where one is needed, and only there"


def test_a_result_is_a_value():
    with pytest.raises(FrozenInstanceError):
        doctor.check_cpu(1, HostMemory(GIB, GIB)).status = PASS  # type: ignore[misc]


def test_the_remedy_names_the_build_that_is_right_here():
    both = {CPU: "1.8.0", CUDA: "1.9.0"}
    assert f"{CPU}==1.9.0" in doctor.check_fbgemm_build(both, "2.14.1", None, False).remedy
    assert f"{CPU}==1.8.0" in doctor.check_fbgemm_build(both, "2.13.0", None, False).remedy
    assert f"{CUDA}==1.8.0" in doctor.check_fbgemm_build(both, "2.13.0", "13.0", True).remedy


@pytest.mark.parametrize(
    ("stderr", "detail", "remedy"),
    [
        (
            "ModuleNotFoundError: No module named 'pyre_extensions'",
            "pyre_extensions",
            "pip install pyre-extensions",
        ),
        ("OSError: libnvidia-ml.so.1: cannot open shared object file", "libnvidia-ml", CPU),
        ("OSError: fbgemm.so: undefined symbol: _ZN3c10", "undefined symbol", "not built for each other"),
        (
            "Traceback ...\nValueError: first\nOSError: last",
            "OSError: last <- ValueError: first",
            "make setup",
        ),
    ],
)
def test_the_real_error_of_an_import_is_shown(stderr: str, detail: str, remedy: str):
    result = doctor.check_import("torchrec", stderr, 1.0)
    assert detail in result.detail
    assert remedy in result.remedy


def test_an_import_that_kills_the_process_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "crashing.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    error, _ = doctor.import_error("crashing", 30.0)
    assert "killed by signal 11" in error


@pytest.mark.slow
def test_an_import_that_hangs_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "hanging.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    error, _ = doctor.import_error("hanging", 1.0)
    assert "no end after 1 s" in error


def test_a_wrong_sum_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "ALL_REDUCE", "import sys\nassert sys.argv[2] == '0', '1 + 2 gave 4.0'")
    error, _ = doctor.all_reduce_error("gloo", 30.0)
    assert error == "rank 1: AssertionError: 1 + 2 gave 4.0"


@pytest.mark.slow
def test_ranks_that_never_meet_end_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "ALL_REDUCE", "import time; time.sleep(60)")
    error, seconds = doctor.all_reduce_error("gloo", 1.0)
    assert "no answer after 1 s" in error
    assert seconds < 60, "they sleep for 60 s"


def healthy(timeout_seconds: float) -> Iterator[CheckResult]:
    yield CheckResult("cpu", PASS, "2 cores")
    yield CheckResult("gpus", SKIP, "none")


def ill(timeout_seconds: float) -> Iterator[CheckResult]:
    yield CheckResult("cpu", PASS, "2 cores")
    yield CheckResult("disk", WARN, "5 GiB", "clean up")
    yield CheckResult("versions", FAIL, "torchrec is missing", "make setup")


def test_exit_code_and_report(capsys: pytest.CaptureFixture[str]):
    assert doctor.main([], healthy) == 0
    assert "Ready" in capsys.readouterr().out
    assert doctor.main([], ill) == 1
    out = capsys.readouterr().out
    assert "-> make setup" in out
    assert "1 PASS, 1 WARN, 1 FAIL" in out


def test_json(capsys: pytest.CaptureFixture[str]):
    assert doctor.main(["--json"], ill) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["checks"][2] == {
        "name": "versions",
        "status": FAIL,
        "detail": "torchrec is missing",
        "remedy": "make setup",
    }


@pytest.mark.matrix
@pytest.mark.slow
def test_it_speaks_when_torchrec_cannot_be_imported(tmp_path: Path, project_dir: Path):
    """The whole doctor, with a torchrec in front of the real one that does not import."""
    (tmp_path / "torchrec.py").write_text("raise OSError('libtorch_cuda.so: cannot open shared object file')\n")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{project_dir}"}
    command = [sys.executable, "-m", "embershard.launch.doctor", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=180)
    assert run.returncode == 1, run.stderr
    report = {check["name"]: check for check in json.loads(run.stdout)["checks"]}
    assert report["import torchrec"]["status"] == FAIL
    assert "libtorch_cuda.so" in report["import torchrec"]["detail"]
    assert report["gloo, two ranks"]["status"] == PASS
