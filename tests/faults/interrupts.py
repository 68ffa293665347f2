"""Real SIGINTs at random moments of a training; afterwards every table is that of a whole number of batches."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from embershard import flush
from embershard.sharding.torchrec import cached_embeddings
from tests.faults.injection import is_refusal, no_hang
from tests.faults.model_level import TRAININGS, Ended, unlike
from tests.ranks.look_ahead import Case, as_run, batches, only_our_warnings_raise, plain, reference
from tests.ranks.parity import snapshot

#: What is interrupted. The last two: in the middle of a training, between two steps.
KINDS = ("pipeline, worker", "pipeline, inline", "plain loop", "pipeline, staged", "flush", "snapshot")

_SECONDS = 30.0
_STEPS_BEFORE = 6
_SENDER = """
import os, sys, time
for line in sys.stdin:
    time.sleep(float(line))
    os.kill(int(sys.argv[1]), 2)
"""


class Interrupts:
    """Sends SIGINT to this process from another one. Outside of `region` it has no effect."""

    def __init__(self) -> None:
        command = [sys.executable, "-S", "-c", _SENDER, str(os.getpid())]
        self._sender = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        self._is_armed = self._came = False
        self._before = signal.signal(signal.SIGINT, self._handle)

    def _handle(self, *_: Any) -> None:
        self._came = True
        if self._is_armed:
            self._is_armed = False
            raise KeyboardInterrupt

    def close(self) -> None:
        """No more."""
        self._sender.kill()
        self._sender.wait()
        signal.signal(signal.SIGINT, self._before)

    @contextlib.contextmanager
    def region(self, delay: float) -> Iterator[None]:
        """A KeyboardInterrupt comes inside, about `delay` seconds after it began, or at its end."""
        assert self._sender.stdin is not None
        self._came, self._is_armed = False, True
        try:
            self._sender.stdin.write(f"{delay}\n")
            self._sender.stdin.flush()
            yield
            while not self._came:
                time.sleep(0.001)
        finally:
            self._is_armed = False
            while not self._came:  # the body raised by itself
                time.sleep(0.001)


def interrupted_runs(count: int, seed: int) -> list[tuple[str, Ended]]:
    """So many runs, each with one SIGINT, the kinds in turn. Runs in a process with a gloo group of its own."""
    only_our_warnings_raise()
    gc.collect()
    gc.freeze()  # what is here stays, and collections are quick
    rng, interrupts, ended = random.Random(seed), Interrupts(), []
    try:
        for number in range(count):
            kind = KINDS[number % len(KINDS)]
            with warnings.catch_warnings(), no_hang(_SECONDS):
                ended.append((kind, _one(kind, interrupts, rng)))
            torch.set_grad_enabled(True)  # an interrupt in torch's own no_grad can leave it off
            gc.collect()
    finally:
        interrupts.close()
    return ended


def _one(kind: str, interrupts: Interrupts, rng: random.Random) -> Ended:
    base = TRAININGS["inline" if kind in ("pipeline, inline", "plain loop") else "worker"]
    if kind == "pipeline, staged":
        base = TRAININGS["worker, staged"]
    case, run = base.case, base.run
    if kind == "plain loop":
        run = replace(run, policy="lfu", working_set_of=2)
    expected = reference(case).after
    # Named features: an interrupt of torch.fx, which would trace the model, can leave its patch of nn.Module for ever.
    with as_run(case, run, features=lambda batch: {"parts.0": batch.features}) as (model, pipeline):
        loop: Any = plain(model) if kind == "plain loop" else pipeline
        try:
            if kind in ("flush", "snapshot"):
                return _copies_interrupted(kind, case, model, loop, interrupts, rng)
            return _training_interrupted(kind, case, model, loop, interrupts, rng.uniform(0.0, 0.08), expected)
        finally:
            if pipeline._worker is not None:
                pipeline._worker._thread.shutdown(wait=True)


def _training_interrupted(
    kind: str, case: Case, model: nn.Module, loop: Any, interrupts: Interrupts, delay: float, expected: Any
) -> Ended:
    iterator, done, place = iter(batches(case)), 0, "between steps"
    try:
        with interrupts.region(delay):
            for _ in range(case.steps):
                loop.progress(iterator)
                done += 1
    except BaseException as error:
        if not _is_interrupt(error):
            return Ended("wrong", kind, f"after {done} steps {type(error).__name__}: {error}")
        place = _place(error)
    return _compared(f"{kind}, step {done}, {place}", case, model, expected[done : done + 2])


def _copies_interrupted(
    kind: str, case: Case, model: nn.Module, loop: Any, interrupts: Interrupts, rng: random.Random
) -> Ended:
    iterator, place = iter(batches(case)), ""
    for _ in range(_STEPS_BEFORE):
        loop.progress(iterator)
    copy: Callable[[Any], Any] = flush if kind == "flush" else snapshot
    try:
        with interrupts.region(rng.uniform(0.0, 0.01)):
            while True:
                for pool in cached_embeddings(model):
                    pool.cache.state.clean_through = 0  # as if nothing had been written back
                copy(model)
    except BaseException as error:
        if not _is_interrupt(error):
            return Ended("wrong", kind, f"{type(error).__name__}: {error}")
        place = _place(error)
    return _compared(f"{kind}, {place}", case, model, [reference(case).after[_STEPS_BEFORE]])


def _compared(where: str, case: Case, model: nn.Module, expected: list[dict[str, torch.Tensor]]) -> Ended:
    try:
        different = ", ".join(unlike(case, expected, snapshot(model)))
        return Ended("wrong" if different else "equal", where, different)
    except BaseException as error:
        if not is_refusal(error, KeyboardInterrupt()):
            return Ended("wrong", where, f"the snapshot says {type(error).__name__}: {error}")
        return Ended("refused", where)


def _is_interrupt(error: BaseException) -> bool:
    """Whether it is one, or what CPython makes of one that comes within a call of a compiled function."""
    found: BaseException | None = error
    while type(found) is SystemError:  # one for each call that it passes
        found = found.__cause__ or found.__context__
    return isinstance(found, KeyboardInterrupt)


def _place(error: BaseException) -> str:
    """The line of the cache, or of what it was called from, that was interrupted."""
    found, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "embershard" in code.co_filename:
            found = f"{os.path.basename(code.co_filename)}:{trace.tb_lineno} {code.co_qualname}"
        trace = trace.tb_next
    return found or "elsewhere"
