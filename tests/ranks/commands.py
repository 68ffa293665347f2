"""`embershard train` and the like in processes that are forked, not started anew: the imports of a rank take 6 s.

Launcher and ranks are processes of their own, with the environment, output, signals and exit codes of the command. What
a new interpreter adds is left to those tests that start one: another hash seed, and the interpreter's own end.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from embershard.commands import cli

PROJECT = Path(__file__).resolve().parents[2]
#: Of the environment: a folder in which each rank writes how many tensors it has, to a file by its process id.
TENSORS_VARIABLE = "TESTS_TENSORS_FOLDER"
_TENSORS_SECONDS = 2.0
_new_process = subprocess.Popen
#: What ranks import, some of it at their first use.
_IMPORTED_ONCE = [
    *(f"embershard.cache.loops.{name}" for name in ("ids", "initial_rows", "next_uses", "rows", "slots", "victims")),
    "embershard.launch.rank",
    "embershard.commands.score",
    "embershard.commands.train.command",
    "embershard.commands.train.run",
    "embershard.extras.verify.command",
    "embershard.extras.verify.equivalence",
    "torch.distributed.optim",
    "torch.utils.tensorboard",
    "torchmetrics.functional.classification",
    "torchrec.distributed.model_parallel",
    "embershard.reports.tracking.trackers",
    "pydantic.dataclasses",
    "torch.utils.serialization.config",
    "tests.ranks.preloaded",
]


def forked() -> Any:
    """Return how to start processes that are forked from one which has imported the slow libraries, and has no threads.

    All such processes of a session have the same parent.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    return context


class Process:
    """A process of `multiprocessing`, used like one of `subprocess`."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        process.start()
        assert process.pid is not None
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; negative after a signal, None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended after `timeout` seconds.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def start(arguments: Sequence[str], output: Path, errors: Path | None = None, **variables: str) -> Process:
    """Start `embershard arguments...` in the project's folder, on the CPU.

    Args:
        output, errors: files to which it appends what it prints; without `errors`, both go to `output`.
        variables: of its environment, beside this process's own.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
    return Process(forked().Process(target=_command, args=(list(arguments), output, errors, environment)))


def run(arguments: Sequence[str], folder: Path, timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
    """Run `embershard arguments...` to its end.

    Args:
        folder: for files with what it prints.

    Raises:
        subprocess.TimeoutExpired: it takes longer; it is killed.
    """
    output, errors = folder / "output.txt", folder / "errors.txt"
    output.unlink(missing_ok=True)
    errors.unlink(missing_ok=True)
    process = start(arguments, output, errors)
    try:
        code = process.wait(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(list(arguments), code, output.read_text(), errors.read_text())


def _command(arguments: list[str], output: Path, errors: Path | None, environment: Mapping[str, str]) -> NoReturn:
    """The launcher's process."""
    print_to(output, errors)
    os.chdir(PROJECT)
    _become(environment, ["embershard", *arguments])
    subprocess.Popen = _popen  # type: ignore[assignment, misc]
    sys.exit(cli.main(arguments))


def run_program(words: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m words...`, whose module has a `main`, in a forked process without threads: it may fork on.

    Args:
        folder: for a file with what it prints, to both.
    """
    output = folder / "program.txt"
    process = Process(forked().Process(target=_program, args=(list(words), output)))
    try:
        code = process.wait(600)
    finally:
        process.kill()
    return subprocess.CompletedProcess(list(words), code, output.read_text())


def _program(words: list[str], output: Path) -> NoReturn:
    print_to(output)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(PROJECT)
    sys.argv = words
    sys.exit(importlib.import_module(words[0]).main())


def run_script(words: Sequence[str], folder: Path, world_size: int = 2) -> str:
    """Run `words`, a script of the project and its arguments, in forked ranks; return what all of them print.

    Args:
        folder: for files with what each rank prints.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    place = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    files = [folder / f"rank_{rank}.txt" for rank in range(world_size)]
    ranks = [
        Process(forked().Process(target=_script, args=(list(words), rank, {**place, "MASTER_PORT": port}, file)))
        for rank, file in enumerate(files)
    ]
    try:
        codes = [rank.wait(600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    said = [file.read_text() for file in files]
    assert codes == [0] * world_size, "\n".join(said)
    return "".join(said)


def _script(words: list[str], rank: int, place: Mapping[str, str], output: Path) -> None:
    os.environ.update(place, RANK=str(rank), LOCAL_RANK=str(rank), CUDA_VISIBLE_DEVICES="")
    os.chdir(PROJECT)
    output.unlink(missing_ok=True)
    print_to(output)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def print_to(output: Path, errors: Path | None = None) -> None:
    """Have this process append what it prints to these files; without `errors`, all to `output`."""
    for path, descriptor in ((output, 1), (errors or output, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)


def _become(environment: Mapping[str, str], words: list[str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    tempfile.tempdir = None  # what was found by the environment before


def _popen(command: Sequence[str], **how: Any) -> Any:
    """`subprocess.Popen`, which forks this process for `python -m embershard.MODULE ARGUMENTS...`."""
    if list(command[:2]) != [sys.executable, "-m"] or not command[2].startswith("embershard."):
        return _new_process(command, **how)
    assert how.pop("start_new_session")
    how.pop("pass_fds", None)  # a fork has them all
    return Process(multiprocessing.get_context("fork").Process(target=_module, args=(command[2:],), kwargs=how))


def _module(
    words: Sequence[str],
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: int | None = None,
    preexec_fn: Callable[[], None] | None = None,
) -> NoReturn:
    """The process of a rank or of a run: what its parent changed in its own is undone."""
    os.setsid()
    if preexec_fn is not None:
        preexec_fn()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if stdout is not None:
        assert stderr == subprocess.STDOUT
        print_to(Path(stdout.name))
    _become(env or dict(os.environ), list(words))
    if folder := os.environ.get(TENSORS_VARIABLE):
        threading.Thread(target=_count_tensors, args=(Path(folder, str(os.getpid())),), daemon=True).start()
    try:
        code = importlib.import_module(words[0]).main()
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    sys.exit(code)


def _count_tensors(file: Path) -> NoReturn:
    """Those that Python knows, garbage that was not collected yet among them.

    No other thread runs while objects are held: one that builds a tuple could not go on.
    """
    import torch

    while True:
        types = list(map(type, itertools.chain.from_iterable(map(gc.get_objects, (None,)))))
        count = sum(issubclass(each, torch.Tensor) for each in types)
        file.with_suffix(".new").write_text(str(count))
        file.with_suffix(".new").replace(file)
        time.sleep(_TENSORS_SECONDS)
