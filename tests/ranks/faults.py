"""The exactness comparison with a fault in the cache, to prove that it would notice."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

from embershard.cache.row_cache import CacheGrowthWarning
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
