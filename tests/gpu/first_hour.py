"""The first hour on a machine with GPUs: whatever needs one, into one folder that is worth sending.

    python -m tests.gpu.first_hour                                   # an hour; writes first_hour/
    python -m tests.gpu.first_hour --minutes 20 --out /tmp/hour
    python -m tests.gpu.first_hour --only machine doctor waits

Each step (tests/gpu/hour_steps.py) is a process of its own with its minutes: one that fails, hangs or takes too long
ends alone. With fewer minutes than an hour the steps of most value run, each with all of its own. `summary.txt` has a
line for each, `STEP.json` what it found, `STEP.txt` what it printed, and the folder `STEP/` what its commands printed.
Without a GPU a step runs on the CPU, at toy size, or is skipped and says why.
Exit codes: 0; 1 where a step failed; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.gpu.hour_steps import STEPS, Place, Step

_COUNT_GPUS = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
_IMPORT_SECONDS = 120.0


@dataclass(frozen=True)
class Ended:
    """How a step ended: "done", "failed", "too long" or "skipped", and why."""

    name: str
    status: str
    seconds: float = 0.0
    why: str = ""

    def __str__(self) -> str:
        return f"{self.name:<12} {self.status:<9} {self.seconds:7.1f} s  {self.why}".rstrip()


def count_gpus() -> int:
    """Return how many GPUs torch sees; 0 where torch cannot be imported, too."""
    command = [sys.executable, "-c", _COUNT_GPUS]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_SECONDS).stdout or 0)
    except (subprocess.TimeoutExpired, ValueError):
        return 0


def run_step(step: Step, out: Path, seconds: float, num_gpus: int, command: Sequence[str]) -> Ended:
    """Run a step as `command`, within `seconds`; all processes of its group end with it."""
    if num_gpus < step.num_gpus:
        return Ended(step.name, "skipped", why=f"needs {step.num_gpus} GPUs, there are {num_gpus}")
    started = time.monotonic()
    with (out / f"{step.name}.txt").open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(seconds)
            status, why = ("done", "") if code == 0 else ("failed", f"exit code {code}")
        except subprocess.TimeoutExpired:
            status, why = "too long", f"ended after {seconds:.0f} s; {step.name}.json has what it found by then"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status == "failed":
        last = (out / f"{step.name}.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        why = f"{why}: {last[0]}" if last else why
    return Ended(step.name, status, time.monotonic() - started, why)


def chosen(steps: Sequence[Step], minutes: float) -> list[Step]:
    """Return the steps that have time, by their value; one too long for what is left makes room for shorter ones."""
    taken: list[Step] = []
    for step in sorted(steps, key=lambda each: -each.value):
        if step.minutes <= minutes + 1e-9:
            taken.append(step)
            minutes -= step.minutes
    return [step for step in steps if step in taken]


def run_all(program: str, steps: Sequence[Step], out: Path, minutes: float, num_gpus: int) -> list[Ended]:
    """Run steps one after another, of the program that knows them; after each, what is known so far is in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    ended: list[Ended] = []
    have_time = chosen(steps, minutes)
    for step in steps:
        seconds = 60.0 * step.minutes
        command = [sys.executable, "-m", program, "--step", step.name, "--out", str(out.resolve())]
        command += ["--seconds", str(seconds), "--gpus", str(num_gpus)]
        if step not in have_time:
            found = Ended(step.name, "skipped", why=f"needs {step.minutes:g} minutes")
        else:
            try:
                found = run_step(step, out, seconds, num_gpus, command)
            except OSError as error:  # no process can be started, or the disk is full: the next one may work
                found = Ended(step.name, "failed", why=str(error))
        ended.append(found)
        print(found, flush=True)
        (out / "summary.txt").write_text("".join(f"{each}\n" for each in ended), encoding="utf-8")
        (out / "summary.json").write_text(json.dumps([asdict(each) for each in ended], indent=2), encoding="utf-8")
    return ended


def main(argv: Sequence[str], program: str, description: str, all_steps: Sequence[Step]) -> int:
    """Run steps, or (`--step`, of the program's own processes) one of them in this process."""
    parser = argparse.ArgumentParser(
        f"python -m {program}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [step.name for step in all_steps]
    parser.add_argument("--only", nargs="+", metavar="STEP", choices=names, help=f"of {', '.join(names)}")
    all_minutes = sum(step.minutes for step in all_steps)
    parser.add_argument("--minutes", type=float, default=all_minutes, help="for all steps (default: %(default)g)")
    out = Path(program.rpartition(".")[2])
    parser.add_argument("--out", type=Path, default=out, help="folder (default: %(default)s)")
    for name, kind in (("--step", str), ("--seconds", float), ("--gpus", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.step is not None:
        (step,) = (each for each in all_steps if each.name == arguments.step)
        place = Place(step.name, arguments.out, arguments.seconds, arguments.gpus)
        try:
            step.run(place)
        except Exception as error:
            traceback.print_exc()
            place.note("error", repr(error))
            return 1
        return 1 if place.failed else 0
    steps = [step for step in all_steps if not arguments.only or step.name in arguments.only]
    ended = run_all(program, steps, arguments.out, arguments.minutes, count_gpus())
    print(f"All of it is in {arguments.out}: send the folder.")
    return 1 if any(each.status in ("failed", "too long") for each in ended) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "tests.gpu.first_hour", __doc__, STEPS))
