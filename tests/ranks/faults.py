"""Faults put into the cache on purpose, to prove that the exactness tests would notice."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor

from embershard.cache import planner, row_cache, transfer
from embershard.cache.row_cache import CacheGrowthWarning
from tests.ranks.parity import Case, Outcome, compare


@contextlib.contextmanager
def _states_stay_behind() -> Iterator[None]:
    """Weights move, optimizer states do not."""
    init = transfer.PlainTransfer.__init__

    def weights_only(self: Any, device: list[Tensor], host: list[Tensor]) -> None:
        init(self, device[:1], host[:1])

    with mock.patch.object(transfer.PlainTransfer, "__init__", weights_only):
        yield


@contextlib.contextmanager
def _pins_are_ignored() -> Iterator[None]:
    """Rows that the batch itself needs may be put out."""
    choose = planner.CachePlanner.choose_victims

    def unpinned(self: Any, count: int, oldest_pinned: int) -> Tensor:
        self.queue.clear()
        return choose(self, count, oldest_pinned + 1)

    with mock.patch.object(planner.CachePlanner, "choose_victims", unpinned):
        yield


@contextlib.contextmanager
def _write_backs_are_skipped() -> Iterator[None]:
    """A trained row that leaves is forgotten."""
    with mock.patch.object(transfer.PlainTransfer, "write_back", return_value=None):
        yield


@contextlib.contextmanager
def _dirty_rows_look_clean() -> Iterator[None]:
    """Every tenth batch's rows count as written back."""
    prepare = row_cache.RowCache.prepare

    def forgetful(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._batch % 10 == 9:
            self.planner.clean_through = self._batch
        return prepare(self, *args, **kwargs)

    with mock.patch.object(row_cache.RowCache, "prepare", forgetful):
        yield


FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "states_stay_behind": _states_stay_behind,
    "pins_are_ignored": _pins_are_ignored,
    "write_backs_are_skipped": _write_backs_are_skipped,
    "dirty_rows_look_clean": _dirty_rows_look_clean,
}


def compare_with_fault(case: Case, fault: str) -> dict[str, Outcome]:
    """The exactness comparison with one fault in place."""
    with FAULTS[fault]():
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
