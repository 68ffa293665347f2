"""The exactness comparison with a fault in the cache, to prove that it would notice."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor

from embershard.cache.planner import CacheGrowthWarning
from embershard.cache.rows.transfer import StagedTransfer
from embershard.cache.tickets import InFlight
from embershard.pipeline.module_input import ModuleInput
from tests.ranks import look_ahead, look_ahead_events
from tests.ranks.parity import Case, Outcome, compare
from tests.unit.cache.faults import FAULTS as CACHE_FAULTS

# Those that one batch at a time and no flush in between can show.
FAULTS = ("pins_ignored", "states_stay_behind", "write_back_skipped", "fill_before_write_back")


def compare_with_fault(case: Case, fault: str) -> dict[str, Outcome]:
    """The exactness comparison with one fault in place."""
    with CACHE_FAULTS[fault]():
        return compare(case)


def compare_ignoring_growth_warnings(case: Case) -> dict[str, Outcome]:
    """The exactness comparison for a cache that is meant to grow."""
    with mock.patch.object(warnings, "warn", _only_growth(warnings.warn)):
        return compare(case)


def _only_growth(warn: Callable[..., None]) -> Callable[..., None]:
    def filtered(message: Any, category: Any = None, *args: Any, **kwargs: Any) -> None:
        if category is not CacheGrowthWarning:
            warn(message, category, *args, **kwargs)

    return filtered


@contextlib.contextmanager
def _evicted_one_batch_early() -> Iterator[None]:
    """The first half of the safety rule: the batch in training, the oldest in flight, does not pin its slots. Its
    forward waits, so that a plan that is made beside it comes first."""
    pinned, forward = InFlight.oldest.fget, ModuleInput.forward  # type: ignore[attr-defined]

    def early(self: InFlight) -> int | None:
        oldest = pinned(self)
        return None if oldest is None else oldest + 1

    def late(self: ModuleInput, *args: Any) -> Any:
        time.sleep(0.02)
        return forward(self, *args)

    with mock.patch.object(InFlight, "oldest", property(early)), mock.patch.object(ModuleInput, "forward", late):
        yield


@contextlib.contextmanager
def _read_before_the_write_back_landed() -> Iterator[None]:
    """The second half: what a plan puts out lands two plans later, and the fills in between do not wait for it."""
    write_back = StagedTransfer.write_back

    def late(self: StagedTransfer, slots: Tensor, keys: Tensor) -> None:
        waiting, self._landing = list(self._landing), deque()
        write_back(self, slots, keys)
        for buffer_and_keys in reversed(waiting[-1:]):
            self._landing.appendleft(buffer_and_keys)
        put_off, self._landing = self._landing, deque(waiting[:-1])
        self._land()
        self._landing = put_off

    with mock.patch.object(StagedTransfer, "write_back", late):
        yield


LOOK_AHEAD_FAULTS = {
    "evicted_one_batch_early": _evicted_one_batch_early,
    "read_before_the_write_back_landed": _read_before_the_write_back_landed,
    **{name: CACHE_FAULTS[name] for name in FAULTS},
}


def look_ahead_with_fault(case: look_ahead.Case, run: look_ahead.Run, fault: str) -> look_ahead.Outcome:
    """A run through the pipeline with one fault in place."""
    with LOOK_AHEAD_FAULTS[fault]():
        return look_ahead.compare(case, [run])[0]


def evict_then_reuse_with_fault(
    case: look_ahead.Case, run: look_ahead.Run, distances: list[int], land_seconds: float, fault: str
) -> list[dict[str, Any]]:
    """Rows that are put out and come back, with slow write-backs and one fault in place."""
    with LOOK_AHEAD_FAULTS[fault]():
        return look_ahead_events.evict_then_reuse(case, run, distances, land_seconds)
