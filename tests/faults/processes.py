"""Real processes that die or stop: a training ends as if nothing had happened, and leaves no process behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.ranks import commands

STEPS, SAVE_EVERY, NUM_RANKS = 60, 12, 2
HANG_SECONDS = 6
#: From the fault until the launcher has ended all ranks.
MOST_SECONDS = 60.0
_START_SECONDS = 180.0  # on a busy machine
SETTINGS = (
    "data.synthetic.num_samples=20000", "data.synthetic.scale=0.001", "data.eval_fraction=0.0", "train.eval_every=none",
    "look_ahead.lookahead=8", "train.batch_size=64", "train.log_every=1",
    f"train.max_steps={STEPS}", "train.epochs=none", "train.device=cpu",
    f"checkpoint.every_steps={SAVE_EVERY}",
)  # fmt: skip
TORCHRUN = (
    "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(NUM_RANKS), "--max-restarts", "1",
    "-m", "embershard", "train",
)  # fmt: skip
KINDS = ("a rank is killed", "a rank is killed in a save", "the launcher is killed", "a rank is stopped")


@dataclass(frozen=True)
class Fault:
    """One process is killed or stopped after a step, `delay_seconds` later; in a save: while it writes."""

    kind: str
    step: int
    rank: int
    delay_seconds: float

    @classmethod
    def of(cls, seed: int) -> Fault:
        """Return the fault of a seed: kinds and ranks in turn, the place at random."""
        chance = random.Random(seed)
        place = chance.randrange(1, STEPS - 5)
        return cls(KINDS[seed % len(KINDS)], place, seed // len(KINDS) % NUM_RANKS, chance.uniform(0.0, 0.05))


def _start_new(words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start Python with these arguments in the project's folder, on the CPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(commands.PROJECT), environment.get("PYTHONPATH", "")])
    with log.open("a") as file:
        return subprocess.Popen(
            [sys.executable, *words], cwd=commands.PROJECT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )


class Training:
    """`embershard train` in forked processes, or the program of its ranks under torchrun, as a user starts it.

    Args:
        folder: of the run; what it prints goes to a file beside it.
        more: arguments.
        settings: of the run.
        temporary: folder for temporary files; None: the system's.
        launcher: starts the ranks; what it needs before the arguments of the training.
        tensors: folder in which ranks write how many tensors they have; None: they do not.
    """

    def __init__(
        self,
        folder: Path,
        *more: str,
        settings: Sequence[str] = SETTINGS,
        temporary: Path | None = None,
        launcher: Sequence[str] = (),
        tensors: Path | None = None,
    ) -> None:
        self.folder, self._log = folder, folder.with_name(f"{folder.name}.log")
        words = ["--config", "examples/quickstart.toml", "--run-dir", str(folder), *more]
        words += [word for text in settings for word in ("--set", text)]
        given = {"TMPDIR": temporary, commands.TENSORS_VARIABLE: tensors}
        variables = {name: str(folder) for name, folder in given.items() if folder is not None}
        self._log.touch()
        self._before = self._log.stat().st_size
        self.process: subprocess.Popen[bytes] | commands.Process
        if launcher:
            self.process = _start_new([*launcher, *words], self._log)
        else:
            self.process = commands.start(["train", "--nproc", str(NUM_RANKS), *words], self._log, **variables)

    @property
    def text(self) -> str:
        """What it printed so far."""
        return self._log.read_bytes()[self._before :].decode(errors="replace")

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks, in order."""
        return psutil.Process(self.process.pid).children()

    def wait_for(self, is_so: Callable[[], bool], seconds: float = _START_SECONDS, every_seconds: float = 0.05) -> None:
        """Wait until something is so, asking `every_seconds`.

        Raises:
            TimeoutError: it took too long.
            ChildProcessError: the training ended before.
        """
        ends_at = time.monotonic() + seconds
        while not is_so():
            if self.process.poll() is not None:
                raise ChildProcessError(f"it ended (exit code {self.process.returncode}): {self.text[-2000:]}")
            if time.monotonic() > ends_at:
                raise TimeoutError(f"not within {seconds:.0f} s: {self.text[-2000:]}")
            time.sleep(every_seconds)

    def wait_for_step(self, step: int) -> None:
        """Wait until it has trained this step."""
        self.wait_for(lambda: f"step {step}/" in self.text)

    def end(self, seconds: float = _START_SECONDS) -> int:
        """Wait for the end; return the exit code."""
        return self.process.wait(seconds)

    def losses(self) -> dict[int, float]:
        """Return the loss of each step."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return {report["step"]: report["loss"] for line in lines if (report := json.loads(line))["kind"] == "train"}

    def checkpoint(self) -> Path:
        """Return the checkpoint of the last step."""
        return self.folder / "checkpoints" / f"step_{STEPS}"


def still_alive(processes: list[psutil.Process], seconds: float = 5.0) -> list[int]:
    """Return which of the processes are alive after this time at most."""
    return [process.pid for process in psutil.wait_procs(processes, timeout=seconds)[1]]


def try_fault(fault: Fault, whole: Training, folder: Path) -> str:
    """Run a training with a fault; return what is wrong, or nothing.

    Args:
        whole: the same training without a fault, to its end.
        folder: for the run.
    """
    try:
        return "; ".join(_problems(fault, whole, folder))
    except (OSError, TimeoutError, psutil.Error, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"


def _problems(fault: Fault, whole: Training, folder: Path) -> Iterator[str]:
    run = Training(folder, "--max-restarts", "1", "--hang-seconds", str(HANG_SECONDS))
    run.wait_for_step(fault.step)
    if fault.kind == "a rank is killed in a save":
        saves = folder / "checkpoints"
        run.wait_for(lambda: any(path.suffix == ".tmp" for path in saves.glob("step_*")), every_seconds=0.002)
    time.sleep(fault.delay_seconds if "save" not in fault.kind else fault.delay_seconds / 10)
    ranks, started = run.ranks(), time.monotonic()
    if fault.kind == "the launcher is killed":
        run.process.send_signal(signal.SIGKILL)
    else:
        ranks[fault.rank].send_signal(signal.SIGSTOP if fault.kind == "a rank is stopped" else signal.SIGKILL)
    alive = still_alive(ranks, MOST_SECONDS)
    if alive:
        yield f"processes {alive} live {time.monotonic() - started:.0f} s after the fault"
    if fault.kind == "the launcher is killed":
        run.end()
        run = Training(folder, "--resume")
        if code := run.end():
            yield f"exit code {code}: {run.text[-500:]}"
    else:
        if code := run.end():
            yield f"exit code {code}: {run.text[-500:]}"
        named = f"rank {fault.rank} " + ("hangs (stopped by a signal)" if "stopped" in fault.kind else "failed first")
        if named not in run.text:
            yield f"no {named!r} in {run.text[-500:]}"
        if "Traceback" in run.text:
            yield f"a traceback: {run.text[-2000:]}"
    yield from differences(run, whole)


def differences(run: Training, whole: Training) -> Iterator[str]:
    """Yield in what two trainings differ: losses of all steps, and the last checkpoint's tensors, bit for bit.

    Which rows are cached may differ: a resumed cache begins with the best rows of the checkpoint.
    """
    from embershard.commands.ckpt import differences as checkpoints_differ

    if run.losses() != whole.losses():
        yield "the losses differ"
    names = [name for name, *_ in checkpoints_differ(run.checkpoint(), whole.checkpoint())]
    changed = [name for name in names if name != "run" and not name.startswith("cache.")]
    if changed:
        yield f"the last checkpoint differs: {changed[:5]}"
