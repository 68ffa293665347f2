"""Ranks that die, hang, or are asked to stop."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from embershard.launch import launcher, rank_group
from tests.unit.troubleshooting.case import Case, Outcome, Provoke, outcome_of, rank

TITLE = "Ranks"


def ranks(code: str, **settings: float) -> Provoke:
    """Return a function that starts two ranks which run `code`, a line of Python without torch."""

    def start() -> int:
        Path("program.py").write_text(f"import os, signal, sys, time\n{code}\n")
        with mock.patch.object(rank_group, "_GRACE_SECONDS", 0.2):
            return launcher.start_ranks(2, "program", [], stacks=Path("stacks.txt"), **settings)

    return lambda: outcome_of(start)


def under_torchrun(provoke: Callable[[], Outcome]) -> Provoke:
    """Return a function that provokes the same with the variables of a torchrun that may restart."""

    def run() -> Outcome:
        with mock.patch.dict(os.environ, TORCHELASTIC_RUN_ID="none", TORCHELASTIC_MAX_RESTARTS="3"):
            return provoke()

    return run


CASES = [
    Case(
        "A rank ended by an error of its own",
        ranks("time.sleep(60) if os.environ['RANK'] == '0' else sys.exit(1)"),
        "embershard: rank 1 failed first (exit code 1).",
        "See that rank's own message, above. Then `--resume`, or `--max-restarts N` from the start.",
        code=1,
    ),
    Case(
        "A rank was killed, by somebody or because memory ran out",
        ranks("time.sleep(60) if os.environ['RANK'] == '0' else os.kill(os.getpid(), signal.SIGKILL)"),
        "embershard: rank 1 failed first (killed by SIGKILL, as the system does when memory runs out).",
        "See the system's log (`dmesg`). Use fewer rows, `cache.host=mmap`, or more memory; then `--resume`.",
        code=1,
    ),
    Case(
        "A rank is stopped by a signal, and the others wait for it",
        ranks(
            "os.kill(os.getpid(), signal.SIGSTOP) if os.environ['RANK'] == '1' else time.sleep(60)", hang_seconds=0.5
        ),
        "embershard: rank 1 hangs (stopped by a signal): for <number> s no rank made progress (--hang-seconds), so all "
        "were ended. Their stacks are in <file>.",
        "Then `--resume`. Continue a stopped rank sooner (`kill -CONT`), or give more `--hang-seconds`.",
        code=1,
    ),
    Case(
        "torchrun may restart the run, which has no folder that would be found again",
        under_torchrun(rank("--config", "run.toml", files={"run.toml": ""})),
        "[rank<number>]: ConfigError: torchrun may restart this run, which would then begin anew in another folder. "
        "Give --run-dir, or give torchrun --rdzv-id.",
        "Give `--run-dir`.",
        code=1,
    ),
]
