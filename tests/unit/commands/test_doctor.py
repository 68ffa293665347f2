"""embershard doctor: cases that pass and fail for every check, and the whole of it on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from embershard.commands.doctor import checks
from embershard.commands.doctor import command as doctor
from embershard.commands.doctor.checks import FAIL, PASS, SKIP, WARN, CheckResult, Gpu
from embershard.launch.versions import CPU_FBGEMM, CUDA_FBGEMM
from embershard.machine import HostMemory

CPU, CUDA = CPU_FBGEMM, CUDA_FBGEMM
GIB = 1 << 30

CASES = [
    # python
    (checks.check_python((3, 10)), PASS),
    (checks.check_python((3, 13)), PASS),
    (checks.check_python((3, 9)), FAIL),
    (checks.check_python((3, 14)), WARN),
    # versions
    (checks.check_versions("2.13.0+cpu", "1.8.0", "1.8.0"), PASS),
    (checks.check_versions("2.11.0+cu128", "1.6.1", "1.6.0"), PASS),
    (checks.check_versions("2.12.0", "1.7.0", "1.7.0"), WARN),
    (checks.check_versions("2.13.0", "1.8.0", "1.9.0"), FAIL),
    (checks.check_versions("2.13.0", "1.6.0", "1.8.0"), FAIL),
    (checks.check_versions("2.14.1", "1.9.2", "1.9.0"), PASS),
    (checks.check_versions("2.14.1", "1.8.0", "1.9.0"), FAIL),
    (checks.check_versions("2.13.0+cpu", "1.9.2", "1.8.0"), WARN),
    (checks.check_versions("2.15.0", "1.9.2", "1.9.0"), WARN),
    (checks.check_versions("2.13.0", None, "1.8.0"), FAIL),
    # FBGEMM's build
    (checks.check_fbgemm_build({CPU: "1.8.0"}, "2.13.0", None, False), PASS),
    (checks.check_fbgemm_build({CUDA: "1.8.0"}, "2.13.0", "13.0", True), PASS),
    (checks.check_fbgemm_build({CPU: "1.8.0"}, "2.13.0", "13.0", False), PASS),
    (checks.check_fbgemm_build({CUDA: "1.8.0"}, "2.13.0", None, True), FAIL),
    (checks.check_fbgemm_build({CUDA: "1.8.0"}, "2.13.0", "13.0", False), FAIL),
    (checks.check_fbgemm_build({CPU: "1.8.0"}, "2.13.0", "13.0", True), FAIL),
    (checks.check_fbgemm_build({CPU: "1.8.0", CUDA: "1.9.0"}, "2.13.0", None, False), FAIL),
    (checks.check_fbgemm_build({}, "2.13.0", None, False), FAIL),
    # imports
    (checks.check_import("torchrec", "", 2.5), PASS),
    (checks.check_import("torchrec", "ModuleNotFoundError: No module named 'tensordict'", 0.1), FAIL),
    # devices
    (checks.check_cpu(2, HostMemory(16 * GIB, 15 * GIB)), PASS),
    (checks.check_cpu(2, HostMemory(2 * GIB, GIB)), WARN),
    (checks.check_gpus(("H200 (139 GiB)",), "13.0", True), PASS),
    (checks.check_gpus((), None, False), SKIP),
    (checks.check_gpus((), None, True), WARN),
    (checks.check_gpus((), "13.0", True), WARN),
    (checks.check_triton("3.7.1", 1), PASS),
    (checks.check_triton(None, 0), SKIP),
    (checks.check_triton(None, 1), FAIL),
    # collectives
    (checks.check_collective("gloo", 2, "", 2.0, "remedy"), PASS),
    (checks.check_collective("gloo", 2, "no answer after 60 s", 60.0, "remedy"), FAIL),
    (checks.check_debug(""), PASS),
    (checks.check_debug("TORCH_DISTRIBUTED_DEBUG=DETAIL: it ends in a fault"), WARN),
    (checks.check_huge_pages("always [madvise] never\n"), PASS),
    (checks.check_huge_pages("[always] madvise never"), PASS),
    (checks.check_huge_pages("always madvise [never]"), WARN),
    (checks.check_huge_pages(None), SKIP),
    # a GPU
    (checks.check_driver("580.65.06", "13.0"), PASS),
    (checks.check_driver("570.124.06", "13.0"), FAIL),
    (checks.check_driver("570.124.06", "12.8"), PASS),
    (checks.check_driver(None, "13.0"), WARN),
    (checks.check_driver("580.65.06", "99.0"), WARN),
    (checks.check_capabilities([(9, 0), (8, 0), (8, 9), (10, 0)]), PASS),
    (checks.check_capabilities([(9, 0), (7, 5)]), WARN),
    (checks.check_capabilities([(12, 0)]), WARN),
    (checks.check_compiler("/usr/bin/gcc", True), PASS),
    (checks.check_compiler(None, True), FAIL),
    (checks.check_compiler("/usr/bin/gcc", False), FAIL),
    (checks.check_links([Gpu("a", "580", 16, 16)]), PASS),
    (checks.check_links([Gpu("a", "580", 16, 16), Gpu("b", "580", 8, 16)]), WARN),
    (checks.check_links([Gpu("a", "580")]), SKIP),
    (checks.check_links([]), SKIP),
    (checks.check_numa([Gpu("a", "580")], 1), PASS),
    (checks.check_numa([Gpu("a", "580", numa_node=0), Gpu("b", "580", numa_node=1)], 2), PASS),
    (checks.check_numa([Gpu("a", "580", numa_node=0), Gpu("b", "580")], 2), WARN),
    (checks.check_numa([], 2), WARN),
    (checks.check_program("kernel", "", 3.0, "remedy"), PASS),
    (checks.check_program("kernel", "RuntimeError: no", 3.0, "remedy"), FAIL),
    (checks.check_program("lock 1 GiB", "CacheError: no", 3.0, "remedy", otherwise=WARN), WARN),
    # limits
    (checks.check_shared_memory(8 * GIB, 8), PASS),
    (checks.check_shared_memory(64 << 20, 0), WARN),
    (checks.check_shared_memory(64 << 20, 8), FAIL),
    (checks.check_shared_memory(None, 0), WARN),
    (checks.check_open_files(65536), PASS),
    (checks.check_open_files(-1), PASS),
    (checks.check_open_files(512), WARN),
    (checks.check_open_files(64), FAIL),
    (checks.check_locked_memory(-1, 8), PASS),
    (checks.check_locked_memory(8 << 20, 8), WARN),
    (checks.check_locked_memory(8 << 20, 0), SKIP),
    (checks.check_disk("/runs", 100 * GIB), PASS),
    (checks.check_disk("/runs", 5 * GIB), WARN),
    (checks.check_disk("/runs", GIB // 2), FAIL),
    (checks.check_disk_rates("/rows", 43_000, 476e6), PASS),
    (checks.check_disk_rates("/rows", 180, 150e6), WARN),
]


@pytest.mark.parametrize(("result", "status"), CASES, ids=[f"{r.name}: {r.detail}"[:60] for r, _ in CASES])
def test_every_check_passes_and_fails_as_it_should(result: CheckResult, status: str):
    assert result.status == status
    assert bool(result.remedy) == (status in (WARN, FAIL)), "a remedy stands where one is needed, and only there"


def test_a_result_is_a_value():
    with pytest.raises(FrozenInstanceError):
        checks.check_cpu(1, HostMemory(GIB, GIB)).status = PASS  # type: ignore[misc]


def test_the_remedy_names_the_build_that_is_right_here():
    both = {CPU: "1.8.0", CUDA: "1.9.0"}
    assert f"{CPU}==1.9.0" in checks.check_fbgemm_build(both, "2.14.1", None, False).remedy
    assert f"{CPU}==1.8.0" in checks.check_fbgemm_build(both, "2.13.0", None, False).remedy
    assert f"{CUDA}==1.8.0" in checks.check_fbgemm_build(both, "2.13.0", "13.0", True).remedy


@pytest.mark.parametrize(
    ("stderr", "detail", "remedy"),
    [
        ("ModuleNotFoundError: No module named 'pyre_extensions'", "pyre_extensions", "pip install pyre-extensions"),
        ("OSError: libnvidia-ml.so.1: cannot open shared object file", "libnvidia-ml", CPU),
        ("OSError: fbgemm.so: undefined symbol: _ZN3c10", "undefined symbol", "not built for each other"),
        ("Traceback ...\nValueError: first\nOSError: last", "OSError: last <- ValueError: first", "make setup"),
    ],
)
def test_the_real_error_of_an_import_is_shown(stderr: str, detail: str, remedy: str):
    result = checks.check_import("torchrec", stderr, 1.0)
    assert detail in result.detail
    assert remedy in result.remedy


def test_an_import_that_kills_the_process_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "crashing.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    error, _ = doctor.program_error("import crashing", timeout_seconds=30.0)
    assert "killed by signal 11" in error


@pytest.mark.slow
def test_an_import_that_hangs_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "hanging.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    error, _ = doctor.program_error("import hanging", timeout_seconds=1.0)
    assert "no end after 1 s" in error


def test_gpus_are_read_as_nvidia_smi_and_linux_describe_them(tmp_path: Path):
    (tmp_path / "bus/pci/devices/0000:3b:00.0").mkdir(parents=True)
    (tmp_path / "bus/pci/devices/0000:3b:00.0/numa_node").write_text("1\n")
    (tmp_path / "bus/pci/devices/0001:af:00.0").mkdir()
    (tmp_path / "bus/pci/devices/0001:af:00.0/numa_node").write_text("-1\n")
    text = "00000000:3B:00.0, 580.65.06, 8, 16\n00000001:AF:00.0, 580.65.06, [N/A], [N/A]\nNo devices were found\n"
    assert doctor.parse_gpus(text, tmp_path) == [
        Gpu("0000:3b:00.0", "580.65.06", 8, 16, 1),
        Gpu("0001:af:00.0", "580.65.06"),
    ]


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("program", ["KERNEL", "LOOKUP"])
def test_the_programs_for_a_gpu_run_on_a_cpu_and_notice_what_is_wrong(program: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    text = getattr(doctor, program)
    assert doctor.program_error(text, "cpu", timeout_seconds=300.0)[0] == ""
    wrong = {"KERNEL": ("keys + 1)", "keys + 0)"), "LOOKUP": ("[3, 3, 5]", "[3, 4, 5]")}[program]
    assert "AssertionError" in doctor.program_error(text.replace(*wrong), "cpu", timeout_seconds=300.0)[0]


def test_without_a_gpu_its_checks_are_skipped_by_name():
    (result,) = doctor.examine_gpus(0, None, 1.0)
    assert result.status == SKIP
    assert "driver" in result.detail


def test_a_wrong_sum_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "ALL_REDUCE", "import sys\nassert sys.argv[2] == '0', '1 + 2 gave 4.0'")
    error, _ = doctor.all_reduce_error("cpu", 2, 30.0)
    assert error == "rank 1: AssertionError: 1 + 2 gave 4.0"


@pytest.mark.slow
def test_ranks_that_never_meet_end_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "ALL_REDUCE", "import time; time.sleep(60)")
    error, seconds = doctor.all_reduce_error("cpu", 2, 1.0)
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


def filed_settings(folder: Path) -> Path:
    (folder / "filed.toml").write_text(
        f'[cache]\nhost = "file"\nhost_bytes = 1_000_000\nhost_dir = "{folder / "of rows"}"\n'
    )
    return folder / "filed.toml"


@pytest.mark.matrix
@pytest.mark.slow
def test_settings_that_name_no_disk_or_a_wrong_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "plain.toml").write_text("")
    assert doctor.main(["--config", str(tmp_path / "plain.toml")], healthy) == 0
    assert "cache.host_dir" not in capsys.readouterr().out
    filed = filed_settings(tmp_path)
    assert doctor.main(["--config", str(filed), "--set", f"cache.host_dir={filed}/rows"], healthy) == 1
    assert "filed.toml/rows' cannot be made" in capsys.readouterr().out


@pytest.mark.matrix
@pytest.mark.slow
def test_the_disk_of_a_runs_rows_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    filed = filed_settings(tmp_path)
    assert doctor.main(["--json", "--config", str(filed)], healthy) == 0
    result = json.loads(capsys.readouterr().out)["checks"][-1]
    told = rf"([\d,]+) random pages and [\d.]+ [KMG]iB in order a second, in {tmp_path}/of rows; in a topology's file, "
    found = re.fullmatch(told + r"for plans: disk_pages_per_second = (\d+)", result["detail"])
    assert found is not None
    assert found[1].replace(",", "") == found[2]
    assert not list((tmp_path / "of rows").iterdir())
    with pytest.raises(SystemExit):
        doctor.main(["--set", "cache.host_dir=."], healthy)
    assert "--set changes the settings of --config FILE, which is missing" in capsys.readouterr().err


@pytest.mark.matrix
@pytest.mark.slow
def test_it_speaks_when_torchrec_cannot_be_imported(tmp_path: Path, project_dir: Path):
    """The whole doctor, with a torchrec in front of the real one that does not import."""
    (tmp_path / "torchrec.py").write_text("raise OSError('libtorch_cuda.so: cannot open shared object file')\n")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{project_dir}", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    command = [sys.executable, "-m", "embershard.commands.doctor.command", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=180)
    assert run.returncode == 1, run.stderr
    report = {check["name"]: check for check in json.loads(run.stdout)["checks"]}
    assert report["import torchrec"]["status"] == FAIL
    assert "libtorch_cuda.so" in report["import torchrec"]["detail"]
    assert report["gloo, 2 ranks"]["status"] == PASS
    assert report["torch's debugging"]["status"] == WARN
