"""Which cases of a matrix, and how many examples, `make test` runs; `make test-all` runs all of them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings


def matrix(*values: Any) -> Any:
    """Return a case that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.matrix)


def keep(kept: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return cases of one value each, of which `make test` runs those in `kept`."""
    return [case if case in kept else matrix(case) for case in cases]


def examples(count: int) -> settings:
    """Return settings of a property: its number of examples, fewer where `make test` runs fewer of all properties."""
    return settings(max_examples=max(8, count * settings.default.max_examples // 100))


def combinations(kept: Collection[tuple[Any, ...]], *values: Sequence[Any]) -> list[Any]:
    """Return all combinations; `make test` runs those in `kept`."""
    return [case if case in kept else matrix(*case) for case in itertools.product(*values)]


def covering(*values: Sequence[Any]) -> list[Any]:
    """Return all combinations; `make test` runs as many as it takes to have every value once.

    >>> [case for case in covering("ab", (1, 2, 3)) if isinstance(case, tuple)]
    [('a', 1), ('b', 2), ('a', 3)]
    """
    longest = max(map(len, values))
    kept = [tuple(each[number % len(each)] for each in values) for number in range(longest)]
    return kept + [matrix(*case) for case in itertools.product(*values) if case not in kept]
