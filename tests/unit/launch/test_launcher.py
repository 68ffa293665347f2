"""The launcher with real processes, small ones: how they end, who is named, and that none is left."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from embershard.errors import ConfigError
from embershard.launch import rank_group
from embershard.launch.launcher import loopback_store, start_ranks, warn_of_cores
from embershard.launch.rank_group import Ended, RankGroup
from embershard.launch.stop_signals import StopAsked, stop_asked
from embershard.training.config import RunConfig, TrainConfig
from tests.covering import matrix

#: A rank that starts at once: without torch, it uses the launcher's memory itself.
_BEGIN = """
import faulthandler, mmap, os, signal, struct, sys, time
rank = int(os.environ["RANK"])
_, pulses, stacks = map(int, os.environ["EMBERSHARD_LAUNCHER"].split())
board = mmap.mmap(pulses, 0)
def tell(column, value):
    struct.pack_into("q", board, rank * 32 + column * 8, value)
def wait():
    time.sleep(60)
def end_on_sigterm():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
BEATS, STACKS, FAILED_AT, IS_FINAL = range(4)
"""


def rank_command(code: str) -> list[str]:
    return [sys.executable, "-c", _BEGIN + textwrap.dedent(code)]


def run(
    code: str, *, asked: StopAsked | None = None, hang_seconds: float | None = None, stacks: Path | None = None
) -> Ended:
    """Run two ranks; none may be left."""
    others = set(psutil.Process().children())
    group = RankGroup(2, rank_command(code), ("127.0.0.1", 1), asked or StopAsked(), hang_seconds, stacks)
    ended = group.run()
    assert set(psutil.Process().children()) <= others
    return ended


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "_GRACE_SECONDS", 0.3)
    monkeypatch.setattr(rank_group, "_LOOK_SECONDS", 0.2)


def test_all_end_well():
    assert run("tell(BEATS, 3)") == Ended(0)


def test_a_rank_that_fails_ends_the_others():
    ended = run("sys.exit(3) if rank == 1 else wait()")
    assert ended == Ended(1, "rank 1 failed first (exit code 3).", may_restart=True)


@pytest.mark.slow
def test_a_rank_that_was_killed_is_named_not_one_that_failed_for_it(monkeypatch):
    monkeypatch.setattr(rank_group, "_GRACE_SECONDS", 20.0)  # until both have ended
    ended = run("(tell(FAILED_AT, 1), sys.exit(1)) if rank == 0 else os.kill(os.getpid(), signal.SIGKILL)")
    assert ended.message == "rank 1 failed first (killed by SIGKILL, as the system does when memory runs out)."
    ended = run("tell(FAILED_AT, 9 - rank); sys.exit(1)")
    assert ended.message == "rank 1 failed first (exit code 1)."


def test_an_error_that_would_come_again_is_not_tried_again():
    assert not run("tell(FAILED_AT, 1); tell(IS_FINAL, 1); sys.exit(1)").may_restart


def asked_when_ready(number: int, folder: Path, *more_at_seconds: float) -> StopAsked:
    """Return a request that comes when both ranks have made their file, and again at these times after the first."""
    asked = StopAsked()

    def when_ready() -> None:
        while not all((folder / str(rank)).exists() for rank in range(2)):
            time.sleep(0.01)
        for at_seconds in (0.0, *more_at_seconds):
            asked.receive(number, at_seconds)

    threading.Thread(target=when_ready, daemon=True).start()
    return asked


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_all_in_order(number, code, tmp_path, monkeypatch):
    ready = "end_on_sigterm(); tell(BEATS, 1); open(f'{rank}', 'w').close(); wait()"
    monkeypatch.chdir(tmp_path)
    assert run(ready, asked=asked_when_ready(number, tmp_path)) == Ended(code)


def test_a_signal_before_the_first_step():
    asked = StopAsked()
    asked.receive(signal.SIGTERM, 0.0)
    assert run("wait()", asked=asked) == Ended(0, "stopped before the first step. Nothing was trained.")


@pytest.mark.parametrize(("says", "code"), [("", 0), ("tell(FAILED_AT, 1)", 1), matrix("tell(BEATS, 1)", 1)])
def test_a_rank_that_lost_one_that_stopped_before_the_first_step_has_not_failed(says, code, tmp_path, monkeypatch):
    loses = f"signal.signal(signal.SIGTERM, lambda *_: ({says or 0}, sys.exit(1)))"
    ready = f"end_on_sigterm() if rank == 0 else {loses}; open(f'{{rank}}', 'w').close(); wait()"
    monkeypatch.chdir(tmp_path)
    assert run(ready, asked=asked_when_ready(signal.SIGTERM, tmp_path)).code == code


def test_a_second_signal_ends_all_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); tell(BEATS, 1); open(f'{rank}', 'w').close(); wait()"
    ended = run(stubborn, asked=asked_when_ready(signal.SIGINT, tmp_path, 0.1, 2.0))
    assert ended == Ended(130, "stopped at once. Steps that are in no checkpoint are lost.")


_LAUNCHER = """
import signal, sys, time
from pathlib import Path
from embershard.launch.stop_signals import stop_asked
with stop_asked() as asked:
    print("ready", flush=True)
    while not asked.number:
        time.sleep(0.01)
    print("nobody reads this", flush=True)
    print("nor this", file=sys.stderr, flush=True)
    Path("number").write_text(f"{asked.number}")
"""


@pytest.mark.slow
def test_a_closed_terminal_is_a_request_to_stop(tmp_path, project_dir):
    """And what is written after that is no error."""
    process, terminal = pty.fork()
    if not process:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests ignore it, as under nohup
        os.chdir(tmp_path)
        os.execve(sys.executable, [sys.executable, "-c", _LAUNCHER], {**os.environ, "PYTHONPATH": str(project_dir)})
    assert os.read(terminal, 5) == b"ready"
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert (tmp_path / "number").read_text() == f"{signal.SIGHUP:d}"


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_sighup_that_is_ignored_stays_so(before):
    """`nohup embershard train ...`"""
    at_first = signal.signal(signal.SIGHUP, before)
    try:
        with stop_asked() as asked:
            assert callable(signal.getsignal(signal.SIGHUP)) is (before == signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGHUP)
        assert asked.number == (0 if before == signal.SIG_IGN else signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, at_first)


_WAITS = """
faulthandler.register(signal.SIGUSR1, file=stacks); tell(STACKS, 1); tell(BEATS, 5)
path = "/env/torch/distributed/x.py" if rank == 0 else "/app/reader.py"
exec(compile("def read():\\n    time.sleep(60)\\nread()", path, "exec"))
"""


def test_a_rank_that_hangs_is_named_and_its_stack_kept(tmp_path):
    ended = run(_WAITS, hang_seconds=0.5, stacks=tmp_path / "stacks.txt")
    assert ended.message.startswith("rank 1 hangs: for 0.5 s no rank made progress (--hang-seconds)")
    assert ended.message.endswith(f"Their stacks are in {tmp_path / 'stacks.txt'}.")
    assert ended.may_restart
    first, second = (tmp_path / "stacks.txt").read_text().split("rank 1\n")
    assert '"/env/torch/distributed/x.py", line 2 in read' in first
    assert '"/app/reader.py", line 2 in read' in second


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named(tmp_path):
    (tmp_path / "a file").touch()
    works = "[tell(BEATS, n) or time.sleep(0.01) for n in range(999)]"
    code = f"os.kill(os.getpid(), signal.SIGSTOP) if rank == 0 else {works}"
    ended = run(code, hang_seconds=0.5, stacks=tmp_path / "a file" / "stacks.txt")
    assert ended.message.startswith("rank 0 hangs (stopped by a signal): ")
    assert "could not be written" in ended.message


@pytest.mark.slow
def test_ranks_that_may_hang():
    assert run("time.sleep(1.5)", hang_seconds=None) == Ended(0)
    assert run("wait()", hang_seconds=0.5).code == 1


@pytest.mark.slow
def test_restarts(tmp_path, monkeypatch, capfd):
    """The second attempt gets another job, and is the last."""
    handed = "__import__('pickle').loads(os.pread(int(os.environ['EMBERSHARD_JOB']), 1000, 0))"
    code = f"wait() if rank else (print(*sys.argv[1:], {handed}), sys.exit(7))"
    (tmp_path / "program.py").write_text(_BEGIN + code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    trained: list[bool] = []

    def again(has_trained: bool) -> str:
        trained.append(has_trained)
        return "again"

    assert start_ranks(2, "program", ["word"], job="first", most_restarts=1, restarted=again) == 1
    said = capfd.readouterr()
    assert (said.out.split(), trained) == (["word", "first", "word", "again"], [False])
    assert said.err.splitlines() == [
        "embershard: rank 0 failed first (exit code 7). Restart 1 of 1.",
        "embershard: rank 0 failed first (exit code 7).",
    ]


_TELLS = "print(*(os.environ.get(each) for each in ('OMP_NUM_THREADS', 'EMBERSHARD_RANK_CORES')), flush=True)"


@pytest.mark.parametrize(("given", "told"), [(None, "8 8"), ("5", "5 None"), matrix("8", "8 None")])
def test_ranks_share_the_cores_unless_the_user_chose_their_threads(given, told, tmp_path, monkeypatch, capfd):
    """And this process keeps its variables: it may start other numbers of ranks."""
    (tmp_path / "program.py").write_text(f"import os\n{_TELLS}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS")
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(16))
    before = dict(os.environ)
    assert start_ranks(2, "program") == 0
    assert capfd.readouterr().out.splitlines() == [told, told]
    assert os.environ == before


_PROGRAM = """
import os
from embershard.distributed import Supervision
supervision = Supervision.of_this_process()
os.write(1, b"ready\\n")  # at once: print writes the end of the line by itself
import time; time.sleep(60)
"""


@pytest.mark.slow
def test_ranks_end_with_their_launcher(tmp_path, project_dir):
    (tmp_path / "program.py").write_text(_PROGRAM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(project_dir), str(tmp_path)])}
    start = "from embershard.launch.launcher import start_ranks; start_ranks(2, 'program', [])"
    with subprocess.Popen([sys.executable, "-c", start], env=environment, stdout=subprocess.PIPE) as process:
        assert [process.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
        ranks = psutil.Process(process.pid).children()
        process.kill()
    assert len(ranks) == 2
    assert psutil.wait_procs(ranks, timeout=60)[1] == []


_ALONE = """
import os
from embershard.distributed import process_group
with process_group("cpu") as ranks:
    print(ranks.rank, ranks.world_size, ranks.all_gather_objects("it"), "MASTER_ADDR" in os.environ, flush=True)
"""


@pytest.mark.slow
def test_one_rank_needs_no_store_and_its_launcher_no_torch(tmp_path, project_dir):
    """Also where the variables of another program name an address."""
    (tmp_path / "program.py").write_text(_ALONE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(project_dir), str(tmp_path)])}
    environment |= {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}
    start = "import sys; from embershard.launch.launcher import start_ranks; code = start_ranks(1, 'program', [])"
    words = [sys.executable, "-c", f"{start}; sys.exit(code or 'torch' in sys.modules)"]
    ran = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "0 1 ['it'] False\n"), ran.stderr


def test_only_this_machine_can_reach_the_store():
    store = loopback_store()
    store.set("key", "value")
    assert store.get("key") == b"value"
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if line.split()[3] == "0A"]
    address = socket.inet_aton("127.0.0.1")[::-1].hex().upper()
    found = [entry for entry in listening if entry.endswith(f":{store.port:04X}")]
    assert found == [f"{address}:{store.port:04X}"]


@pytest.mark.slow
def test_a_pause_of_the_launcher_is_not_one_of_the_ranks(monkeypatch):
    """A laptop that slept, a launcher that was stopped."""
    seen: list[float] = []
    monkeypatch.setattr(rank_group.HangWatch, "add", lambda self, seconds, looks: seen.append(seconds))
    real = time.monotonic
    monkeypatch.setattr(rank_group.time, "monotonic", lambda: real() * 100)
    run("time.sleep(1)", hang_seconds=60.0)
    assert seen
    assert max(seen) <= 2 * rank_group._LOOK_SECONDS


def test_ranks_of_torchrun_start_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    with pytest.raises(ConfigError, match="Call this command without torchrun"):
        start_ranks(2, "some.program", [])


@pytest.mark.parametrize("world_size", ["1", "4"])
def test_one_of_several_processes_starts_no_run_of_its_own(world_size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes' PyTorchJob sets RANK and WORLD_SIZE alone: each of its processes would train all of it."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", world_size)
    if world_size == "1":
        assert start_ranks(1, "no.such.module", []) == 1
        return
    with pytest.raises(
        ConfigError, match=r"this process is rank 0 of 4, by RANK and WORLD_SIZE.*unset RANK WORLD_SIZE"
    ):
        start_ranks(1, "no.such.module", [])


@pytest.mark.slow
def test_a_limit_of_mapped_memory_under_which_libc_would_end_the_ranks_is_refused():
    """In a process of its own: limits that were lowered stay low."""
    lowers = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1_200_000 << 10, -1))"
    program = f"{lowers}; from embershard.launch.launcher import start_ranks; start_ranks(1, 'this', [])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ConfigError: ulimit -v: got 1200000, needed at least 2441406 KiB" in ended.stderr


@pytest.mark.parametrize(
    ("num_ranks", "device", "has_gpu", "warns"),
    [
        (128, "cpu", False, True),
        (128, "cpu", True, True),
        (128, "auto", False, True),
        (128, "auto", True, False),
        (128, "cuda", True, False),
        (4, "cpu", False, False),
    ],
)
def test_many_more_ranks_than_cores_are_said(num_ranks, device, has_gpu, warns, monkeypatch, capsys):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    warn_of_cores(RunConfig(train=TrainConfig(device=device)), num_ranks)
    said = capsys.readouterr().err
    assert said.startswith("embershard: 128 ranks share the 2 cores of this machine") is warns
    assert ("Use --nproc 2" in said) is warns
