"""A fault: one change of one line; where it is planted, and whether a test fails then."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FAULTS = Path(__file__).with_name("faults.jsonl")
PROJECT = Path(__file__).resolve().parents[2]
_SECONDS = 600.0  # a fault may make a loop endless
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Fault:
    """A change of a file of the package.

    Attributes:
        file: its path in the tree.
        line: text of the line, without its indentation.
        number: which of the lines of this text, from 0 on.
        at: where in the text `old` begins, in characters.
        old, new: what is replaced, and by what.
        test: the one that must fail.
    """

    file: str
    line: str
    number: int
    at: int
    old: str
    new: str
    test: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.line!r}, {self.old!r} -> {self.new!r}"

    def planted_in(self, text: str) -> str | None:
        """Return a file's text with the fault; None where it has no such line any more."""
        lines = text.splitlines(keepends=True)
        places = [at for at, line in enumerate(lines) if line.strip() == self.line]
        if self.number >= len(places) or not self.line.startswith(self.old, self.at):
            return None
        place = places[self.number]
        indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
        changed = self.line[: self.at] + self.new + self.line[self.at + len(self.old) :]
        return "".join([*lines[:place], f"{indent}{changed}\n", *lines[place + 1 :]])

    @contextlib.contextmanager
    def planted(self, tree: Path) -> Iterator[bool]:
        """Plant it in a copy of the tree, for the body; False where it does not fit any more."""
        path = tree / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        changed = self.planted_in(text)
        if changed is None:
            yield False
            return
        _write(path, changed)
        try:
            yield True
        finally:
            _write(path, text)


#: Seconds that no file was written at before: Python takes what it compiled of a file by second and size.
_new_seconds = itertools.count(int(time.time()) + 10, 2)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    second = next(_new_seconds)
    os.utime(path, (second, second))


def known() -> list[Fault]:
    """Return the faults that are kept."""
    return [Fault(**json.loads(line)) for line in FAULTS.read_text(encoding="utf-8").splitlines()]


def keep(faults: Sequence[Fault]) -> None:
    """Keep these, by file."""
    lines = [json.dumps(asdict(fault)) for fault in sorted(faults, key=lambda each: (each.file, each.line, each.at))]
    FAULTS.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def preload() -> None:
    """Import what all tests need, and nothing of the package: processes that are forked import that with a fault."""
    os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", NUMBA_BOUNDSCHECK="1", OMP_NUM_THREADS="1")
    import hypothesis
    import numba
    import pyarrow
    import pytest
    import torch.distributed.checkpoint
    import torchmetrics
    import torchrec.distributed.model_parallel

    assert not [name for name in sys.modules if name.partition(".")[0] == "embershard"]
    assert all((hypothesis, numba, pyarrow, pytest, torch, torchmetrics, torchrec))
    gc.collect()
    gc.freeze()


def run_tests(tree: Path, words: Sequence[str], seconds: float = _SECONDS) -> tuple[int, str]:
    """Run pytest in a copy of the tree, in a forked process. Return its exit code, 124 for one that took too long, and
    what it printed."""
    output = tree / ".pytest_planted.txt"
    process = os.fork()
    if not process:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        os.chdir(tree)
        sys.path[:] = [str(tree), *(each for each in sys.path if each not in ("", str(PROJECT)))]
        os.environ["PYTHONPATH"] = str(tree)
        os.environ.pop("PYTEST_ADDOPTS", None)
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        import pytest

        code = 9
        try:
            code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *words]))
        finally:
            os._exit(code)
    ends_at, code = time.monotonic() + seconds, 124
    while time.monotonic() < ends_at:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(_POLL_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if code == 124:
        os.waitpid(process, 0)
    return code, output.read_text(encoding="utf-8", errors="replace")
