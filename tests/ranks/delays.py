"""Random waits in every stage of the look-ahead pipeline and in every copy, to find what depends on timing.

The waits follow a seed, and each stage has random numbers of its own: threads do not change each other's. On a GPU it
is the streams that wait, each one where it stands, so that what no event orders is likely to go wrong.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from embershard import LookAheadPipeline
from embershard.cache.row_cache import RowCache
from embershard.cache.rows.copies import RowCopies
from embershard.cache.rows.transfer import PlainTransfer
from embershard.pipeline.intake import Intake
from embershard.pipeline.module_input import ModuleInput
from embershard.pipeline.staged_batch import StagedBatch

_CYCLES_PER_SECOND = 1.5e9

STAGES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (Intake, ("offer", "enter")),
    (LookAheadPipeline, ("_let_in",)),
    (StagedBatch, ("send", "receive", "make_resident")),
    (ModuleInput, ("know", "make_resident", "forward")),
    (PlainTransfer, ("fill", "write_back")),
)
# On a GPU: where kernels are queued on the stream of each stage, the copies' among them, and the training's.
GPU_STAGES: tuple[tuple[type, tuple[str, ...]], ...] = (
    *STAGES[:2],
    (StagedBatch, ("send", "receive", "begin_resident", "end_resident")),
    (ModuleInput, ("know", "forward")),
    (RowCopies, ("write_back_evicted", "fill_missed", "trained")),
    (RowCache, ("know", "wait", "flush", "read")),
)


@contextlib.contextmanager
def random_delays(seed: int, rank: int, most_seconds: float = 0.004, on_gpu: bool = False) -> Iterator[dict[str, int]]:
    """Every third call of a stage or a copy waits, before or after its work. Gives the number of waits by stage."""
    waits: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        for owner, names in GPU_STAGES if on_gpu else STAGES:
            for name in names:
                stage = f"{owner.__name__}.{name}"
                numbers = random.Random(f"{seed} {rank} {stage}")
                wait = _let_the_stream_wait if on_gpu else time.sleep
                delayed = _delayed(getattr(owner, name), stage, numbers, most_seconds, waits, wait)
                stack.enter_context(mock.patch.object(owner, name, delayed))
        yield waits


def _let_the_stream_wait(seconds: float) -> None:
    torch.cuda._sleep(int(seconds * _CYCLES_PER_SECOND))


def _delayed(
    function: Callable[..., Any],
    stage: str,
    numbers: random.Random,
    most_seconds: float,
    waits: dict[str, int],
    wait: Callable[[float], None],
) -> Callable[..., Any]:
    waits[stage] = 0

    def with_delays(*args: Any, **kwargs: Any) -> Any:
        waits_now = numbers.random() < 1 / 3
        seconds, before = numbers.random() * most_seconds, numbers.random() < 0.5
        waits[stage] += waits_now
        if waits_now and before:
            wait(seconds)
        try:
            return function(*args, **kwargs)
        finally:
            if waits_now and not before:
                wait(seconds)

    return with_delays


@contextlib.contextmanager
def slow_landings(seconds: float) -> Iterator[None]:
    """Every write-back takes this long to reach the host rows."""
    write_back = PlainTransfer.write_back

    def late(self: PlainTransfer, *args: Any) -> None:
        time.sleep(seconds)
        write_back(self, *args)

    with mock.patch.object(PlainTransfer, "write_back", late):
        yield
